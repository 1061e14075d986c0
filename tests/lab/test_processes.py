"""Worker processes answer every item, and end at Ctrl-C."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest
from waiting import HANG

from perilune_lab.terminal.processes import mapped

INTERRUPTED = """
import os, signal, time
from perilune_lab.terminal.processes import mapped

signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs in the background inherits none

def item(number):
    os.write(1, b"at work\\n")
    time.sleep(600)

with mapped(item, range(8), 2) as answers:
    list(answers)
"""


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("ordered", [True, False])
def test_every_item_is_answered(jobs: int, ordered: bool):
    items: Sequence[int] = range(-5, 5)
    with mapped(abs, items, jobs, ordered=ordered) as answers:
        found = list(answers)
    assert found == [abs(i) for i in items] if ordered else sorted(found) == sorted(map(abs, items))


def test_no_more_workers_than_items():
    with mapped(_pid, range(1), 100_000) as answers:
        assert list(answers) == [os.getpid()]
    with mapped(_pid, range(2), 100_000) as answers:
        assert len(set(answers) - {os.getpid()}) <= 2


def _pid(number: int) -> int:
    return os.getpid()


@pytest.mark.processes
def test_ctrl_c_ends_the_work_at_once():
    """As a terminal sends it: to the command and to its workers."""
    command = [sys.executable, "-c", INTERRUPTED]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "at work\n"
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=HANG)
    assert process.returncode == -signal.SIGINT
    assert said.rstrip().endswith("KeyboardInterrupt")
