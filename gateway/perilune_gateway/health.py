"""What is wrong, why probably, and what to do about it: a list of small checks over the stats.

    NodeStats… ─▶ diagnose ─▶ Problem… ─▶ Health (/api/health)

Each check is a function from one endpoint's row to the problems it sees; no clock, no I/O. A problem degrades
one term of the decisions (named in `effect`), it never stops the gateway; only having no endpoint does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import isinf

from perilune_gateway.stats import LogStats, NodeStats

STALE_METRICS_S = 15.0
LATE_EVENTS_S = 2.0


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
    """It routes; something that it would like to know is missing."""
    UNREADY = "unready"
    """No endpoint may be chosen."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong."""

    kind: ProblemKind
    endpoint: str
    """Empty: the gateway itself."""
    message: str
    effect: str
    cause: str
    cure: str


@dataclass(frozen=True, slots=True)
class Health:
    """The gateway at one moment."""

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
    nodes: Sequence[NodeStats],
    *,
    block_size: int,
    pool: str,
    policy: str,
    version: str,
    uptime_s: float,
    pool_error: str = "",
    decision_log: LogStats | None = None,
) -> Health:
    """`block_size`: the pool's; `pool_error`: why the newest pool document is not in force."""
    problems = diagnose(nodes, block_size, pool_error) + _decision_log(decision_log)
    ready = sum(node.endpoint.ready for node in nodes)
    usable = ready or any(node.silent for node in nodes)
    status = Status.UNREADY if not usable else Status.DEGRADED if problems else Status.OK
    return Health(status, pool, policy, version, uptime_s, len(nodes), ready, problems)


def diagnose(nodes: Sequence[NodeStats], block_size: int, pool_error: str = "") -> tuple[Problem, ...]:
    """Every problem, the gateway's own first."""
    found: list[Problem] = []
    if pool_error:
        found.append(
            Problem(
                ProblemKind.POOL_FILE,
                "",
                pool_error,
                "the pool as it was before the edit stays in force",
                "the newest edit of the pool document is wrong",
                "correct the field that the message names; the file is read again within a second",
            )
        )
    if not any(node.endpoint.ready for node in nodes):
        found.append(
            Problem(
                ProblemKind.NO_ENDPOINT,
                "",
                f"none of {len(nodes)} endpoints is ready" if nodes else "the pool has no endpoints",
                "requests go to those of which only the metrics fail"
                if any(node.silent for node in nodes)
                else "every request is refused with 503",
                "the engines are down or still loading" if nodes else "`spec.endpoints` is empty",
                "see each endpoint below" if nodes else "list the engines in the pool document",
            )
        )
    for node in nodes:
        checks = CHECKS if node.endpoint.ready else (_not_ready,)
        found.extend(problem for check in checks for problem in check(node, block_size))
    return tuple(found)


def _decision_log(log: LogStats | None) -> tuple[Problem, ...]:
    if log is None or not log.error:
        return ()
    return (
        Problem(
            ProblemKind.DECISION_LOG,
            "",
            f"{log.path} cannot be written ({log.error}); {log.dropped} entries are lost",
            "requests go on, their decisions are not recorded",
            "the disk is full, or the folder is not the gateway's to write",
            "make room, or choose another file with --decision-log; it is tried again all the time",
        ),
    )


Check = Callable[[NodeStats, int], Iterator[Problem]]


def _not_ready(node: NodeStats, block_size: int) -> Iterator[Problem]:
    address = node.endpoint.address
    yield Problem(
        ProblemKind.NOT_READY,
        address,
        "not ready",
        "it gets requests only where no endpoint is ready" if node.silent else "it gets no requests",
        "its /metrics does not answer: it is down, or far too busy"
        if node.silent
        else "it is down, still loading, or answered with errors",
        f"see its log and curl http://{address}/metrics; with its next good answer it is taken back",
    )


def _stale_metrics(node: NodeStats, block_size: int) -> Iterator[Problem]:
    age_s = node.load.metrics_age_s
    if age_s > STALE_METRICS_S:
        yield Problem(
            ProblemKind.STALE_METRICS,
            node.endpoint.address,
            "its metrics were never read" if isinf(age_s) else f"its metrics are {age_s:.0f} s old",
            "KV usage and running requests are what this gateway itself has sent there",
            "the engine's /metrics does not answer within 2 s",
            f"curl http://{node.endpoint.address}/metrics from the gateway's host",
        )


def _events(node: NodeStats, block_size: int) -> Iterator[Problem]:
    events, address = node.events, node.endpoint.address
    if events is None:
        return
    if not events.connected and node.prefix_queries_tokens:  # an engine that served nothing says nothing
        yield Problem(
            ProblemKind.NO_EVENTS,
            address,
            "it has served prompts, and no KV event has arrived",
            "its cache is known only by what was routed there",
            "its publisher is off, or not reachable at the address of the pool document",
            "start vLLM with --kv-events-config enabling zmq, and check `events` of the pool document",
        )
    if events.lag_s > LATE_EVENTS_S:
        yield Problem(
            ProblemKind.LATE_EVENTS,
            address,
            f"KV events arrive {events.lag_s:.1f} s after they were published",
            "its cache is seen as it was then",
            "the two hosts' clocks differ, or one of the two is overloaded",
            "compare the clocks, then the CPU use of both",
        )
    if events.rebuilds:
        yield Problem(
            ProblemKind.LOST_EVENTS,
            address,
            f"{events.rebuilds} of {events.gaps} gaps in its KV events could not be replayed",
            "what it held was forgotten each time, and learned anew from later events",
            "no replay address, or its replay buffer is shorter than the gap",
            "set `replay` in the pool document and raise vLLM's replay buffer_steps",
        )


def _parity(node: NodeStats, block_size: int) -> Iterator[Problem]:
    if node.parity_cause:
        yield Problem(
            ProblemKind.PARITY,
            node.endpoint.address,
            "block hashes computed here differ from those it announces",
            "predicted cache hits may be wrong",
            node.parity_cause,
            node.parity_cure,
        )


def _block_size(node: NodeStats, block_size: int) -> Iterator[Problem]:
    if node.block_size and node.block_size != block_size:
        yield Problem(
            ProblemKind.BLOCK_SIZE,
            node.endpoint.address,
            f"its KV blocks hold {node.block_size} tokens, the pool says {block_size}",
            "no prefix of it will match",
            "the engine was started with another --block-size than `spec.engine.blockSize`",
            f"set `spec.engine.blockSize: {node.block_size}`, or start the engine with {block_size}",
        )


CHECKS: tuple[Check, ...] = (_stale_metrics, _events, _parity, _block_size)
"""Of a ready endpoint; of another one, being down explains the rest."""
