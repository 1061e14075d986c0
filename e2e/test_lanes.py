"""Lanes tell in one session what their own pytests found, and leave nothing when they are interrupted."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.http import HANG_S
from testbed.lanes import IN_A_LANE
from testbed.shell import until

pytestmark = pytest.mark.e2e

HERE = Path(__file__).parent
CONFTEST = """
import os, pathlib, pytest
from testbed.lanes import IN_A_LANE, Lane, SideBySide

def pytest_collection_finish(session):
    if IN_A_LANE not in os.environ:
        lanes = {i.nodeid: Lane(i.name[5:6]) for i in session.items if i.name != "test_here"}
        session.config.pluginmanager.register(SideBySide(lanes))

@pytest.fixture(scope="session")
def thing():
    up = pathlib.Path("up-" + os.environ[IN_A_LANE])
    up.touch()
    yield
    up.unlink()
"""
SCENARIOS = """
import os, time

def test_here(): assert os.environ.get("PERILUNE_E2E_LANE") is None
def test_a1(thing): assert os.environ["PERILUNE_E2E_LANE"] == "a"
def test_a2(thing): print("said before"); assert 1 == 2, "wrong"
def test_b1(thing): assert os.environ["PERILUNE_E2E_LANE"] == "b"
def test_b2(): ENDS
def test_b3(): pass
"""


PYTEST = """
import signal, sys, pytest

signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs in the background inherits none
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.fixture
def project(tmp_path):
    def made(ends):
        (tmp_path / "conftest.py").write_text(CONFTEST)
        (tmp_path / "test_them.py").write_text(SCENARIOS.replace("ENDS", ends))
        env = {**os.environ, "PYTHONPATH": str(HERE)}
        env.pop(IN_A_LANE, None)
        command = [sys.executable, "-c", PYTEST, "-p", "no:cacheprovider", "-rA", tmp_path]
        return subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)

    return made


def test_a_failure_in_a_lane_fails_the_session_and_is_shown(project):
    session = project("pass")
    said, _ = session.communicate(timeout=HANG_S)
    assert session.returncode == 1
    assert "1 failed, 5 passed" in said.splitlines()[-1]
    assert "AssertionError: wrong" in said
    assert "said before" in said


def test_a_lane_that_dies_fails_what_it_did_not_tell(project):
    session = project("print('last words', flush=True); os._exit(7)")
    said, _ = session.communicate(timeout=HANG_S)
    assert session.returncode == 1
    assert "1 failed, 3 passed, 2 errors" in said.splitlines()[-1]
    assert "lane 'b' ended with status 7 before this was told" in said


def test_an_interrupted_session_lets_its_lanes_clean_up(project, tmp_path):
    session = project("time.sleep(30)")
    until((tmp_path / "up-b").exists, "the fixture is up", timeout_s=HANG_S)
    session.send_signal(signal.SIGINT)
    said, _ = session.communicate(timeout=HANG_S)
    assert session.returncode == 2
    assert "KeyboardInterrupt" in said
    assert list(tmp_path.glob("up-*")) == []
