"""Pictures, sound and video in the bytes of a conversation whose tokens are only estimated.

A file's bytes say nothing of its tokens, and files of one format begin alike. So each long run of base64 is
replaced by bytes that follow from the whole run: as many as the tokens that a medium is estimated to have.
Then one picture always looks the same, and two pictures differ from their first block on.
"""

import re
from hashlib import shake_128

_BASE64_RUN = re.compile(rb"(?:[A-Za-z0-9+/=_-]|\\/){1024,}")
_SIGNS = (b"base64", b'"input_audio"')
"""A conversation without these has no file in it."""


def digested(conversation: bytes | memoryview, medium_bytes: int) -> bytes | memoryview:
    """The conversation with `medium_bytes` bytes in place of each file. Costs a search for two words where
    there is none."""
    text = bytes(conversation)
    if not any(sign in text for sign in _SIGNS):
        return conversation
    return _BASE64_RUN.sub(lambda run: shake_128(run[0]).digest(medium_bytes), text)
