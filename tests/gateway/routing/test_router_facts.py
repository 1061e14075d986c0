"""What the router tells policies and learns on the way: prefix, links, speeds, SLOs."""

from collections.abc import Sequence

import pytest
from router_rig import USUAL, A, B, C, Rig, completion, pool
from routing_objects import chosen, head

from perilune_api.pool import Canary, EndpointSpec, Limits, NodePlace, Routing, Shadow, Topology
from perilune_api.topology import Level
from perilune_gateway.model import (
    H20_30B,
    DecisionRecord,
    Location,
    Overlap,
    Refusal,
    RefuseReason,
    Routed,
    Tier,
)
from perilune_gateway.policy import POLICIES
from perilune_gateway.state.calibration import HALF_LIFE_S

LONG = range(32_000)
TWO_RACKS = Topology({"n1": NodePlace("r1", "s"), "n2": NodePlace("r1", "s"), "n3": NodePlace("r2", "s")})


def rig_of(policy: str = "ear", **routing: object) -> Rig:
    """Three endpoints on two racks."""
    at = zip((A, B, C), TWO_RACKS.nodes, strict=True)
    endpoints = [EndpointSpec(address=a, node=node, events=(f"tcp://{a}",)) for a, node in at]
    return Rig(
        pool(
            endpoints=endpoints,
            routing=Routing(policy=chosen(policy), **routing),  # type: ignore[arg-type]
            engine=USUAL,
            topology=TWO_RACKS,
        )
    )


def ask(rig: Rig, ids: Sequence[int], **headers: str) -> Routed | Refusal:
    return rig.ask(ids, head("/v1/completions", **headers))


def route(rig: Rig, ids: Sequence[int], **headers: str) -> tuple[Routed, DecisionRecord]:
    routed = ask(rig, ids, **headers)
    assert isinstance(routed, Routed), routed
    return routed, rig.record(routed)


def test_a_prompt_carries_its_longest_prefix_and_who_holds_it() -> None:
    rig = rig_of(policy="mooncake")
    rig.stored(A, range(320))
    rig.stored(B, range(160))
    _, record = route(rig, range(640))
    prefix = record.view.prefix
    assert prefix.locations == (Location(A, 320), Location(B, 160))
    assert not prefix.pullable
    links = {c.address: c.links for c in record.candidates}
    assert links[A][B].distance is links[B][A].distance is Level.RACK
    assert links[C][A].distance is links[C][B].distance is Level.SPINE


@pytest.mark.parametrize(
    ("routing", "holders"),
    [
        (Routing(policy=chosen("conductor")), 6),
        (Routing(policy=chosen("mooncake")), 4),
        (Routing(), 4),
        (Routing(shadow=Shadow(policies=("conductor",))), 6),
        (Routing(canary=Canary(policy=chosen("conductor"))), 6),
    ],
    ids=["asks", "does not", "default", "in shadow", "canary"],
)
def test_all_holders_reach_a_policy_that_asks_for_them(routing: Routing, holders: int) -> None:
    addresses = [f"10.0.0.{number}:8000" for number in range(1, 8)]
    endpoints = [EndpointSpec(address=a, events=(f"tcp://{a}",)) for a in addresses]
    rig = Rig(pool(endpoints=endpoints, routing=routing, engine=USUAL))
    for address in addresses[1:]:
        rig.stored(address, range(320))
    _, record = route(rig, range(640))
    locations = {location.address for location in record.view.prefix.locations}
    assert len(locations) == holders
    assert all(locations - {c.address} <= c.links.keys() for c in record.candidates)


def test_each_use_of_a_prefix_is_counted() -> None:
    rig = rig_of(policy="mooncake")
    rig.stored(A, range(320))
    for hits in range(3):
        routed, record = route(rig, range(330))
        assert record.view.prefix.hits == hits
        rig.finish(routed)


def test_a_prompt_that_comes_again_meets_what_has_changed() -> None:
    rig = rig_of(policy="mooncake")

    def held() -> dict[str, int]:
        routed, record = route(rig, range(330))
        rig.finish(routed)
        return {c.address: c.overlap.device_tokens for c in record.candidates}

    assert held() == {A: 0, B: 0, C: 0}
    claimed = held()
    assert sorted(claimed.values()) == [0, 0, 320]
    rig.stored(A, range(160))
    rig.stored(B, range(160))
    assert held() == {address: max(claimed[address], 160 if address != C else 0) for address in claimed}
    rig.now += 3600
    assert held() == {A: 160, B: 160, C: 0}


