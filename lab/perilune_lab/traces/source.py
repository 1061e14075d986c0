"""Opens what `--trace FILE|agentic` names."""

from pathlib import Path

import msgspec

from perilune_api.pool import SpecError
from perilune_lab.traces import bailian, jsonl, mooncake
from perilune_lab.traces.agentic import Agentic, generate
from perilune_lab.traces.files import read_lines
from perilune_lab.traces.model import Trace

AGENTIC = "agentic"


def open_trace(
    name: str,
    limit: int | None = None,
    seed: int = 0,
    sessions: int = 200,
    parameters: Agentic | None = None,
) -> Trace:
    """Open a file in Mooncake's, Qwen-Bailian's or Perilune's schema, recognised by its first line, or
    generate agentic sessions. `limit`: number of requests to keep, from the first. Raises SpecError naming
    line and field."""
    if name == AGENTIC:
        trace = generate(parameters or Agentic(), seed, sessions)
        return trace.limit(limit) if limit is not None else trace
    path = Path(name)
    for number, first in read_lines(path, msgspec.Raw):
        try:
            keys = msgspec.json.decode(first, type=dict[str, msgspec.Raw])
        except msgspec.DecodeError as error:
            raise SpecError(f"{path}:{number}: {error}") from None
        if "session" in keys:
            return jsonl.read(path, limit)
        if "chat_id" in keys:
            return bailian.load(path, limit)
        if "hash_ids" in keys or "timestamp" in keys:
            return mooncake.load(path, limit)
        raise SpecError(
            f"{path}:{number}: neither `hash_ids` (Mooncake), `chat_id` (Qwen-Bailian) nor `session` (ours)"
            " is there - at `$`"
        )
    raise SpecError(f"{path}: no requests")
