"""Whatever happens to `up`, `down` leaves nothing: no process, namespace, mount, cgroup or file."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from testbed.cluster import Cluster
from testbed.shell import until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.one_of_its_own,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("archives"),
]

NAME = "lifecycle"
COMMAND = [sys.executable, str(Path(__file__).with_name("cluster.py")), "--name", NAME]


def left_over():
    return Cluster(NAME).remains()


def machines(cluster):
    return [
        m for m in (cluster.fabric, cluster.control.machine, *(n.machine for n in cluster.nodes)) if m.running
    ]


@pytest.fixture(autouse=True)
def _nothing_before_and_after(archives):
    subprocess.run([*COMMAND, "down"], check=True)
    assert left_over() == []
    yield
    subprocess.run([*COMMAND, "down"], check=True)


def test_down_leaves_nothing():
    """Before, a cluster that is up is left alone, and a kubelet that ends is started again: or one that does
    so at its start, as when containerd is slow, leaves its node unready for ever."""
    subprocess.run([*COMMAND, "up", "--nodes", "2"], check=True)
    cluster = Cluster(NAME)
    assert len(machines(cluster)) == 4
    assert cluster.is_up
    namespaces = {os.readlink(f"/proc/{m.pid}/ns/net") for m in machines(cluster)}
    assert len(namespaces) == 4

    before = [m.pid for m in machines(cluster)]
    again = subprocess.run([*COMMAND, "up"], check=True, capture_output=True, text=True)
    assert "is up already" in again.stdout
    assert [m.pid for m in machines(Cluster(NAME))] == before

    cluster.kill("kubelet")
    until(lambda: "kubelet" in cluster.resident_bytes(), "a kubelet runs again", timeout_s=30)

    subprocess.run([*COMMAND, "down"], check=True)
    assert left_over() == []
    alive = {os.readlink(p) for p in Path("/proc").glob("[0-9]*/ns/net") if p.exists()}
    assert not namespaces & alive


@pytest.mark.parametrize(
    "after_s", [7, *(pytest.param(each, marks=pytest.mark.long) for each in (0.3, 1.5, 4))]
)
def test_what_a_killed_up_left_is_cleaned_by_down(after_s):
    killed_after(after_s)
    subprocess.run([*COMMAND, "down"], check=True)
    assert left_over() == []


def test_what_a_killed_up_left_is_cleaned_by_the_next_up():
    killed_after(4)
    subprocess.run([*COMMAND, "up", "--nodes", "1"], check=True)
    assert Cluster(NAME).is_up


def killed_after(life_s):
    """Kill an `up` in the middle."""
    up = subprocess.Popen([*COMMAND, "up", "--nodes", "2"])
    time.sleep(life_s)  # a moment of its life, not a wait for anything
    up.send_signal(signal.SIGKILL)
    up.wait()
