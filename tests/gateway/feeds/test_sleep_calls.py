"""Which engines are asked to sleep or to wake."""

import pytest

from perilune_api.pool import EndpointSpec
from perilune_gateway.feeds.sleep_calls import AGAIN_S, SLEEP, WAKE, Asked, due
from perilune_gateway.model import Endpoint, Load
from perilune_gateway.state.fleet import EndpointView

A = "10.0.0.1:8000"


def view(asleep: bool = False, in_flight: int = 0) -> dict[str, EndpointView]:
    endpoint = Endpoint(address=A, ready=not asleep)
    load = Load(in_flight=in_flight)
    return {A: EndpointView(endpoint=endpoint, load=load, seconds_since_move=0.0, links={}, asleep=asleep)}


@pytest.mark.parametrize(
    ("wanted", "views", "path"),
    [
        pytest.param(None, view(), None, id="nothing is wanted"),
        pytest.param(None, view(asleep=True), None, id="somebody else has put it to sleep"),
        pytest.param(True, view(), SLEEP, id="it is to sleep"),
        pytest.param(True, view(in_flight=1), None, id="it is to sleep, and has a request"),
        pytest.param(True, view(asleep=True), None, id="it sleeps"),
        pytest.param(False, view(asleep=True), WAKE, id="it is to wake"),
        pytest.param(False, view(), None, id="it is awake"),
        pytest.param(True, {}, None, id="it is not known yet"),
    ],
)
def test_an_engine_is_asked_for_what_it_is_not(
    wanted: bool | None, views: dict[str, EndpointView], path: str | None
) -> None:
    found = due([EndpointSpec(address=A, asleep=wanted)], views, {}, 0.0)
    assert found == ({A: path} if path else {})


def test_it_is_asked_again_after_a_while_and_at_once_for_the_other_thing() -> None:
    sleeps, wakes = EndpointSpec(address=A, asleep=True), EndpointSpec(address=A, asleep=False)
    asked = {A: Asked(SLEEP, 100.0)}
    assert due([sleeps], view(), asked, 101.0) == {}
    assert due([sleeps], view(), asked, 100.0 + AGAIN_S) == {A: SLEEP}
    assert due([wakes], view(asleep=True), asked, 101.0) == {A: WAKE}
