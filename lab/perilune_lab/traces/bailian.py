"""Loads Qwen-Bailian's traces (alibaba-edu/qwen-bailian-usagetraces-anon, ATC'25): JSON lines of

    chat_id          one per request; a number, from 0
    parent_chat_id   the request that this one continues; -1 begins a session
    timestamp        seconds since the trace began, to the millisecond; never goes back
    input_length     tokens, chat template included
    output_length    tokens
    hash_ids         one per 16 tokens of the prompt, the incomplete last block included
    type, turn       text, search, image, file, api, thinking or coder; counts from 1. Both are not read

A request continues its parent's session, unless another request has continued it already, or the file does
not have the parent: then it begins one. Gaps are guessed (recorded.py).

Meaning of the ids: an id stands for its block's own tokens, in two of the four files without
what is before it, so blocks are compared from the beginning on. A request's ids hold its prompt alone, and
its last block changes once the answer begins (their FAQ): of a turn that follows, nothing but the earlier
prompt's other blocks is known to be the same. The answer counts as new text, though an engine has it cached.

The format as the repository's README and FAQ specify it, and as audits of its four files (10,812 to 172,800
requests) found it; the files themselves were never read here.

Cost: a look-up per id, some 30 times as many as in Mooncake's blocks of 512; 8 bytes per id of every prompt.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from perilune_api.pool import SpecError
from perilune_gateway.model import H20_30B, EngineModel
from perilune_lab.traces.files import read_lines
from perilune_lab.traces.model import Segment, Trace, Turn
from perilune_lab.traces.recorded import recorded

BLOCK_TOKENS = 16


class Line(msgspec.Struct, frozen=True, kw_only=True):
    chat_id: int
    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Annotated[int, Meta(ge=1)]
    output_length: Annotated[int, Meta(ge=0)]
    hash_ids: tuple[int, ...]
    parent_chat_id: int = -1


def load(path: Path, limit: int | None = None, engine: EngineModel = H20_30B) -> Trace:
    """Return the trace, or its first `limit` requests. Raises SpecError naming line and field."""
    turns: list[Turn] = []
    last_of: dict[int, tuple[str, int]] = {}
    """Session and number of a turn that none has continued, by its chat id."""
    full: dict[int, Segment] = {}
    earliest_s = 0.0
    for number, line in islice(read_lines(path, Line), limit):
        blocks, rest = divmod(line.input_length, BLOCK_TOKENS)
        if len(line.hash_ids) != blocks + (rest > 0):
            raise SpecError(
                f"{path}:{number}: {line.input_length} tokens need {blocks + (rest > 0)} ids,"
                f" got {len(line.hash_ids)} - at `$.hash_ids`"
            )
        if line.timestamp < earliest_s:
            raise SpecError(f"{path}:{number}: earlier than the line before - at `$.timestamp`")
        earliest_s = line.timestamp
        session, before = last_of.pop(line.parent_chat_id, (f"q{line.chat_id}", -1))
        last_of[line.chat_id] = session, before + 1
        prompt = [full.setdefault(i, Segment(f"block{i}", BLOCK_TOKENS)) for i in line.hash_ids[:blocks]]
        if rest:
            prompt.append(Segment(f"block{line.hash_ids[-1]}", rest))
        turns.append(
            Turn(
                session=session,
                number=before + 1,
                prompt=tuple(prompt),
                output_tokens=max(1, line.output_length),
                timestamp_s=line.timestamp,
            )
        )
    return recorded(path, turns, engine)
