"""Every metric, read back through a scrape."""

from dataclasses import replace

import list_of_one
import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry, generate_latest
from routing_objects import candidate, request, session

from perilune_api import extproc_pb2 as pb
from perilune_gateway.model import (
    Decision,
    DecisionRecord,
    Endpoint,
    Load,
    Location,
    Outcome,
    Phase,
    Prefix,
    Reason,
    Refusal,
    RefuseReason,
    Step,
    TokenSource,
)
from perilune_gateway.model.kv_events import EventStats, IngestStats
from perilune_gateway.observe.metrics import LEFT, Affinity, Metrics, StreamMetrics, Window, affinity_of
from perilune_gateway.observe.stats import EndpointStats, LogStats, Snapshot
from perilune_gateway.state.prefix_index import EndpointBlocks, IndexStats


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def metrics(clock):
    return Metrics(CollectorRegistry(), clock)


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"perilune_{name}", labels)


def record(**changes: object) -> DecisionRecord:
    base = DecisionRecord(
        view=request(tokens=1_000, of=session("a")),
        verdict=Decision("a", Reason.HOST),
        policy="ear",
        candidates=(candidate("a"),),
        cached_tokens=800,
        timings_us={"policy": 20.0, "total": 90.0},
    )
    return structs.replace(base, **changes)


class TestDecided:
    def test_a_decision_is_counted_by_policy_reason_and_phase(self, metrics):
        metrics.decided(record())
        metrics.decided(record(view=request(phase=Phase.HEADERS, of=session("a"))))
        assert value(metrics, "decisions_total", policy="ear", reason="host", phase="body") == 1
        assert value(metrics, "decisions_total", policy="ear", reason="host", phase="headers") == 1

    def test_the_hit_ratio_is_that_of_the_last_minute(self, metrics, clock):
        metrics.decided(record())
        clock.now += 50
        assert metrics.hit_ratio() == pytest.approx(0.8)
        metrics.decided(record())
        clock.now += 50
        metrics.decided(record(cached_tokens=0))
        assert metrics.hit_ratio() == pytest.approx(0.4)
        clock.now += 50
        assert metrics.hit_ratio() == 0.0

    def test_time_is_observed_by_step(self, metrics):
        metrics.decided(record())
        assert value(metrics, "scheduling_seconds_count", step="policy") == 1
        assert value(metrics, "scheduling_seconds_sum", step="total") == pytest.approx(90e-6)
        assert value(metrics, "scheduling_seconds_bucket", step="total", le="0.0001") == 1
        assert value(metrics, "scheduling_seconds_bucket", step="total", le="5e-05") == 0
        assert value(metrics, "scheduling_seconds_count", step="tokenize") == 0

    @pytest.mark.parametrize("le", ["0.0001", "0.0005", "0.001", "0.002", "0.005"])
    def test_the_published_buckets_are_there(self, metrics, le):
        for step in Step:
            assert value(metrics, "scheduling_seconds_bucket", step=step.value, le=le) == 0

    def test_tokens_are_counted_by_endpoint_and_the_ratio_is_one(self, metrics):
        metrics.decided(record())
        metrics.decided(record(cached_tokens=0))
        assert value(metrics, "prompt_tokens_total", endpoint="a") == 2_000
        assert value(metrics, "predicted_cached_tokens_total", endpoint="a") == 800
        assert value(metrics, "cache_hit_ratio") == pytest.approx(0.4)

    def test_tokens_cached_at_another_endpoint_are_reachable(self, metrics):
        assert value(metrics, "reachable_cached_tokens_total") == 0
        metrics.decided(record())
        assert value(metrics, "reachable_cached_tokens_total") == 800
        elsewhere = structs.replace(request(), prefix=Prefix(locations=(Location("b", 900),)))
        metrics.decided(record(view=elsewhere, cached_tokens=0))
        assert value(metrics, "reachable_cached_tokens_total") == 1_700
        assert value(metrics, "predicted_cached_tokens_total", endpoint="a") == 800

    def test_the_ratio_forgets_what_is_older_than_its_window(self, metrics, clock):
        metrics.decided(record())
        clock.now += 61
        assert value(metrics, "cache_hit_ratio") is None
        metrics.decided(record(cached_tokens=100))
        assert value(metrics, "cache_hit_ratio") == pytest.approx(0.1)

    def test_prompts_are_counted_by_source_of_tokens(self, metrics):
        metrics.decided(record(view=structs.replace(request(), token_source=TokenSource.ESTIMATE)))
        assert value(metrics, "token_counts_total", source="estimate") == 1
        assert value(metrics, "token_counts_total", source="local") == 0

    def test_a_move_is_a_migration(self, metrics):
        metrics.decided(record())
        assert value(metrics, "migrations_total") == 0
        metrics.decided(record(verdict=Decision("b", Reason.MOVED, moved_from="a")))
        assert value(metrics, "migrations_total") == 1
        assert value(metrics, "session_requests_total", affinity="moved") == 1
        assert value(metrics, "session_requests_total", affinity="hit") == 1

    def test_a_refusal_is_counted_by_reason_and_nothing_else(self, metrics):
        metrics.decided(record(verdict=Refusal(RefuseReason.OVERLOADED, "busy"), timings_us={"total": 5.0}))
        assert value(metrics, "refusals_total", reason="overloaded") == 1
        assert value(metrics, "refusals_total", reason="bad_json") == 0
        assert value(metrics, "prompt_tokens_total", endpoint="a") is None
        assert value(metrics, "scheduling_seconds_count", step="total") == 1

    def test_a_pass_through_counts_no_tokens(self, metrics):
        metrics.decided(record(verdict=Decision("a", Reason.PASS_THROUGH), policy=""))
        assert value(metrics, "decisions_total", policy="", reason="pass_through", phase="body") == 1
        assert value(metrics, "cache_hit_ratio") is None