def test_links_are_as_slow_as_they_were_observed_to_be() -> None:
    rig = rig_of(policy="mooncake")
    rig.stored(A, range(320))
    rig.router.state.calibration.transfer(A, B, 3.0, 1.0, rig.now)
    _, record = route(rig, range(640))
    slowdowns = {c.address: c.links[A].slowdown for c in record.candidates if c.address != A}
    assert slowdowns == pytest.approx({B: 2.0, C: 2.0}, rel=1e-3)


def test_an_engine_slower_than_believed_is_found_out() -> None:
    rig = rig_of(policy="least_loaded")
    predicted_s = H20_30B.prefill_s(len(LONG))
    for n in range(10):
        ids = range(100_000 * n, 100_000 * n + len(LONG))
        routed, record = route(rig, ids)
        before = rig.router.state.calibration.prefill_ratio(record.target, rig.now)
        rig.now += 2.0 * predicted_s
        rig.stored(record.target, ids)
        rig.now += 5.0
        rig.finish(routed)
        assert rig.router.state.calibration.prefill_ratio(record.target, rig.now) > before
    known = rig.router.state.calibration.of(record.target, rig.now)
    assert 1.5 < known.prefill.ratio <= 2.0
    assert known.decode_s == pytest.approx(5.0)
    chosen = next(c for c in record.candidates if c.address == record.target)
    assert chosen.engine.scale > 1.3


@pytest.mark.parametrize("times", [0.2, 1.0, 3.0])
def test_how_fast_an_engine_is_shows_in_short_prompts_too(times: float) -> None:
    rig = rig_of(policy="sticky")
    for n in range(60):
        ids = range(1_000 * n, 1_000 * n + 160)
        routed, record = route(rig, ids, x_session_id="s")
        rig.now += times * (H20_30B.request_overhead_s(160) + H20_30B.prefill_s(160))
        rig.stored(record.target, ids)
        rig.now += 1.0
        rig.finish(routed)
    known = rig.router.state.calibration.of(record.target, rig.now)
    assert known.prefill.observations == 60
    assert known.prefill.ratio == pytest.approx(times, rel=0.05)
    assert known.ttft.ratio == pytest.approx(1.0, rel=0.4), "beside what the prefill's ratio explains"


def test_a_store_slower_than_believed_is_found_out_and_says_nothing_of_prefill() -> None:
    rig = rig_of(policy="least_loaded")
    engine = H20_30B
    for n in range(1, 4):
        start = n * 1_000_000
        ids = range(start, start + 32_000)
        rig.stored(C, ids[:24_000], tier=Tier.STORE)
        routed, record = route(rig, ids)
        assert record.cached_tokens == 24_000
        fetch_s = engine.store_s(24_000)
        assert rig.pending()[record.target] == 8_000
        rest_s = engine.prefill_s(8_000, 24_000) + engine.request_overhead_s(32_000)
        rig.now += 3 * fetch_s + rest_s
        rig.stored(record.target, ids)
        rig.finish(routed)
    known = [rig.router.state.calibration.of(a, rig.now) for a in (A, B, C)]
    assert sum(k.store.observations for k in known) == 3
    assert sum(k.prefill.observations for k in known) == 0
    assert all(2.5 <= k.store.ratio < 3.0 for k in known), "who loaded nothing is as slow as the pool"
    _, record = route(rig, range(9_000_000, 9_032_000))
    slower = [engine.store_bytes_per_s / c.engine.store_bytes_per_s for c in record.candidates]
    assert all(2.45 <= times < 3.0 for times in slower), "and so policies are told"
    rig.now += 10 * HALF_LIFE_S
    _, record = route(rig, range(10_000_000, 10_032_000))
    faded = [engine.store_bytes_per_s / c.engine.store_bytes_per_s for c in record.candidates]
    assert faded == [1.0] * 3, "also that it gets another chance, though nothing was observed since"


