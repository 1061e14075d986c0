"""perilune by hand: per token 1 ms of prefill, 0.2 ms over a link of 5 MB/s."""

from random import Random

import pytest
from routing_objects import PLAIN, candidate, link, prefix, request, session

from perilune_api.policies import PeriluneParams
from perilune_gateway.model import NEED_BODY, Decision, Phase, Reason
from perilune_gateway.policy.perilune import perilune

PARAMS = PeriluneParams(least_gain_seconds=0.1 / PLAIN.pace(), least_gain_with_kv_seconds=0.05 / PLAIN.pace())
"""On these engines 0.1 s and 0.05 s."""


def run(r, candidates, seed: int = 0) -> Decision:
    verdict = perilune(r, candidates, PARAMS, Random(seed))
    assert isinstance(verdict, Decision)
    return verdict


def node(address: str, **kwargs):
    links = {"a": link(bytes_per_s=5e6)} if address != "a" else {}
    return candidate(address, engine=PLAIN, **({"links": links} | kwargs))


def at_home(**held):
    return request(tokens=1000, of=session("a"), prefix=prefix(**held))


@pytest.mark.parametrize(
    ("queue_s", "reason"),
    [
        pytest.param(0.0, Reason.HOST, id="idle host"),
        pytest.param(0.179, Reason.HOST, id="pulling takes 0.18 s"),
        pytest.param(0.234, Reason.NOT_WORTH, id="saves 0.054 s with nine tenths of the prompt"),
        pytest.param(0.236, Reason.MOVED, id="saves 0.056 s"),
    ],
)
def test_a_session_leaves_only_when_that_pays(queue_s: float, reason: Reason) -> None:
    verdict = run(at_home(a=900), [node("a", cached=900, pending_s=queue_s), node("b")])
    assert verdict.reason is reason
    assert verdict.target == ("b" if reason is Reason.MOVED else "a")
    if reason is Reason.MOVED:
        assert (verdict.moved_from, verdict.replicate_from, verdict.cached_tokens) == ("a", "a", 900)
        assert verdict.estimated_ttft_s == pytest.approx(0.28)


@pytest.mark.parametrize(("queue_s", "reason"), [(0.99, Reason.NOT_WORTH), (1.01, Reason.MOVED)])
def test_recomputing_elsewhere_has_to_pay_too(queue_s: float, reason: Reason) -> None:
    without_pull = request(tokens=1000, of=session("a"), prefix=prefix(pullable=False, a=900))
    assert run(without_pull, [node("a", cached=900, pending_s=queue_s), node("b")]).reason is reason


@pytest.mark.parametrize(
    ("held", "least_s"),
    [
        pytest.param({}, 0.1, id="nothing"),
        pytest.param({"stored": 400}, 0.09, id="a fifth, in the store"),
        pytest.param({"stored": 1_000}, 0.075, id="half, in the store"),
        pytest.param({"host": 1_000}, 0.075, id="half, in its host memory"),
        pytest.param({"cached": 1_000}, 0.075, id="half, on its device"),
    ],
)
@pytest.mark.parametrize("more_s", [-0.001, 0.001])
def test_a_move_has_to_save_less_where_the_other_endpoint_has_more(
    held, least_s: float, more_s: float
) -> None:
    """It has so many of the prompt's 2,000 tokens; the host caches 800."""
    r = request(tokens=2_000, of=session("a"), prefix=prefix(pullable=False))
    there = candidate("b", engine=PLAIN, **held)

    def decision(queue_s: float) -> Decision:
        return run(r, [candidate("a", cached=800, pending_s=queue_s, engine=PLAIN), there])

    def saved_s(queue_s: float) -> float:
        stays, goes = (each.total for each in decision(queue_s).costs)
        return stays - goes

    queue_s = 2.0 - saved_s(2.0) + least_s + more_s
    assert saved_s(queue_s) == pytest.approx(least_s + more_s)
    assert (decision(queue_s).reason is Reason.MOVED) == (more_s > 0)


@pytest.mark.parametrize(("here", "there"), [(0.1, 0.1), (1.0, 1.0), (3.0, 3.0), (1.5, 0.5)])
def test_what_a_move_has_to_save_follows_the_engines_speed(here: float, there: float) -> None:
    """The host caches everything, so all that a move saves is the host's queue."""
    mean = (here + there) / 2
    for queue_s, reason in ((0.099 * mean, Reason.NOT_WORTH), (0.101 * mean, Reason.MOVED)):
        other = candidate("b", engine=PLAIN.scaled(there))
        prefill_s = other.engine.prefill_s(1000)
        host = candidate("a", cached=1000, pending_s=queue_s + prefill_s, engine=PLAIN.scaled(here))
        r = request(tokens=1000, of=session("a"), prefix=prefix(pullable=False, a=1000))
        assert run(r, [host, other]).reason is reason


def test_a_shorter_gain_without_kv_counts_with_it_too() -> None:
    params = PeriluneParams(
        least_gain_seconds=0.1 / PLAIN.pace(), least_gain_with_kv_seconds=0.5 / PLAIN.pace()
    )
    nodes = [node("a", cached=900, pending_s=0.29), node("b")]  # pulled, it takes 0.28 s instead of 0.39 s
    assert perilune(at_home(a=900), nodes, params, Random(0)).reason is Reason.MOVED


