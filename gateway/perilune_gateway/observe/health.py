"""Finds problems, with their likely causes and cures, by a list of small checks over the stats.

    EndpointStats… ─▶ diagnose ─▶ Problem… ─▶ Health (/api/health)

Each check is a pure function from one endpoint's stats to the problems it finds. A problem makes decisions
worse, as `effect` says; only a pool without a usable endpoint stops the gateway from serving.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import isinf

from perilune_gateway.observe.stats import EndpointStats, LogStats
from perilune_gateway.state.parity import Parity

STALE_METRICS_S = 15.0
"""Age in seconds above which metrics are reported."""
LATE_EVENTS_S = 2.0
"""Lag in seconds above which KV events are reported."""


class ProblemKind(StrEnum):
    NO_ENDPOINT = "no_endpoint"
    NOT_READY = "not_ready"
    STALE_METRICS = "stale_metrics"
    NO_EVENTS = "no_events"
    LATE_EVENTS = "late_events"
    LOST_EVENTS = "lost_events"
    PARITY = "parity"
    BLOCK_SIZE = "block_size"
    POOL_FILE = "pool_file"
    DECISION_LOG = "decision_log"


class Status(StrEnum):
    OK = "ok"
    DEGRADED = "degraded"
    """It routes, but there is a problem."""
    UNREADY = "unready"
    """No endpoint may be chosen."""


@dataclass(frozen=True, slots=True)
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


def report(
    endpoints: Sequence[EndpointStats],
    *,
    block_size: int,
    pool: str,
    policy: str,
    version: str,
    uptime_s: float,
    pool_error: str = "",
    decision_log: LogStats | None = None,
) -> Health:
    """`block_size` is the pool's; `pool_error` says why the newest pool document is not in force, if it is
    not."""
    problems = diagnose(endpoints, block_size, pool_error) + _decision_log(decision_log)
    ready = sum(stats.endpoint.ready for stats in endpoints)
    usable = ready or any(stats.silent for stats in endpoints)
    status = Status.UNREADY if not usable else Status.DEGRADED if problems else Status.OK
    return Health(status, pool, policy, version, uptime_s, len(endpoints), ready, problems)


def diagnose(
    endpoints: Sequence[EndpointStats], block_size: int, pool_error: str = ""
) -> tuple[Problem, ...]:
    """All problems, those of the gateway itself first."""
    found: list[Problem] = []
    if pool_error:
        found.append(
            Problem(
                ProblemKind.POOL_FILE,
                "",
                pool_error,
                "the pool as it was before the edit stays in force",
                "the newest edit of the pool document is wrong, or it cannot be read",
                "correct the field that the message names; it is read again within a second",
            )
        )
    if not any(stats.endpoint.ready for stats in endpoints):
        found.append(
            Problem(
                ProblemKind.NO_ENDPOINT,
                "",
                f"none of {len(endpoints)} endpoints is ready" if endpoints else "the pool has no endpoints",
                "requests go to the endpoints of which only the metrics cannot be read"
                if any(stats.silent for stats in endpoints)
                else "every request is refused with 503",
                "the engines are down or still loading" if endpoints else "`spec.endpoints` is empty",
                "see each endpoint below" if endpoints else "list the engines in the pool document",
            )
        )
    for stats in endpoints:
        checks = CHECKS if stats.endpoint.ready else (_not_ready,)
        found.extend(problem for check in checks for problem in check(stats, block_size))
    return tuple(found)


def _decision_log(log: LogStats | None) -> tuple[Problem, ...]:
    if log is None or not log.error:
        return ()
    return (
        Problem(
            ProblemKind.DECISION_LOG,
            "",
            f"{log.path} cannot be written ({log.error}); {log.dropped} entries are lost",
            "requests are served, and their decisions are not recorded",
            "the disk is full, or the gateway may not write to the folder",
            "free some space, or choose another file with --decision-log; the gateway keeps trying",
        ),
    )


Check = Callable[[EndpointStats, int], Iterator[Problem]]


def _not_ready(stats: EndpointStats, block_size: int) -> Iterator[Problem]:
    address = stats.endpoint.address
    yield Problem(
        ProblemKind.NOT_READY,
        address,
        "not ready",
        "it gets requests only while no endpoint is ready" if stats.silent else "it gets no requests",
        "its /metrics does not answer: it is down, or far too busy"
        if stats.silent
        else "it is down, still loading, or answered with errors",
        f"see its log and curl http://{address}/metrics; it is used again once that succeeds",
    )


def _stale_metrics(stats: EndpointStats, block_size: int) -> Iterator[Problem]:
    age_s = stats.load.metrics_age_s
    if age_s > STALE_METRICS_S:
        yield Problem(
            ProblemKind.STALE_METRICS,
            stats.endpoint.address,
            "its metrics were never read" if isinf(age_s) else f"its metrics are {age_s:.0f} s old",
            "its load is estimated from the requests that this gateway has sent there",
            "the engine's /metrics does not answer within 2 s",
            f"curl http://{stats.endpoint.address}/metrics from the gateway's host",
        )


def _events(stats: EndpointStats, block_size: int) -> Iterator[Problem]:
    events, address = stats.events, stats.endpoint.address
    if events is None:
        return
    if not events.connected and stats.prefix_queries_tokens:  # an engine without requests sends no events
        yield Problem(
            ProblemKind.NO_EVENTS,
            address,
            "it has served prompts, and no KV event has arrived",
            "its cache is inferred from the requests routed there",
            "its publisher is off, or cannot be reached at the address in the pool document",
            "start vLLM with --kv-events-config enabling zmq, and check `events` in the pool document",
        )
    if events.lag_s > LATE_EVENTS_S:
        yield Problem(
            ProblemKind.LATE_EVENTS,
            address,
            f"KV events arrive {events.lag_s:.1f} s after they were published",
            "decisions use its cache as it was then",
            "the two hosts' clocks differ, or one of the two is overloaded",
            "compare the clocks, then the CPU use of both",
        )
    if events.rebuilds:
        yield Problem(
            ProblemKind.LOST_EVENTS,
            address,
            f"{events.rebuilds} of {events.gaps} gaps in its KV events could not be replayed",
            "its blocks were forgotten each time, and learned again from later events",
            "no replay address, or its replay buffer is shorter than the gap",
            "set `replay` in the pool document and raise vLLM's replay buffer_steps",
        )


def _parity(stats: EndpointStats, block_size: int) -> Iterator[Problem]:
    if stats.parity_cause:
        yield Problem(
            ProblemKind.PARITY,
            stats.endpoint.address,
            "hardly any prompt tokenized here matches the blocks that it announces"
            if stats.parity == Parity.TEMPLATE
            else "block hashes computed here differ from those it announces",
            "predicted cache hits may be wrong",
            stats.parity_cause,
            stats.parity_cure,
        )


def _block_size(stats: EndpointStats, block_size: int) -> Iterator[Problem]:
    if stats.block_size and stats.block_size != block_size:
        yield Problem(
            ProblemKind.BLOCK_SIZE,
            stats.endpoint.address,
            f"its KV blocks hold {stats.block_size} tokens, the pool says {block_size}",
            "no prefix will match there",
            "the engine was started with another --block-size than `spec.engine.blockSize`",
            f"set `spec.engine.blockSize: {stats.block_size}`, or start the engine with {block_size}",
        )


CHECKS: tuple[Check, ...] = (_stale_metrics, _events, _parity, _block_size)
"""Checks of a ready endpoint. One that is not ready has only the problem NOT_READY, which explains the
rest."""
