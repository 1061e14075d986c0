"""Each policy's formula as a table of cases; then what must hold for all of them."""

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_objects import candidate, fleet, request, session

from perilune_api.policies import PolicyParams
from perilune_gateway import policy
from perilune_gateway.model import (
    NEED_BODY,
    Candidate,
    Decision,
    Phase,
    Reason,
    RequestView,
    Verdict,
)
from perilune_gateway.policy import POLICIES

PARAMS = PolicyParams()
T_HOT, T_COOL = PARAMS.ear.hot_pending_tokens, PARAMS.ear.cooldown_seconds
FILES = sorted(Path(policy.__path__[0]).rglob("*.py"))
SHARED = {"__init__", "contract", "cost", "packages", "registry", "trial"}
SCREEN_LINES = 90


def decide(name: str, r: RequestView, candidates: Sequence[Candidate], seed: int = 0) -> Verdict:
    return POLICIES[name](r, candidates, PARAMS, Random(seed))


def choice(name: str, r: RequestView, candidates: Sequence[Candidate]) -> tuple[str, Reason]:
    verdict = decide(name, r, candidates)
    assert isinstance(verdict, Decision)
    return verdict.target, verdict.reason


@pytest.mark.parametrize(("ordinal", "target"), [(0, "a"), (1, "b"), (2, "c"), (3, "a")])
def test_round_robin_counts(ordinal: int, target: str) -> None:
    assert choice("round_robin", request(ordinal=ordinal), fleet(a=9, b=0, c=0))[0] == target


def test_random_reaches_every_endpoint_and_follows_its_dice() -> None:
    def targets() -> list[str]:
        rng = Random(1)
        verdicts = [POLICIES["random"](request(), fleet(a=0, b=0, c=0), PARAMS, rng) for _ in range(60)]
        return [v.target for v in verdicts if isinstance(v, Decision)]

    assert set(targets()) == {"a", "b", "c"}
    assert targets() == targets()


@pytest.mark.parametrize(
    ("candidates", "target"),
    [
        pytest.param(fleet(a=5, b=3, c=4), "b", id="fewest pending tokens"),
        pytest.param([candidate("a", in_flight=2), candidate("b", in_flight=1)], "b", id="tie: in flight"),
        pytest.param([candidate("a", sessions=2), candidate("b", sessions=1)], "b", id="tie: sessions"),
        pytest.param([candidate("a", cached=900), candidate("b", pending=1)], "a", id="one idle"),
    ],
)
def test_least_loaded_chooses_the_lowest_load(candidates: list[Candidate], target: str) -> None:
    assert choice("least_loaded", request(), candidates) == (target, Reason.LEAST_LOADED)


def test_power_of_two_never_takes_the_worst_of_three() -> None:
    for seed in range(30):
        verdict = decide("power_of_two", request(), fleet(a=1, b=2, c=3), seed)
        assert isinstance(verdict, Decision)
        assert verdict.target != "c"


def test_power_of_two_with_one_endpoint() -> None:
    assert choice("power_of_two", request(), fleet(a=7))[0] == "a"


@pytest.mark.parametrize(
    ("r", "expected"),
    [
        pytest.param(request(), ("b", Reason.COLD), id="no session: least loaded"),
        pytest.param(request(of=session("")), ("b", Reason.COLD), id="new session: least loaded"),
        pytest.param(request(of=session("a")), ("a", Reason.HOST), id="host, however hot"),
        pytest.param(request(of=session("gone")), ("b", Reason.COLD), id="host gone: least loaded"),
    ],
)
def test_sticky_stays_on_the_host_however_hot(r: RequestView, expected: tuple[str, Reason]) -> None:
    assert choice("sticky", r, fleet(a=10 * T_HOT, b=0)) == expected


HOT = T_HOT + 1


