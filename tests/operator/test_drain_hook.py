"""What an engine's preStop hook runs, against a page of metrics that changes from one reading to the next."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from perilune_operator.render.vllm import DRAIN

BUSY = 'vllm:num_requests_running{engine="0"} 1.0\nvllm:num_requests_waiting{engine="0"} 0.0\n'
IDLE = BUSY.replace(" 1.0", " 0.0")
SILENT = ""
"""The connection is closed without an answer."""


@contextmanager
def engine(pages: list[str]) -> Iterator[str]:
    """Serves each page once, in order, and the last one for ever; its URL. `pages` keeps those not read."""

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


def drain(url: str, seconds: float = 30.0) -> None:
    """Run the hook, in an environment that names a proxy where nobody is."""
    environment = os.environ | {"http_proxy": "http://127.0.0.1:1", "no_proxy": ""}
    command = [sys.executable, "-c", DRAIN, str(seconds), "0", url]
    subprocess.run(command, env=environment, timeout=60, check=True)


@pytest.mark.parametrize(
    "pages",
    [
        pytest.param([BUSY, IDLE, IDLE, "end"], id="until nothing runs, twice"),
        pytest.param([IDLE, BUSY, IDLE, IDLE, "end"], id="once is not enough"),
        pytest.param([BUSY, SILENT, IDLE, IDLE, "end"], id="an engine too busy to answer is not gone"),
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
