"""What it would cost to ask processes that each follow a part of a fleet's KV events. There are none.

In every decision the gateway would send each process the hashes of a prompt's blocks over a socket pair, and
get how many leading blocks each of its engines has. The processes here have nothing else to do.
"""

import asyncio
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from statistics import median

import bars
import pytest

PROCESSES, ENGINES, BLOCKS, DECISIONS = 8, 125, 2_100, 500
QUESTION, ANSWER = 8 * BLOCKS, 2 * ENGINES
PROCESS = f"""
import socket, sys
end = socket.socket(fileno=int(sys.argv[1]))
questions = end.makefile("rb")
while len(questions.read({QUESTION})) == {QUESTION}:
    end.sendall(bytes({ANSWER}))
"""


async def ask(pairs: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> None:
    for _, writer in pairs:
        writer.write(bytes(QUESTION))
    await asyncio.gather(*(reader.readexactly(ANSWER) for reader, _ in pairs))


async def measure(ours: list[socket.socket]) -> tuple[float, float]:
    """Return the milliseconds of this thread's CPU, and of latency, of one decision's questions."""
    pairs = [await asyncio.open_connection(sock=end) for end in ours]
    await ask(pairs)  # until they run
    took, cpu_s = [], time.thread_time()
    for _ in range(DECISIONS):
        began = time.perf_counter()
        await ask(pairs)
        took.append(time.perf_counter() - began)
    cpu_s = time.thread_time() - cpu_s
    for _, writer in pairs:
        writer.close()
    return cpu_s / DECISIONS * 1e3, median(took) * 1e3


@pytest.mark.bench
def test_event_processes(request: pytest.FixtureRequest) -> None:
    with ExitStack() as stack:
        pairs = [tuple(map(stack.enter_context, socket.socketpair())) for _ in range(PROCESSES)]
        for _, end in pairs:
            command = [sys.executable, "-c", PROCESS, str(end.fileno())]
            process = stack.enter_context(subprocess.Popen(command, pass_fds=[end.fileno()]))
            stack.callback(process.kill)
        cpu_ms, latency_ms = asyncio.run(measure([end for end, _ in pairs]))
    text = f"""{bars.machine()}. To ask {PROCESSES} processes for a prompt of {BLOCKS:,} blocks takes
{cpu_ms:.2f} ms of the gateway's CPU, and {latency_ms:.2f} ms until all have answered."""
    bars.publish(request, "event-processes", text)
