"""Serves Envoy's method as a call of the HTTP/2 server.

A message is answered before `message` returns, unless it has to wait. Then a task waits, and
messages that arrive meanwhile are queued. The peer gets no credit for these, and other streams continue.
"""

from __future__ import annotations

import asyncio
from collections import deque

from perilune_gateway.extproc.exchange import Abort, Hold, Wait
from perilune_gateway.extproc.h2.call import Link
from perilune_gateway.extproc.h2.replies import Status
from perilune_gateway.extproc.service import Reply, Stream


class ExtProc:
    """One call of Envoy's method."""

    __slots__ = ("_closed", "_ended", "_inbox", "_link", "_number", "_stream", "_waiting")

    def __init__(self, stream: Stream, link: Link, number: int) -> None:
        self._stream = stream
        self._link = link
        self._number = number
        self._waiting: asyncio.Task[None] | None = None
        self._inbox: deque[bytes] | None = None
        """Messages that arrived during a wait."""
        self._ended = False
        self._closed = False

    def message(self, raw: bytes) -> None:
        if self._waiting is None:
            self._carry_out(self._stream.receive(raw))
            self._link.handled(self._number, len(raw))
        elif self._inbox is None:
            self._inbox = deque((raw,))
        else:
            self._inbox.append(raw)

    def ended(self) -> None:
        self._ended = True
        if self._waiting is None:
            self._link.finish(self._number)

    def closed(self) -> None:
        self._closed = True
        if self._waiting is not None:
            self._waiting.cancel()
        self._stream.closed()

    def _carry_out(self, reply: Reply) -> None:
        for message in reply.messages:
            self._link.send(self._number, message)
        match reply.then:
            case None:
                pass
            case Wait() | Hold() as wait:
                self._waiting = asyncio.get_running_loop().create_task(self._wait(wait))
            case Abort(reason):
                self._link.finish(self._number, Status.INTERNAL, reason)

    async def _wait(self, wait: Wait | Hold) -> None:
        reply = await self._stream.waited(wait)
        self._waiting = None
        self._carry_out(reply)
        while self._inbox and self._waiting is None and not self._closed:
            self.message(self._inbox.popleft())
        if self._ended and self._waiting is None and not self._closed:
            self._link.finish(self._number)
        self._link.flush()
