"""Every metric of the operator."""

from collections.abc import Callable
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

BUCKETS_S = (
    *(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0),
)


class Outcome(StrEnum):
    """How a round ended."""

    DONE = "done"
    FAILED = "failed"
    """The round is repeated after a pause."""
    NOT_LEADER = "not_leader"
    """Leadership was lost during the round."""


class Metrics:
    """Counts rounds and writes."""

    def __init__(self, registry: CollectorRegistry, leads_s: Callable[[], float]) -> None:
        """`leads_s`: seconds for which this process leads; 0 or less when it does not."""
        self._rounds = Counter(
            "perilune_operator_rounds", "Rounds of one pool, by outcome.", ["outcome"], registry=registry
        )
        self._seconds = Histogram(
            "perilune_operator_round_seconds",
            "Duration of a round, without waiting for its turn.",
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
            "Requests that may change objects, by method and kind; without Kubernetes events.",
            ["method", "kind"],
            registry=registry,
        )
        self.pools = Gauge("perilune_operator_pools", "Known pools.", registry=registry)
        leader = Gauge("perilune_operator_leader", "1 when this replica leads.", registry=registry)
        leader.set_function(lambda: float(leads_s() > 0))

    def round(self, outcome: Outcome, seconds: float, reaction_s: float, *, changed: bool) -> None:
        self._rounds.labels(outcome).inc()
        self._seconds.observe(seconds)
        self._reaction.labels(str(changed).lower()).observe(reaction_s)

    def wrote(self, method: str, kind: str) -> None:
        self._writes.labels(method, kind).inc()
