"""What each endpoint's KV connector can, as its bootstrap page said last.

A page that does not answer any more takes the ability away. An engine has another id after every start, so
nothing that was learned from an earlier process is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from perilune_gateway.model.handoff import Immovable
from perilune_gateway.state.facts import EndpointLeft


class Connector(NamedTuple):
    """The engine behind one bootstrap page."""

    engine_ids: Sequence[str]
    """One for each data-parallel rank, in order."""
    tensor_parallel: int
    """Number of workers of one rank."""


class Connectors:
    """The connectors of a pool's endpoints."""

    def __init__(self, alike: Callable[[str, str], bool] = lambda source, target: True) -> None:
        """`alike`: whether the KV of two endpoints means the same."""
        self._alike = alike
        self._known: dict[str, Connector] = {}

    def answered(self, address: str, connector: Connector) -> None:
        """Record an endpoint's page."""
        self._known[address] = connector

    def forget(self, address: str) -> None:
        """Record that the endpoint's page does not answer any more."""
        self._known.pop(address, None)

    def on_endpoint_left(self, fact: EndpointLeft) -> None:
        self.forget(fact.address)

    @property
    def known(self) -> Mapping[str, Connector]:
        """The endpoints that can hand KV over, by address."""
        return self._known

    def why_not(self, source: str) -> Immovable | None:
        """Return why the endpoint cannot give; None if it can."""
        giver = self._known.get(source)
        if giver is None:
            return Immovable.NO_GIVER
        return Immovable.RANKS if len(giver.engine_ids) > 1 else None

    def can(self, source: str, target: str) -> bool:
        """Return whether `target` can take KV from `source`. Their KV must mean the same, because nothing
        would notice if it did not, and their tensor parallel sizes must be equal, because others were not
        tried."""
        giver, taker = self._known.get(source), self._known.get(target)
        return (
            giver is not None
            and taker is not None
            and len(giver.engine_ids) == len(taker.engine_ids) == 1
            and giver.tensor_parallel == taker.tensor_parallel
            and self._alike(source, target)
        )
