"""Processes around the benchmark of the transports, each with a ready line:

python transport_parts.py endpoint N         N cheap HTTP endpoints: read the body, answer {}
python transport_parts.py gateway TRANSPORT  the transport with a router that decides nothing: a request with
                                             a session id on its headers, any other on its body
"""

import asyncio
import itertools
import sys

import uvloop

from perilune_api.pool import Limits
from perilune_gateway import allocator
from perilune_gateway.extproc import SERVERS, Transport
from perilune_gateway.extproc.service import Service
from perilune_gateway.model import NEED_BODY, Routed

HOST = "127.0.0.1"
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
METRICS = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.1\n"
METRICS_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n" % len(METRICS)


class Endpoint(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
        self.head = b""
        self.left = 0

    def data_received(self, data):
        if self.left:
            self.left -= len(data)
        else:
            self.head += data
            end = self.head.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self.head[:end].lower()
            if head.startswith(b"get /metrics"):
                self.head = b""
                self.transport.write(METRICS_ANSWER + METRICS)
                return
            at = head.find(b"content-length:")
            size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            self.left = size - (len(self.head) - end - 4)
            self.head = b""
        if self.left == 0:
            self.transport.write(ANSWER)


class TrivialRouter:
    """The first half of the work that every router has, none of the second."""

    def __init__(self, destination: str) -> None:
        self._destinations = (destination,)
        self._tickets = itertools.count()

    def _routed(self) -> Routed:
        return Routed(next(self._tickets), self._destinations, "")

    def on_headers(self, head):
        return self._routed() if "x-session-id" in head.headers else NEED_BODY

    def on_body(self, head, body):
        return self._routed()

    def on_response(self, ticket, status, served, streamed):
        pass

    def finished(self, ticket, outcome):
        pass

    def refused(self, head, refusal):
        pass


async def endpoints(count: int) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Endpoint, HOST, 0) for _ in range(count)]
    addresses = [f"{HOST}:{server.sockets[0].getsockname()[1]}" for server in servers]
    print(f"endpoint ready at={','.join(addresses)}", flush=True)
    await asyncio.Event().wait()


async def gateway(transport: Transport, destination: str) -> None:
    server = SERVERS[transport](Service(TrivialRouter(destination), None, limits=Limits()))
    port = await server.start(f"{HOST}:0")
    print(f"gateway ready ext_proc={HOST}:{port}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    kind, *arguments = sys.argv[1:]
    if kind == "endpoint":
        uvloop.run(endpoints(int(arguments[0])))
    else:
        allocator.tune()
        uvloop.run(gateway(Transport(arguments[0]), arguments[1]))
