"""An upgrade from the last release, under load: operator, gateways and engines in every order.

The release is built from this repository's history (`testbed/releases.py`): its CRD, chart and operator run
first, with its gateways and engines. Each pool then gets the new gateway and the new engines before or after
the new operator, by `gateway.image` and `engine.image`; one pool names no images, and follows the operator.
Today's gateway cannot read the document that the operator of 0.1.0 writes: it does not start before its
operator is there, and until then the one of before serves.
"""

from contextlib import ExitStack

import pytest

from testbed import perilune, perilune_image, releases
from testbed.http import eventually, under_load
from testbed.pool import LivePool, is_ready

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not releases.is_here(releases.LAST), reason="no history: the last release is in it"),
]

ENGINES = 2
QUICK = {"sessionSeconds": 1, "drainSeconds": 5}
OLD = perilune_image.release_name(releases.LAST)
NEW = {"gateway": perilune_image.NAME, "engine": perilune_image.ENGINE_NAME}
ORDERS = {
    "follows": ([], []),
    "operator-gateway-engine": ([], ["gateway", "engine"]),
    "operator-engine-gateway": ([], ["engine", "gateway"]),
    "gateway-operator-engine": (["gateway"], ["engine"]),
    "engine-operator-gateway": (["engine"], ["gateway"]),
    "gateway-engine-operator": (["gateway", "engine"], []),
    "engine-gateway-operator": (["engine", "gateway"], []),
}
"""Pool → its parts that are upgraded before the operator, and those after it, in order."""
USUAL = ("follows", "gateway-operator-engine", "engine-operator-gateway")
"""Each part once before the operator, and once after it; `make e2e-long` takes all orders."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(USUAL, id="usual"), pytest.param((*ORDERS,), marks=pytest.mark.long, id="all")],
)
def released(request, cluster, kube, edge):
    """Run the last release instead of ours, and ours again afterwards. Yield the names of pools to make."""
    cluster.ensure(OLD, lambda: perilune_image.release_archive(releases.LAST))
    perilune.uninstall(kube)
    perilune.install_release(kube, releases.LAST)
    yield request.param
    perilune.install(kube)


@pytest.fixture(scope="module")
def pools(kube, edge, released):
    """Yield a pool for each of these orders, by name: two engines and a gateway, all of the release."""
    pools = {name: LivePool(kube, edge, name) for name in released}
    for name, pool in pools.items():
        pinned = {} if name == "follows" else {"image": OLD}
        gateway = {"parent": {"name": "edge", "namespace": "edge"}, "hostnames": [f"{name}.test"]}
        pool.apply(
            replicas=ENGINES,
            rollout=QUICK,
            routing={},  # the release has not all of today's fields
            engine={"kind": "simulated", "imagePullPolicy": "Never", **pinned},
            gateway={**gateway, "imagePullPolicy": "Never", **pinned},
        )
    try:
        for pool in pools.values():
            eventually(lambda pool=pool: all_run(pool, OLD, OLD), timeout_s=300)
        for pool in pools.values():
            eventually(pool.answers, timeout_s=60)
        yield pools
    finally:
        for pool in pools.values():
            pool.delete()


def images(pool, part):
    """Return the image of each pod of this part, leaving ones included; '' for one that is not ready."""
    return [pod["spec"]["containers"][0]["image"] if is_ready(pod) else "" for pod in pool.all_pods(part)]


def all_run(pool, gateway, engine):
    assert images(pool, "gateway") == [gateway]
    assert images(pool, "engine") == [engine] * ENGINES


def upgrade(pools, parts, begin=()):
    """Give each of these pools the new image of one of its parts, and wait until it runs; name → part.
    `begin`: parts for which it is enough that a pod begins."""
    for name, part in parts.items():
        pools[name].patch(**{part: {"image": NEW[part]}})
    for name, part in parts.items():
        if part in begin:
            eventually(lambda: assert_begins(pools[name], part), timeout_s=300)  # noqa: B023
        else:
            count = ENGINES if part == "engine" else 1
            eventually(lambda: assert_equal(images(pools[name], part), [NEW[part]] * count), timeout_s=300)  # noqa: B023


def assert_begins(pool, part):
    assert NEW[part] in [pod["spec"]["containers"][0]["image"] for pod in pool.pods(part)]


def assert_equal(found, wanted):
    assert found == wanted


def test_an_upgrade_in_any_order_fails_no_request(kube, pools):
    with ExitStack() as stack:
        loads = {
            name: stack.enter_context(under_load(pool.client, sessions=1)) for name, pool in pools.items()
        }

        def all_go_on(step):
            for load in loads.values():
                load.goes_on(10)
            print(step, {name: (load.succeeded, load.failures[:3]) for name, load in loads.items()})

        all_go_on("0.1.0")
        for turn in range(2):
            parts = {name: ORDERS[name][0][turn] for name in pools if ORDERS[name][0][turn:]}
            upgrade(pools, parts, begin=("gateway",))
            all_go_on(f"before the operator, {turn}")
        perilune.install(kube)
        all_go_on("operator")
        for turn in range(2):
            upgrade(pools, {name: ORDERS[name][1][turn] for name in pools if ORDERS[name][1][turn:]})
            all_go_on(f"after the operator, {turn}")
        for pool in pools.values():
            eventually(lambda pool=pool: all_run(pool, NEW["gateway"], NEW["engine"]), timeout_s=300)
            pool.settles(ENGINES, timeout_s=300)
        all_go_on("done")
    assert {name: load.failures for name, load in loads.items() if load.failures} == {}
    for pool in pools.values():
        pool.patch(routing={"decisionHeader": "address"})
        eventually(pool.answers, timeout_s=60)
        assert pool.conditions()["Ready"][0] == "True"
