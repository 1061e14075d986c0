"""The h2 server's end of one stream: what came while tokens were awaited."""

import asyncio

import pytest

from perilune_gateway.extproc.exchange import Abort, Wait
from perilune_gateway.extproc.h2.ext_proc import ExtProc
from perilune_gateway.extproc.service import Reply


class Stream:
    """Stands in for `service.Stream`: its first message waits for tokens, which bring `then`."""

    def __init__(self, then: Reply) -> None:
        self.then = then
        self.received: list[bytes] = []
        self.ended = 0

    def receive(self, raw: bytes) -> Reply:
        self.received.append(raw)
        return Reply([], Wait(None) if len(self.received) == 1 else None)  # type: ignore[arg-type]

    async def waited(self, wait: object) -> Reply:
        return self.then

    def closed(self) -> None:
        self.ended += 1


class Link:
    """Stands in for a connection with this one stream."""

    def __init__(self, stream: Stream) -> None:
        self.finished = 0
        self.over = asyncio.Event()
        self.call = ExtProc(stream, self, 1)  # type: ignore[arg-type]

    def handled(self, number: int, size: int) -> None: ...
    def flush(self) -> None: ...

    def finish(self, number: int, *status: object) -> None:
        self.finished += 1
        self.over.set()
        self.call.closed()


@pytest.mark.parametrize(
    ("then", "received"), [(Reply([], None), [b"body", b"late"]), (Reply([], Abort("a bug")), [b"body"])]
)
async def test_what_waited_is_read_unless_the_stream_is_over(then: Reply, received: list[bytes]) -> None:
    stream = Stream(then)
    link = Link(stream)
    for message in (b"body", b"late"):
        link.call.message(message)
    link.call.ended()
    await link.over.wait()
    await asyncio.sleep(0)
    assert stream.received == received
    assert (link.finished, stream.ended) == (1, 1)
