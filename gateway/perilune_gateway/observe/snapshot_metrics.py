"""The gateway's metrics of the current state: a snapshot (stats.py) as metric families.

The tables have a row for each metric: its name, its help and its value. moves.py has the metrics of moves,
metrics.py counts events. A scrape takes 100 µs for each endpoint; requests do no work for these metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from perilune_api import names
from perilune_api.findings import Finding
from perilune_gateway.model import Tier
from perilune_gateway.model.shared import SharedStats
from perilune_gateway.observe import canary, moves
from perilune_gateway.observe.findings import Lack
from perilune_gateway.observe.shadow import tally as shadow
from perilune_gateway.observe.stats import EndpointStats, LogStats, Snapshot
from perilune_gateway.request.tokens.proof import Outcome
from perilune_gateway.routing.new_sessions import SessionAdmissionStats
from perilune_gateway.state.engine_blocks import Unused
from perilune_gateway.state.prefix_index import IndexStats

Row = tuple[str, str, Callable[[EndpointStats], float]]

LOAD_GAUGES: tuple[Row, ...] = (
    ("pending_prefill_tokens", "Prompt tokens not yet prefilled.", lambda e: e.load.pending_prefill_tokens),
    ("pending_prefill_seconds", "Predicted time of that prefill.", lambda e: e.load.pending_prefill_s),
    ("in_flight_requests", "Requests sent to the endpoint that have not ended.", lambda e: e.load.in_flight),
    ("running_requests", "Running requests, as reported by the engine.", lambda e: e.load.running),
    ("waiting_requests", "Waiting requests, as reported by the engine.", lambda e: e.load.waiting),
    ("kv_usage_ratio", "Share of the KV cache in use, 0 to 1.", lambda e: e.load.kv_usage),
    ("sessions", "Sessions whose host it is.", lambda e: e.load.sessions),
    ("recent_hits_tokens", "Prompt tokens found in its prefix cache lately.", lambda e: e.recent_hits_tokens),
    ("metrics_age_seconds", "Seconds since its metrics were read.", lambda e: e.load.metrics_age_s),
    ("ready", "1 when it may be chosen.", lambda e: e.endpoint.ready),
    ("draining", "1 when it serves only sessions that it already has.", lambda e: e.endpoint.draining),
    ("ejected", "1 while it gets no requests because its answers failed.", lambda e: e.ejection is not None),
    ("prefill_time_ratio", "Prefill time, observed / predicted.", lambda e: e.calibration.prefill.ratio),
    ("ttft_ratio", "Seconds to the first token, observed / predicted.", lambda e: e.calibration.ttft.ratio),
    ("store_time_ratio", "Time of store reads, observed / predicted.", lambda e: e.calibration.store.ratio),
    ("sending_time_ratio", "Transfers from it, observed / predicted.", lambda e: e.calibration.sends.ratio),
)  # fmt: skip
"""perilune_endpoint_<name>{endpoint}"""

EVENT_COUNTERS: tuple[tuple[str, str], ...] = (
    ("batches", "KV event batches received."),
    ("gaps", "Gaps in the sequence of batches."),
    ("replayed", "Batches received by a replay."),
    ("rebuilds", "Gaps that could not be filled, so that the endpoint's blocks were forgotten."),
    ("restarts", "Restarts of the engine."),
    ("malformed", "Messages that could not be read."),
    ("old", "Batches that were received before."),
    ("unknown", "Events of unknown types."),
)
"""(field of EventStats, help) of each perilune_events_<field>_total{endpoint}."""


def families(snapshot: Snapshot) -> Iterator[Metric]:
    """Yield all metric families of the snapshot."""
    yield from _endpoints(snapshot.endpoints)
    waiting_s = sum(e.load.pending_prefill_s for e in snapshot.endpoints)
    gateways = 1 + (snapshot.shared.peers if snapshot.shared else 0)
    queued = "This gateway's part of the predicted prefill that waits; all gateways' sum is the pool's."
    yield _gauge("queued_prefill_seconds", queued, waiting_s / gateways)
    index = snapshot.index
    yield _gauge("index_entries", "Blocks in the index.", index.entries)
    yield _gauge("index_store_blocks", "Blocks known to be in the shared store.", index.store)
    unlearnt = "Blocks in the shared store that no known prompt contains."
    yield _gauge("index_store_unlearnt_blocks", unlearnt, snapshot.store_unlearnt)
    yield _gauge("index_depth_blocks", "Longest recent match in blocks.", index.depth_blocks)
    yield _recent(index)
    yield _counter("index_evicted_blocks", "Blocks dropped because the index was full.", index.evicted)
    yield _gauge("sessions_bound", "Sessions with a host.", snapshot.sessions_bound)
    evicted = "Sessions forgotten because they were idle for too long or there were too many."
    yield _counter("sessions_evicted", evicted, snapshot.sessions_evicted)
    in_part = "Bodies of which only the new part was parsed."
    yield _counter("bodies_parsed_in_part", in_part, snapshot.bodies_parsed_in_part)
    yield _unused(snapshot.unused_blocks)
    drained = GaugeMetricFamily(
        names.DRAINED,
        "1 for a draining pod that this gateway no longer uses, with its draining mark.",
        labels=("pod", "mark"),
    )
    for pod, mark in snapshot.drained.items():
        drained.add_metric((pod, mark), 1)
    yield drained
    if snapshot.proofs is not None:
        yield _proofs(snapshot.proofs)
    if snapshot.lacks is not None:
        yield _findings(snapshot.lacks)
    ingest = snapshot.ingest
    yield _gauge("ingest_busy_ratio", "Share of the event loop's time that KV events take.", ingest.busy)
    yield _gauge("ingest_behind_seconds", "Delay of the slowest KV event feed.", ingest.behind_s)
    yield _gauge("ingest_catching_up", "Feeds that read or await a replay.", ingest.catching_up)
    yield _counter("ingest_blocks", "Blocks stored or removed by KV events.", ingest.blocks)
    if snapshot.moves:
        yield from moves.families(snapshot.moves)
    if snapshot.handoffs and snapshot.remote_prefills and snapshot.pulls:
        yield from moves.handoff_families(snapshot.handoffs, snapshot.remote_prefills, snapshot.pulls)
    if snapshot.shared:
        yield from _shared(snapshot.shared)
    yield from _new_sessions(snapshot.new_sessions)
    if snapshot.shadow:
        yield from shadow.families(snapshot.shadow)
    if snapshot.canary:
        yield from canary.families(snapshot.canary)
    if snapshot.decision_log:
        yield from _decision_log(snapshot.decision_log)


def _endpoints(endpoints: tuple[EndpointStats, ...]) -> Iterator[Metric]:
    for name, text, value in LOAD_GAUGES:
        load = GaugeMetricFamily(f"perilune_endpoint_{name}", text, labels=("endpoint",))
        for stats in endpoints:
            load.add_metric((stats.endpoint.address,), value(stats))
        yield load
    blocks = GaugeMetricFamily(
        "perilune_index_blocks", "Blocks known to be on the endpoint.", labels=("endpoint", "tier")
    )
    speculative = GaugeMetricFamily(
        "perilune_index_speculative_blocks",
        "Blocks expected from routed requests and not yet announced.",
        labels=("endpoint",),
    )
    waiting = GaugeMetricFamily(
        "perilune_index_waiting_blocks",
        "Announced blocks that are not used yet, because their parents are not known.",
        labels=("endpoint",),
    )
    parity = GaugeMetricFamily(
        "perilune_parity", "1 for the state of the comparison of our block hashes with the engine's.",
        labels=("endpoint", "state"),
    )  # fmt: skip
    ejections = CounterMetricFamily(
        "perilune_ejections", "Times that the endpoint was ejected.", labels=("endpoint", "cause")
    )
    lag = GaugeMetricFamily(
        "perilune_events_lag_seconds",
        "Seconds from publication to receipt of the last batch.",
        labels=("endpoint",),
    )
    counters = [
        (field, CounterMetricFamily(f"perilune_events_{field}", text, labels=("endpoint",)))
        for field, text in EVENT_COUNTERS
    ]
    for stats in endpoints:
        address = stats.endpoint.address
        blocks.add_metric((address, Tier.DEVICE.value), stats.index.device)
        blocks.add_metric((address, Tier.HOST.value), stats.index.host)
        speculative.add_metric((address,), stats.index.speculative)
        waiting.add_metric((address,), stats.waiting_blocks)
        for cause, count in stats.ejections.items():
            ejections.add_metric((address, cause.value), count)
        if stats.parity:
            parity.add_metric((address, stats.parity), 1)
        if stats.events is not None:
            lag.add_metric((address,), stats.events.lag_s)
            for field, family in counters:
                family.add_metric((address,), getattr(stats.events, field))
    yield from (blocks, speculative, waiting, parity, ejections, lag, *(family for _, family in counters))


def _recent(index: IndexStats) -> GaugeMetricFamily:
    """Return recent prompts by how much of them matched; Conductor has the same statistics."""
    recent = GaugeMetricFamily(
        "perilune_index_recent_prompts",
        "About the last 1,000 prompts, by how much of them matched.",
        labels=("match",),
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


def _proofs(counts: Mapping[Outcome, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(
        "perilune_token_proofs",
        "Comparisons of the tokens that an engine and the gateway make of one kind of request.",
        labels=("outcome",),
    )
    for outcome in Outcome:
        family.add_metric((outcome.value,), counts.get(outcome, 0))
    return family


def _findings(lacks: Sequence[Lack]) -> GaugeMetricFamily:
    counts = {lack.finding: len(lack.endpoints) for lack in lacks}
    text = "Engines that the operator does not run and that have this finding."
    family = GaugeMetricFamily(names.FINDINGS, text, labels=("finding",))
    for finding in Finding:
        family.add_metric((finding.value,), counts.get(finding, 0))
    return family


def _new_sessions(stats: SessionAdmissionStats) -> Iterator[Metric]:
    yield _gauge("new_sessions_waiting", "New sessions that wait to begin.", stats.waiting)
    yield _counter("new_sessions_begun", "New sessions that began.", stats.begun)
    yield _counter("new_sessions_refused", "New sessions that were refused.", stats.refused)
    yield _gauge("active_context_tokens", "Expected tokens of active contexts.", stats.active_tokens)
    yield _gauge("kv_capacity_tokens", "Tokens that fit into the pool's KV.", stats.capacity_tokens)


def _decision_log(log: LogStats) -> Iterator[Metric]:
    yield _counter("decision_log_written", "Decisions and endings written to the decision log.", log.written)
    yield _counter("decision_log_dropped", "Decisions and endings that could not be written.", log.dropped)


def _shared(shared: SharedStats) -> Iterator[Metric]:
    yield _gauge("shared_state_connected", "1 while the shared state's server answers.", shared.connected)
    yield _gauge("shared_state_lag_seconds", "From writing a change to reading it back.", shared.lag_s)
    yield _gauge("shared_state_peers", "Other gateways that share the state and are alive.", shared.peers)
    yield _gauge("shared_state_sessions", "Sessions that only other gateways have routed.", shared.sessions)
    changes = CounterMetricFamily(
        "perilune_shared_state_changes", "Changes of the shared state.", labels=("what",)
    )
    for what in ("sent", "received", "dropped"):
        changes.add_metric((what,), getattr(shared, what))
    yield changes
    yield _counter("shared_state_reconnects", "Times that the connection was made again.", shared.reconnects)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"perilune_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"perilune_{name}", text, value=value)
