"""A small HTTP client for scenarios: one request, one answer, with times; and load that counts failures."""

import http.client
import json
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from perilune_api.names import DECISION_HEADER, REFUSE_REASON_HEADER
from perilune_lab.engine.http import NAME_HEADER
from testbed.shell import ClusterError

ENGINE_TOOK_HEADER = "x-envoy-upstream-service-time"
"""How many milliseconds passed, by Envoy, from the request's last byte to the engine's first."""
HANG_S = 300.0
"""Seconds after which what a scenario waits for will never come. How soon it comes decides nothing."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes
    seconds: float

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def served(self) -> str:
        """The engine that answered, by its own word."""
        return self.headers.get(NAME_HEADER, "")

    @property
    def engine_s(self) -> float:
        """How long the engine took; NaN if Envoy does not say it."""
        return float(self.headers.get(ENGINE_TOOK_HEADER, "nan")) / 1000

    @property
    def decided(self) -> str:
        """The engine that the gateway chose; empty if it was not asked."""
        return self._decision("").split(";")[0].strip()

    @property
    def reason(self) -> str:
        return self._decision(";;").split(";")[1].strip()

    @property
    def request_id(self) -> str:
        return self._decision(";;=").split("=")[-1].strip()

    def _decision(self, default: str) -> str:
        return self.headers.get(DECISION_HEADER, default)


@dataclass(slots=True)
class Client:
    """Speaks to one address, as one host."""

    address: str
    host: str
    model: str = "sim-30b"
    trust: ssl.SSLContext | None = None
    """Checks the host's certificate; None for plain HTTP."""

    def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60,
    ) -> Answer:
        """Send one request. Raises OSError and http.client.HTTPException as they come."""
        began = time.monotonic()
        connection = http.client.HTTPConnection(self.address, timeout=timeout_s)
        if self.trust is not None:
            connection.sock = self._handshake(self.trust, timeout_s)
        try:
            connection.request(method, path, body or None, {"host": self.host, **(headers or {})})
            got = connection.getresponse()
            content = got.read()
            fields = {name.lower(): value for name, value in got.getheaders()}
            return Answer(got.status, fields, content, time.monotonic() - began)
        finally:
            connection.close()

    def _handshake(self, trust: ssl.SSLContext, timeout_s: float) -> ssl.SSLSocket:
        address, _, port = self.address.rpartition(":")
        plain = socket.create_connection((address, int(port)), timeout_s)
        return trust.wrap_socket(plain, server_hostname=self.host)

    def complete(
        self,
        prompt: str = "ba be bi",
        *,
        session: str = "",
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60,
        **fields: Any,
    ) -> Answer:
        """One completion of 4 tokens, unless `fields` say otherwise; asks for the gateway's decision."""
        document = {"model": self.model, "prompt": prompt, "max_tokens": 4, **fields}
        asked = {"content-type": "application/json", DECISION_HEADER: "1", **(headers or {})}
        if session:
            asked["x-session-id"] = session
        body = json.dumps(document).encode()
        return self.request("POST", "/v1/completions", body, asked, timeout_s)


@dataclass(frozen=True, slots=True)
class Sample:
    """One request of a load; times by time.monotonic()."""

    began: float
    ended: float
    decided: str
    served: str
    engine_s: float
    """How long the engine took; NaN if Envoy does not say it."""

    @property
    def without_engine_s(self) -> float:
        """Seconds in the client, Envoy and the gateway."""
        return self.ended - self.began - self.engine_s


