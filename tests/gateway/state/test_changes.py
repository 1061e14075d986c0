"""What waits to be told to the other replicas."""

from perilune_gateway.model.shared import Claimed, Ejected, Measure, Measured, Stamp, packed
from perilune_gateway.state import facts
from perilune_gateway.state.changes import MAX_CLAIMED_BLOCKS, PendingChanges, Stamps

NOW_US = 1_700_000_000_000_000


def pending() -> tuple[PendingChanges, list[str]]:
    """Also a list that gets longer with each wake."""
    woken: list[str] = []
    return PendingChanges(Stamps("b", lambda: NOW_US / 1e6), lambda: woken.append("up")), woken


def test_a_stamp_is_later_than_all_that_was_seen() -> None:
    stamps = Stamps("b", lambda: NOW_US / 1e6)
    assert stamps.next() == Stamp(NOW_US, "b")
    assert stamps.next() == Stamp(NOW_US + 1, "b")
    stamps.saw(NOW_US + 500)
    assert stamps.next() == Stamp(NOW_US + 501, "b")


def test_each_change_is_taken_once() -> None:
    changes, woken = pending()
    changes.on_claimed(facts.Claimed("a", range(MAX_CLAIMED_BLOCKS + 1), 5.0, 7))
    changes.on_measured(
        facts.Measured(Measured(of=Measure.PREFILL, endpoint="a", observed_s=2.0, predicted_s=1.0))
    )
    for here in (True, True, False):
        changes.on_load_changed(facts.LoadChanged("a", here))
    changes.on_offers_changed(facts.OffersChanged())
    assert len(woken) == 5
    assert changes.take_events() == [
        Claimed("a", packed(range(MAX_CLAIMED_BLOCKS)), 5.0, 7),
        Measured(of=Measure.PREFILL, endpoint="a", observed_s=2.0, predicted_s=1.0, at_us=NOW_US),
    ]
    assert changes.take_loaded() == {"a"}
    assert changes.take_offers_changed()
    assert (changes.take_events(), changes.take_loaded(), changes.take_offers_changed()) == ([], set(), False)


def test_own_ejections_that_stand_are_told_again_with_a_sign_of_life() -> None:
    changes, _ = pending()
    changes.on_judged(facts.Judged("a", "failures", True))
    changes.on_judged(facts.Judged("b", "late", True))
    changes.on_judged(facts.Judged("b", "", True))
    ejected = {Ejected(NOW_US, "a", "failures"), Ejected(NOW_US + 2, "b", "")}
    assert set(changes.take_judged(repeat=False)) == ejected
    assert changes.take_judged(repeat=False) == []
    assert changes.take_judged(repeat=True) == [Ejected(NOW_US, "a", "failures")]


def test_of_two_judgements_the_later_one_wins() -> None:
    changes, _ = pending()
    changes.on_judged(facts.Judged("a", "failures", True))
    assert not changes.judged_elsewhere("a", "", Stamp(NOW_US - 1, "c"))
    assert changes.judged_elsewhere("a", "", Stamp(NOW_US + 1, "c"))
    assert changes.take_judged(repeat=True) == [], "it is not true any more"


def test_what_was_found_out_of_an_endpoint_that_left_holds_for_no_other_at_its_address() -> None:
    changes, _ = pending()
    changes.on_judged(facts.Judged("a", "failures", True))
    changes.on_claimed(facts.Claimed("a", [1, 2], 5.0, 0))
    changes.on_claimed(facts.Claimed("b", [1], 5.0, 0))
    for endpoint in ("a", "c"):
        changes.on_endpoint_left(facts.EndpointLeft(endpoint))
    assert changes.take_judged(repeat=True) == []
    assert changes.take_events() == [Claimed("b", packed([1]), 5.0, 0)]
    for endpoint in ("a", "c"):
        assert not changes.judged_elsewhere(endpoint, "late", Stamp(NOW_US - 1, "r")), "of the one before"
        assert changes.judged_elsewhere(endpoint, "late", Stamp(NOW_US + 9, "r"))
