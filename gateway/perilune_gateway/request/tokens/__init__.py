"""A prompt's tokens: exact where a tokenizer is at hand, an estimate where none is.

    request ─▶ tokenizer ─┬─ given      ids in the body
                          ├─ local      conversation ─▶ chat_template ─▶ incremental ─▶ encoder
                          ├─ engine     engine: its /tokenize
                          └─ estimate   bytes / bytes_per_token

`conversation` reads the messages of each API as one form, `chat_template` writes them as the model's template
does, `incremental` encodes only what is new in that text (`cuts` says where a text may be cut), `encoder` is
the tokenizer.json itself. `prompts` is what all sources ask of a request, `causes` why one of them cannot
tell, `metrics` what all of it did.
"""

from perilune_gateway.request.tokens.tokenizer import Tokenizer

__all__ = ["Tokenizer"]