def test_slow_links_stop_moves_by_themselves() -> None:
    def reason(slowdown: float) -> Reason:
        far = node("b", links={"a": link(bytes_per_s=5e6, slowdown=slowdown)})
        return run(at_home(a=900), [node("a", cached=900, pending_s=0.5), far]).reason

    assert [reason(1.0), reason(3.0)] == [Reason.MOVED, Reason.HOST]


def test_a_session_that_moved_just_now_may_move_again() -> None:
    r = request(tokens=1000, of=session("a", moved_s_ago=0.0), prefix=prefix(a=900))
    assert run(r, [node("a", cached=900, pending_s=5.0), node("b")]).reason is Reason.MOVED


@pytest.mark.parametrize("host", ["", "gone"])
def test_cold_sessions_go_where_it_is_cheapest(host: str) -> None:
    r = request(tokens=1000, of=session(host), prefix=prefix(b=500))
    verdict = run(r, [node("a", pending_s=0.1), node("b", cached=500, pending_s=0.4), node("c", pending_s=2)])
    assert (verdict.target, verdict.reason) == ("b", Reason.COLD)


def test_a_draining_host_is_left_at_once() -> None:
    nodes = [node("a", cached=900, draining=True), node("b", pending_s=3.0), node("c", pending_s=1.0)]
    verdict = run(at_home(a=900), nodes)
    assert (verdict.target, verdict.reason, verdict.moved_from) == ("c", Reason.MOVED, "a")
    alone = run(at_home(a=900), nodes[:1])
    assert (alone.target, alone.reason) == ("a", Reason.HOST)


def test_a_host_that_lost_the_prefix_has_no_claim() -> None:
    verdict = run(
        request(tokens=1000, of=session("a"), prefix=prefix(b=900)), [node("a"), node("b", cached=900)]
    )
    assert (verdict.target, verdict.reason) == ("b", Reason.MOVED)


def test_noise_does_not_move_a_session_that_has_nothing_to_lose() -> None:
    verdict = run(request(tokens=1000, of=session("a")), [node("a", pending_s=0.05), node("b")])
    assert (verdict.target, verdict.reason) == ("a", Reason.NOT_WORTH)


@pytest.mark.parametrize(
    ("pullable", "queue_s", "target"),
    [
        pytest.param(False, 4.89, "a", id="saves 3.99 s"),
        pytest.param(False, 4.91, "b", id="saves 4.01 s"),
        pytest.param(True, 1.47, "a", id="saves 1.29 s with nine tenths of the prompt"),
        pytest.param(True, 1.49, "b", id="saves 1.31 s"),
    ],
)
def test_what_brings_little_is_not_worth_a_move(pullable: bool, queue_s: float, target: str) -> None:
    nodes = [node("a", cached=900, pending_s=queue_s), node("b")]
    usual, pace = PeriluneParams(), PLAIN.pace()
    params = PeriluneParams(
        least_gain_seconds=usual.least_gain_seconds / pace,
        least_gain_with_kv_seconds=usual.least_gain_with_kv_seconds / pace,
    )
    verdict = perilune(at_home(a=900, pullable=pullable), nodes, params, Random(0))
    assert isinstance(verdict, Decision)
    assert verdict.target == target
    assert verdict.reason is (Reason.MOVED if target == "b" else Reason.NOT_WORTH)


@pytest.mark.parametrize(
    ("tokens", "target"),
    [
        pytest.param(300, "a", id="0.3 s of prefill for three: 0.9 s"),
        pytest.param(400, "b", id="0.4 s for three: 1.2 s > 1 s of queue"),
    ],
)
def test_a_long_prefill_goes_where_few_are_in_flight(tokens: int, target: str) -> None:
    nodes = [node("a", in_flight=3, active_kv=0), node("b", pending_s=1.0)]
    assert run(request(tokens=tokens), nodes).target == target


def test_a_host_that_lost_the_context_is_a_case_for_the_body() -> None:
    r = request(tokens=1000, of=session("a"), phase=Phase.HEADERS, prefix=prefix(pullable=False))
    nodes = [node("a"), node("b", pending_s=0.1)]
    assert perilune(r, nodes, PARAMS, Random(0)) is NEED_BODY
    short = request(tokens=10, of=session("a"), phase=Phase.HEADERS, prefix=prefix(pullable=False))
    assert run(short, nodes).target == "a", "no whole block: nothing is lost"


@pytest.mark.parametrize(
    ("queue_s", "host", "decides"),
    [(0.1, "a", True), (5.0, "a", False), (0.0, "", False), (0.0, "gone", False)],
    ids=["host clearly best", "a move may pay", "new session", "host gone"],
)
def test_headers_suffice_while_the_host_is_good_enough(queue_s: float, host: str, decides: bool) -> None:
    r = request(tokens=1000, of=session(host), phase=Phase.HEADERS, prefix=prefix(pullable=False, a=900))
    verdict = perilune(r, [node("a", cached=900, pending_s=queue_s), node("b")], PARAMS, Random(0))
    assert (verdict is not NEED_BODY) == decides
    if decides:
        assert isinstance(verdict, Decision)
        assert verdict.reason is Reason.HOST
