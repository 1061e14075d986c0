"""Who may be chosen, and who is told what where nobody may."""

import pytest
from router_rig import A, B, Rig, completion, pool
from routing_objects import chosen, head

from perilune_api.pool import EndpointSpec, Limits, Model, Routing
from perilune_gateway.model import Refusal, RefuseReason, RequestHead, Routed


def test_only_endpoints_of_the_subset_hint_are_chosen(rig: Rig) -> None:
    h = RequestHead("POST", "/v1/completions", {}, frozenset({B}))
    assert rig.route(h=h).destinations == (B,)


@pytest.mark.parametrize("subset", [frozenset(), frozenset({"1.1.1.1:1"})])
def test_a_subset_without_an_endpoint_of_ours_is_refused(rig: Rig, subset: frozenset[str]) -> None:
    refusal = rig.ask(h=RequestHead("POST", "/v1/completions", {}, subset))
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.status) == (RefuseReason.SUBSET_EMPTY, 503)


def test_a_draining_endpoint_keeps_its_sessions_and_takes_no_other() -> None:
    routing = Routing(chosen("ear"))
    rig = Rig(pool(routing=routing))
    h = head("/v1/completions", x_session_id="s")
    host = rig.route(h=h).destinations[0]
    drained = [EndpointSpec(a, draining=a == host) for a in (A, B)]
    rig.router.configure(pool(routing=routing, endpoints=drained))
    assert rig.route(h=h).destinations[0] == host
    assert rig.route(range(100, 120)).destinations[0] != host


def test_no_endpoint_at_all() -> None:
    refusal = Rig(pool(endpoints=[])).ask()
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.status) == (RefuseReason.NO_ENDPOINT, 503)
    assert refusal.retry_after_s > 0


@pytest.mark.parametrize(
    ("body", "reason", "status"),
    [
        pytest.param(b"{", RefuseReason.BAD_JSON, 400, id="no JSON"),
        pytest.param(b'{"prompt": "x"}', RefuseReason.NO_MODEL, 400, id="no model"),
        pytest.param(
            b'{"model": "other", "prompt": "x"}', RefuseReason.UNKNOWN_MODEL, 404, id="unknown model"
        ),
        pytest.param(completion(range(200)), RefuseReason.TOO_LONG, 400, id="longer than the context"),
        pytest.param(
            completion([[1], list(range(200))]), RefuseReason.TOO_LONG, 400, id="one of several is longer"
        ),
        pytest.param(b"x" * 5_000, RefuseReason.BODY_TOO_LARGE, 413, id="too many bytes"),
    ],
)
def test_a_body_that_cannot_be_served_is_refused_with_its_reason(
    body: bytes, reason: RefuseReason, status: int
) -> None:
    rig = Rig(
        pool(
            model=Model("m", context_tokens=200, tokenize="estimate"),
            routing=Routing(limits=Limits(max_body_bytes=4_000)),
        )
    )
    refusal = rig.router.on_body(head("/v1/completions"), body)
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.status) == (reason, status)
    assert rig.router.state.in_flight.count == 0
    kept = rig.decisions.query(n=1)[0]
    assert kept.reason == reason
    assert kept.timings_us["total"] > 0


def test_a_body_that_says_it_is_too_large_is_refused_unseen() -> None:
    rig = Rig(pool(routing=Routing(limits=Limits(max_body_bytes=4_000))))
    refusal = rig.router.on_headers(head("/v1/completions", content_length="4001"))
    assert isinstance(refusal, Refusal)
    assert refusal.reason is RefuseReason.BODY_TOO_LARGE


def test_a_list_of_prompts_is_as_long_as_its_longest() -> None:
    rig = Rig(pool(model=Model("m", context_tokens=2_100, tokenize="estimate")))
    prompts = [list(range(i, i + 2_000)) for i in range(100)]
    assert isinstance(rig.router.on_body(head("/v1/completions"), completion(prompts)), Routed)


def test_overload_is_429_with_the_time_until_the_shortest_queue_fits() -> None:
    rig = Rig(pool(routing=Routing(limits=Limits(max_pending_seconds=2.0))))
    rig.queue(A, 5.0)
    rig.queue(B, 6.0)
    refusal = rig.ask()
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.retry_after_s) == (429, pytest.approx(3.0))


def test_a_client_learns_no_addresses_from_a_refusal(rig: Rig) -> None:
    for address in (A, B):
        rig.router.state.fleet.suspect(address, rig.now)
    refusal = rig.ask()
    assert isinstance(refusal, Refusal)
    assert "not_ready: 2" in refusal.message
    assert A not in refusal.message
