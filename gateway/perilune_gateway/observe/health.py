"""Finds problems, with their likely causes and cures, by a list of small checks over the stats.

    EndpointStats… ─▶ diagnose ─▶ Problem… ─▶ Health (/api/health)

Each check is a pure function from one endpoint's stats to the problems it finds. A problem makes decisions
worse, as `effect` says; only a pool without a usable endpoint stops the gateway from serving.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import isinf
from statistics import median

from perilune_api import names
from perilune_gateway.model import server_of
from perilune_gateway.model.kv_events import IngestStats, Lost
from perilune_gateway.model.shared import SharedStats
from perilune_gateway.observe.findings import Lack
from perilune_gateway.observe.stats import EndpointStats, LogStats
from perilune_gateway.request.tokens.media_spans import MediaRow
from perilune_gateway.request.tokens.proof import Kind, KindParity, Part
from perilune_gateway.routing.handing_over import HandoffStats
from perilune_gateway.routing.new_sessions import SessionAdmissionStats
from perilune_gateway.routing.policy_watch import PolicyState
from perilune_gateway.state.in_flight import Cause
from perilune_gateway.state.parity import Parity
from perilune_gateway.state.session_queue import FULL

STALE_METRICS_S = 15.0
"""Age in seconds above which metrics are reported."""
LATE_EVENTS_S = 2.0
"""Lag in seconds above which KV events are reported."""
RECENT_S = 60.0
"""Seconds for which what happened once to a feed is reported."""


class ProblemKind(StrEnum):
    NO_ENDPOINT = "no_endpoint"
    NOT_READY = "not_ready"
    ASLEEP = "asleep"
    EJECTED = "ejected"
    STALE_METRICS = "stale_metrics"
    NO_EVENTS = "no_events"
    LATE_EVENTS = "late_events"
    LOST_EVENTS = "lost_events"
    FEED_FAILED = "feed_failed"
    INGEST_BEHIND = "ingest_behind"
    PARITY = "parity"
    TOKENS = "tokens"
    BLOCK_SIZE = "block_size"
    LEARNING = "learning"
    KV_GROUP = "kv_group"
    POOL_FILE = "pool_file"
    DECISION_LOG = "decision_log"
    TOKEN_MEMORY = "token_memory"
    BOOTSTRAP = "bootstrap"
    PEER = "peer"
    SHARED_STATE = "shared_state"
    SESSIONS_WAIT = "sessions_wait"
    POLICY = "policy"


class Status(StrEnum):
    OK = "ok"
    DEGRADED = "degraded"
    """It routes, but there is a problem."""
    UNREADY = "unready"
    """No endpoint may be chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem."""

    kind: ProblemKind
    endpoint: str
    """Address; empty for a problem of the gateway itself."""
    message: str
    effect: str
    cause: str
    cure: str


@dataclass(frozen=True, slots=True)
class CostModel:
    """What predictions of time start from, and how far that is from what was observed."""

    source: str
    error: float | None = None
    """Seconds of prefill observed / predicted − 1, the median over endpoints; the calibration corrects it.
    None if no prefill was observed."""
    observations: int = 0
    """Number of prefills that were observed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The answer of /api/health."""

    status: Status
    pool: str
    """namespace/name"""
    policy: str
    version: str
    uptime_s: float
    endpoints: int
    endpoints_ready: int
    problems: tuple[Problem, ...]
    cost_model: CostModel
    token_memory_bytes: int = 0
    """Memory in use for the token ids of blocks, which hand-offs of KV need."""
    token_memory_max_bytes: int = 0
    """Its limit; 0 if no endpoint hands KV over."""
    lacks: tuple[Lack, ...] = ()
    """What engines lack for exact routing that the operator does not run, worst first."""
    renderings: tuple[KindParity, ...] = ()
    """Whether engines and gateway make the same tokens, for each kind of request that was seen."""
    media: tuple[MediaRow, ...] = ()
    """How the media of prompts get the names by which engines cache them, and why some have none."""


def report(
    endpoints: Sequence[EndpointStats],
    *,
    block_size: int,
    pool: str,
    policy: str,
    version: str,
    uptime_s: float,
    prefill_scale: float = 1.0,
    has_cost_model: bool = False,
    pool_error: str = "",
    decision_log: LogStats | None = None,
    ingest: IngestStats | None = None,
    handoffs: HandoffStats | None = None,
    shared: SharedStats | None = None,
    new_sessions: SessionAdmissionStats | None = None,
    peers: Collection[str] = (),
    lacks: tuple[Lack, ...] = (),
    policies: Sequence[PolicyState] = (),
    renderings: tuple[KindParity, ...] = (),
    media: tuple[MediaRow, ...] = (),
) -> Health:
    """Return the health. `block_size`, `prefill_scale` and `has_cost_model` are the pool's; `pool_error` says
    why the newest pool document is not in force, if it is not. `peers`: the endpoints whose host memory
    others can read."""
    own = (
        _decision_log(decision_log)
        + _ingest(ingest or IngestStats(), len({server_of(stats.endpoint.address) for stats in endpoints}))
        + _handoffs(endpoints, handoffs)
        + _peers(endpoints, peers)
        + _shared(shared)
        + _sessions_wait(new_sessions or SessionAdmissionStats())
        + tuple(map(_policy, policies))
        + tuple(problem for row in renderings for problem in _tokens(row))
    )
    problems = diagnose(endpoints, block_size, pool_error) + own
    ready = sum(stats.endpoint.ready for stats in endpoints)
    usable = ready or any(stats.silent or stats.ejection for stats in endpoints)
    status = Status.UNREADY if not usable else Status.DEGRADED if problems else Status.OK
    cost = cost_model(endpoints, prefill_scale, has_cost_model)
    return Health(
        status=status,
        pool=pool,
        policy=policy,
        version=version,
        uptime_s=uptime_s,
        endpoints=len(endpoints),
        endpoints_ready=ready,
        problems=problems,
        cost_model=cost,
        token_memory_bytes=handoffs.token_bytes if handoffs else 0,
        token_memory_max_bytes=handoffs.token_max_bytes if handoffs else 0,
        lacks=lacks,
        renderings=renderings,
        media=media,
    )


def cost_model(endpoints: Sequence[EndpointStats], prefill_scale: float, told: bool = False) -> CostModel:
    """Say from what predictions start. `told`: whether the pool has a cost model."""
    times = "the times of spec.engine.costModel" if told else "one H20 with a 30B-A3B model, its times"
    source = f"{times} × {prefill_scale:g} (spec.engine.prefillScale)"
    seen = [stats.calibration.prefill for stats in endpoints if stats.calibration.prefill.observations]
    if not seen:
        return CostModel(source)
    error = median(prefill.ratio for prefill in seen) - 1.0
    return CostModel(source, round(error, 3), sum(prefill.observations for prefill in seen))


def diagnose(
    endpoints: Sequence[EndpointStats], block_size: int, pool_error: str = ""
) -> tuple[Problem, ...]:
    """Return all problems, those of the gateway itself first."""
    found: list[Problem] = []
    if pool_error:
        found.append(
            Problem(
                kind=ProblemKind.POOL_FILE,
                endpoint="",
                message=pool_error,
                effect="the pool as it was before the edit stays in force",
                cause="the newest edit of the pool document is wrong, or it cannot be read",
                cure="correct the field that the message names; it is read again within a second",
            )
        )
    if not any(stats.endpoint.ready for stats in endpoints):
        found.append(
            Problem(
                kind=ProblemKind.NO_ENDPOINT,
                endpoint="",
                message=f"none of {len(endpoints)} endpoints is ready"
                if endpoints
                else "the pool has no endpoints",
                effect="requests go to the endpoints that are ejected, or of which only the metrics "
                "cannot be read"
                if any(stats.silent or stats.ejection for stats in endpoints)
                else "every request is refused with 503",
                cause="the engines are down or still loading" if endpoints else "`spec.endpoints` is empty",
                cure="see each endpoint below" if endpoints else "list the engines in the pool document",
            )
        )
    for stats in endpoints:
        checks = CHECKS if stats.endpoint.ready else (_why_not_ready(stats),)
        found.extend(problem for check in checks for problem in check(stats, block_size))
    return tuple(found)


def _decision_log(log: LogStats | None) -> tuple[Problem, ...]:
    if log is None or not log.error:
        return ()
    return (
        Problem(
            kind=ProblemKind.DECISION_LOG,
            endpoint="",
            message=f"{log.path} cannot be written ({log.error}); {log.dropped} entries are lost",
            effect="requests are served, and their decisions are not recorded",
            cause="the disk is full, or the gateway may not write to the folder",
            cure="free some space, or choose another file with --decision-log; the gateway keeps trying",
        ),
    )


def _ingest(ingest: IngestStats, servers: int) -> tuple[Problem, ...]:
    if ingest.busy <= names.BUSY_INGEST and ingest.behind_s <= names.BEHIND_S:
        return ()
    cure = "wait while feeds catch up; else give the gateway a core of its own, or split the pool"
    if ingest.busy > names.BUSY_INGEST:
        fit = int(servers * names.BUSY_INGEST / ingest.busy)
        cure += f" ({names.BUSY_INGEST:.0%} of its core follow about {fit} of {servers} endpoints)"
    return (
        Problem(
            kind=ProblemKind.INGEST_BEHIND,
            endpoint="",
            message=f"KV events take {ingest.busy:.0%} of this gateway's core and are "
            f"{ingest.behind_s:.1f} s behind"
            + (f"; {ingest.catching_up} feeds are catching up" if ingest.catching_up else ""),
            effect="requests are decided in time; once events are late, by caches as they were then",
            cause="the pool announces more blocks than one gateway can take in, or the gateway gets too "
            "little CPU",
            cure=cure,
        ),
    )


def _tokens(row: KindParity) -> Iterator[Problem]:
    """Yield a problem for each engine that makes other tokens of a kind of request."""
    where = f" from token {row.at} on" if row.ours != row.theirs else ""
    for engine in row.different:
        yield Problem(
            kind=ProblemKind.TOKENS,
            endpoint=engine,
            message=f"its tokens of {Kind(row.api, row.tools, row.thinking)} differ{where}"
            + (f" ({row.ours} here, {row.theirs} there)" if where else ""),
            effect="such prompts are tokenized by an engine, which takes a round trip"
            if row.asks_engine
            else "cached prefixes of such prompts are found in part or not at all",
            cause=PARTS[row.part] if row.part else "",
            cure="give `spec.model.tokenizer` the engines' tokenizer and chat template, and start all "
            "engines with the same --chat-template and --default-chat-template-kwargs",
        )


PARTS: Mapping[Part, str] = {
    Part.TOKENIZER: "the two have different tokenizer files",
    Part.SPECIAL_TOKENS: "one of the two alone puts a special token before or after the prompt",
    Part.TEMPLATE: "the two have different chat templates, or the engine has default arguments for it",
    Part.TOOLS: "their chat templates write tools, calls or results differently",
    Part.THINKING: "their chat templates treat thinking differently",
    Part.CONVERSION: "this version of the engine makes other messages of such a request than the gateway",
}
"""What differs, in words."""


def _shared(shared: SharedStats | None) -> tuple[Problem, ...]:
    if shared is None or shared.connected:
        return ()
    return (
        Problem(
            kind=ProblemKind.SHARED_STATE,
            endpoint="",
            message=f"no connection to the shared state's server {shared.server} for {shared.alone_s:.0f} s"
            + (f" ({shared.error})" if shared.error else ""),
            effect="this gateway decides alone, without the load and the new sessions of other gateways",
            cause="the server is down, or address, password, TLS or a NetworkPolicy is wrong",
            cure="start the server, or correct what the message names; the gateway connects again by itself",
        ),
    )


def _sessions_wait(new: SessionAdmissionStats) -> tuple[Problem, ...]:
    if not new.waiting:
        return ()
    return (
        Problem(
            kind=ProblemKind.SESSIONS_WAIT,
            endpoint="",
            message=f"{new.waiting} new sessions wait to begin, the first of them for {new.longest_s:.0f} s:"
            f" active contexts need {new.active_tokens:,.0f} tokens of KV,"
            f" of {FULL * new.capacity_tokens:,.0f} that they may fill",
            effect="sessions that have begun are served as usual; one that waits too long gets 429",
            cause="more sessions are active than fit into the KV caches of the endpoints that take new ones",
            cure="none is needed for a short while; else add endpoints",
        ),
    )


def _policy(state: PolicyState) -> Problem:
    if state.off:
        return Problem(
            kind=ProblemKind.POLICY,
            endpoint="",
            message=f"policy {state.name} is switched off: {state.off}",
            effect=f"{state.in_place} decides in its place",
            cause="the package of the policy is missing or wrong, or its parameters are",
            cure="correct what the message names; a change of routing.policy or a restart switches it on"
            " again",
        )
    faults = ", ".join(f"{count} {kind}" for kind, count in state.faults.items())
    return Problem(
        kind=ProblemKind.POLICY,
        endpoint="",
        message=f"policy {state.name} failed: {faults}; the last time {state.last}",
        effect=f"{state.in_place} took these decisions; those that were only slow held up all requests",
        cause="a mistake in the package of the policy",
        cure="correct the package; the gateway's log has the whole error",
    )


def _peers(endpoints: Sequence[EndpointStats], peers: Collection[str]) -> tuple[Problem, ...]:
    return tuple(
        Problem(
            kind=ProblemKind.PEER,
            endpoint=stats.endpoint.address,
            message=f"nothing answers at {stats.endpoint.peer}, where other engines read its host memory",
            effect="no engine reads from it, nor it from others; they compute instead",
            cause="vLLM runs without OffloadingConnector's tier p2p, or the gateway may not reach the port",
            cure="start vLLM >= 0.27 with that tier and check `peer` in the pool document",
        )
        for stats in endpoints
        if stats.endpoint.peer and stats.endpoint.ready and stats.endpoint.address not in peers
    )


def _handoffs(endpoints: Sequence[EndpointStats], handoffs: HandoffStats | None) -> tuple[Problem, ...]:
    if handoffs is None:
        return ()
    found = [
        Problem(
            kind=ProblemKind.BOOTSTRAP,
            endpoint=stats.endpoint.address,
            message=f"its bootstrap page http://{stats.endpoint.bootstrap}/query does not answer, or "
            "lacks workers",
            effect="no KV is handed over to or from it; its sessions move without their KV",
            cause="vLLM runs without MooncakeConnector or still starts, or the gateway may not reach "
            "the port",
            cure="start vLLM with kv_role kv_both and check `bootstrap` in the pool document",
        )
        for stats in endpoints
        if stats.endpoint.bootstrap
        and stats.endpoint.ready
        and stats.endpoint.address not in handoffs.connectors
    ]
    if handoffs.tokens_missing:
        found.append(
            Problem(
                kind=ProblemKind.TOKEN_MEMORY,
                endpoint="",
                message=f"token ids of {handoffs.tokens_missing} blocks that endpoints cache were forgotten",
                effect="sessions with such blocks move without their KV",
                cause="the memory for token ids is smaller than what the endpoints cache",
                cure="raise `spec.routing.migration.tokenMemoryBytes`",
            )
        )
    return tuple(found)


Check = Callable[[EndpointStats, int], Iterator[Problem]]


def _not_ready(stats: EndpointStats, block_size: int) -> Iterator[Problem]:
    address = stats.endpoint.address
    yield Problem(
        kind=ProblemKind.NOT_READY,
        endpoint=address,
        message="not ready",
        effect="it gets requests only while no endpoint is ready" if stats.silent else "it gets no requests",
        cause="its /metrics does not answer: it is down, or far too busy"
        if stats.silent
        else "it is down, still loading, or answered with errors",
        cure=f"see its log and {stats.curl}/metrics; it is used again once that succeeds",
    )


def _asleep(stats: EndpointStats, block_size: int) -> Iterator[Problem]:
    address = stats.endpoint.address
    yield Problem(
        kind=ProblemKind.ASLEEP,
        endpoint=address,
        message="its engine sleeps",
        effect="it gets no requests, its sessions go elsewhere, and what it cached is gone",
        cause="somebody has sent it to sleep (POST /sleep)",
        cure=f"{stats.curl}/wake_up -X POST; it is used again once its metrics say that it is awake",
    )


def _ejected(stats: EndpointStats, block_size: int) -> Iterator[Problem]:
    found, address = stats.ejection, stats.endpoint.address
    assert found is not None
    late = found.cause is Cause.LATE
    what = "gave no first token in time" if late else "failed"
    yield Problem(
        kind=ProblemKind.EJECTED,
        endpoint=address,
        message=f"ejected {found.since_s:.0f} s ago: {found.bad} of its last {found.of} requests {what}",
        effect="it gets one request at a time as a trial, and its sessions go elsewhere",
        cause="it hangs, or is far slower than the other endpoints"
        if late
        else "its requests fail, although its /metrics answers",
        cure=f"see its log and send it a request ({stats.curl}/v1/completions); it is used again once "
        "a trial succeeds",
    )


def _stale_metrics(stats: EndpointStats, block_size: int) -> Iterator[Problem]:
    age_s = stats.load.metrics_age_s
    if age_s > STALE_METRICS_S:
        yield Problem(
            kind=ProblemKind.STALE_METRICS,
            endpoint=stats.endpoint.address,
            message="its metrics were never read" if isinf(age_s) else f"its metrics are {age_s:.0f} s old",
            effect="its load is estimated from the requests that this gateway has sent there",
            cause="the engine's /metrics does not answer within 2 s",
            cure=f"{stats.curl}/metrics from the gateway's host",
        )


def _events(stats: EndpointStats, block_size: int) -> Iterator[Problem]:
    events, address = stats.events, stats.endpoint.address
    if events is None:
        return
    if events.failure:
        yield Problem(
            kind=ProblemKind.FEED_FAILED,
            endpoint=address,
            message=f"its KV events are not followed: {events.failure}",
            effect="its cache is inferred from the requests routed there",
            cause="its address, the limit of open files, the engine's messages, or a bug, as the message "
            "says",
            cure="correct what the message names; a feed that can come back is tried again within a minute",
        )
    elif not events.connected and stats.prefix_queries_tokens:  # an engine without requests sends no events
        yield Problem(
            kind=ProblemKind.NO_EVENTS,
            endpoint=address,
            message="it has served prompts, and no KV event has arrived",
            effect="its cache is inferred from the requests routed there",
            cause="its publisher is off, or cannot be reached at the address in the pool document",
            cure="start vLLM with --kv-events-config enabling zmq, and check `events` in the pool document",
        )
    if events.lag_s > LATE_EVENTS_S and (events.heard_s or 0.0) <= RECENT_S:
        yield Problem(
            kind=ProblemKind.LATE_EVENTS,
            endpoint=address,
            message=f"KV events arrive {events.lag_s:.1f} s after they were published",
            effect="decisions use its cache as it was then",
            cause="the two hosts' clocks differ, or one of the two is overloaded",
            cure="compare the clocks, then the CPU use of both",
        )
    if events.lost and ((events.lost_s or 0.0) <= RECENT_S or stats.waiting_blocks):
        cause, cure = WHY_LOST[events.lost]
        yield Problem(
            kind=ProblemKind.LOST_EVENTS,
            endpoint=address,
            message=f"a gap in its KV events could not be replayed {events.lost_s or 0.0:.0f} s ago;"
            f" so far {events.rebuilds} of {events.gaps}",
            effect="its blocks were forgotten, and are learned again from later events",
            cause=cause,
            cure=cure,
        )


WHY_LOST: Mapping[Lost, tuple[str, str]] = {
    Lost.NO_REPLAY: ("the pool document names no replay address", "set `replay` in the pool document"),
    Lost.UNANSWERED: (
        "its replay socket does not answer, or not to the end",
        "check `replay` in the pool document, and that the gateway may reach the port",
    ),
    Lost.TOO_OLD: ("its replay buffer is shorter than the gap", "raise vLLM's replay buffer_steps"),
    Lost.UNREADABLE: ("it replays messages that cannot be read", "see the gateway's log and vLLM's version"),
}
"""Why events were lost → (cause, cure)."""


def _parity(stats: EndpointStats, block_size: int) -> Iterator[Problem]:
    if stats.parity_cause:
        yield Problem(
            kind=ProblemKind.PARITY,
            endpoint=stats.endpoint.address,
            message="hardly any prompt tokenized here matches the blocks that it announces"
            if stats.parity == Parity.TEMPLATE
            else "block hashes computed here differ from those it announces",
            effect="predicted cache hits may be wrong",
            cause=stats.parity_cause,
            cure=stats.parity_cure,
        )


def _block_size(stats: EndpointStats, block_size: int) -> Iterator[Problem]:
    if stats.block_size % block_size:
        yield Problem(
            kind=ProblemKind.BLOCK_SIZE,
            endpoint=stats.endpoint.address,
            message=f"its KV blocks hold {stats.block_size} tokens, the pool says {block_size}",
            effect="no prefix will match there",
            cause="the engine was started with another --block-size than `spec.engine.blockSize`",
            cure=f"set `spec.engine.blockSize: {stats.block_size}`, or start the engine with {block_size}",
        )


def _learning(stats: EndpointStats, block_size: int) -> Iterator[Problem]:
    if stats.waiting_blocks:
        yield Problem(
            kind=ProblemKind.LEARNING,
            endpoint=stats.endpoint.address,
            message=f"learning, {stats.waiting_blocks} blocks of unknown parents",
            effect="prompts that it caches may count as uncached there",
            cause="the engine had stored the parents before the gateway listened, and replay did not "
            "reach them",
            cure="none is needed: requests ask it to tell (vLLM 0.32); a larger replay buffer_steps "
            "avoids it",
        )


def _kv_group(stats: EndpointStats, block_size: int) -> Iterator[Problem]:
    if stats.strange_group:
        yield Problem(
            kind=ProblemKind.KV_GROUP,
            endpoint=stats.endpoint.address,
            message=f"KV cache groups of the kind {stats.strange_group} are not understood",
            effect="their blocks are ignored, so more may count as cached than is",
            cause="the model has layers that this version does not know",
            cure="update the gateway; until then compare predicted and real cached tokens",
        )


CHECKS: tuple[Check, ...] = (_stale_metrics, _events, _parity, _block_size, _learning, _kv_group)
"""Checks of a ready endpoint. One that is not ready has only the problem NOT_READY, ASLEEP or EJECTED, which
explains the rest."""


def _why_not_ready(stats: EndpointStats) -> Check:
    if stats.asleep:
        return _asleep
    return _ejected if stats.ejection else _not_ready
