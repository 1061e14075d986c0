"""The values that the gateway's parts exchange. This package imports no other part of the gateway.

    RequestHead ──▶ RequestView ──┐
                                  ├─▶ policy ─▶ Decision │ Refusal │ NeedBody ─▶ Routed
    Endpoint, Load, Overlap ─▶ Candidate ──┘

All are immutable but for `RequestHead.identity`. Units are in the names: token counts are integers, names
ending in `_s` are seconds, `kv_usage` is between 0 and 1. An endpoint is named by its address, `ip:port`.

Values made for every request are msgspec structs or named tuples: a frozen dataclass costs five times as much
to make.
"""

from perilune_gateway.model.decision import (
    MOVING,
    NEED_BODY,
    STATUS,
    Cost,
    Decision,
    NeedBody,
    Outcome,
    Reason,
    Refusal,
    RefuseReason,
    Routed,
    Step,
    Verdict,
)
from perilune_gateway.model.endpoint import Candidate, Endpoint, EngineMetrics, Load, Overlap, Tier
from perilune_gateway.model.engine_model import H20_30B, EngineModel
from perilune_gateway.model.errors import ProtocolError
from perilune_gateway.model.moves import APPROVED, Move, MoveReason, Subject
from perilune_gateway.model.record import DecisionRecord, Ending, tenant_hash
from perilune_gateway.model.request import (
    NO_PREFIX,
    Identity,
    Location,
    Phase,
    Prefix,
    RequestHead,
    RequestView,
    SessionKey,
    SessionView,
    Tokens,
    TokenSource,
)

__all__ = [
    "APPROVED",
    "H20_30B",
    "MOVING",
    "NEED_BODY",
    "NO_PREFIX",
    "STATUS",
    "Candidate",
    "Cost",
    "Decision",
    "DecisionRecord",
    "Ending",
    "Endpoint",
    "EngineMetrics",
    "EngineModel",
    "Identity",
    "Load",
    "Location",
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
    "Verdict",
    "tenant_hash",
]
