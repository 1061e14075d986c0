"""The cluster's network: bridges for racks, spines and the core, veth pairs between them, rates by `tc tbf`.

    core ── control (10.250.0.1)
     ├── spine s0 ── rack s0-r0 ── node-0 (10.250.0.10), node-1 …
     │           └── rack s0-r1 ── …
     └── spine s1 ── …

All bridges are one layer-2 network in the machine `fabric`. Rates are an H20 cluster's (400 Gbit/s RoCE
measured at 9.7 GB/s within a spine, 4.0 GB/s across) divided by 80, both ways: what takes a millisecond
there takes 80 here, and moving KV across a spine really costs more. Each node's pods have a /24 that the
others route to it; outside the cluster (`control`) Services are reached through a node.
"""

from dataclasses import dataclass

from testbed.machines import Machine
from testbed.shell import run

SCALE_DOWN = 80
SPINE_BIT_S = int(9.7e9 * 8 / SCALE_DOWN)
FABRIC_BIT_S = int(4.0e9 * 8 / SCALE_DOWN)
CONTROL = "10.250.0.1"
PODS = "10.244.0.0/16"
SERVICES = "10.96.0.0/16"
API_SERVICE = "10.96.0.1"
CONTROL_LINK = "control"


@dataclass(frozen=True, slots=True)
class Site:
    """Where a node stands."""

    index: int
    spine: str
    rack: str

    @property
    def node(self) -> str:
        return f"node-{self.index}"

    @property
    def address(self) -> str:
        return f"10.250.0.{10 + self.index}"

    @property
    def pods(self) -> str:
        return f"10.244.{self.index}.0/24"


def sites(nodes: int, spines: int = 2, racks: int = 2) -> tuple[Site, ...]:
    """`nodes` spread over spines × racks, neighbours in number being neighbours in place."""
    each = -(-nodes // (spines * racks))
    return tuple(
        Site(i, f"s{i // each // racks}", f"s{i // each // racks}-r{i // each % racks}") for i in range(nodes)
    )


def build_fabric(fabric: Machine, places: tuple[Site, ...]) -> None:
    """Build the bridges and the links between them."""
    spines = sorted({place.spine for place in places})
    racks = sorted({(place.spine, place.rack) for place in places})
    lines = []
    for bridge in ("core", *spines, *(rack for _, rack in racks)):
        lines += [f"link add {bridge} type bridge", f"link set {bridge} up"]
    links = [("core", spine, FABRIC_BIT_S) for spine in spines]
    links += [(spine, rack, SPINE_BIT_S) for spine, rack in racks]
    for upper, lower, _ in links:
        lines += [f"link add {lower}-up type veth peer name {lower}-down"]
        lines += [f"link set {lower}-up master {lower} up", f"link set {lower}-down master {upper} up"]
    fabric.configure("\n".join(lines))
    for _, lower, rate in links:
        limit(fabric, f"{lower}-up", rate)
        limit(fabric, f"{lower}-down", rate)


def attach_control(fabric: Machine, control: Machine, places: tuple[Site, ...]) -> None:
    _plug(fabric, control, CONTROL_LINK, "core", CONTROL)
    control.configure("\n".join(f"route add {place.pods} via {place.address}" for place in places))
    route_services(control, places[0])


def route_services(control: Machine, gate: Site) -> None:
    """Let everything outside reach Services through this node's kube-proxy."""
    control.configure(f"route replace {SERVICES} via {gate.address}")


def attach_node(fabric: Machine, node: Machine, place: Site, places: tuple[Site, ...]) -> None:
    _plug(fabric, node, place.node, place.rack, place.address)
    routes = [f"route add {other.pods} via {other.address}" for other in places if other != place]
    node.configure("\n".join([f"route add default via {CONTROL}", *routes]))
    run(node.on_its_network(["sysctl", "-qw", "net.ipv4.ip_forward=1"]))
    limit(fabric, place.node, SPINE_BIT_S)
    limit(node, "eth0", SPINE_BIT_S)


def _plug(fabric: Machine, machine: Machine, link: str, bridge: str, address: str) -> None:
    fabric.configure(
        f"link add {link} type veth peer name eth0 netns {machine.pid}\nlink set {link} master {bridge} up"
    )
    machine.configure(f"addr add {address}/24 dev eth0\nlink set eth0 up")


def limit(machine: Machine, device: str, bit_s: int) -> None:
    """Limit the rate at which `device` sends."""
    rate = ("rate", f"{bit_s}bit", "burst", "256kb", "latency", "50ms")
    run(machine.on_its_network(["tc", "qdisc", "replace", "dev", device, "root", "tbf", *rate]))


def set_link(fabric: Machine, node: str, up: bool) -> None:
    """Plug a node's cable in or out."""
    fabric.configure(f"link set {node} {'up' if up else 'down'}")
