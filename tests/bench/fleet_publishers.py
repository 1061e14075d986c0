"""Publishers of a fleet, in one process, as engines with full caches: each stores as many blocks as it
removes.

    python fleet_publishers.py COUNT FIRST HELD BLOCKS_PER_S MESSAGES_PER_S

prints the ZMQ address of each and waits for a line. Then each stores HELD blocks, and after another line
stores and removes BLOCKS_PER_S each, in MESSAGES_PER_S messages, until the next line. At the end it prints by
how many seconds the last messages came too late, and for each publisher the number of messages that it sent.

A block is 16 tokens, of which the first two make it differ from every other; its name is a hash, as engines'
are. Prompts have 40 messages.
"""

from __future__ import annotations

import select
import struct
import sys
import time
from collections import deque

import msgspec
import xxhash
import zmq

BLOCK, PROMPT = 16, 40
CHUNK = 256
"""Blocks in each message of the beginning."""
_OTHER_TOKENS = b"".join(msgspec.msgpack.encode(100_000 + n) for n in range(2, BLOCK))
_pack = msgspec.msgpack.encode
_LOW = (1 << 28) - 1
_name, _token = struct.Struct(">BQ").pack, struct.Struct(">BI").pack


class Publisher:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], number: int) -> None:
        self._socket = context.socket(zmq.PUB)
        self._socket.set_hwm(100_000)  # vLLM's
        self.url = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._next = number << 28
        self._token = _token(0xCE, number)
        self._parent: int | None = None
        self._held: deque[int] = deque()
        self.sent = 0

    def publish(self, store: int, remove: int) -> None:
        """Publish one message."""
        numbers = range(self._next, self._next + store)
        names = [xxhash.xxh3_64_intdigest(number.to_bytes(8, "big")) for number in numbers]
        self._next += store
        parent = None if self.sent % PROMPT == 0 else self._parent
        self._parent = names[-1]
        self._held.extend(names)
        # The map is made by hand, since msgspec would take longer than the gateway takes to read it.
        event = b"".join(
            (
                b"\x87", _pack("type"), _pack("BlockStored"),
                _pack("block_hashes"), b"\xdd", len(names).to_bytes(4, "big"),
                *[_name(0xCF, name) for name in names],
                _pack("parent_block_hash"), _pack(parent),
                _pack("token_ids"), b"\xdd", (BLOCK * len(names)).to_bytes(4, "big"),
                *[_token(0xCE, number & _LOW) + self._token + _OTHER_TOKENS for number in numbers],
                _pack("block_size"), _pack(BLOCK), _pack("medium"), _pack("GPU"),
                _pack("group_idx"), _pack(0),
            )
        )  # fmt: skip
        removed = [
            b"\x84\xa4type\xacBlockRemoved\xacblock_hashes\x91%b\xa6medium\xa3GPU\xa9group_idx\x00"
            % _name(0xCF, self._held.popleft())
            for _ in range(remove)
        ]
        batch = b"".join(
            (
                b"\x93",
                _pack(time.time()),
                b"\xdc",
                (1 + len(removed)).to_bytes(2, "big"),
                event,
                *removed,
                b"\x00",
            )
        )
        self._socket.send_multipart((b"kv", self.sent.to_bytes(8, "big"), batch))
        self.sent += 1


def main(count: int, first: int, held: int, blocks_per_s: int, messages_per_s: int) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 20_000)
    publishers = [Publisher(context, first + n) for n in range(1, count + 1)]
    print(*(publisher.url for publisher in publishers), flush=True)
    sys.stdin.readline()
    for at in range(0, held, CHUNK):
        for publisher in publishers:
            publisher.publish(min(CHUNK, held - at), 0)
    print(sum(publisher.sent for publisher in publishers), flush=True)
    sys.stdin.readline()
    each = blocks_per_s // messages_per_s
    due, late_s = time.monotonic(), 0.0
    while not select.select([sys.stdin], [], [], 0)[0]:
        for publisher in publishers:
            due += 1 / (messages_per_s * count)
            if (pause := due - time.monotonic()) > 0:
                time.sleep(pause)
            if each:
                publisher.publish(each, each)
        late_s = max(0.0, time.monotonic() - due)
    print(f"{late_s:.2f}", *(publisher.sent for publisher in publishers), flush=True)
    context.destroy(linger=None)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
