"""NetworkPolicies enforced by a real agent: kube-router's policy controller, one per node.

kube-router turns policies into iptables rules and IP sets. (kube-network-policies asks a program of its own
about each connection instead, which needs the kernel's `queue` statement of nftables, CONFIG_NFT_QUEUE; not
every kernel has it.) Routing and Services stay as they are.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from testbed import cgroups, network, programs
from testbed.cluster import Cluster
from testbed.machines import Machine
from testbed.shell import ClusterError, run, until

_PROGRAM = "kube-router"


def prepare() -> None:
    """Build the agent if it is missing: two minutes, once."""
    programs.module(*programs.KUBE_ROUTER)
    programs.ensure((_PROGRAM,))


@contextmanager
def enforced(cluster: Cluster) -> Iterator[None]:
    """While inside, each node enforces NetworkPolicies; afterwards no node has a rule of the agent's."""
    try:
        with cgroups.member(cluster.name):
            for node in cluster.nodes:
                _start(cluster, node.machine)
        for node in cluster.nodes:
            what = f"{_PROGRAM} has written its rules on {node.site.node}, see {node.machine.home}"
            until(lambda machine=node.machine: _enforces(machine), what, timeout_s=120)  # type: ignore[misc]
        yield
    finally:
        with suppress(ClusterError):  # none runs
            cluster.kill(_PROGRAM)
        for node in cluster.nodes:
            for command in (("iptables", "-F"), ("iptables", "-X"), ("ipset", "destroy")):
                run(node.machine.on_its_network(command))


def _start(cluster: Cluster, machine: Machine) -> None:
    machine.daemon(
        [
            *(programs.path(_PROGRAM), f"--kubeconfig={cluster.control.kubeconfig}"),
            *("--run-firewall=true", "--run-router=false", "--run-service-proxy=false"),
            *(f"--hostname-override={machine.name}", f"--service-cluster-ip-range={network.SERVICES}"),
            *("--health-port=0", "--metrics-port=0"),
        ]
    )


def _enforces(machine: Machine) -> bool:
    """Return whether its first round is done: the last rule of it lets pass what policies allow."""
    return "0x20000" in run(machine.on_its_network(["iptables", "-S"]))
