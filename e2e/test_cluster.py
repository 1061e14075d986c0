"""The cluster is what it says: H20 nodes in their racks, GPUs that count, links that cost, kubelets."""

import re
import subprocess
import time

import pytest

from testbed import network
from testbed.http import eventually
from testbed.perilune_image import NAME

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

RACK, SPINE = "topology.kubernetes.io/rack", "topology.kubernetes.io/spine"


def pod(name, node, **container):
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "labels": {"of": "test-cluster"}},
        "spec": {
            "nodeName": node,
            "terminationGracePeriodSeconds": 0,
            "containers": [
                {"name": "c", "image": "perilune.test/pause:1", "imagePullPolicy": "Never", **container}
            ],
        },
    }


def test_eight_nodes_in_two_spines_of_two_racks_with_eight_gpus_each(kube):
    nodes = kube.get("node")
    places = {n["metadata"]["name"]: n["metadata"]["labels"] for n in nodes}
    assert [(places[f"node-{i}"][SPINE], places[f"node-{i}"][RACK]) for i in range(8)] == [
        *2 * [("s0", "s0-r0")],
        *2 * [("s0", "s0-r1")],
        *2 * [("s1", "s1-r0")],
        *2 * [("s1", "s1-r1")],
    ]
    assert [n["status"]["allocatable"]["nvidia.com/gpu"] for n in nodes] == 8 * ["8"]
    kube.wait("condition=Ready", "node", "--all", timeout_s=5)


def test_the_scheduler_counts_gpus(kube):
    """Nine pods of eight GPUs for eight nodes: those without a free node wait."""
    users = [p for p in kube.get("pod", "-A") if "nvidia.com/gpu" in str(p["spec"])]
    fit = 8 - len({p["spec"]["nodeName"] for p in users})
    wanted = [pod(f"gpu-{i}", "", resources={"limits": {"nvidia.com/gpu": 8}}) for i in range(9)]
    kube.apply(*wanted)
    try:

        def one_waits():
            pods = kube.get("pod", "-l", "of=test-cluster", "-n", "default")
            assert sorted(p["status"]["phase"] for p in pods) == [
                *(9 - fit) * ["Pending"],
                *fit * ["Running"],
            ]
            waiting = next(p for p in pods if p["status"]["phase"] == "Pending")
            assert "Insufficient nvidia.com/gpu" in waiting["status"]["conditions"][0]["message"]

        eventually(one_waits, timeout_s=60)
    finally:
        kube.ctl("delete", "pod", "-l", "of=test-cluster", "-n", "default", "--wait")


def test_logs_exec_and_names_work(kube):
    """A kubelet runs the pod; it answers by its Service's name through kube-proxy and CoreDNS."""
    talk = "echo started; exec python3 -m http.server 8080 -d /"
    served = pod("served", "node-7", image=NAME, command=["sh", "-c", talk])
    served["metadata"]["labels"]["app"] = "served"
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "served", "namespace": "default"},
        "spec": {"selector": {"app": "served"}, "ports": [{"port": 80, "targetPort": 8080}]},
    }
    kube.apply(served, service, pod("client", "node-0", image=NAME, command=["sleep", "1000"]))
    try:
        kube.wait("condition=Ready", "pod/served", "pod/client", "-n", "default", timeout_s=60)
        assert kube.ctl("logs", "served", "-n", "default").startswith("started\n")
        fetch = (
            "python3",
            "-c",
            "import urllib.request as u; print(u.urlopen('http://served/etc/hosts').read())",
        )

        def answers():
            assert "served" in kube.ctl("exec", "client", "-n", "default", "--", *fetch)

        eventually(answers)
    finally:
        kube.ctl("delete", "pod,service", "served", "-n", "default", "--ignore-not-found")
        kube.ctl("delete", "pod", "client", "-n", "default", "--wait")


@pytest.mark.parametrize(
    ("far", "bit_s"),
    [
        pytest.param("node-1", network.SPINE_BIT_S, id="same rack"),
        pytest.param("node-2", network.SPINE_BIT_S, id="same spine"),
        pytest.param("node-4", network.FABRIC_BIT_S, id="across spines"),
    ],
)
def test_links_are_as_fast_as_their_level(cluster, far, bit_s):
    """20 MB from node-0: never faster than the level; as fast, when the machine has time for it."""

    def as_fast():
        rate = measured_bit_s(cluster.node("node-0"), cluster.node(far))
        assert rate < 1.1 * bit_s
        assert rate > 0.5 * bit_s

    eventually(as_fast)


def measured_bit_s(near, there):
    script = (
        "import socket,time\n"
        "s=socket.create_server(('0.0.0.0',7000)); print('up',flush=True); c,_=s.accept(); n=0; t=None\n"
        "while b:=c.recv(1<<20):\n"
        "  t=t or time.monotonic(); n+=len(b)\n"
        "print(8*n/(time.monotonic()-t))"
    )
    to = (there.site.address, 7000)
    receiver = subprocess.Popen(
        there.machine.inside(["python3", "-c", script]), stdout=subprocess.PIPE, text=True
    )
    try:
        assert receiver.stdout.readline() == "up\n"
        send = f"import socket as s; s.create_connection({to}).sendall(bytes(20_000_000))"
        near.machine.run(["python3", "-c", send])
        return float(receiver.stdout.readline())
    finally:
        receiver.kill()
        receiver.communicate()


def test_a_dead_link_makes_a_node_not_ready_and_back(cluster, kube):
    began = time.monotonic()
    cluster.set_link("node-7", up=False)
    try:
        kube.wait("condition=Ready=Unknown", "node/node-7", timeout_s=40)
        assert time.monotonic() - began < 30
    finally:
        cluster.set_link("node-7", up=True)
    kube.wait("condition=Ready", "node/node-7", timeout_s=40)
    gpus = kube.get("node", "node-7")["status"]["allocatable"]["nvidia.com/gpu"]
    assert gpus == "8"


def test_versions_are_those_that_were_asked_for(kube):
    version = kube.ctl("version")
    assert re.search(r"Server Version: v1\.36\.2\b", version)