@pytest.mark.parametrize(
    ("r", "candidates", "expected"),
    [
        pytest.param(request(), fleet(a=2, b=1), ("b", Reason.COLD), id="cold: fewest pending"),
        pytest.param(request(of=session("a")), fleet(a=T_HOT, b=0), ("a", Reason.HOST), id="T_hot itself"),
        pytest.param(request(of=session("a")), fleet(a=HOT, b=9, c=5), ("c", Reason.MOVED), id="hot: moves"),
        pytest.param(
            request(of=session("a", moved_s_ago=T_COOL)),
            fleet(a=HOT, b=0),
            ("a", Reason.HOT_COOLDOWN),
            id="moved T_cool ago: stays",
        ),
        pytest.param(
            request(of=session("a", moved_s_ago=T_COOL + 0.1)),
            fleet(a=HOT, b=0),
            ("b", Reason.MOVED),
            id="moved longer ago: moves",
        ),
        pytest.param(
            request(of=session("a")), fleet(a=HOT, b=HOT), ("a", Reason.HOT_NOWHERE), id="equal load: stays"
        ),
        pytest.param(
            request(of=session("a"), tokens=100),
            [candidate("a", pending=HOT), candidate("b", kv_free=99), candidate("c", pending=5, kv_free=100)],
            ("c", Reason.MOVED),
            id="only where the prompt fits",
        ),
        pytest.param(
            request(of=session("a"), tokens=100),
            [candidate("a", pending=HOT), candidate("b", kv_free=40, cached=60)],
            ("b", Reason.MOVED),
            id="cached tokens need no room",
        ),
        pytest.param(request(of=session("gone")), fleet(a=1, b=0), ("b", Reason.COLD), id="host gone"),
    ],
)
def test_ear_leaves_only_a_hot_host(
    r: RequestView, candidates: list[Candidate], expected: tuple[str, Reason]
) -> None:
    assert choice("ear", r, candidates) == expected


def test_ear_says_whom_a_moving_session_leaves() -> None:
    verdict = decide("ear", request(of=session("a")), fleet(a=HOT, b=0))
    assert isinstance(verdict, Decision)
    assert verdict.moved_from == "a"


@pytest.mark.parametrize(
    ("pending_at_host", "host", "needs_body"),
    [(0, "a", False), (T_HOT, "a", False), (HOT, "a", True), (0, "gone", True), (0, "", True)],
)
def test_ear_decides_from_headers_only_for_a_host_that_is_not_hot(
    pending_at_host: int, host: str, needs_body: bool
) -> None:
    r = request(of=session(host), phase=Phase.HEADERS)
    assert (decide("ear", r, fleet(a=pending_at_host, b=0)) is NEED_BODY) == needs_body


candidates_strategy = st.lists(
    st.builds(
        candidate,
        st.sampled_from("abcdefgh"),
        pending=st.integers(0, 3 * T_HOT),
        in_flight=st.integers(0, 5),
        cached=st.integers(0, 2_000),
        kv_free=st.integers(0, 5_000),
    ),
    min_size=1,
    unique_by=lambda c: c.address,
)
requests_strategy = st.builds(
    request,
    ordinal=st.integers(0, 20),
    tokens=st.integers(0, 5_000),
    of=st.none()
    | st.builds(session, st.sampled_from(["", *"abcdefghz"]), moved_s_ago=st.floats(0, 2 * T_COOL)),
    phase=st.sampled_from(Phase),
)


@given(r=requests_strategy, candidates=candidates_strategy)
def test_every_policy_chooses_a_candidate_and_shows_all_costs(
    r: RequestView, candidates: list[Candidate]
) -> None:
    addresses = [c.address for c in candidates]
    for name in POLICIES:
        verdict = decide(name, r, candidates)
        if verdict is NEED_BODY:
            assert r.phase is Phase.HEADERS, name
            continue
        assert isinstance(verdict, Decision), name
        assert verdict.target in addresses, name
        assert [cost.address for cost in verdict.costs] == addresses, name
        assert not verdict.moved_from or verdict.moved_from != verdict.target, name


@pytest.mark.parametrize("name", POLICIES)
def test_an_empty_prompt_is_routed_too(name: str) -> None:
    """`"prompt": []`: what is wrong with it is the engine's to say."""
    nodes = [candidate("a"), candidate("b")]
    assert isinstance(decide(name, request(tokens=0, of=session("")), nodes), Decision)


@given(r=requests_strategy, candidates=candidates_strategy)
def test_a_policy_is_a_function_of_its_arguments(r: RequestView, candidates: list[Candidate]) -> None:
    for name in POLICIES:
        assert decide(name, r, candidates, 7) == decide(name, r, candidates, 7), name


@pytest.mark.parametrize("path", [p for p in FILES if p.stem not in SHARED], ids=lambda path: path.stem)
def test_a_policy_fits_on_one_screen(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= SCREEN_LINES
