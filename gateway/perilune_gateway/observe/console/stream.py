"""Sends the console what changes: server-sent events, one of each kind per second, to every browser.

| event | when | data |
|---|---|---|
| `hello` | once, first | pool, history, endpoints, latest decisions, waiting sessions, open hand-offs |
| `state` | every second | what changed of that, and how a point of the history would be now |
| `point` | every POINT_S seconds | the newest point of the history |

All browsers get the same bytes, so a further one costs a write. Without a browser only the history goes on,
with one look at the endpoints every POINT_S seconds. A browser that does not read is let go after QUEUED
events.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
from aiohttp import web

from perilune_gateway.observe import explain
from perilune_gateway.observe.console.rows import Point, Row, endpoint_row, new_sessions_row, point
from perilune_gateway.observe.decisions import Decisions, Totals
from perilune_gateway.observe.stats import EndpointStats
from perilune_gateway.routing.new_sessions import SessionAdmissionStats

STREAM = "/api/stream"
TICK_S = 1.0
POINT_S = 5.0
HISTORY_S = 900.0
SHOWN = 50
"""Number of decisions per second that the console gets; it learns how many there were."""
HANDOFFS = 40
"""Number of open hand-offs that the console gets."""
WATCHERS = 16
"""Number of browsers at a time."""
QUEUED = 30


class Stream:
    """The event stream of one gateway."""

    def __init__(
        self,
        endpoints: Callable[[], Sequence[EndpointStats]],
        new_sessions: Callable[[], SessionAdmissionStats],
        handoffs: Callable[[], Sequence[Row]],
        decisions: Decisions,
        about: Callable[[], Row],
        wall: Callable[[], float],
        trying: Callable[[], Row] = dict,
        *,
        tick_s: float = TICK_S,
        point_s: float = POINT_S,
    ) -> None:
        """`about`: pool, policy and version. `wall`: Unix seconds. `trying`: shadow policies and canary.
        `tick_s`, `point_s`: seconds between two
        states and between two points of the history."""
        self._tick_s, self._point_s = tick_s, point_s
        self._endpoints, self._decisions, self._about, self._wall = endpoints, decisions, about, wall
        self._new_sessions, self._handoffs, self._trying = new_sessions, handoffs, trying
        self.history: deque[Point] = deque(maxlen=int(HISTORY_S / point_s))
        self._rows: dict[str, Row] = {}
        """The rows that all watchers have."""
        self._sent = 0
        """Number of the next decision to send."""
        self._watchers: set[asyncio.Queue[bytes]] = set()

    async def run(self) -> None:
        """Send events until cancelled."""
        now = before = self._decisions.totals, self._wall()
        self.history.append(self._point(self._endpoints(), before, now))
        readings = deque([now], maxlen=round(self._point_s / self._tick_s) + 1)
        while True:
            await asyncio.sleep(self._tick_s)
            now = self._decisions.totals, self._wall()
            readings.append(now)
            due = now[1] - before[1] >= self._point_s
            if not (due or self._watchers):
                continue
            endpoints = self._endpoints()
            if self._watchers:
                self._send(await self._state(endpoints, self._point(endpoints, readings[0], now)))
            if due:
                self.history.append(self._point(endpoints, before, now))
                self._send(_event("point", self.history[-1]))
                before = now

    async def watch(self, request: web.Request) -> web.StreamResponse:
        """Answer one browser until it leaves; with 503 when too many watch."""
        if len(self._watchers) >= WATCHERS:
            raise web.HTTPServiceUnavailable(reason=f"{WATCHERS} consoles are open already: close one")
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        )
        await response.prepare(request)
        if not self._watchers:
            self._sent = self._decisions.totals.recorded
            self._rows = {row["address"]: row for row in map(endpoint_row, self._endpoints())}
        queue: asyncio.Queue[bytes] = asyncio.Queue(QUEUED)
        queue.put_nowait(self._hello())
        self._watchers.add(queue)
        try:
            with suppress(ConnectionResetError):
                while queue in self._watchers or not queue.empty():
                    await response.write(await queue.get())
        finally:
            self._watchers.discard(queue)
        return response

    def close(self) -> None:
        """End the stream of every browser, which then comes back by itself."""
        self._send(b"")
        self._watchers.clear()

    def _send(self, event: bytes) -> None:
        for queue in list(self._watchers):
            try:
                queue.put_nowait(event)
            except asyncio.QueueFull:
                self._watchers.discard(queue)

    def _hello(self) -> bytes:
        unsent = self._decisions.totals.recorded - self._sent
        latest = self._decisions.query(n=SHOWN + unsent)[unsent:]
        hello = {
            **self._about(),
            "tick_s": self._tick_s,
            "point_s": self._point_s,
            "history_s": HISTORY_S,
            "history": list(self.history),
            "endpoints": list(self._rows.values()),
            "decisions": [explain.summary(record) for record in latest],
            "new_sessions": new_sessions_row(self._new_sessions()),
            "handoffs": self._handoffs()[:HANDOFFS],
            "trying": self._trying(),
        }
        return _event("hello", hello)

    def _point(
        self, endpoints: Sequence[EndpointStats], before: tuple[Totals, float], now: tuple[Totals, float]
    ) -> Point:
        (first, began), (latest, at) = before, now
        return point(endpoints, self._new_sessions(), first, latest, at - began or self._point_s, at)

    async def _state(self, endpoints: Sequence[EndpointStats], now: Point) -> bytes:
        """`now`: the pool in the last `point_s`, from the same look at the endpoints."""
        rows: dict[str, Row] = {}
        for i, stats in enumerate(endpoints):
            rows[stats.endpoint.address] = endpoint_row(stats)
            if i % 64 == 63:
                await asyncio.sleep(0)
        changed = [row for address, row in rows.items() if self._rows.get(address) != row]
        left = [address for address in self._rows if address not in rows]
        self._rows = rows
        recorded = self._decisions.totals.recorded
        newest = self._decisions.since(self._sent, SHOWN)
        data = {
            "now": now,
            "endpoints": changed,
            "left": left,
            "decisions": [explain.summary(record) for record in newest],
            "decided": recorded - self._sent,
            "new_sessions": new_sessions_row(self._new_sessions()),
            "handoffs": self._handoffs()[:HANDOFFS],
            "trying": self._trying(),
        }
        self._sent = recorded
        return _event("state", data)


def _event(name: str, data: object) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(data))
