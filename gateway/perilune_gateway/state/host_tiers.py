"""The endpoints whose host memory other engines can read at present, as `feeds/peer_ports.py` found."""

from __future__ import annotations

from collections.abc import Callable, Set

from perilune_gateway.state.facts import EndpointLeft


class HostTiers:
    """The endpoints of a pool whose port for peers answers."""

    def __init__(self, alike: Callable[[str, str], bool] = lambda source, target: True) -> None:
        """`alike`: whether the KV of two endpoints means the same."""
        self._alike = alike
        self._answering: set[str] = set()

    def answered(self, address: str) -> None:
        """Record that an endpoint's port answers."""
        self._answering.add(address)

    def forget(self, address: str) -> None:
        """Record that the port does not answer any more."""
        self._answering.discard(address)

    def on_endpoint_left(self, fact: EndpointLeft) -> None:
        self.forget(fact.address)

    @property
    def known(self) -> Set[str]:
        """The endpoints whose port answers."""
        return self._answering

    def can(self, source: str, target: str) -> bool:
        """Return whether `target` can read the host memory of `source`. It reads into its own, so it needs
        the same tier; engines whose KV means something else refuse, which takes them long."""
        return source != target and {source, target} <= self._answering and self._alike(source, target)
