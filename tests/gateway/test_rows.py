"""Candidates and costs that are made when read: the same as if they had been made at once."""

from itertools import permutations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune_api.pool import PolicyParams
from perilune_api.topology import Level, Link
from perilune_gateway.model import H20_30B, Candidate, Cost, Endpoint, Load, Overlap, RequestView, SessionView
from perilune_gateway.policy import POLICIES
from perilune_gateway.policy.cost import pending_costs
from perilune_gateway.routing.rows import Costs, Rows, addresses, find, loads, ranked, totals

LINK = Link(Level.RACK, 1e9)
SLOW = H20_30B.scaled(2.0)


def made(alike: bool = True) -> tuple[Rows, list[Candidate]]:
    """Three endpoints, and the same by hand."""
    tokens, held = 1_000, {"b": Overlap(320, 320, 640), "c": Overlap(640, 640, 640)}
    names = ["a", "b", "c"]
    views = [
        (Endpoint(a), Load(pending_prefill_tokens=n), float(n), {b: LINK for b in names if b != a})
        for n, a in enumerate(names)
    ]
    engines = [H20_30B] * 3 if alike else [H20_30B, SLOW, SLOW]
    rows = Rows(
        views,
        names,
        {name: at for at, name in enumerate(names)},
        tokens,
        held,
        Overlap(0, 0, 640),
        ["c"],
        [None] * 3,
        engines,
        alike,
        {"b": 7.0},
        [1.0] * 3,
    )
    by_hand = []
    for (endpoint, load, moved_s, _), engine in zip(views, engines, strict=True):
        overlap = held.get(endpoint.address, Overlap(0, 0, 640))
        by_hand.append(
            Candidate(
                endpoint,
                load,
                overlap,
                engine.prefill_s(tokens - overlap.device_tokens, overlap.device_tokens),
                moved_s,
                {"c": LINK} if endpoint.address != "c" else {},
                engine,
                7.0 if endpoint.address == "b" else 0.0,
                1.0,
            )
        )
    return rows, by_hand


@pytest.mark.parametrize("alike", [True, False], ids=["equally fast", "not equally fast"])
class TestRows:
    def test_all_at_once(self, alike: bool) -> None:
        rows, by_hand = made(alike)
        assert list(rows) == by_hand
        assert rows == by_hand
        assert rows[1:] == by_hand[1:]

    @pytest.mark.parametrize("order", [*permutations(range(3))])
    def test_one_by_one(self, alike: bool, order: tuple[int, ...]) -> None:
        rows, by_hand = made(alike)
        one_by_one = {at: rows[at] for at in order}
        assert [one_by_one[at] for at in range(3)] == by_hand
        assert all(row is one_by_one[at] for at, row in enumerate(rows))  # policies tell them apart by `is`

    def test_one_column(self, alike: bool) -> None:
        rows, by_hand = made(alike)
        for candidates in (rows, by_hand):
            assert list(addresses(candidates)) == ["a", "b", "c"]
            assert loads(candidates) == [c.load for c in by_hand]
            assert find(candidates, "b") == by_hand[1]
            assert find(candidates, "nobody") is None


def test_positions_as_in_a_list() -> None:
    rows, by_hand = made()
    assert (len(rows), rows[-1]) == (3, by_hand[-1])
    for beyond in (3, -4):
        with pytest.raises(IndexError):
            rows[beyond]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.integers(1, 4))
def test_ranked_is_a_stable_sort(pending: list[int], count: int) -> None:
    fleet = [Candidate(Endpoint(str(n)), Load(pending_prefill_tokens=p)) for n, p in enumerate(pending)]
    lazy = pending_costs(fleet)
    plain = tuple(lazy)
    assert isinstance(lazy, Costs)
    assert all(isinstance(cost, Cost) for cost in plain)
    expected = [cost.address for cost in sorted(plain, key=lambda cost: cost.total)][:count]
    assert ranked(lazy, count) == ranked(plain, count) == expected
    assert totals(lazy) == totals(plain) == {str(n): float(p) for n, p in enumerate(pending)}
    assert lazy == plain
    assert lazy[-1].terms["pending_prefill_tokens"] == pending[-1]


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_do_not_mind_which(policy: str) -> None:
    asked = RequestView("r", 0, 1_000, session=SessionView("s", "b", turns=3))
    rows, by_hand = made(alike=False)
    assert POLICIES[policy](asked, rows, PolicyParams(), Random(1)) == POLICIES[policy](
        asked, by_hand, PolicyParams(), Random(1)
    )
