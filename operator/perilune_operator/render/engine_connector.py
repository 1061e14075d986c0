"""vLLM's MooncakeConnector without five faults of vLLM 0.32; engines load it as `kv_connector_module_path`.

- One message may ask for the KV of several requests. When the engine that gives ends after some of them have
  arrived, vLLM reports all of them as failed, also those that were answered since. Its scheduler asserts that
  it knows each of them, so the engine that takes ends too, once its patience is over (the timeout of aborted
  requests and a minute). Here what has arrived counts as done with, and cannot fail any more.
- An engine that takes does not notice that the one that gives has ended, and its request waits until its
  patience is over. Here a second connection to the same port says so; a second later the prompt is computed.
- Blocks whose transfer failed are used again at once, for any request, while Mooncake may still be writing
  what has reached this node over TCP. Then KV is wrong, and so are answers. Here a failure is reported later.
- MultiConnector requires Prometheus metrics of every connector that reports how transfers went, and
  MooncakeConnector reports without having such metrics: beside a store, the first hand-off that succeeds
  would end the engine. This one does not report.
- Over TCP, Mooncake 0.3.13 refuses pieces of KV, blocks of one layer that lie side by side, while 1,024 wait
  for the engine that takes (kvcache-ai/Mooncake#4209; newer versions let 65,535 wait, #3710). vLLM sends all
  of a request at once, so long prompts may not arrive. Here they are sent in parts.

Only vLLM itself is imported, because the file is mounted into engines alone.
"""

import asyncio
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import (  # type: ignore[import-not-found]
    mooncake_connector,
)

SETTLE_S = 1.0
"""How long blocks of a failed transfer are kept. Mooncake has then written what this worker had received."""
PROTOCOL = "mooncake_protocol"
PART = 100
"""Pieces that are sent at once: vLLM's ten threads together stay below what Mooncake lets wait."""
LOOK_AGAIN_S = 0.1
"""Seconds between two connections to the giver's port."""


class MooncakeConnector(mooncake_connector.MooncakeConnector):  # type: ignore[misc]
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if hasattr(self.connector_worker, "_handle_failed_recv"):
            _be_done_with_what_arrived(self.connector_worker)
            _fail_when_the_giver_ends(self.connector_worker)
            _fail_later(self.connector_worker)
            if self._vllm_config.kv_transfer_config.kv_connector_extra_config.get(PROTOCOL) == "tcp":
                _send_in_parts(self.connector_worker)

    def get_kv_connector_stats(self) -> None:
        """Report nothing."""


def _be_done_with_what_arrived(worker: Any) -> None:
    """Have the worker mark each pull that has arrived as one whose failure was reported, since it reports
    none twice."""
    process = worker.process_pulling_result

    def processed(response: Any, pulls: Any) -> None:
        process(response, pulls)
        for request in response.ok_reqs or ():
            if pulls[request].pull_tasks_count == 0:
                pulls[request].failed = True

    worker.process_pulling_result = processed


def _fail_when_the_giver_ends(worker: Any) -> None:
    """Have the worker report pulls as failed when the process that gives has ended."""
    receive = worker.receive_kv_from_single_worker

    async def received(address: str, pulls: Any) -> None:
        receiving = asyncio.ensure_future(receive(address, pulls))
        ending = asyncio.ensure_future(_ended(address))
        await asyncio.wait((receiving, ending), return_when=asyncio.FIRST_COMPLETED)
        if not receiving.done() and not ending.exception():
            worker._handle_failed_recv(pulls, list(pulls), f"the engine at {address} has ended")  # noqa: SLF001
            await asyncio.wait((receiving,), timeout=SETTLE_S)  # its last answer may be on its way
            receiving.cancel()
        await asyncio.wait((receiving,))
        ending.cancel()
        if not receiving.cancelled():
            receiving.result()

    worker.receive_kv_from_single_worker = received


async def _ended(address: str) -> None:
    """Return when nothing listens at the address. Raises OSError if that cannot be told."""
    listener = urlsplit(address)
    while True:
        try:
            reader, writer = await asyncio.open_connection(listener.hostname, listener.port)
        except ConnectionRefusedError:
            return
        try:
            with suppress(ConnectionError):
                await reader.read()  # until ZeroMQ there misses our handshake, or the process ends
        finally:
            writer.close()
        await asyncio.sleep(LOOK_AGAIN_S)


def _fail_later(worker: Any) -> None:
    """Have the worker report failed pulls once nothing of theirs is written any more. It calls this in the
    loop that receives."""
    report = worker._handle_failed_recv  # noqa: SLF001  (all its failures pass here)

    def later(*failed: Any) -> None:
        asyncio.get_running_loop().call_later(SETTLE_S, report, *failed)

    worker._handle_failed_recv = later  # noqa: SLF001


def _send_in_parts(worker: Any) -> None:
    """Have the worker send a request's KV in parts, until one fails."""
    send = worker._send_blocks  # noqa: SLF001

    def sent(session: str, sources: list[int], targets: list[int], lengths: list[int]) -> int:
        for at in range(0, len(lengths), PART):
            part = slice(at, at + PART)
            if failure := send(session, sources[part], targets[part], lengths[part]):
                return int(failure)
        return 0

    worker._send_blocks = sent  # noqa: SLF001
