"""A process that publishes and replays KV events as vLLM's publisher does, for tests of slow readers.

One thread publishes and answers requests in turn: while it answers one, nothing is published. A request is
answered with every kept message from the number it names on, then with the end. The replay socket has ZMQ's
default of 1,000 queued messages and, as every ROUTER, drops what its reader's queue has no room for.

    python replaying_engine.py KEPT BLOCKS [MESSAGES_PER_S]

has KEPT messages of BLOCKS stored blocks from the beginning, prints `EVENTS REPLAY` (addresses), publishes
further ones at that rate, and ends with its standard input, when it prints the number of messages that it put
into replies.
"""

from __future__ import annotations

import os
import random
import select
import sys
import time
from collections import deque

import msgspec
import zmq

BLOCK = 16
END = b"\xff" * 8


def message(dice: random.Random, blocks: int, parent: int | None) -> tuple[int, bytes]:
    """(name of the last block, payload) of one BlockStored."""
    names = [dice.getrandbits(63) for _ in range(blocks)]
    event = {
        "type": "BlockStored", "block_hashes": names, "parent_block_hash": parent,
        "token_ids": [100_000 + n for n in range(blocks * BLOCK)],
        "block_size": BLOCK, "medium": "GPU", "group_idx": 0,
    }  # fmt: skip
    return names[-1], msgspec.msgpack.encode([time.time(), [event], 0])


def main(kept: int, blocks: int, rate: float = 0.0) -> None:
    dice, parent, sent = random.Random(1), None, 0
    buffer: deque[tuple[bytes, bytes]] = deque(maxlen=2 * kept)
    context = zmq.Context()
    events, replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (events, replay)]
    for seq in range(kept):
        parent, payload = message(dice, blocks, parent if seq % 20 else None)
        buffer.append((seq.to_bytes(8, "big"), payload))
    print(*(f"tcp://127.0.0.1:{port}" for port in ports), flush=True)
    seq, due = kept, time.monotonic()
    while not select.select([sys.stdin], [], [], 0)[0]:
        if replay.poll(0):
            who, _, start = replay.recv_multipart()
            for number, payload in buffer:
                if number >= start:
                    sent += 1
                    replay.send_multipart([who, b"", b"kv", number, payload])
            replay.send_multipart([who, b"", b"", END, b""])
        if not rate or (pause := due - time.monotonic()) > 0:
            time.sleep(min(pause, 0.1) if rate else 0.01)
            continue
        due += 1 / rate
        parent, payload = message(dice, blocks, parent if seq % 20 else None)
        number = seq.to_bytes(8, "big")
        events.send_multipart([b"kv", number, payload])
        buffer.append((number, payload))
        seq += 1
    print(sent, flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *map(float, sys.argv[3:]))
