"""Which sessions are bound to which host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from perilune_gateway.model import SessionKey
from perilune_gateway.state.facts import SessionsChanged, Tell
from perilune_gateway.state.session import Session


class Bindings:
    """The bound sessions of a pool. Every method costs O(1)."""

    def __init__(self, tell: Tell) -> None:
        """`tell` hears `SessionsChanged`."""
        self._tell = tell
        self.count: Counter[str] = Counter()
        """Host → number of sessions bound to it."""
        self._at: dict[str, dict[SessionKey, Session]] = {}
        """Host → the sessions bound to it, the least recently used first."""

    def at(self, host: str) -> Iterator[Session]:
        """Yield the sessions that are bound to `host`, the most recently used first."""
        return reversed(self._at.get(host, {}).values())

    def bind(self, session: Session, host: str) -> None:
        """Bind the session to `host`; empty binds it to none."""
        self.drop(session)
        session.host = host
        if host:
            self.count[host] += 1
            self._tell(SessionsChanged(host))
            self._at.setdefault(host, {})[session.key] = session

    def drop(self, session: Session) -> None:
        """Forget the session, which keeps the name of its host."""
        if host := session.host:
            self.count[host] -= 1
            self._tell(SessionsChanged(host))
            del self._at[host][session.key]
            if not self.count[host]:
                del self.count[host], self._at[host]

    def used(self, session: Session) -> None:
        """Mark the session as the most recently used one of its host."""
        if session.host:
            at = self._at[session.host]
            at[session.key] = at.pop(session.key)
