"""Whatever happens to operators, one of them acts and the end is the same.

- Killed at seeded moments between (and in) their writes, through everything that a user does to a pool:
  afterwards every object is as it is when nobody is killed.
- Of two, one acts. One that slept past its Lease and whose last write arrives late does no harm.
"""

import json
import random

import pytest

from testbed.http import eventually
from testbed.operators import Fate, holder, operators
from testbed.pool import LivePool

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

KILLS_A_STEP = 2
FIRST_KILL, NEXT_KILL = 5, 15
"""At most so many writes into a step, and then into the next operator's life: its first round, which applies
every object once, has about fifteen."""
MESSY = ("uid", "resourceVersion", "creationTimestamp", "generation", "generateName")


def is_refused(pool):
    def refused():
        assert pool.conditions()["Accepted"] == ("False", "Invalid")
        said = pool.get()
        assert said["status"]["observedGeneration"] == said["metadata"]["generation"]

    eventually(refused, timeout_s=60)


def has(engines):
    return lambda pool: pool.settles(engines)


def lose(pool, *objects):
    for thing in objects:
        pool.kube.ctl("delete", thing, "-n", pool.namespace, "--wait=false")


def comes_back(pool, *objects):
    def there():
        for thing in objects:
            assert "deletionTimestamp" not in pool.kube.get(thing, "-n", pool.namespace)["metadata"]

    eventually(there, timeout_s=60)
    pool.settles(2)


LOST = ("service/tortured-gateway", "configmap/tortured-gateway", "role/tortured-gateway")
QUICK = {"sessionSeconds": 1, "drainSeconds": 0}
WRONG, RIGHT = ["same", "same"], []

STEPS = (
    ("apply", lambda pool: pool.apply(replicas=1, rollout=QUICK), has(1)),
    ("scale up", lambda pool: pool.scale(2), has(2)),
    ("wrong", lambda pool: pool.patch(model={"aliases": WRONG}), is_refused),
    ("right", lambda pool: pool.patch(model={"aliases": RIGHT}), has(2)),
    ("change", lambda pool: pool.patch(engine={"env": [{"name": "A", "value": "b"}]}), has(2)),
    ("two gateways", lambda pool: pool.patch(gateway={"replicas": 2}), has(2)),
    ("one gateway", lambda pool: pool.patch(gateway={"replicas": 1}), has(2)),
    ("lost objects", lambda pool: lose(pool, *LOST), lambda pool: comes_back(pool, *LOST)),
    ("scale down", lambda pool: pool.scale(1), has(1)),
)
"""Name, what is done, what it should come to."""


@pytest.fixture(scope="module")
def undisturbed(cluster, kube, edge, operator, tmp_path_factory):
    """Every object after the steps, when the operator lives through all of them."""
    with operators(cluster, kube, tmp_path_factory.mktemp("undisturbed"), "only") as (only,):
        only.start()
        return walk(kube, edge)


def walk(kube, edge, before_step=lambda name: None):
    """The state after all steps; then the pool is deleted, and nothing of it is left."""
    pool = LivePool(kube, edge, "tortured")
    try:
        for name, do, comes_to in STEPS:
            before_step(name)
            do(pool)
            comes_to(pool)
        eventually(pool.answers)
        return state(pool)
    finally:
        before_step("delete")
        pool.delete()

        def nothing():
            assert [f"{o['kind']}/{o['metadata']['name']}" for o in pool.objects()] == []

        eventually(nothing, timeout_s=120)


def state(pool):
    """Every object of the pool and the pool itself, without what differs from one life to the next."""
    uid = pool.get()["metadata"]["uid"]
    dump = {f"{o['kind']}/{o['metadata']['name']}": plain(o, uid) for o in pool.objects() if is_ours(o)}
    own = pool.get()
    conditions = [(c["type"], c["status"], c["reason"]) for c in own["status"]["conditions"]]
    counts = {name: own["status"].get(name) for name in ("replicas", "readyReplicas", "ready", "fabric")}
    return {**dump, "pods": len(pool.all_pods()), "conditions": conditions, "counts": counts}


def is_ours(thing):
    return any(owner["kind"] == "InferencePool" for owner in thing["metadata"].get("ownerReferences", ()))


