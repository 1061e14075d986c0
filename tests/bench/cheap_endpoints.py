"""N HTTP endpoints that cost little: they read a request's body and answer {}; and /metrics, as vLLM would.

python cheap_endpoints.py N     prints `endpoint ready at=IP:PORT,IP:PORT,…`
"""

import asyncio
import sys
from typing import cast

import uvloop

HOST = "127.0.0.1"
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
METRICS = b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0.1\n"
METRICS_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n" % len(METRICS)


class Endpoint(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self.head = b""
        self.left = 0

    def data_received(self, data: bytes) -> None:
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


async def endpoints(count: int) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Endpoint, HOST, 0) for _ in range(count)]
    addresses = [f"{HOST}:{server.sockets[0].getsockname()[1]}" for server in servers]
    print(f"endpoint ready at={','.join(addresses)}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(endpoints(int(sys.argv[1])))
