"""The simulated engine's metrics page."""

import pytest
from prometheus_client.parser import text_string_to_metric_families
from stepped_engine import SteppedEngine

from perilune_lab.engine.metrics import Metrics, Page

COUNTERS = {
    "prefix_cache_queries",
    "prefix_cache_hits",
    "external_prefix_cache_queries",
    "external_prefix_cache_hits",
    "prompt_tokens_by_source",
    "prompt_tokens_cached_by_source",
    "prompt_tokens",
    "generation_tokens",
    "num_preemptions",
    "admission_rejections",
    "request_success",
}
GAUGES = {
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "kv_cache_usage_perc",
    "engine_sleep_state",
    "cache_config_info",
    "lora_requests_info",
}
HISTOGRAMS = {
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "iteration_tokens_total",
}


@pytest.fixture
def page():
    """Families of an engine that served three requests, one of them aborted."""
    engine = SteppedEngine()
    metrics = Metrics("sim", 131_072, {"block_size": "16"}, ["tuned"], started=1.5)
    first = engine.add([1] * 100, 10)
    engine.run()
    second = engine.add([1] * 100, 10)
    engine.run()
    third = engine.add([2] * 50_000, 10)
    engine.run(1.0)
    engine.scheduler.abort(third, engine.now)
    for step in engine.steps:
        metrics.step_ended(step)
    for request in (first, second, third):
        metrics.request_ended(request)
    engine.add([3] * 100, 10)
    sheet = Page()
    metrics.write(sheet, engine.scheduler)
    families = list(text_string_to_metric_families(sheet.text()))
    return {family.name: family for family in families}


def values(family):
    return {
        tuple(v for k, v in sorted(s.labels.items()) if k not in ("engine", "model_name")): s.value
        for s in family.samples
    }


def test_names_and_types_are_vllms(page):
    by_type: dict[str, set[str]] = {}
    for name, family in page.items():
        if not name.endswith("_created"):
            by_type.setdefault(family.type, set()).add(name.removeprefix("vllm:"))
    assert by_type == {"counter": COUNTERS, "gauge": GAUGES, "histogram": HISTOGRAMS}


def test_every_series_carries_engine_and_model(page):
    for name, family in page.items():
        if name not in ("vllm:cache_config_info", "vllm:lora_requests_info"):
            assert all(s.labels["engine"] == "0" for s in family.samples)
            assert all(s.labels["model_name"] == "sim" for s in family.samples)


def test_counters_count_each_request_once(page):
    assert values(page["vllm:prefix_cache_queries"]) == {(): 50_200}
    assert values(page["vllm:prefix_cache_hits"]) == {(): 96}
    assert values(page["vllm:generation_tokens"]) == {(): 20}
    assert values(page["vllm:request_success"]) == {
        ("stop",): 0,
        ("length",): 2,
        ("abort",): 1,
        ("error",): 0,
    }
    by_source = values(page["vllm:prompt_tokens_by_source"])
    assert by_source[("local_cache_hit",)] == 96
    assert sum(by_source.values()) == 50_200


def test_latencies_are_those_of_completed_tokens(page):
    counts = {
        name: next(s.value for s in page[f"vllm:{name}"].samples if s.name.endswith("_count"))
        for name in HISTOGRAMS
    }
    assert counts["time_to_first_token_seconds"] == 2
    assert counts["inter_token_latency_seconds"] == 18
    assert counts["request_time_per_output_token_seconds"] == 2
    assert counts["e2e_request_latency_seconds"] == 2
    total = {s.name: s.value for s in page["vllm:inter_token_latency_seconds"].samples}
    assert total["vllm:inter_token_latency_seconds_sum"] == pytest.approx(18 * 0.0058, rel=0.01)


def test_gauges_show_the_moment(page):
    assert values(page["vllm:num_requests_running"]) == {(): 0}
    assert values(page["vllm:num_requests_waiting"]) == {(): 1}
    assert values(page["vllm:num_requests_waiting_by_reason"]) == {("capacity",): 1, ("deferred",): 0}
