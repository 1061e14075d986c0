"""The gateway's metrics of what *happens* (a decision, a refusal, an answer's end): name, unit, labels, help.

What *is* (load, index, feeds) is read from one snapshot when a scrape asks for it (snapshot_metrics.py). So
are the tokenizer's numbers (request/tokens/metrics.py). Requests pay nothing for those.

Labels come from enums, policy names and endpoint addresses, never from what a client sent.

Conductor's four: cache hit rate = perilune_cache_hit_ratio (a true ratio; for longer windows divide the two
token counters), schedule latency = perilune_scheduling_seconds{step="total"} (buckets 0.1, 0.5, 1, 2, 5 ms
among others), node load by endpoint = perilune_endpoint_*, cache migrations =
perilune_migrations_total.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import accumulate
from math import inf
from typing import Protocol

from prometheus_client import CollectorRegistry, Info
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from perilune_gateway.model import (
    Decision,
    DecisionRecord,
    Outcome,
    Reason,
    RefuseReason,
    Step,
    TokenSource,
)
from perilune_gateway.observe import snapshot_metrics
from perilune_gateway.observe.stats import Snapshot

SCHEDULING_BUCKETS_S = (
    *(0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005),
    *(0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.5),
)
LEFT = "left"
"""Label that stands for all endpoints that have left the pool."""


class Affinity(StrEnum):
    """What a decision did with its session's host."""

    HIT = "hit"
    """The request went to the session's host."""
    MOVED = "moved"
    """The policy moved the session."""
    LEFT = "left"
    """Another endpoint without a move: the host is gone or draining, or the policy knows no sessions."""
    NEW = "new"
    """The session had no host yet."""


class Window:
    """Sums of (part, whole) over about the last `seconds`: a ring of slots, each overwritten when it is due.

    Time is an argument; reading changes nothing.
    """

    def __init__(self, seconds: float = 60.0, slots: int = 12) -> None:
        self._slot_s = seconds / slots
        self._ages = [-1] * slots
        self._parts = [0.0] * slots
        self._wholes = [0.0] * slots

    def add(self, part: float, whole: float, now: float) -> None:
        age = int(now / self._slot_s)
        slot = age % len(self._ages)
        if self._ages[slot] != age:
            self._ages[slot] = age
            self._parts[slot] = self._wholes[slot] = 0.0
        self._parts[slot] += part
        self._wholes[slot] += whole

    def ratio(self, now: float) -> float | None:
        """None: nothing was added in the window."""
        oldest = int(now / self._slot_s) - len(self._ages) + 1
        live = [i for i, age in enumerate(self._ages) if age >= oldest]
        whole = sum(self._wholes[i] for i in live)
        return sum(self._parts[i] for i in live) / whole if whole else None


class Tally:
    """A counter by labels that counts in a dict and becomes a metric when a scrape reads it: a request pays a
    tenth of what prometheus_client's own counters take."""

    def __init__(self, registry: CollectorRegistry, name: str, text: str, labels: Sequence[str] = ()) -> None:
        self._name = f"perilune_{name}"
        self._text = text
        self._labels = labels
        self._counts: defaultdict[tuple[str, ...], float] = defaultdict(float)
        registry.register(self)

    def add(self, *labels: str, by: float = 1) -> None:
        """Count `by` more under these labels."""
        self._counts[labels] += by

    def start(self, values: Iterable[str]) -> None:
        """Show a series of 0 for each value of the only label: a rate() over a series that appears late is
        wrong."""
        for value in values:
            self._counts[value,] += 0

    def remove(self, *labels: str) -> None:
        """Show the series no longer."""
        self._counts.pop(labels, None)

    def describe(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._text, labels=self._labels)

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, count in self._counts.items():
            family.add_metric(labels, count)
        yield family


class Scheduling:
    """Histogram of the seconds that each step of a decision takes, counted like a `Tally`."""

    _NAME = "perilune_scheduling_seconds"
    _TEXT = "Time spent deciding one request, by step; total is all of it without waiting for the body."

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counts = {step.value: [0] * (len(SCHEDULING_BUCKETS_S) + 1) for step in Step}
        self._sums = dict.fromkeys(self._counts, 0.0)
        registry.register(self)

    def observe(self, microseconds: Mapping[str, float]) -> None:
        """Count one decision's steps."""
        for step, value_us in microseconds.items():
            seconds = value_us * 1e-6
            self._counts[step][bisect_left(SCHEDULING_BUCKETS_S, seconds)] += 1
            self._sums[step] += seconds

    def describe(self) -> Iterator[Metric]:
        yield HistogramMetricFamily(self._NAME, self._TEXT, labels=("step",))

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._NAME, self._TEXT, labels=("step",))
        ends = [floatToGoString(bound) for bound in (*SCHEDULING_BUCKETS_S, inf)]  # type: ignore[no-untyped-call]
        for step, counts in self._counts.items():
            buckets = list(zip(ends, accumulate(counts), strict=True))
            family.add_metric((step,), buckets, self._sums[step])
        yield family


class StreamCounts(Protocol):
    """The counts of extproc.service.Service that a scrape shows."""

    streams_open: int
    streams_total: int
    body_bytes_received: int
    protocol_errors: int
    failures: int
    late_tokens: int
    connections_closed: dict[str, int]


