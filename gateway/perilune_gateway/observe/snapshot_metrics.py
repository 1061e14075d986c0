"""The gateway's metrics of what *is*: a snapshot of the state (stats.py) as metric families.

One table for each kind of row: its name, its help and where its value stands. Moves have their own
(moves.py). Costs a scrape 100 µs an endpoint, requests nothing. What *happens* is counted in metrics.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from perilune_gateway.model import Tier
from perilune_gateway.observe import moves
from perilune_gateway.observe.stats import EndpointStats, LogStats, Snapshot
from perilune_gateway.state.engine_blocks import Unused
from perilune_gateway.state.prefix_index import IndexStats

Row = tuple[str, str, Callable[[EndpointStats], float]]

LOAD_GAUGES: tuple[Row, ...] = (
    ("pending_prefill_tokens", "Prompt tokens not yet prefilled.", lambda e: e.load.pending_prefill_tokens),
    ("pending_prefill_seconds", "The same in predicted seconds.", lambda e: e.load.pending_prefill_s),
    ("in_flight_requests", "Requests sent there and not ended.", lambda e: e.load.in_flight),
    ("running_requests", "Running, as the engine says.", lambda e: e.load.running),
    ("waiting_requests", "Waiting, as the engine says.", lambda e: e.load.waiting),
    ("kv_usage_ratio", "KV pool in use, 0 to 1.", lambda e: e.load.kv_usage),
    ("sessions", "Sessions bound there.", lambda e: e.load.sessions),
    ("metrics_age_seconds", "Since its metrics were read; +Inf: never.", lambda e: e.load.metrics_age_s),
    ("ready", "1: may be chosen.", lambda e: e.endpoint.ready),
    ("draining", "1: known sessions only.", lambda e: e.endpoint.draining),
    ("prefill_time_ratio", "Prefill, observed / predicted.", lambda e: e.calibration.prefill.ratio),
    ("ttft_ratio", "Seconds to the first token, observed / predicted.", lambda e: e.calibration.ttft.ratio),
    ("store_time_ratio", "Store reads, observed / predicted.", lambda e: e.calibration.store.ratio),
    ("sending_time_ratio", "Pulls from it, observed / predicted.", lambda e: e.calibration.sends.ratio),
)  # fmt: skip
"""perilune_endpoint_<name>{endpoint}"""

EVENT_COUNTERS: tuple[tuple[str, str], ...] = (
    ("batches", "KV event batches received."),
    ("gaps", "Times that batches were missing."),
    ("replayed", "Batches that a replay brought."),
    ("rebuilds", "Times that an endpoint's blocks were dropped because a gap could not be filled."),
    ("restarts", "Times that an engine began anew."),
    ("malformed", "Messages that could not be read."),
    ("old", "Batches that had come before."),
    ("unknown", "Events of types that this version does not know."),
)
"""perilune_events_<name>_total{endpoint}, each named like its field of EventStats."""


def families(snapshot: Snapshot) -> Iterator[Metric]:
    """One metric family after the other."""
    yield from _endpoints(snapshot.endpoints)
    index = snapshot.index
    yield _gauge("index_entries", "Blocks known anywhere.", index.entries)
    yield _gauge("index_store_blocks", "Blocks known in the shared store.", index.store)
    yield _gauge("index_depth_blocks", "Deepest recent match.", index.depth_blocks)
    yield _recent(index)
    yield _counter("index_evicted_blocks", "Blocks dropped for want of room.", index.evicted)
    yield _gauge("sessions_bound", "Sessions with a host.", snapshot.sessions_bound)
    evicted = "Sessions forgotten: idle for too long, or for want of room."
    yield _counter("sessions_evicted", evicted, snapshot.sessions_evicted)
    in_part = "Bodies of which only what is new was parsed: the rest was known."
    yield _counter("bodies_parsed_in_part", in_part, snapshot.bodies_parsed_in_part)
    yield _unused(snapshot.unused_blocks)
    if snapshot.moves:
        yield from moves.families(snapshot.moves)
    if snapshot.decision_log:
        yield from _decision_log(snapshot.decision_log)


def _endpoints(endpoints: tuple[EndpointStats, ...]) -> Iterator[Metric]:
    for name, text, value in LOAD_GAUGES:
        load = GaugeMetricFamily(f"perilune_endpoint_{name}", text, labels=("endpoint",))
        for stats in endpoints:
            load.add_metric((stats.endpoint.address,), value(stats))
        yield load
    blocks = GaugeMetricFamily("perilune_index_blocks", "Blocks known there.", labels=("endpoint", "tier"))
    speculative = GaugeMetricFamily(
        "perilune_index_speculative_blocks", "Routed there, not yet announced.", labels=("endpoint",)
    )
    parity = GaugeMetricFamily(
        "perilune_parity", "1 for the state that computed and announced block hashes are in.",
        labels=("endpoint", "state"),
    )  # fmt: skip
    lag = GaugeMetricFamily("perilune_events_lag_seconds", "Of the last batch.", labels=("endpoint",))
    counters = [
        (field, CounterMetricFamily(f"perilune_events_{field}", text, labels=("endpoint",)))
        for field, text in EVENT_COUNTERS
    ]
    for stats in endpoints:
        address = stats.endpoint.address
        blocks.add_metric((address, Tier.DEVICE.value), stats.index.device)
        blocks.add_metric((address, Tier.HOST.value), stats.index.host)
        speculative.add_metric((address,), stats.index.speculative)
        if stats.parity:
            parity.add_metric((address, stats.parity), 1)
        if stats.events is not None:
            lag.add_metric((address,), stats.events.lag_s)
            for field, family in counters:
                family.add_metric((address,), getattr(stats.events, field))
    yield from (blocks, speculative, parity, lag, *(family for _, family in counters))


def _recent(index: IndexStats) -> GaugeMetricFamily:
    """Missed, partly or fully matched: Conductor's statistics of its index."""
    recent = GaugeMetricFamily(
        "perilune_index_recent_prompts", "About the last 1,000 prompts, by what matched.", labels=("match",)
    )
    for name in ("missed", "partial", "full"):
        recent.add_metric((name,), getattr(index, f"recent_{name}"))
    return recent


def _unused(blocks: Mapping[str, int]) -> CounterMetricFamily:
    unused = CounterMetricFamily(
        "perilune_events_unused_blocks", "Blocks in KV events that changed nothing.", labels=("cause",)
    )
    for cause in Unused:
        unused.add_metric((cause.value,), blocks.get(cause, 0))
    return unused


def _decision_log(log: LogStats) -> Iterator[Metric]:
    yield _counter("decision_log_written", "Decisions and endings written to the decision log.", log.written)
    yield _counter("decision_log_dropped", "Decisions and endings that it could not take.", log.dropped)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"perilune_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"perilune_{name}", text, value=value)
