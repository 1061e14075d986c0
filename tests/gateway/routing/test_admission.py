"""Who may be chosen is tested with the router; here: refusals by prediction. Per token 1 ms of prefill."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_objects import PLAIN, candidate, link, prefix, request

from perilune_api.pool import Limits
from perilune_gateway.model import H20_30B, RefuseReason
from perilune_gateway.routing import admission


def node(address: str = "a", **kwargs):
    return candidate(address, engine=PLAIN, **kwargs)


@pytest.mark.parametrize(
    ("asked", "nodes", "retry_after_s"),
    [
        pytest.param({}, [node(pending_s=99)], None, id="no SLO"),
        pytest.param({"slo_ttft_s": 3}, [node(pending_s=2)], None, id="2 s of queue + 1 s of prefill"),
        pytest.param({"slo_ttft_s": 3}, [node(pending_s=2.5)], 0.5, id="half a second too late"),
        pytest.param(
            {"slo_ttft_s": 3}, [node(pending_s=9), node("b", pending_s=4)], 2.0, id="the nearest endpoint"
        ),
        pytest.param({"slo_ttft_s": 3}, [node(pending_s=9), node("b")], None, id="one is free"),
        pytest.param(
            {"slo_ttft_s": 3}, [node(pending_s=2.5, cached=500)], None, id="its cache makes up for the queue"
        ),
        pytest.param(
            {"slo_ttft_s": 0.5}, [node(pending_s=2.0)], 2.0, id="what no endpoint can: the queue has to go"
        ),
        pytest.param({"slo_ttft_s": 0.5}, [node()], None, id="and on an idle one it may run"),
        pytest.param(
            {"slo_ttft_s": 3, "level": 1}, [node(pending_s=4)], None, id="level 1: twice the backlog"
        ),
        pytest.param({"slo_ttft_s": 3, "level": 1}, [node(pending_s=5)], 1.0, id="but not more"),
        pytest.param({"slo_ttft_s": 3, "level": -1}, [node(pending_s=1.5)], 0.5, id="level −1: half of it"),
        pytest.param(
            {"slo_tpot_s": 0.004},
            [node(in_flight=4, active_kv=4_000, decode_s=10, cached=1_000)],
            10 * (1 - 4 / 5),
            id="5 ms per token: until a fifth has ended",
        ),
        pytest.param(
            {"slo_tpot_s": 0.005}, [node(in_flight=4, active_kv=4_000, decode_s=10)], None, id="5 ms allowed"
        ),
        pytest.param(
            {"slo_tpot_s": 0.004},
            [node(in_flight=4, active_kv=4_000, decode_s=10, pending_s=4)],
            None,
            id="most will have ended when its decode begins",
        ),
        pytest.param(
            {"slo_ttft_s": 2, "slo_tpot_s": 0.002},
            [node(pending_s=5), node("b", in_flight=9, active_kv=9_000, decode_s=10)],
            4.0,
            id="both on one endpoint",
        ),
    ],
)
def test_a_request_whose_slo_nobody_can_keep_is_refused_until_one_can(
    asked: dict, nodes: list, retry_after_s: float | None
) -> None:
    refusal = admission.meets_slo(request(tokens=1000, **asked), nodes)
    if retry_after_s is None:
        assert refusal is None
    else:
        assert refusal is not None
        assert (refusal.reason, refusal.status) == (RefuseReason.OVERLOADED, 429)
        assert refusal.retry_after_s == pytest.approx(retry_after_s)


@given(
    ttft_s=st.floats(0, 100),
    tpot_s=st.floats(0, 1),
    tokens=st.integers(1, 131_072),
    level=st.integers(-8, 8),
    nodes=st.lists(
        st.builds(
            candidate,
            st.sampled_from("abcdef"),
            cached=st.integers(0, 4_000),
            stored=st.integers(0, 4_000),
            kv_free=st.integers(0, 10_000),
            decode_s=st.floats(0, 100),
            links=st.just({"a": link()}),
            engine=st.builds(H20_30B.scaled, st.floats(0.1, 10)),
        ),
        min_size=1,
        unique_by=lambda c: c.address,
    ),
)
def test_an_idle_fleet_never_refuses(ttft_s, tpot_s, tokens, level, nodes) -> None:
    assert all(c.load.idle for c in nodes)
    limits = Limits(max_pending_seconds=1.0)
    r = request(
        tokens=tokens + 4_000, slo_ttft_s=ttft_s, slo_tpot_s=tpot_s, level=level, prefix=prefix(a=3_000)
    )
    assert admission.meets_slo(r, nodes) is None
    assert admission.not_overloaded(nodes, limits, level) is None


@given(
    waits=st.lists(st.floats(0, 100), min_size=1, max_size=5),
    slo_s=st.floats(0.001, 50),
    level=st.integers(-3, 3),
)
def test_retry_after_is_when_it_would_be_admitted(waits: list[float], slo_s: float, level: int) -> None:
    """A queue goes by one second a second."""

    def nodes(after_s: float) -> list:
        return [node(chr(97 + i), pending_s=max(0.0, w - after_s)) for i, w in enumerate(waits)]

    r = request(tokens=1000, slo_ttft_s=slo_s, level=level)
    refusal = admission.meets_slo(r, nodes(0.0))
    if refusal:
        assert refusal.retry_after_s > 0
        assert admission.meets_slo(r, nodes(refusal.retry_after_s + 1e-6)) is None


@pytest.mark.parametrize(
    ("level", "queue_s", "refused"),
    [(0, 2.0, False), (0, 2.1, True), (1, 4.0, False), (1, 4.1, True), (-1, 1.0, False), (-1, 1.1, True)],
)
def test_the_pools_limit_by_priority_level(level: int, queue_s: float, refused: bool) -> None:
    verdict = admission.not_overloaded([node(pending_s=queue_s)], Limits(max_pending_seconds=2.0), level)
    assert (verdict is not None) == refused


def test_engine_priority_is_shortest_first_with_ageing() -> None:
    """Weight 3: a request with 2 s of prefill is overtaken by short ones for 6 s, not longer."""
    long = admission.engine_priority(100.0, 2.0, 3.0)
    assert admission.engine_priority(105.9, 0.0, 3.0) < long < admission.engine_priority(106.1, 0.0, 3.0)
    assert admission.engine_priority(100.0, 9.0, 0.0) < admission.engine_priority(100.1, 0.0, 0.0)
    assert 0 <= admission.engine_priority(1.8e9, 60.0, 3.0) < 2**31, "Unix time fits"
