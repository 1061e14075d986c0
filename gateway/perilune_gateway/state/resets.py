"""Requests that break engines: they ended connections of engines before these had answered.

A prompt, or what it asks for, may end an engine's process by a bug of the engine. Envoy sends a request whose
connection breaks to one other engine, which may be the next to end. So a request is named by its body (or,
where that is not read, by its session and its length), and

    broke off ─▶ counted ─▶ RESETS times, and never answered in between ─▶ refused for REFUSED_S

One that was answered is not to blame: engines also end for other reasons, with many requests at once. Each
gateway counts for itself. Costs a hash of the body; names are kept only of what broke off.
"""

from __future__ import annotations

from collections.abc import Hashable

from xxhash import xxh3_64_intdigest

from perilune_gateway.state.request_facts import Answered, Broken

RESETS = 2
REFUSED_S = 600.0
FAILED = 500
"""Least status of an answer that is a failure."""
MOST = 10_000
"""Number of names that are kept."""


def named(body: bytes) -> int:
    """Return the name of a request whose body was read."""
    return xxh3_64_intdigest(body) or 1


def named_unread(session: Hashable, body_bytes: int) -> int:
    """Return the name of a request whose body was not read."""
    return hash((session, body_bytes)) or 1


class Resets:
    """What broke off lately; a name of 0 stands for no request."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, float]] = {}
        """Name → (times, when last), by time."""
        self._last_at = 0.0

    def on_broken(self, fact: Broken) -> None:
        name, now = fact.request.name, fact.now
        if not name:
            return
        before, _ = self._seen.pop(name, (0, now))
        self._seen[name] = before + fact.times, now
        self._last_at = now
        while len(self._seen) > MOST or now - next(iter(self._seen.values()))[1] > REFUSED_S:
            del self._seen[next(iter(self._seen))]

    def on_answered(self, fact: Answered) -> None:
        if fact.request.status < FAILED:
            self._seen.pop(fact.request.name, None)

    def refused_s(self, name: int, now: float) -> float:
        """Return for how many more seconds the request is refused; 0 if it is not."""
        times, at = self._seen.get(name, (0, now))
        return max(0.0, at + REFUSED_S - now) if times >= RESETS else 0.0

    def watching(self, now: float) -> bool:
        """Return whether bodies have to be read, because something broke off lately."""
        return bool(self._seen) and now - self._last_at <= REFUSED_S
