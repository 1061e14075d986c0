"""Conversations that grow as an agent's do, and the client that sends their turns over HTTP/1.1.

Each body extends the one before by an answer (with its tool call) and a tool's result. The client writes and
reads raw sockets: it costs some 50 µs a request, which nobody counts.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from urllib.parse import urlsplit

LINE_BYTES = 80
"""A line of text, as JSON writes it: with its line break, and with quotes now and then."""
HEAD = b'{"model":"m","max_tokens":64,"stream":true,"messages":['
TAIL = b"]}"
FIRST = b'{"role":"user","content":"session %b: %b"}'
"""The first message; a first turn has nothing else."""
TOOL = b'{"role":"tool","tool_call_id":"call_%d","content":"%b"}'
ANSWER = (
    b'{"role":"assistant","content":"%b","tool_calls":[{"id":"call_%d","type":"function",'
    b'"function":{"name":"read_file","arguments":"{\\"path\\": \\"src/part_%d.py\\"}"}}]}'
)


def _text(lines: int) -> bytes:
    rng = Random("text")
    words = [rng.randbytes(4).hex()[: 3 + i % 6] for i in range(2_000)]
    words += [f'"{word}"' for word in words[:200]]
    written = (json.dumps(" ".join(rng.choices(words, k=40))[:60])[1:-1] for _ in range(lines))
    return b"".join(line.ljust(LINE_BYTES - 2, " ").encode() + b"\\n" for line in written)


TEXT = _text(10_000)
"""What all messages are pieces of. A conversation's name, in its first message, tells it from all others."""


@dataclass
class Conversation:
    """One session's. `named`: its requests carry a session header. `first_bytes`: of its first turn."""

    rng: Random
    named: bool = False
    first_bytes: int = 1_000
    turns: int = 0
    session: str = field(init=False)
    _messages: bytearray = field(init=False)

    def __post_init__(self) -> None:
        self.session = self.rng.randbytes(8).hex()
        said = self._piece(self.first_bytes // LINE_BYTES - 1)
        self._messages = bytearray(FIRST % (self.session.encode(), said))

    def __len__(self) -> int:
        return len(HEAD) + len(self._messages) + len(TAIL)

    def grow_to(self, size: int) -> None:
        """Add an answer and a tool's result, up to about `size` bytes, unless it is as long already."""
        if len(self) >= size:
            return
        lines = max(2, (size - len(self)) // LINE_BYTES - 3)
        said, found = self._piece(lines // 5), self._piece(lines - lines // 5)
        number = self.turns = self.turns + 1
        answer, result = ANSWER % (said, number, number), TOOL % (number, found)
        self._messages += b",%b,%b" % (answer, result)

    def _piece(self, lines: int) -> bytes:
        at = self.rng.randrange(len(TEXT) // LINE_BYTES - lines) * LINE_BYTES
        return TEXT[at : at + lines * LINE_BYTES]

    def request(self) -> list[bytes]:
        """Head and body of the next turn, as HTTP/1.1."""
        header = f"x-session-id: {self.session}\r\n" if self.named else ""
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\nuser-agent: OpenAI/Python 1.99.9\r\n"
            f"accept: application/json\r\ncontent-type: application/json\r\n{header}"
            f"content-length: {len(self)}\r\n\r\n"
        )
        return [head.encode(), HEAD, bytes(self._messages), TAIL]


class Client:
    """Some connections to one Envoy."""

    def __init__(self, url: str, connections: int) -> None:
        address = urlsplit(url)
        self._at = (address.hostname, address.port)
        self._count = connections
        self._connections: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def __aenter__(self) -> "Client":
        self._connections = [await asyncio.open_connection(*self._at) for _ in range(self._count)]
        return self

    async def __aexit__(self, *error: object) -> None:
        for _, writer in self._connections:
            writer.close()
            await writer.wait_closed()

    async def play(self, conversations: Sequence[Conversation], size: int) -> None:
        """Grow every conversation to that size and send it. A connection has its share of them, whose turns
        it takes one after the other."""

        async def part(at: int) -> None:
            for conversation in conversations[at :: self._count]:
                conversation.grow_to(size)
                await _post(*self._connections[at], conversation.request())

        async with asyncio.TaskGroup() as tasks:
            for at in range(self._count):
                tasks.create_task(part(at))


async def _post(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: list[bytes]) -> None:
    writer.writelines(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert head.startswith(b"http/1.1 200"), head
    _, _, length = head.partition(b"content-length:")
    await reader.readexactly(int(length.split(b"\r\n", 1)[0]))