def plain(thing, uid):
    meta = {k: v for k, v in thing["metadata"].items() if k not in MESSY}
    notes = meta.pop("annotations", {})
    meta["annotations"] = {k: v for k, v in notes.items() if "hash" not in k and "revision" not in k}
    fields = [m for m in meta.pop("managedFields", ()) if m["manager"].startswith("perilune")]
    meta["ours"] = [(m["manager"], m["operation"], m.get("subresource", "")) for m in fields]
    spec = {k: v for k, v in thing.get("spec", {}).items() if not k.startswith("clusterIP")}
    rest = {k: v for k, v in thing.items() if k not in ("metadata", "spec", "status")}
    return json.loads(json.dumps({**rest, "metadata": meta, "spec": spec}).replace(uid, "UID"))


@pytest.mark.parametrize("seed", [1, 2])
def test_an_operator_killed_at_any_write_comes_to_the_same_end(
    cluster, kube, edge, tmp_path, undisturbed, seed
):
    """kill -9 between writes, or in one: the next life finds half of a plan carried out, and finishes it."""
    dice, kills, left = random.Random(seed), [], {"writes": 0, "kills": 0, "step": ""}

    def next_step(name):
        left.update(step=name, kills=KILLS_A_STEP, writes=dice.randint(1, FIRST_KILL))

    def fate(write):
        left["writes"] -= 1
        if left["writes"] > 0 or left["kills"] == 0:
            return Fate.PASS
        left["kills"] -= 1
        left["writes"] = dice.randint(1, NEXT_KILL)
        chosen = dice.choice((Fate.KILL_BEFORE, Fate.KILL_AFTER))
        kills.append(f"{left['step']}: {write.split('/namespaces/')[-1]}: {chosen.value}")
        return chosen

    with operators(cluster, kube, tmp_path, "victim") as (victim,), victim.restarted():
        victim.at_write = fate
        ended = walk(kube, edge, next_step)
    print(f"killed {len(kills)} times:", *kills, sep="\n  ")
    assert len(kills) >= len(STEPS)
    assert ended == undisturbed


def test_one_that_slept_past_its_lease_does_no_harm(cluster, kube, edge, operator, tmp_path):
    """It is stopped (SIGSTOP) with a write under way; another takes over and carries out a newer plan; then
    the old write arrives, and at last the sleeper wakes up."""
    pool = LivePool(kube, edge, "tortured")
    deployment = ("deployment/tortured-engine", "-n", "default")
    with operators(cluster, kube, tmp_path, "sleeper", "other") as (sleeper, other):
        try:
            sleeper.start()
            pool.apply(replicas=1, rollout=QUICK)
            pool.settles(1)
            other.start()
            assert holder(kube) == "sleeper"
            assert other.writes == []

            sleeper.at_write = hold_deployment
            pool.scale(3)
            sleeper.wait_for_held()
            sleeper.pause()
            eventually(lambda: is_held_by(kube, "other"), timeout_s=60)
            pool.scale(2)
            pool.settles(2)
            slept = len(sleeper.writes)
            version = kube.get(*deployment)["metadata"]["resourceVersion"]
            acted = len(other.writes)

            sleeper.release()
            eventually(lambda: is_mended(kube, deployment, version, other, acted), timeout_s=60)
            pool.settles(2)

            sleeper.at_write = lambda write: Fate.PASS
            sleeper.resume()
            pool.scale(1)
            pool.settles(1)
            assert sleeper.writes[slept:] == []
            assert holder(kube) == "other"

            other.kill()
            pool.scale(2)
            eventually(lambda: is_held_by(kube, "sleeper"), timeout_s=60)
            pool.settles(2)
        finally:
            pool.delete()


def hold_deployment(write):
    return Fate.HOLD if "/deployments/" in write else Fate.PASS


def is_held_by(kube, identity):
    assert holder(kube) == identity


def is_mended(kube, deployment, version, other, acted):
    """The late write arrived (the version moved), and the acting operator has written its own plan again."""
    found = kube.get(*deployment)
    assert found["metadata"]["resourceVersion"] != version
    assert any("/deployments/tortured-engine" in write for write in other.writes[acted:])
    assert found["spec"]["replicas"] == 2
