"""Blocks in the shared store are forgotten with the segment of the engine that put them there."""

import pytest

from perilune_gateway.state.store_claims import StoreClaims

A, B = "10.0.0.1:8000", "10.0.0.2:8000"
SEGMENTS = {"10.0.0.1:12001": 5000, "10.0.0.2:12002": 8000}


@pytest.fixture
def claims():
    made = StoreClaims(lambda block: block % 2 == 0, max_blocks=100)
    made.seen(SEGMENTS)
    made.stored(A, [1, 2, 3])
    made.stored(B, [3, 4])
    return made


@pytest.mark.parametrize(
    ("now", "lost"),
    [
        (SEGMENTS, set()),
        ({"10.0.0.2:12002": 8000}, {1, 2}),  # 3 lies in the other's segment too
        ({"10.0.0.1:12003": 0, "10.0.0.2:12002": 8000}, {1, 2}),  # restarted
        (SEGMENTS | {"10.0.0.3:12004": 0}, set()),
        ({}, {1, 2, 3, 4}),  # another master
        (SEGMENTS | {"10.0.0.1:12001": 300}, {1, 2}),  # lost and back
        (SEGMENTS | {"10.0.0.1:12001": 4750}, set()),  # the master evicted some
    ],
    ids=["as before", "one gone", "one anew", "one more", "all gone", "one back", "eviction"],
)
def test_blocks_are_lost_with_their_segment(claims, now, lost):
    assert claims.seen(now) == lost
    assert claims.seen(now) == set()


def test_an_engine_that_came_back_stores_anew(claims):
    claims.seen({})
    claims.seen(SEGMENTS)
    claims.stored(A, [7])
    assert claims.seen({}) == {7}


def test_of_too_many_blocks_those_stay_that_matter(claims):
    claims.stored(A, range(200))
    assert claims.seen({}) == set(range(0, 200, 2))


def test_addresses_are_those_of_ipv6_too():
    claims = StoreClaims(bool, 10)
    claims.seen({"[fd00::1]:12001": 0})
    claims.stored("[fd00::1]:8000", [1])
    assert claims.seen({}) == {1}
