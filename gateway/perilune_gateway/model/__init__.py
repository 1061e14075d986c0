"""The values that the parts of the gateway exchange. This package imports no other part of the gateway.

    RequestHead ──▶ RequestView ──┐
                                  ├─▶ policy ─▶ Decision │ Refusal │ NeedBody ─▶ Routed
    Endpoint, Load, Overlap ─▶ Candidate ──┘

All values except `RequestHead.identity` are immutable. Names carry the unit: names ending in `_tokens` count
tokens, names ending in `_s` are seconds, and `kv_usage` is between 0 and 1. An endpoint is identified by its
address, `ip:port`.

Values that are created for every request are msgspec structs or named tuples, because creating a frozen
dataclass takes five times as long.
"""

from perilune_gateway.model.decision import (
    MOVING,
    NEED_BODY,
    NO_FIELDS,
    STATUS,
    Answer,
    Cost,
    Decision,
    EngineFields,
    NeedBody,
    Outcome,
    Reason,
    Refusal,
    RefuseReason,
    Routed,
    Step,
    Verdict,
)
from perilune_gateway.model.endpoint import (
    Candidate,
    Endpoint,
    EngineMetrics,
    Load,
    Overlap,
    Tier,
    rank_of,
    server_of,
)
from perilune_gateway.model.engine_model import H20_30B, EngineModel
from perilune_gateway.model.errors import ProtocolError
from perilune_gateway.model.moves import APPROVED, UNPLANNED, Move, MoveReason, Subject
from perilune_gateway.model.record import DecisionRecord, Ending, tenant_hash
from perilune_gateway.model.request import (
    COMPUTED_WHOLE,
    NO_PREFIX,
    AwaitedMedium,
    Identity,
    Location,
    MediaSpan,
    Phase,
    Prefix,
    RequestHead,
    RequestView,
    SessionKey,
    SessionView,
    Tokens,
    TokenSource,
    Unpulled,
    Unsplit,
)

__all__ = [
    "APPROVED",
    "COMPUTED_WHOLE",
    "H20_30B",
    "MOVING",
    "NEED_BODY",
    "NO_FIELDS",
    "NO_PREFIX",
    "STATUS",
    "UNPLANNED",
    "Answer",
    "AwaitedMedium",
    "Candidate",
    "Cost",
    "Decision",
    "DecisionRecord",
    "Ending",
    "Endpoint",
    "EngineFields",
    "EngineMetrics",
    "EngineModel",
    "Identity",
    "Load",
    "Location",
    "MediaSpan",
    "Move",
    "MoveReason",
    "NeedBody",
    "Outcome",
    "Overlap",
    "Phase",
    "Prefix",
    "ProtocolError",
    "Reason",
    "Refusal",
    "RefuseReason",
    "RequestHead",
    "RequestView",
    "Routed",
    "SessionKey",
    "SessionView",
    "Step",
    "Subject",
    "Tier",
    "TokenSource",
    "Tokens",
    "Unpulled",
    "Unsplit",
    "Verdict",
    "rank_of",
    "server_of",
    "tenant_hash",
]