@pytest.mark.parametrize(
    ("host", "decision", "expected"),
    [
        pytest.param("", Decision("a", Reason.COLD), Affinity.NEW, id="no host yet"),
        pytest.param("a", Decision("a", Reason.HOT_NOWHERE), Affinity.HIT, id="stays"),
        pytest.param("a", Decision("b", Reason.MOVED, moved_from="a"), Affinity.MOVED, id="moves"),
        pytest.param("a", Decision("b", Reason.COLD), Affinity.LEFT, id="host gone"),
        pytest.param("a", Decision("b", Reason.ROUND_ROBIN), Affinity.LEFT, id="policy without sessions"),
    ],
)
def test_affinity_says_whether_a_session_stayed_with_its_host(host, decision, expected):
    assert affinity_of(host, decision) is expected


def test_what_happens_is_counted(metrics):
    metrics.refused(RefuseReason.BODY_TOO_LARGE)
    metrics.scrape_failed("a")
    metrics.ended("a", Outcome.COMPLETED)
    metrics.ended("a", Outcome.FAILED)
    metrics.describe("0.1.0", "ear")
    assert value(metrics, "refusals_total", reason="body_too_large") == 1
    assert value(metrics, "scrape_errors_total", endpoint="a") == 1
    assert value(metrics, "requests_total", endpoint="a", outcome="completed") == 1
    assert value(metrics, "requests_total", endpoint="a", outcome="failed") == 1
    assert value(metrics, "build_info", version="0.1.0", policy="ear") == 1


class TestStreams:
    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("streams_open", 1),
            ("streams_total", 2),
            ("body_received_bytes_total", 3),
            ("stream_protocol_errors_total", 2),
            ("stream_failures_total", 0),
            ("late_tokens_total", 0),
        ],
    )
    def test_what_streams_count_is_read_when_asked(self, metrics, name, expected):
        service = list_of_one.service(None)
        StreamMetrics(metrics.registry, service)
        stream = service.open()
        stream.receive(b"no message of Envoy's")
        stream.closed()
        body = pb.ProcessingRequest(request_body=pb.HttpBody(body=b"abc"))
        service.open().receive(body.SerializeToString())  # without headers before it
        assert value(metrics, name) == expected

    def test_without_streams_there_are_no_series_of_them(self, metrics):
        assert value(metrics, "streams_total") is None