class Metrics:
    """What the router and the feeds report, and what a scrape reads."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = registry
        self._clock = clock
        self._left: set[str] = set()
        """Endpoints that left the pool. Requests may still be in flight there."""
        self._window = Window()
        self._snapshot: Callable[[], Snapshot] | None = None
        self._streams: StreamCounts | None = None

        def tally(name: str, text: str, *labels: str) -> Tally:
            return Tally(registry, name, text, labels)

        # Decisions
        self._scheduling = Scheduling(registry)
        self._decisions = tally("decisions", "Requests given an endpoint.", "policy", "reason", "phase")
        self._refusals = tally(
            "refusals", "Requests answered with an error instead of an endpoint.", "reason"
        )
        self._sources = tally("token_counts", "Prompts by where their token count came from.", "source")

        # Cache and sessions
        self._prompt = tally("prompt_tokens", "Prompt tokens sent to an endpoint.", "endpoint")
        self._cached = tally(
            "predicted_cached_tokens", "Of these, tokens predicted to be in its KV cache.", "endpoint"
        )
        self._affinity = tally(
            "session_requests", "Requests of sessions, by what came of the host.", "affinity"
        )
        self._migrations = tally("migrations", "Sessions moved to another endpoint because that pays.")

        # Ends, scrapes, the build
        self._requests = tally("requests", "Requests that ended, by outcome.", "endpoint", "outcome")
        self._scrape_errors = tally("scrape_errors", "Engine metrics that could not be read.", "endpoint")
        self._info = Info("perilune_build", "Version and policy of this gateway.", registry=registry)

        self._refusals.start(RefuseReason)
        self._sources.start(TokenSource)
        self._affinity.start(Affinity)
        self._migrations.add(by=0)
        registry.register(_Mirror(self))

    # What happens

    def decided(self, record: DecisionRecord) -> None:
        """Count one decision or refusal."""
        self._scheduling.observe(record.timings_us)
        verdict, view = record.verdict, record.view
        if not isinstance(verdict, Decision):
            self.refused(verdict.reason)
            return
        self._left.discard(verdict.target)
        self._decisions.add(record.policy, verdict.reason, view.phase)
        if verdict.moved_from:
            self._migrations.add()
        if verdict.reason is Reason.PASS_THROUGH:
            return
        self._prompt.add(verdict.target, by=view.prompt_tokens)
        self._cached.add(verdict.target, by=record.cached_tokens)
        self._sources.add(view.token_source)
        if view.session is not None:
            self._affinity.add(affinity_of(view.session.host, verdict))
        self._window.add(record.cached_tokens, view.prompt_tokens, self._clock())

    def refused(self, reason: RefuseReason) -> None:
        """Count one refusal."""
        self._refusals.add(reason)

    def ended(self, endpoint: str, outcome: Outcome) -> None:
        """Count the end of a request, under the endpoint that served it."""
        self._requests.add(LEFT if endpoint in self._left else endpoint, outcome)

    def scrape_failed(self, endpoint: str) -> None:
        self._scrape_errors.add(endpoint)

    # What is

    def describe(self, version: str, policy: str) -> None:
        self._info.info({"version": version, "policy": policy})

    def mirror(self, snapshot: Callable[[], Snapshot]) -> None:
        """From now on a scrape shows what this function returns."""
        self._snapshot = snapshot

    def count_streams(self, streams: StreamCounts) -> None:
        """From now on a scrape shows these counts too."""
        self._streams = streams

    def hit_ratio(self) -> float | None:
        """Predicted cached / prompt tokens of about the last minute; None: no prompt in it."""
        return self._window.ratio(self._clock())

    def forget(self, endpoint: str) -> None:
        """Drop the series of an endpoint that has left the pool. Requests that end there afterwards count
        under LEFT; otherwise the series of every pod that ever was would come back."""
        self._left.add(endpoint)
        for counter in (self._prompt, self._cached, self._scrape_errors):
            counter.remove(endpoint)
        for outcome in Outcome:
            self._requests.remove(endpoint, outcome)

    def streams(self) -> Iterator[Metric]:
        streams = self._streams
        if streams is None:
            return
        yield GaugeMetricFamily("perilune_streams_open", "Envoy streams open now.", streams.streams_open)
        for name, text, field in STREAM_COUNTERS:
            yield CounterMetricFamily(f"perilune_{name}", text, getattr(streams, field))
        closed = CounterMetricFamily(
            "perilune_connections_closed", "Connections closed by the h2 server.", labels=["cause"]
        )
        for cause, count in streams.connections_closed.items():
            closed.add_metric([cause], count)
        yield closed

    def snapshot(self) -> Snapshot | None:
        return self._snapshot() if self._snapshot else None


def affinity_of(host: str, decision: Decision) -> Affinity:
    """What `decision` did with a session bound to `host` (empty: to none)."""
    if not host:
        return Affinity.NEW
    if decision.target == host:
        return Affinity.HIT
    return Affinity.MOVED if decision.moved_from else Affinity.LEFT


STREAM_COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("streams", "Envoy streams opened.", "streams_total"),
    ("body_received_bytes", "Request body bytes that reached the gateway.", "body_bytes_received"),
    ("stream_protocol_errors", "Streams in which Envoy broke the protocol.", "protocol_errors"),
    ("stream_failures", "Streams ended by a bug of this gateway.", "failures"),
    ("late_tokens", "Prompts routed by their bytes, since their tokens came too late.", "late_tokens"),
)
"""perilune_<name>_total, and its field of StreamCounts."""


class _Mirror:
    """What is read at scrape time."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not take a snapshot."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        ratio = self._metrics.hit_ratio()
        hit = GaugeMetricFamily(
            "perilune_cache_hit_ratio",
            "Predicted cached tokens / prompt tokens over the last minute; absent without prompts.",
        )
        if ratio is not None:
            hit.add_metric((), ratio)
        yield hit
        yield from self._metrics.streams()
        if (snapshot := self._metrics.snapshot()) is not None:
            yield from snapshot_metrics.families(snapshot)
