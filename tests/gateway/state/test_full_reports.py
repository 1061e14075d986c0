"""Which endpoints are asked to announce their cached blocks again."""

from perilune_gateway.state.facts import EndpointLeft
from perilune_gateway.state.full_reports import MAX_ASKING, FullReports


def ask(reports: FullReports, endpoint: str) -> int:
    """So many requests ask until no more may."""
    asked = 0
    while reports.wanted(endpoint):
        reports.asked(endpoint)
        asked += 1
    return asked


def test_an_endpoint_that_is_learnt_is_asked_within_a_budget_until_it_has_told_all() -> None:
    reports = FullReports()
    assert not reports.wanted("a")
    reports.learning("a", True)
    assert not reports.wanted("b")
    assert ask(reports, "a") == MAX_ASKING
    reports.learning("a", True)
    assert not reports.wanted("a")
    reports.learning("a", False)
    reports.learning("a", True)
    assert ask(reports, "a") == MAX_ASKING


def test_another_endpoint_of_the_same_address_begins_with_a_full_budget() -> None:
    reports = FullReports()
    reports.learning("a", True)
    ask(reports, "a")
    reports.on_endpoint_left(EndpointLeft("a"))
    reports.learning("a", True)
    assert reports.wanted("a")
