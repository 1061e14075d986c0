"""Every metric of the operator on one page."""

from collections.abc import Callable
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

BUCKETS_S = (
    *(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0),
)


class Outcome(StrEnum):
    """What became of a round."""

    DONE = "done"
    FAILED = "failed"
    """It is tried again."""
    NOT_LEADER = "not_leader"
    """Leadership was lost on the way."""


class Metrics:
    """What workers report, and what a scrape reads."""

    def __init__(self, registry: CollectorRegistry, leads_s: Callable[[], float]) -> None:
        """`leads_s`: seconds for which we are leader, 0 or less: we are not."""
        self._rounds = Counter(
            "perilune_operator_rounds", "Rounds of one pool, by outcome.", ["outcome"], registry=registry
        )
        self._seconds = Histogram(
            "perilune_operator_round_seconds",
            "How long a round worked, without waiting for its turn.",
            registry=registry,
            buckets=BUCKETS_S,
        )
        self._reaction = Histogram(
            "perilune_operator_reaction_seconds",
            "From the event that woke a pool to the end of its round, by whether its spec has changed.",
            ["changed"],
            registry=registry,
            buckets=BUCKETS_S,
        )
        self._writes = Counter(
            "perilune_operator_writes",
            "Requests that may change the cluster, by method and kind.",
            ["method", "kind"],
            registry=registry,
        )
        self.pools = Gauge("perilune_operator_pools", "Pools known.", registry=registry)
        leader = Gauge("perilune_operator_leader", "1: this replica acts.", registry=registry)
        leader.set_function(lambda: float(leads_s() > 0))

    def round(self, outcome: Outcome, seconds: float, reaction_s: float, *, changed: bool) -> None:
        self._rounds.labels(outcome).inc()
        self._seconds.observe(seconds)
        self._reaction.labels(str(changed).lower()).observe(reaction_s)

    def wrote(self, method: str, kind: str) -> None:
        self._writes.labels(method, kind).inc()
