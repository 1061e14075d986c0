"""The ext_proc server with a scripted router, as a program: `main([transport, "goes" or "drains", port])`.

It prints its port. SIGTERM stops it; one that drains says first that it is not ready, and goes on serving
until SIGUSR1.
"""

import asyncio
import signal
from collections.abc import Sequence

import list_of_one
from envoy_doubles import ScriptedRouter

from perilune_gateway.extproc import Transport, new_server


def main(arguments: Sequence[str]) -> int:
    transport, how, port = arguments
    asyncio.run(_serve(Transport(transport), int(port), drains=how == "drains"))
    return 0


async def _serve(transport: Transport, port: int, *, drains: bool) -> None:
    loop, stop, go = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGUSR1, go.set)
    server = new_server(transport, list_of_one.service(ScriptedRouter()))
    print(await server.start(f"127.0.0.1:{port}"), flush=True)
    await server.set_ready(True)
    await stop.wait()
    if drains:
        await server.set_ready(False)
        await go.wait()
    await server.stop(10)
