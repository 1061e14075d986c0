"""The gateway's metrics of events: decisions, refusals, ends of requests, failed scrapes.

Metrics of the current state (load, index, feeds) are read from one snapshot at each scrape
(snapshot_metrics.py), and so are the tokenizer's (request/tokens/metrics.py). Requests do no work for those.

Labels come from enums, policy names and endpoint addresses, never from what a client sent.

Conductor defines four metrics. Their equivalents here are: cache hit rate = perilune_cache_hit_ratio (a true
ratio; for longer windows divide the two token counters), schedule latency =
perilune_scheduling_seconds{step="total"} (with buckets at 0.1, 0.5, 1, 2 and 5 ms), node load by endpoint =
perilune_endpoint_*, cache migrations = perilune_migrations_total.
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

from prometheus_client import CollectorRegistry, Histogram, Info
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from perilune_api import names
from perilune_gateway.model import (
    Decision,
    DecisionRecord,
    Outcome,
    Reason,
    RefuseReason,
    Step,
    TokenSource,
    Unpulled,
    Unsplit,
)
from perilune_gateway.observe import snapshot_metrics
from perilune_gateway.observe.spans import Sent
from perilune_gateway.observe.stats import Snapshot

QUEUED_BUCKETS_S = (0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600)
SCHEDULING_BUCKETS_S = (
    *(0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005),
    *(0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.5),
)
FETCHED = "fetched"
REMOTE = "remote"
"""Label of prompts that another endpoint prefills than the one that decodes."""
LEFT = "left"
"""Label that stands for all endpoints that have left the pool."""


class Affinity(StrEnum):
    """How a decision relates to its session's host."""

    HIT = "hit"
    """The request went to the session's host."""
    MOVED = "moved"
    """The policy moved the session."""
    LEFT = "left"
    """The request went elsewhere without a move: the host is gone or draining, or the policy ignores
    sessions."""
    NEW = "new"
    """The session had no host yet."""


class Window:
    """The ratio of two sums over about the last `seconds`.

    A ring of slots; the oldest one is overwritten. Reading changes nothing.
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
        """Sum of the parts / sum of the wholes; None when nothing was added in the window."""
        oldest = int(now / self._slot_s) - len(self._ages) + 1
        live = [i for i, age in enumerate(self._ages) if age >= oldest]
        whole = sum(self._wholes[i] for i in live)
        return sum(self._parts[i] for i in live) / whole if whole else None


class Tally:
    """A counter with labels that counts in a dict, from which each scrape makes a metric. Counting takes a
    tenth of the time of prometheus_client's own counters."""

    def __init__(self, registry: CollectorRegistry, name: str, text: str, labels: Sequence[str] = ()) -> None:
        self._name = f"perilune_{name}"
        self._text = text
        self._labels = labels
        self._counts: defaultdict[tuple[str, ...], float] = defaultdict(float)
        registry.register(self)

    def add(self, *labels: str, by: float = 1) -> None:
        """Add `by` to the count of these labels."""
        self._counts[labels] += by

    def start(self, values: Iterable[str]) -> None:
        """Show a series of 0 for each value of the only label, because rate() is wrong for a series that
        appears later."""
        for value in values:
            self._counts[value,] += 0

    def remove(self, *labels: str) -> None:
        """Remove the series of these labels."""
        self._counts.pop(labels, None)

    def describe(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._text, labels=self._labels)

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, count in self._counts.items():
            family.add_metric(labels, count)
        yield family


class Scheduling:
    """A histogram of the seconds that each step of a decision takes, counted as in `Tally`."""

    _NAME = "perilune_scheduling_seconds"
    _TEXT = "Time spent deciding one request, by step; total is all of it without waiting for the body."

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counts = {step.value: [0] * (len(SCHEDULING_BUCKETS_S) + 1) for step in Step}
        self._sums = dict.fromkeys(self._counts, 0.0)
        registry.register(self)

    def observe(self, microseconds: Mapping[str, float]) -> None:
        """Count the steps of one decision, given in microseconds."""
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


