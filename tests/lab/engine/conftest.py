"""A real engine process on loopback."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.request import Request, urlopen

import pytest
from forked import Popen
from waiting import HANG


@dataclass
class Process:
    popen: Popen
    facts: dict[str, str]
    """Of the ready line: http, events, replay."""

    @property
    def url(self) -> str:
        return f"http://{self.facts['http']}"


Start = Callable[..., Process]


@contextmanager
def engines() -> Iterator[Start]:
    """Start engines with the given arguments; whatever still runs at the end is killed."""
    started: list[Popen] = []

    def begin(*arguments: str) -> Process:
        popen = Popen("perilune_lab.engine.main", arguments)
        started.append(popen)
        line = popen.stdout.readline().split()
        assert line[:2] == ["perilune-engine", "ready"], popen.communicate(timeout=HANG)
        return Process(popen, dict(fact.split("=", 1) for fact in line[2:]))

    try:
        yield begin
    finally:
        for popen in started:
            popen.kill()
            popen.communicate()


@pytest.fixture
def start() -> Iterator[Start]:
    with engines() as begin:
        yield begin


@pytest.fixture(scope="module")
def start_for_module() -> Iterator[Start]:
    with engines() as begin:
        yield begin


@pytest.fixture(scope="module")
def fast() -> Iterator[Process]:
    with engines() as begin:
        yield begin("--time-scale", "50")


@pytest.fixture
def engine(fast: Process) -> Process:
    """Return an engine with an empty cache, fifty times as fast as real; one process serves all tests of a
    file."""
    with urlopen(Request(f"{fast.url}/reset_prefix_cache", method="POST")) as answer:
        assert answer.status == 200
    return fast


@pytest.fixture(scope="module")
def shared() -> Iterator[Process]:
    """One engine for tests that leave nothing behind; requests of at most 1,000 tokens."""
    with engines() as begin:
        yield begin("--time-scale", "50", "--context-tokens", "1000")
