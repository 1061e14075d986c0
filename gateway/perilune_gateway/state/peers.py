"""Which other replicas of the gateway are alive."""

from __future__ import annotations

LEASE_S = 1.5
"""Seconds without a sign of life after which a replica counts as gone."""


class Peers:
    """The other replicas that are alive: those that were heard within the last LEASE_S seconds."""

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self._heard: dict[str, float] = {}
        """Other replica → time of its last sign of life."""

    def __len__(self) -> int:
        return len(self._heard)

    def __contains__(self, replica: str) -> bool:
        return replica in self._heard

    def hear(self, replica: str, now: float) -> None:
        """Record that the replica has given a sign of life."""
        self._heard[replica] = now

    def late(self, now: float) -> list[str]:
        """Return the replicas whose lease has ended."""
        return [replica for replica, at in self._heard.items() if now - at > LEASE_S]

    def all(self) -> list[str]:
        return list(self._heard)

    def forget(self, replica: str) -> None:
        """Record that the replica is gone. Unknown ones are ignored."""
        self._heard.pop(replica, None)

    @property
    def this_is_first(self) -> bool:
        """Whether this replica's id is less than those of all others."""
        return all(self._replica < other for other in self._heard)
