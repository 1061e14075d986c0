"""What an engine's preStop hook runs, against a page of metrics that changes from one reading to the next."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from waiting import HANG

from perilune_api import names
from perilune_operator.render.drain_hook import DRAIN, command

BUSY = 'vllm:num_requests_running{engine="0"} 1.0\nvllm:num_requests_waiting{engine="0"} 0.0\n'
IDLE = BUSY.replace(" 1.0", " 0.0")
ENDED = IDLE + 'vllm:request_success_total{finished_reason="length"} %d.0\n'
SILENT = ""
"""The connection is closed without an answer."""


@contextmanager
def engine(pages: list[str]) -> Iterator[str]:
    """Serve each page once, in order, and the last one for ever; yield the URL. `pages` keeps those not
    read."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if page := pages.pop(0) if len(pages) > 1 else pages[0]:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(page.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/metrics"
        finally:
            server.shutdown()
            thread.join()


ELSEWHERE = {"http_proxy": "http://127.0.0.1:1", "no_proxy": ""}
"""A proxy where nobody is."""


def drain(url: str, seconds: float = 30.0) -> None:
    hook = [sys.executable, "-c", DRAIN, str(seconds), "0", "2", url]
    subprocess.run(hook, env=os.environ | ELSEWHERE, timeout=HANG, check=True)


def drain_worker(leader: str, seconds: float) -> None:
    """Drain a worker. `leader`: its address, where port and path would follow."""
    folder = str(Path(sys.executable).parent)
    environment = (
        os.environ | ELSEWHERE | {"LWS_LEADER_ADDRESS": leader, "PATH": f"{folder}:{os.environ['PATH']}"}
    )
    shell = [*command(1, serve=False)[:4], str(seconds), "0", "2"]
    subprocess.run(shell, env=environment, timeout=HANG, check=True)


@pytest.mark.parametrize(
    "pages",
    [
        pytest.param([BUSY, IDLE, IDLE, "end"], id="until nothing runs, twice"),
        pytest.param([IDLE, BUSY, IDLE, IDLE, "end"], id="once is not enough"),
        pytest.param([BUSY, SILENT, IDLE, IDLE, "end"], id="an engine too busy to answer is not gone"),
        pytest.param([ENDED % 1, ENDED % 2, ENDED % 2, ENDED % 2, "end"], id="one ran between two looks"),
        pytest.param(["up 1\n"] * 2 + [IDLE, IDLE, "end"], id="nor is one that does not say"),
    ],
)
def test_it_waits_for_the_requests_that_run(pages: list[str]) -> None:
    with engine(pages) as url:
        drain(url)
    assert pages == ["end"]


def test_it_waits_no_longer_than_it_may() -> None:
    with engine([BUSY]) as url:
        drain(url, 0.1)


def test_an_engine_that_has_ended_is_not_waited_for() -> None:
    """Or the test would end by its timeout."""
    with engine([IDLE]) as url:
        pass
    drain(url, 1e6)


def test_a_worker_stays_while_its_leader_has_requests() -> None:
    pages = [BUSY, IDLE, IDLE, "end"]
    with engine(pages) as url:  # what follows the address is cut off as a fragment
        drain_worker(url.removeprefix("http://") + "#", 1e6)
    assert pages == ["end"]
    assert f":{names.ENGINE_PORT}/metrics" in command(1, serve=False)[2]


@pytest.mark.parametrize("serve", [True, False])
def test_where_engines_speak_tls_it_reads_the_port_with_metrics_alone(serve: bool) -> None:
    (url,) = [word for word in command(1, serve=serve, port=names.METRICS_PORT) if "/metrics" in word]
    assert f":{names.METRICS_PORT}/metrics" in url


def test_a_leader_that_is_gone_is_not_waited_for() -> None:
    drain_worker("leader.invalid", 1e6)
