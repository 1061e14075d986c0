"""`spec.routing.migration`: when sessions move and prefixes are replicated."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from perilune_api.fields import Seconds, Share, Struct, Weight


class MoveTrigger(StrEnum):
    """Situations in which the migration planner moves sessions or replicates prefixes."""

    DRAIN = "drain"
    """An endpoint drains: its sessions move to other endpoints."""
    HOT_HOST = "hot_host"
    """An endpoint has too much queued prefill: sessions leave it. With policy ear, which moves sessions from
    hot endpoints itself, it has no effect, and with perilune only while endpoints hand KV over to each
    other."""
    RACK_PRESSURE = "rack_pressure"
    """A rack has far more queued prefill than the others: sessions leave it."""
    REPLICATE = "replicate"
    """Many new sessions begin with one prefix: further endpoints get a copy of it."""


class Migration(Struct, frozen=True, kw_only=True):
    """A background planner, independent of the policy, that proposes to move a session or to replicate a
    prefix. The next request of that session, or with that prefix, carries the proposal out."""

    triggers: tuple[MoveTrigger, ...] | None = None
    """Situations in which the planner acts. If left out: drain. With policy perilune, hot_host acts only
    while endpoints hand KV over to each other. If empty, it proposes nothing, and the sessions of a draining
    endpoint stay there until their policy moves them or the endpoint ends."""
    interval_seconds: Seconds = 1.0
    """Seconds between two runs of the planner."""
    worth: Annotated[float, Meta(ge=1)] = 1.5
    """The expected gain of a move divided by its cost must be at least this."""
    cooldown_seconds: Weight = 30.0
    """Minimum seconds between two moves of one session."""
    moves_per_minute: Annotated[int, Meta(ge=0)] | None = None
    """Maximum number of moves per minute in the whole pool. With 0 there are none. If left out, the budgets
    follow from measured copy times: the bytes that a network card sends or receives within 2 seconds, a
    quarter of an endpoint's KV cache for what it keeps until it is fetched, and for moves from busy endpoints
    a tenth of the pool's time."""
    token_memory_bytes: Annotated[int, Meta(ge=0)] = 256 * 1024 * 1024
    """Memory in bytes for the token ids of announced blocks, which a gateway needs to let one endpoint hand a
    session's KV over to another, or read it from the store. A block of 16 tokens takes about 210 bytes. Pools
    without a bootstrap page and without a store need none."""
    hot_pending_seconds: Weight = 1.5
    """For hot_host and rack_pressure: seconds of queued prefill above which an endpoint, or a rack on
    average, is overloaded."""
    rack_pressure: Annotated[float, Meta(ge=1)] = 2.0
    """For rack_pressure: mean queue of a rack divided by the mean queue of the fleet, above which sessions
    leave the rack."""
    load_persistence: Share = 0.5
    """Share of the difference between two endpoints' queues that is expected to remain one turn later."""
    max_remaining_turns: Weight = 20.0
    """Upper bound of the number of turns that a session is expected to have left."""
    replicate_score: Weight = 0.3
    """For replicate: score (number of uses divided by the square root of the age in seconds) from which a
    prefix is replicated."""