def test_a_prefill_that_waited_is_measured_from_when_it_could_begin() -> None:
    rig = rig_of(policy="sticky")
    first, record = route(rig, LONG, x_session_id="s")
    predicted_s = H20_30B.prefill_s(len(LONG))
    other = range(500_000, 500_000 + len(LONG))
    second = rig.router.on_body(head("/v1/completions", x_session_id="s"), completion(other))
    assert isinstance(second, Routed)
    assert second.destinations[0] == record.target
    rig.now += H20_30B.request_overhead_s(len(LONG)) + predicted_s
    rig.stored(record.target, LONG)
    rig.now += predicted_s
    rig.stored(record.target, other)
    rig.now += 1.0
    rig.finish(second)
    known = rig.router.state.calibration.of(record.target, rig.now)
    assert known.prefill.observations == 2
    assert known.prefill.ratio == pytest.approx(1.0)
    assert known.ttft.ratio == pytest.approx(1.0)
    assert first.ticket != second.ticket


def test_of_an_empty_prompt_nothing_is_cached() -> None:
    record = route(rig_of(), [])[1]
    assert record.view.prompt_tokens == 0
    assert {c.overlap for c in record.candidates} == {Overlap(0, 0, 0)}


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, (0, 4.0, 0.0)),
        ({"x_slo_ttft_ms": "250"}, (0, 0.25, 0.0)),
        ({"x_slo_tpot_ms": "12.5"}, (0, 4.0, 0.0125)),
        ({"x_slo_ttft_ms": ""}, (0, 4.0, 0.0)),
        ({"x_slo_ttft_ms": "0"}, (0, 4.0, 0.0)),
        ({"x_slo_ttft_ms": "-1"}, (0, 4.0, 0.0)),
        ({"x_slo_ttft_ms": "inf"}, (0, 4.0, 0.0)),
        ({"x_gateway_inference_objective": "batch"}, (-1, 4.0, 0.0)),
        ({"x_llm_d_inference_objective": "chat"}, (2, 4.0, 0.0)),
        ({"x_llm_d_inference_objective": "unknown"}, (0, 4.0, 0.0)),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_slos_and_priority_of_a_request_or_else_of_the_pool(headers: dict, expected: tuple) -> None:
    rig = rig_of(limits=Limits(ttft_slo_seconds=4.0, objectives={"batch": -1, "chat": 2}))
    view = route(rig, range(100), **headers)[1].view
    assert (view.level, view.slo_ttft_s, view.slo_tpot_s) == expected


@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-slo-tpot-ms"])
@pytest.mark.parametrize("value", ["soon", "250ms", "nan"])
@pytest.mark.parametrize("known", [True, False], ids=["by headers", "by body"])
def test_an_slo_that_is_no_number_is_refused(name: str, value: str, known: bool) -> None:
    rig = rig_of(limits=Limits(ttft_slo_seconds=4.0))
    if known:
        route(rig, range(100), x_session_id="s")
    refusal = ask(rig, range(100), x_session_id="s", **{name.replace("-", "_"): value})
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.status) == (RefuseReason.BAD_REQUEST, 400)
    assert refusal.message == f"{value!r} is not a number of milliseconds - in {name}"


def test_an_slo_that_nobody_can_keep_is_429_with_the_time_until_the_backlog_is_gone() -> None:
    rig = rig_of(limits=Limits(ttft_slo_seconds=1.0))
    for ticket, address in enumerate((A, B, C)):
        rig.queue(address, 5.0 + ticket)
    refusal = rig.ask(range(100))
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.status) == (RefuseReason.OVERLOADED, 429)
    assert 4.0 < refusal.retry_after_s < 4.3
    assert not len(rig.state.requests)


@pytest.mark.parametrize("name", POLICIES)
def test_every_live_policy_routes_and_shows_a_cost_for_each_candidate(name: str) -> None:
    rig = rig_of(allow_policy_header=True)
    rig.stored(A, range(320))
    for turn in range(3):
        routed, record = route(rig, range(640 + 64 * turn), x_perilune_policy=name, x_session_id="s")
        assert record.policy == name
        assert [c.address for c in record.costs] == [A, B, C]
        rig.finish(routed)
    assert not any(rig.pending().values())


def test_prefilling_requests_are_counted() -> None:
    rig = rig_of(policy="least_loaded")
    routed, record = route(rig, range(160))
    there = rig.load(record.target)
    assert (there.in_flight, there.prefilling, there.decoding, there.active_kv_tokens) == (1, 1, 0, 160)
    rig.stored(record.target, range(160))
    there = rig.load(record.target)
    assert (there.in_flight, there.prefilling, there.decoding, there.idle) == (1, 0, 1, False)
    rig.finish(routed)
    assert rig.load(record.target).idle