@dataclass(slots=True)
class Load:
    """What became of the requests of `under_load`."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    """When each request failed by time.monotonic(), after how many seconds, and with which answer."""
    samples: list[Sample] = field(default_factory=list)
    """Of the requests that were answered."""

    @property
    def succeeded(self) -> int:
        return self.outcomes["200"]

    def goes_on(self, requests: int = 30) -> None:
        """Wait until so many more requests have succeeded."""
        wanted = self.succeeded + requests

        def enough() -> None:
            assert self.succeeded >= wanted, self.outcomes

        eventually(enough)


@contextmanager
def under_load(client: Client, sessions: int = 8, pause_s: float = 0.1, **fields: Any) -> Iterator[Load]:
    """While inside, `sessions` clients send one request after the other, sessions growing by turns.
    `pause_s`: between an answer and the next request, so that the load leaves time to what is tried."""
    load, stop, lock = Load(), threading.Event(), threading.Lock()

    def session(number: int) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            began, sample = time.monotonic(), None
            try:
                prompt = " ".join(f"w{number}x{word}" for word in range(20 * (turn % 20 + 1)))
                answer = client.complete(prompt, session=f"load-{number}-{turn // 20}", **fields)
                outcome, said = str(answer.status), answer.body[:200].decode(errors="replace")
                decided, served = answer.decided, answer.served
                sample = Sample(began, time.monotonic(), decided, served, answer.engine_s)
            except (OSError, http.client.HTTPException) as error:
                outcome, said = type(error).__name__, str(error)
            with lock:
                load.outcomes[outcome] += 1
                if outcome != "200":
                    now = time.monotonic()
                    load.failures.append(f"at {now:.1f} after {now - began:.2f} s: {outcome} {said}")
                elif sample is not None:
                    load.samples.append(sample)
            stop.wait(pause_s)

    threads = [threading.Thread(target=session, args=(number,)) for number in range(sessions)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        stop.set()
        for thread in threads:
            thread.join()


class NewPrompts:
    """Clients that send one new prompt after the other, so that engines have work that no cache saves."""

    def __init__(self, client: Client, words: int, tokens: int = 4, *, comes_back: bool = False) -> None:
        """`words`: of each prompt. `tokens`: of each answer. `comes_back`: a client that is refused because
        the first engine starts asks again after `Retry-After`; else a refusal is a failure."""
        self._client, self._words, self._tokens = client, words, tokens
        self._comes_back = comes_back
        self.ended: list[float] = []
        """When each answer came, by time.monotonic()."""
        self.failures: list[str] = []
        self.refusals = 0
        """How often a client was told to come back, and did."""

    @contextmanager
    def at_once(self, count: int) -> Iterator[None]:
        """While inside, so many clients."""
        stop = threading.Event()
        with ThreadPoolExecutor(count) as threads:
            for number in range(count):
                threads.submit(self._ask, number, stop)
            try:
                yield
            finally:
                stop.set()

    def rate(self, since: float, until: float) -> float:
        """Return the answers per second."""
        return sum(since < at <= until for at in self.ended) / (until - since)

    def go_on(self, requests: int) -> None:
        """Wait for so many more answers."""
        wanted = len(self.ended) + requests

        def enough() -> None:
            assert len(self.ended) >= wanted

        eventually(enough)

    def _ask(self, number: int, stop: threading.Event) -> None:
        prompt = ""
        while not stop.is_set():
            prompt = prompt or f"{number} {time.monotonic_ns()} " + "new " * self._words
            try:
                answer = self._client.complete(
                    prompt, timeout_s=HANG_S, max_tokens=self._tokens, ignore_eos=True
                )
            except Exception as error:  # a client that ends for any reason is one that failed
                self.failures.append(repr(error))
                prompt = ""  # an engine may have it by now
                continue
            if self._comes_back and answer.headers.get(REFUSE_REASON_HEADER) == "starting":
                self.refusals += 1
                stop.wait(float(answer.headers["retry-after"]))
                continue
            prompt = ""
            self.ended.append(time.monotonic())
            if answer.status != 200:
                self.failures.append(f"{answer.status} {answer.body[:200]!r}")


def eventually(check: Callable[[], None], timeout_s: float = HANG_S, every_s: float = 0.2) -> None:
    """Repeat `check` until it has nothing to complain of; its last complaint is raised when time is over."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return check()
        except (AssertionError, ClusterError, OSError):
            if time.monotonic() > deadline:
                raise
        time.sleep(every_s)
