"""Who can hand KV over to whom, by what their bootstrap pages said."""

import pytest

from perilune_api.pool import Topology
from perilune_gateway.model import Endpoint
from perilune_gateway.model.handoff import Immovable
from perilune_gateway.state.connectors import Connector, Connectors
from perilune_gateway.state.fleet import Fleet
from perilune_gateway.state.host_tiers import HostTiers
from perilune_gateway.state.loads import Loads


@pytest.mark.parametrize(
    ("taker", "can"),
    [
        pytest.param(Connector(["b"], 1), True, id="alike"),
        pytest.param(Connector(["b"], 2), False, id="another tensor parallel size"),
        pytest.param(Connector(["b", "c"], 1), False, id="data-parallel ranks"),
        pytest.param(None, False, id="no page"),
    ],
)
def test_both_ends_must_be_able_to(taker: Connector | None, can: bool) -> None:
    connectors = Connectors()
    connectors.answered("h", Connector(["a"], 1))
    if taker:
        connectors.answered("t", taker)
    assert connectors.can("h", "t") is can
    assert connectors.can("t", "h") is can


def test_why_an_endpoint_cannot_give() -> None:
    connectors = Connectors()
    connectors.answered("h", Connector(["a"], 1))
    connectors.answered("r", Connector(["a", "b"], 1))
    assert [connectors.why_not(a) for a in "hrx"] == [None, Immovable.RANKS, Immovable.NO_GIVER]
    connectors.forget("h")
    assert connectors.why_not("h") is Immovable.NO_GIVER


def test_kv_goes_only_between_engines_for_which_it_means_the_same() -> None:
    fleet = Fleet(10_000, Loads())
    named = {"a": "v1", "b": "v1", "c": "v2", "d": ""}
    fleet.set_endpoints([Endpoint(address=a, kv_name=name) for a, name in named.items()], Topology())
    connectors, tiers = Connectors(fleet.alike), HostTiers(fleet.alike)
    for address in named:
        connectors.answered(address, Connector([address], 1))
        tiers.answered(address)
    for can in (connectors.can, tiers.can):
        assert [other for other in "bcd" if can("a", other)] == ["b", "d"]
        assert [other for other in "abc" if can("d", other)] == ["a", "b", "c"], "it may be older than names"