def refusals(registry: CollectorRegistry) -> Tally:
    """Return the counter of refusals: a pool's, or that of refusals by a gateway with several pools that
    belong to no pool."""
    text = "Requests answered with an error instead of an endpoint."
    counter = Tally(registry, "refusals", text, ("reason",))
    counter.start(RefuseReason)
    return counter


class StreamCounts(Protocol):
    """The counts of extproc.service.Service that a scrape shows."""

    streams_open: int
    streams_total: int
    body_bytes_received: int
    protocol_errors: int
    failures: int
    connections_closed: dict[str, int]

    @property
    def late_tokens(self) -> int: ...


class Metrics:
    """Counts what the router and the feeds report, and exports it with the state at each scrape."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = registry
        self._clock = clock
        self._left: set[str] = set()
        """Endpoints that left the pool. Requests may still be in flight there."""
        self._window = Window()
        self._snapshot: Callable[[], Snapshot] | None = None

        def tally(name: str, text: str, *labels: str) -> Tally:
            return Tally(registry, name, text, labels)

        # Decisions
        self._scheduling = Scheduling(registry)
        self._queued = Histogram(
            "perilune_new_session_queued_seconds",
            "Seconds for which new sessions waited that had to wait, until they began or were refused.",
            buckets=QUEUED_BUCKETS_S,
            registry=registry,
        )
        self._first_tokens = Histogram(
            names.FIRST_TOKENS,
            "Seconds from a request's arrival to its first token, or until its client left or was refused.",
            buckets=names.FIRST_TOKEN_BUCKETS_S,
            registry=registry,
        )
        self._decisions = tally("decisions", "Requests given an endpoint.", "policy", "reason", "phase")
        self._refusals = refusals(registry)
        self._sources = tally("token_counts", "Prompts by where their token count came from.", "source")

        # Cache and sessions
        self._prompt = tally("prompt_tokens", "Prompt tokens sent to an endpoint.", "endpoint")
        self._cached = tally(
            "predicted_cached_tokens", "Of these, tokens predicted to be in its KV cache.", "endpoint"
        )
        self._reachable = tally(
            "reachable_cached_tokens",
            "Of the prompt tokens, tokens that some endpoint is known to have in its KV cache.",
        )
        self._affinity = tally(
            "session_requests",
            "Requests of sessions, by whether they went to the session's host.",
            "affinity",
        )
        self._prefills = tally(
            "prefills",
            "Prompts in a pool with prefill endpoints, by where they are prefilled, or why not remotely.",
            "where",
        )
        self._pulls = tally(
            "pulls",
            "Requests whose endpoint could use what another one caches, by whether it does, or why not.",
            "outcome",
        )
        self._migrations = tally("migrations", "Sessions that the policy moved to another endpoint.")

        self._policy_faults = tally(
            "policy_faults",
            "Decisions that a policy of a package got wrong or took too long for, by what was wrong.",
            "policy",
            "kind",
        )

        # Ended requests, scrapes, the build
        self._requests = tally("requests", "Requests that ended, by outcome.", "endpoint", "outcome")
        self._scrape_errors = tally("scrape_errors", "Engine metrics that could not be read.", "endpoint")
        self._info = Info("perilune_build", "Version and policy of this gateway.", registry=registry)

        self._sources.start(TokenSource)
        self._affinity.start(Affinity)
        self._prefills.start((REMOTE, *Unsplit))
        self._pulls.start((FETCHED, *Unpulled))
        self._migrations.add(by=0)
        self._reachable.add(by=0)
        registry.register(_Mirror(self))

    # Events

    def decided(self, record: DecisionRecord) -> None:
        """Count one decision or refusal."""
        self._scheduling.observe(record.timings_us)
        verdict, view = record.verdict, record.view
        if record.queued_s:
            self._queued.observe(record.queued_s)
        if not isinstance(verdict, Decision):
            self.refused(verdict.reason)
            return
        self._left.discard(verdict.target)
        self._decisions.add(record.policy, verdict.reason, view.phase)
        if verdict.moved_from:
            self._migrations.add()
        if verdict.reason is Reason.PASS_THROUGH:
            return
        if verdict.prefill or verdict.unsplit:
            self._prefills.add(verdict.unsplit or REMOTE)
        if verdict.replicate_from or verdict.unpulled:
            self._pulls.add(verdict.unpulled or FETCHED)
        self._prompt.add(verdict.target, by=view.prompt_tokens)
        self._cached.add(verdict.target, by=record.cached_tokens)
        self._reachable.add(by=max(record.cached_tokens, view.prefix.tokens))
        self._sources.add(view.token_source)
        if view.session is not None:
            self._affinity.add(affinity_of(view.session.host, verdict))
        self._window.add(record.cached_tokens, view.prompt_tokens, self._clock())

    def refused(self, reason: RefuseReason) -> None:
        """Count one refusal."""
        self._refusals.add(reason)

    def policy_failed(self, policy: str, kind: str) -> None:
        """Count a fault of a policy of a package."""
        self._policy_faults.add(policy, kind)

    def ended(self, endpoint: str, outcome: Outcome) -> None:
        """Count the end of a request, under the endpoint that served it."""
        self._requests.add(LEFT if endpoint in self._left else endpoint, outcome)

    def first_token(self, seconds: float) -> None:
        """Count the time to a request's first token."""
        self._first_tokens.observe(seconds)

    def scrape_failed(self, endpoint: str) -> None:
        self._scrape_errors.add(endpoint)

    # State

    def describe(self, version: str, policy: str) -> None:
        self._info.info({"version": version, "policy": policy})

    def mirror(self, snapshot: Callable[[], Snapshot]) -> None:
        """Set the function that returns the state for each scrape."""
        self._snapshot = snapshot

    def count_spans(self) -> Callable[[Sent, int], None]:
        """Add the counter of spans, and return what counts, on any thread."""
        spans = Tally(
            self.registry, "spans", "Spans of requests, by whether the collector took them.", ("outcome",)
        )
        spans.start(Sent)
        return lambda outcome, count: spans.add(outcome, by=count)

    def hit_ratio(self) -> float | None:
        """Return the predicted cached / prompt tokens over about the last minute; None without prompts."""
        return self._window.ratio(self._clock())

    def forget(self, endpoint: str) -> None:
        """Drop the series of an endpoint that has left the pool. Request that end there afterwards count
        under LEFT, so that the number of series does not grow with every replaced pod."""
        self._left.add(endpoint)
        for counter in (self._prompt, self._cached, self._scrape_errors):
            counter.remove(endpoint)
        for outcome in Outcome:
            self._requests.remove(endpoint, outcome)

    def snapshot(self) -> Snapshot | None:
        return self._snapshot() if self._snapshot else None


