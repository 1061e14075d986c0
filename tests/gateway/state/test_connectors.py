"""Who can hand KV over to whom, by what their bootstrap pages said."""

import pytest

from perilune_gateway.model.handoff import Immovable
from perilune_gateway.state.connectors import Connector, Connectors


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
