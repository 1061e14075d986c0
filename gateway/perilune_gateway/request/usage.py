"""Reads from an answer's body, part by part, how many prompt tokens came from the engine's prefix cache, and
how many tokens the answer has.

Every API reports both in `usage`, streamed or not: OpenAI's as `cached_tokens` and `completion_tokens` or
`output_tokens`, Anthropic's as `cache_read_input_tokens` and `output_tokens`. The last number wins; what is
no whole number is none. The same words inside a text have escaped quotes and are not found, nor is anything
in a compressed body. Costs a search for one word in each part.
"""

import re

_CACHED = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)"\s{0,8}:\s{0,8}(\d{1,12})(?=[\s,}])')
_OUTPUT = re.compile(rb'"(?:completion_tokens|output_tokens)"\s{0,8}:\s{0,8}(\d{1,12})(?=[\s,}])')
"""A whole number, to its end: neither a part of one that the next part continues, nor of 1.5, 1e9 or a longer
one."""
_CARRY_BYTES = 64
"""More than the longest match, which two parts may share."""


class CachedTokens:
    """Finds in one answer how many cached tokens the engine reports, and how many tokens the answer has."""

    __slots__ = ("_carry", "output_tokens", "value")

    def __init__(self) -> None:
        self.value: int | None = None
        """None if nothing was reported until now."""
        self.output_tokens = 0
        """0 if nothing was reported until now."""
        self._carry = b""

    def read(self, part: bytes) -> None:
        """Read the next part of the body."""
        text = self._carry + part
        if b"_tokens" in text:
            for found in _CACHED.finditer(text):
                self.value = int(found[1])
            for found in _OUTPUT.finditer(text):
                self.output_tokens = int(found[1])
        self._carry = text[-_CARRY_BYTES:]
