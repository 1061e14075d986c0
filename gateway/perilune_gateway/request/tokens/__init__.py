"""Tokens of a prompt: exact where a tokenizer is available, else an estimate.

    request ─▶ tokenizer ─┬─ given      ids in the body
                          ├─ local      conversation ─▶ chat_template ─▶ incremental ─▶ encoder
                          ├─ engine     engine: its /tokenize
                          └─ estimate   bytes / bytes_per_token

`conversation` converts the messages of every API to one form, `chat_template` renders them with the model's
template, `incremental` encodes only the new part of that text (`cuts` finds where a text may be split), and
`encoder` runs the tokenizer.json itself. `media_spans` knows what pictures become in an engine, and `proof`
shows whether an engine makes the same tokens. `prompts` has facts about a request that all sources need,
`causes` the reasons why a source has no tokens, and `metrics` exports counters of all of them.
"""

from perilune_gateway.request.tokens.tokenizer import Tokenizer

__all__ = ["Tokenizer"]
