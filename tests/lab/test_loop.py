"""Ctrl-C while a command's event loop starts."""

import signal
import sys
from collections.abc import Iterator
from types import FrameType

import pytest

from perilune_lab.terminal.loop import run


@pytest.fixture(autouse=True)
def _ctrl_c_is_minded() -> Iterator[None]:
    """Mind SIGINT, which a shell has its background processes ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_while_the_task_is_made_lets_nothing_begin() -> None:
    begun = []

    async def work() -> None:
        begun.append(True)

    def interrupts(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == "add" and "_weakrefset" in frame.f_code.co_filename:
            sys.setprofile(None)  # the loop's list of tasks takes in the first one
            signal.raise_signal(signal.SIGINT)

    sys.setprofile(interrupts)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(work())
    finally:
        sys.setprofile(None)
    assert begun == []


def test_work_returns_its_result_and_ctrl_c_is_minded_again() -> None:
    async def work() -> int:
        return 7

    assert run(work()) == 7
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, set())
