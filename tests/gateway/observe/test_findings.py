"""What engines that others run lack, from what they told."""

from dataclasses import replace
from typing import Any

import pytest

from perilune_api.findings import ADVICE, Finding
from perilune_api.pool import EndpointSpec, Engine, Hashing, Metadata, Model, Pool, Selector, Spec
from perilune_gateway.model.engine_facts import EngineFacts, ServedModel
from perilune_gateway.model.kv_events import EventStats
from perilune_gateway.observe.findings import (
    Expected,
    Seen,
    expected,
    is_older,
    is_silent,
    lacks,
    together,
)

GOOD = EngineFacts(
    models=(ServedModel("m"),),
    version="0.32.0",
    has_metrics=True,
    block_size=16,
    prefix_caching=True,
    hash_algorithm="sha256",
)
POOL = expected(Pool(Metadata("p"), Spec(Model(name="m"), Engine(selector=Selector(labels={"app": "vllm"})))))


def seen(more: dict[str, Any] | None = None, **facts: Any) -> Seen:
    given = {"events": True, "replay": True, "transfers": True} | (more or {})
    return Seen(facts=replace(GOOD, **facts), **given)


@pytest.mark.parametrize(
    ("engine", "found"),
    [
        pytest.param(seen(), [], id="nothing"),
        pytest.param(seen(trouble="/v1/models answers 503", models=()), ["unreachable"], id="no answer"),
        pytest.param(seen(models=(ServedModel("n"),)), ["other_model"], id="another model"),
        pytest.param(seen(asleep=True), ["asleep"], id="asleep"),
        pytest.param(seen(prefix_caching=False), ["no_prefix_caching"], id="no prefix caching"),
        pytest.param(seen(prefix_caching=None), [], id="prefix caching not told"),
        pytest.param(seen(block_size=24), ["block_size"], id="other blocks"),
        pytest.param(seen(block_size=32), [], id="larger blocks that the pool's divide"),
        pytest.param(seen({"events": False, "replay": False}), ["no_events"], id="no events"),
        pytest.param(seen({"silent": True}), ["events_silent"], id="events that do not come"),
        pytest.param(seen({"replay": False}), ["no_replay"], id="no replay"),
        pytest.param(seen(hash_algorithm="sha256_cbor"), ["hashing"], id="another algorithm"),
        pytest.param(seen({"other_tokens": True}), ["tokens"], id="another template"),
        pytest.param(seen({"tokenizes": False}), ["no_tokenize"], id="no /tokenize"),
        pytest.param(seen(has_metrics=False), ["no_metrics"], id="no metrics"),
        pytest.param(seen(version="0.28.1"), ["random_seed"], id="a seed of its own"),
        pytest.param(seen({"transfers": False}), ["no_transfer"], id="no connector"),
        pytest.param(
            seen({"events": False, "transfers": False}, has_metrics=False, prefix_caching=False),
            ["no_prefix_caching", "no_events", "no_metrics", "no_transfer"],
            id="worst first",
        ),
    ],
)
def test_an_engine_lacks(engine: Seen, found: list[str]) -> None:
    assert [*lacks(engine, POOL)] == found


def test_a_pool_that_names_seed_and_tokenizer_needs_less() -> None:
    spec = Spec(Model(name="m", tokenizer="/model"), Engine(hashing=Hashing(seed="0")))
    needs = expected(Pool(Metadata("p"), spec))
    assert lacks(seen({"tokenizes": False}, version="0.23.0"), needs) == ()


def test_without_a_pool_any_model_and_block_size_will_do() -> None:
    assert lacks(seen(models=(ServedModel("x"),), block_size=100, hash_algorithm="xxhash"), Expected()) == ()


@pytest.mark.parametrize(
    ("events", "served_tokens", "silent"),
    [
        pytest.param(EventStats(connected=True, batches=1), 1e6, False, id="they come"),
        pytest.param(EventStats(connected=True, replayed=1), 1e6, False, id="they were replayed"),
        pytest.param(EventStats(connected=True), 1e6, True, id="it serves, and none has come"),
        pytest.param(EventStats(connected=True), 100.0, False, id="it has served prompts of few blocks"),
        pytest.param(EventStats(), 0.0, True, id="nothing is connected, before any prompt"),
        pytest.param(EventStats(batches=9), 0.0, True, id="the connection is lost"),
    ],
)
def test_events_that_are_configured_and_do_not_come(
    events: EventStats, served_tokens: float, silent: bool
) -> None:
    assert is_silent(events, served_tokens, 16) is silent


@pytest.mark.parametrize(
    ("version", "older"),
    [("0.28.9", True), ("v0.9.1", True), ("0.29.0rc1", False), ("1.0", False), ("", False), ("main", False)],
)
def test_a_version_is_older_only_if_it_is_known(version: str, older: bool) -> None:
    assert is_older(version, (0, 29)) is older


def test_findings_of_all_engines_come_worst_first_with_their_cures() -> None:
    made = together({"a": [Finding.NO_TRANSFER], "b": [Finding.NO_EVENTS, Finding.NO_TRANSFER]}, Expected())
    assert [(lack.finding, list(lack.endpoints)) for lack in made] == [
        (Finding.NO_EVENTS, ["b"]),
        (Finding.NO_TRANSFER, ["a", "b"]),
    ]
    assert "--kv-events-config" in made[0].cure


def test_a_cure_names_the_value_that_the_other_engines_have() -> None:
    expected = Expected(block_size=64, hash_algorithm="sha256")
    block, hashing = together({"a": [Finding.BLOCK_SIZE, Finding.HASHING]}, expected)
    assert "--block-size 64 (--page-size 64 of SGLang)" in block.cure
    assert "--prefix-caching-hash-algo sha256," in hashing.cure


def test_a_cure_names_the_pool_document_where_that_lists_the_engines() -> None:
    spec = Spec(Model(name="m"), endpoints=(EndpointSpec(address="10.0.0.1:8000"),))
    found = [Finding.NO_EVENTS, Finding.NO_REPLAY, Finding.NO_TRANSFER, Finding.NO_METRICS]
    cures = {lack.finding: lack.cure for lack in together({"a": found}, expected(Pool(Metadata("p"), spec)))}
    assert cures.pop(Finding.NO_METRICS) == ADVICE[Finding.NO_METRICS].cure
    assert all("its endpoint in the pool document" in cure for cure in cures.values())
    assert '"enable_kv_cache_events":true' in cures[Finding.NO_EVENTS]
    assert not any("document" in lack.cure for lack in together({"a": found}, POOL))


def test_every_finding_has_costs_and_a_cure() -> None:
    assert set(ADVICE) == set(Finding)
    assert all(advice.costs and advice.cure for advice in ADVICE.values())
    assert "SGLang with --enable-metrics" in ADVICE[Finding.NO_METRICS].cure