class TestMirror:
    def snapshot(self) -> Snapshot:
        stats = EndpointStats(
            endpoint=Endpoint(address="a", draining=True),
            load=Load(
                pending_prefill_tokens=5, pending_prefill_s=0.5, in_flight=2, kv_usage=0.25, sessions=3
            ),
            index=EndpointBlocks(40, 2, 6),
            events=EventStats(
                connected=True, lag_s=0.01, batches=9, gaps=2, replayed=1, rebuilds=1, restarts=1
            ),
            parity="ok",
        )
        return Snapshot(
            endpoints=(stats, EndpointStats(endpoint=Endpoint(address="b"))),
            index=IndexStats(
                entries=42, depth_blocks=17, speculative=6, evicted=1, store=3, recent_missed=4, recent_full=5
            ),
            sessions_bound=3,
            sessions_evicted=8,
            bodies_parsed_in_part=9,
            ingest=IngestStats(0.25, 1.5, 12, 4),
        )

    def test_without_a_snapshot_there_are_no_node_series(self, metrics):
        assert value(metrics, "sessions_bound") is None
        assert b"perilune_endpoint" not in generate_latest(metrics.registry)

    def test_what_changed_nothing_and_what_the_log_lost_are_counted(self, metrics):
        metrics.mirror(lambda: Snapshot(unused_blocks={"unknown_parent": 5}))
        assert value(metrics, "events_unused_blocks_total", cause="unknown_parent") == 5
        assert value(metrics, "events_unused_blocks_total", cause="medium") == 0
        assert value(metrics, "decision_log_dropped_total") is None, "there is no log"
        metrics.mirror(lambda: Snapshot(decision_log=LogStats("f", written=7, dropped=2)))
        assert value(metrics, "decision_log_written_total") == 7
        assert value(metrics, "decision_log_dropped_total") == 2

    def test_a_scrape_reads_the_snapshot_of_that_moment(self, metrics):
        current = [self.snapshot()]
        metrics.mirror(lambda: current[0])
        assert value(metrics, "sessions_bound") == 3
        current[0] = replace(current[0], sessions_bound=4)
        assert value(metrics, "sessions_bound") == 4

    @pytest.mark.parametrize(
        ("name", "labels", "expected"),
        [
            ("ingest_busy_ratio", {}, 0.25),
            ("ingest_behind_seconds", {}, 1.5),
            ("ingest_blocks_total", {}, 12),
            ("ingest_catching_up", {}, 4),
            ("endpoint_pending_prefill_tokens", {"endpoint": "a"}, 5),
            ("endpoint_pending_prefill_seconds", {"endpoint": "a"}, 0.5),
            ("endpoint_in_flight_requests", {"endpoint": "a"}, 2),
            ("endpoint_kv_usage_ratio", {"endpoint": "a"}, 0.25),
            ("endpoint_sessions", {"endpoint": "a"}, 3),
            ("endpoint_draining", {"endpoint": "a"}, 1),
            ("endpoint_prefill_time_ratio", {"endpoint": "b"}, 1.0),
            ("endpoint_sending_time_ratio", {"endpoint": "b"}, 1.0),
            ("endpoint_ready", {"endpoint": "b"}, 1),
            ("endpoint_metrics_age_seconds", {"endpoint": "b"}, float("inf")),
            ("index_blocks", {"endpoint": "a", "tier": "device"}, 40),
            ("index_blocks", {"endpoint": "a", "tier": "host"}, 2),
            ("parity", {"endpoint": "a", "state": "ok"}, 1),
            ("events_lag_seconds", {"endpoint": "a"}, 0.01),
            ("events_batches_total", {"endpoint": "a"}, 9),
            ("events_gaps_total", {"endpoint": "a"}, 2),
            ("events_replayed_total", {"endpoint": "a"}, 1),
            ("events_rebuilds_total", {"endpoint": "a"}, 1),
            ("events_restarts_total", {"endpoint": "a"}, 1),
            ("events_gaps_total", {"endpoint": "b"}, None),
            ("index_entries", {}, 42),
            ("index_depth_blocks", {}, 17),
            ("index_speculative_blocks", {"endpoint": "a"}, 6),
            ("index_store_blocks", {}, 3),
            ("index_recent_prompts", {"match": "missed"}, 4),
            ("index_recent_prompts", {"match": "partial"}, 0),
            ("index_recent_prompts", {"match": "full"}, 5),
            ("index_evicted_blocks_total", {}, 1),
            ("sessions_evicted_total", {}, 8),
            ("bodies_parsed_in_part_total", {}, 9),
        ],
    )
    def test_a_snapshot_is_scraped_as_series(self, metrics, name, labels, expected):
        metrics.mirror(self.snapshot)
        assert value(metrics, name, **labels) == expected

    def test_every_metric_is_ours_and_has_help(self, metrics):
        metrics.mirror(self.snapshot)
        families = list(metrics.registry.collect())
        assert all(f.name.startswith("perilune_") and f.documentation for f in families)
        assert len({f.name for f in families}) == len(families)

    def test_what_left_the_pool_leaves_the_page(self, metrics):
        metrics.decided(record())
        metrics.ended("a", Outcome.COMPLETED)
        metrics.scrape_failed("a")
        metrics.forget("a")
        metrics.forget("never seen")
        assert b'endpoint="a"' not in generate_latest(metrics.registry)
        metrics.decided(record())
        assert value(metrics, "prompt_tokens_total", endpoint="a") == 1_000

    def test_what_ends_on_an_endpoint_that_has_left_leaves_no_series_of_it(self, metrics):
        metrics.decided(record())
        metrics.forget("a")
        metrics.ended("a", Outcome.COMPLETED)
        assert b'endpoint="a"' not in generate_latest(metrics.registry)
        assert value(metrics, "requests_total", endpoint=LEFT, outcome="completed") == 1
        metrics.decided(record())
        metrics.ended("a", Outcome.COMPLETED)
        assert value(metrics, "requests_total", endpoint="a", outcome="completed") == 1, "it is back"


class TestWindow:
    def test_ratio_of_sums_not_mean_of_ratios(self):
        window = Window(60, 12)
        window.add(10, 10, now=0)
        window.add(0, 90, now=30)
        assert window.ratio(now=30) == pytest.approx(0.1)

    def test_slots_age_out_one_by_one(self):
        window = Window(60, 12)
        window.add(1, 1, now=0)
        window.add(0, 1, now=30)
        assert window.ratio(now=59) == pytest.approx(0.5)
        assert window.ratio(now=60) == 0
        assert window.ratio(now=90) is None

    def test_reading_changes_nothing(self):
        window = Window(60, 12)
        window.add(1, 2, now=0)
        assert window.ratio(now=500) is None
        assert window.ratio(now=1) == 0.5

    def test_an_empty_window_has_no_ratio(self):
        assert Window().ratio(now=0) is None
