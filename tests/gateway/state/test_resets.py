"""Which requests are refused because engines break off at them."""

from request_records import answered, in_flight

from perilune_gateway.state.request_facts import Broken
from perilune_gateway.state.resets import MOST, REFUSED_S, Resets, named, named_unread


def breaks(resets: Resets, name: int, at: float, times: int = 1) -> None:
    """Let a request of that name break off at so many engines."""
    resets.on_broken(Broken(in_flight(name=name), at, times))


def test_after_two_resets_a_request_is_refused_for_ten_minutes() -> None:
    resets = Resets()
    assert not resets.watching(0.0)
    breaks(resets, 1, 0.0, 1)
    assert (resets.refused_s(1, 1.0), resets.watching(1.0)) == (0.0, True)
    breaks(resets, 1, 10.0, 1)
    assert resets.refused_s(1, 10.0) == REFUSED_S
    assert resets.refused_s(1, 10.0 + REFUSED_S / 2) == REFUSED_S / 2
    assert resets.refused_s(2, 10.0) == 0.0
    assert resets.refused_s(1, 10.0 + REFUSED_S) == 0.0
    assert not resets.watching(11.0 + REFUSED_S)


def test_one_that_was_answered_is_not_to_blame() -> None:
    resets = Resets()
    breaks(resets, 1, 0.0, 1)
    resets.on_answered(answered(in_flight(name=1)))
    breaks(resets, 1, 1.0, 1)
    assert resets.refused_s(1, 1.0) == 0.0


def test_a_request_without_a_name_is_never_refused() -> None:
    resets = Resets()
    breaks(resets, 0, 0.0, 2)
    assert (resets.refused_s(0, 0.0), resets.watching(0.0)) == (0.0, False)


def test_names_are_kept_for_a_while_and_not_without_end() -> None:
    resets = Resets()
    for name in range(1, MOST + 2):
        breaks(resets, name, 0.0, 2)
    assert (resets.refused_s(1, 0.0), resets.refused_s(2, 0.0)) == (0.0, REFUSED_S)
    breaks(resets, 1, REFUSED_S + 1, 1)
    assert resets.refused_s(1, REFUSED_S + 1) == 0.0


def test_names_differ() -> None:
    unread = {named_unread(session, size) for session in ("s", "t") for size in (1, 2)}
    assert len(unread | {named(b"a"), named(b"b")}) == 6
