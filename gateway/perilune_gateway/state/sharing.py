"""How one replica of the gateway shares the state of a pool: what the state and `Replicas` both have to know.

`PoolState.of` keeps it in the state. `PendingChanges` hears what happens here as facts, and sessions call
`SessionsElsewhere`; `Replicas` takes that to the others, and merges what they tell into the state.
"""

from __future__ import annotations

from collections.abc import Callable

from perilune_gateway.model.shared import Names
from perilune_gateway.state.changes import PendingChanges, Stamps
from perilune_gateway.state.peers import Peers
from perilune_gateway.state.sessions_elsewhere import SessionsElsewhere


class Sharing:
    """What one replica keeps in order to share a pool's state."""

    def __init__(
        self,
        replica: str,
        names: Names,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        wake: Callable[[], object] = lambda: None,
    ) -> None:
        """`replica`: an id that no other process has. `wake` is called when there is something to tell."""
        self.stamps = Stamps(replica, wall_clock)
        self.changes = PendingChanges(self.stamps, wake)
        self.peers = Peers(replica)
        self.sessions = SessionsElsewhere(names, self.stamps, self.peers, clock, wake)
        self.clock = clock
        self.wake = wake

    @property
    def replica(self) -> str:
        return self.stamps.replica
