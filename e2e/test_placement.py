"""Engines go where the pool's placement says, and routing knows where they are, by labels of nodes."""

import time
from collections import Counter

import pytest

from testbed import network
from testbed.cluster import NODES
from testbed.http import eventually
from testbed.pool import LivePool

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

RACK, SPINE = "topology.kubernetes.io/rack", "topology.kubernetes.io/spine"
SITES = {site.node: site for site in network.sites(NODES)}
KNOWN_AFTER_S = 5.0
"""From a changed label to decisions that know it."""


def place(level, mode):
    return {"level": level, "mode": mode, "required": True}


PLACEMENTS = {
    "spread-nodes": ([place("node", "spread")], {"nodes": [1, 1, 1, 1]}),
    "spread-racks": ([place("rack", "spread")], {"racks": [1, 1, 1, 1]}),
    "spread-spines": ([place("spine", "spread")], {"spines": [2, 2]}),
    "pack-node": ([place("node", "pack")], {"nodes": [4]}),
    "pack-rack": ([place("rack", "pack")], {"racks": [4]}),
    "pack-spine": ([place("spine", "pack")], {"spines": [4]}),
    "pack-rack-spread-nodes": (
        [place("rack", "pack"), {"level": "node", "mode": "spread"}],
        {"racks": [4], "nodes": [2, 2]},
    ),
}
"""Name of the pool: its placement, and how many of its four engines share a node, rack or spine."""
USUAL = ("spread-racks", "pack-node", "pack-rack-spread-nodes")


@pytest.mark.parametrize(
    "placed",
    [
        pytest.param(USUAL, id="usual"),
        pytest.param((*PLACEMENTS,), marks=pytest.mark.long, id="all"),
    ],
)
def test_engines_go_where_the_placement_says(kube, edge, operator, placed):
    """All pools at once; without gateways, so that only engines are there to be placed."""
    pools = {name: LivePool(kube, edge, name) for name in placed}
    try:
        for name in placed:
            placement, _ = PLACEMENTS[name]
            gateway = {"replicas": 0, "mode": "none"}
            quick = {"sessionSeconds": 0, "drainSeconds": 0}
            pools[name].apply(replicas=4, topology={"placement": placement}, gateway=gateway, rollout=quick)
        for pool in pools.values():
            pool.becomes(4, timeout_s=240)
        found = {name: where_engines_are(pools[name]) for name in placed}
        for name in placed:
            _, wanted = PLACEMENTS[name]
            assert {level: found[name][level] for level in wanted} == wanted, name
    finally:
        for pool in pools.values():
            pool.delete()
    for pool in pools.values():
        eventually(lambda pool=pool: assert_gone(pool), timeout_s=120)


def where_engines_are(pool):
    sites = [SITES[node] for node in pool.engines().values()]
    by_level = {"nodes": "node", "racks": "rack", "spines": "spine"}
    return {
        name: sorted(Counter(getattr(site, level) for site in sites).values())
        for name, level in by_level.items()
    }


def assert_gone(pool):
    assert pool.all_pods() == []


@pytest.fixture
def relabel(kube):
    """Change a node's rack and spine (None removes the label); afterwards all labels are as they were."""

    def change(node, rack, spine):
        given = {RACK: rack, SPINE: spine}
        words = [f"{key}-" if value is None else f"{key}={value}" for key, value in given.items()]
        kube.ctl("label", "node", node, "--overwrite", *words)

    yield change
    for site in SITES.values():
        change(site.node, site.rack, site.spine)


def test_a_changed_label_reaches_decisions_in_seconds(pool, relabel):
    """The node of one engine moves, first next to the other engine, then to another spine. Decisions on a
    prompt whose prefix the other one holds tell the engine's place, and its distance to the prefix."""
    pool.settles(2)
    prompt = " ".join(f"shared{i}" for i in range(600))
    holder = pool.client.complete(prompt, session="first").decided
    home = SITES[pool.engines()[holder]]
    other = next(engine for engine in pool.engines() if engine != holder)
    for rack, spine, distance in ((home.rack, home.spine, "rack"), ("elsewhere", "s9", "fabric")):
        relabel(pool.engines()[other], rack, spine)
        began = time.monotonic()

        def known(rack=rack, spine=spine, distance=distance):
            candidate = decided_on(pool, prompt)[other]
            assert (candidate["place"]["rack"], candidate["place"]["spine"]) == (rack, spine)
            assert candidate["links"][holder]["distance"] == distance

        eventually(known, every_s=0.05)
        took_s = time.monotonic() - began
        print(f"decisions knew of the new place after {took_s:.2f} s")
        assert took_s < KNOWN_AFTER_S


def decided_on(pool, prompt):
    """Candidates by address of one more decision on the prompt, of a session that nobody knows."""
    answer = pool.client.complete(prompt, session=f"look-{time.monotonic()}")
    record = pool.admin(f"/api/decisions/{answer.request_id}")
    return {candidate["address"]: candidate for candidate in record["candidates"]}


def test_an_unlabelled_node_works_and_the_status_says_so(kube, edge, operator, relabel):
    node = "node-7"
    relabel(node, None, None)
    pool = LivePool(kube, edge, "lonely")
    here = {"spec": {"nodeSelector": {"kubernetes.io/hostname": node}}}
    engine = {"kind": "simulated", "imagePullPolicy": "Never", "podTemplate": here}
    pool.apply(replicas=1, engine=engine)
    try:
        pool.becomes(1)
        eventually(pool.answers)
        assert set(pool.engines().values()) == {node}

        def said(status, reason, words):
            assert pool.conditions()["TopologyResolved"] == (status, reason)
            assert words in pool.message("TopologyResolved")

        eventually(lambda: said("False", "UnlabelledNodes", f"No rack label on {node}"))
        assert pool.conditions()["Ready"] == ("True", "Serving")
        relabel(node, SITES[node].rack, SITES[node].spine)
        eventually(lambda: said("True", "Resolved", "in 4 racks under 2 spines"))
    finally:
        pool.delete()