def affinity_of(host: str, decision: Decision) -> Affinity:
    """Return the affinity of `decision` for a session bound to `host`; empty if it is bound to none."""
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
    ("late_tokens", "Prompts estimated from their bytes because their tokens came too late.", "late_tokens"),
)
"""(name, help, field of StreamCounts) of each perilune_<name>_total."""


class StreamMetrics:
    """Collects the counts of a gateway's streams at each scrape."""

    def __init__(self, registry: CollectorRegistry, streams: StreamCounts) -> None:
        self._streams = streams
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        streams = self._streams
        yield GaugeMetricFamily("perilune_streams_open", "Envoy streams open now.", streams.streams_open)
        for name, text, field in STREAM_COUNTERS:
            yield CounterMetricFamily(f"perilune_{name}", text, getattr(streams, field))
        closed = CounterMetricFamily(
            "perilune_connections_closed", "Connections closed by the h2 server.", labels=["cause"]
        )
        for cause, count in streams.connections_closed.items():
            closed.add_metric([cause], count)
        yield closed


class _Mirror:
    """Collects the metrics that are read at each scrape."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterator[Metric]:
        """Return no metric, so that registering does not take a snapshot."""
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
        if (snapshot := self._metrics.snapshot()) is not None:
            yield from snapshot_metrics.families(snapshot)
