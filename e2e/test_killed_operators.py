"""Operators that are killed: whatever happens to a pool meanwhile, it comes to the same end.

Two pools go through the same steps at the same time, each in a namespace of its own with an operator of its
own. The operator of `calm` lives through all of them. That of `killed` is ended by kill -9 twice in each: at
a write, which a seed counts, and at a seeded moment. Its next life finds half of a plan carried out. After
every step both pools have the same objects, conditions and counts.

Before that, the chart's own operators are killed while Helm installs it.

PERILUNE_SEED tries other writes and moments; seed and kills are printed.
"""

import json
import os
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml

from testbed import envoy_gateway, perilune
from testbed.http import eventually
from testbed.operators import Fate, operators
from testbed.pool import LEAVES_SOON, LivePool

# The waits of a walk's steps end by themselves; on two busy cores all of them add up to over ten minutes.
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

SEED = int(os.environ.get("PERILUNE_SEED", "1"))
CALM, KILLED = "calm", "killed"
SECRET = re.compile(r"(-secrets-|-state-tls-)[0-9a-f]{8}")
FIRST_WRITES = 8
"""At most so many writes into a step until the first kill; an operator's first round has about fifteen."""
MODEL = {"name": "walked-30b"}
QUICK = {"sessionSeconds": 1, "drainSeconds": 0}
INSTALL_KILLS = 2
"""Of all operators at once. A kubelet waits longer before each next start: 10 s before the third."""
LONGEST_LIFE_S = 4.0
MESSY = ("uid", "resourceVersion", "creationTimestamp", "generation", "generateName")


class Walk:
    """One of the two: its pool, and another one that joins it."""

    def __init__(self, kube, edge, name):
        self.name = name
        self.pool, self.other = (LivePool(kube, edge, pool, name) for pool in (name, f"{name}-2"))
        for pool in (self.pool, self.other):
            pool.client.model = MODEL["name"]

    def state(self):
        """Of everything in its namespace, without what differs from one life, or name, to the next."""
        state = {pool.name: state_of(pool) for pool in (self.pool, self.other) if pool.exists()}
        return json.loads(json.dumps(state).replace(self.name, "NAME"))


class Trial:
    """Both walks and the cluster on which they are made; `image`: another one for engines."""

    def __init__(self, cluster, kube, walks, image):
        self.cluster, self.kube, self.walks, self.image = cluster, kube, walks, image


def state_of(pool):
    """Every object of the pool, and the pool itself."""
    own = pool.get()
    objects = {f"{o['kind']}/{o['metadata']['name']}": plain(o) for o in pool.objects() if is_ours(o)}
    assert objects
    conditions = [(c["type"], c["status"], c["reason"]) for c in own["status"]["conditions"]]
    counts = {name: own["status"].get(name) for name in ("replicas", "readyReplicas", "ready", "fabric")}
    text = json.dumps({**objects, "pods": len(pool.all_pods()), "conditions": conditions, "counts": counts})
    text = SECRET.sub(r"\1SECRET", text)  # it follows from the uid
    return json.loads(text.replace(own["metadata"]["uid"], "UID"))


def is_ours(thing):
    return any(owner["kind"] == "InferencePool" for owner in thing["metadata"].get("ownerReferences", ()))


def plain(thing):
    meta = {k: v for k, v in thing["metadata"].items() if k not in MESSY}
    notes = meta.pop("annotations", {})
    meta["annotations"] = {k: v for k, v in notes.items() if "hash" not in k and "revision" not in k}
    fields = [m for m in meta.pop("managedFields", ()) if m["manager"].startswith("perilune")]
    meta["ours"] = [(m["manager"], m["operation"], m.get("subresource", "")) for m in fields]
    spec = {k: v for k, v in thing.get("spec", {}).items() if not k.startswith("clusterIP")}
    rest = {k: v for k, v in thing.items() if k not in ("metadata", "spec", "status")}
    if "pool.yaml" in rest.get("data", {}):
        document = yaml.safe_load(rest["data"]["pool.yaml"])
        document["spec"].get("topology", {}).pop("nodes", None)  # those that its engines happen to run on
        rest["data"] = {**rest["data"], "pool.yaml": document}
    return {**rest, "metadata": meta, "spec": spec}


# The steps: what is done to the walks, and what it should come to


def each(what):
    """Return the same with every walk."""

    def done(trial):
        for walk in trial.walks:
            what(walk)

    return done


def has(engines):
    return each(lambda walk: walk.pool.settles(engines))


def patch(**spec):
    return each(lambda walk: walk.pool.patch(**spec))


def scale(engines):
    return each(lambda walk: walk.pool.scale(engines))


def start(walk):
    engine = {"kind": "simulated", "imagePullPolicy": "Never", "podTemplate": LEAVES_SOON}
    walk.pool.apply(replicas=2, model=MODEL, engine=engine, rollout=QUICK)


def is_refused(walk):
    def refused():
        assert walk.pool.conditions()["Accepted"] == ("False", "Invalid")
        said = walk.pool.get()
        assert said["status"]["observedGeneration"] == said["metadata"]["generation"]

    eventually(refused, timeout_s=60)


def another_image(trial):
    patch(engine={"image": trial.image})(trial)


LOST = "service/{0}-gateway configmap/{0}-gateway role/{0}-gateway deployment/{0}-engine"


def lose(walk):
    for thing in LOST.format(walk.name).split():
        walk.pool.kube.ctl("delete", thing, "-n", walk.name, "--wait=false")


def comes_back(walk):
    def there():
        for thing in LOST.format(walk.name).split():
            assert "deletionTimestamp" not in walk.pool.kube.get(thing, "-n", walk.name)["metadata"]

    eventually(there, timeout_s=60)
    walk.pool.settles(2)


def lose_a_node(trial):
    """Its link is down until each pool has all its engines elsewhere."""
    envoys = trial.kube.get("pod", "-n", envoy_gateway.NAMESPACE)
    kept = {"node-0", *(pod["spec"].get("nodeName") for pod in envoys)}
    of_killed = set(trial.walks[1].pool.engines().values()) - kept
    of_both = of_killed & set(trial.walks[0].pool.engines().values())
    node = min(of_both or of_killed)
    trial.cluster.set_link(node, up=False)
    try:
        each(lambda walk: eventually(lambda: assert_left(walk.pool, node), timeout_s=120))(trial)
    finally:
        trial.cluster.set_link(node, up=True)
        trial.kube.wait("condition=Ready", f"node/{node}", timeout_s=60)


def assert_left(pool, node):
    assert node not in {pod["spec"].get("nodeName") for pod in pool.pods()}
    pool.has_engines(4)


def restart_the_api_server(trial):
    """In the middle of a change."""
    patch(engine={"env": [{"name": "A", "value": "b"}]})(trial)
    trial.cluster.restart_api_server()


def join(walk):
    walk.other.apply(replicas=1, model=MODEL, rollout=QUICK)


def both_serve(walk):
    walk.other.settles(1)
    walk.pool.settles(2)
    eventually(walk.other.answers)
    eventually(walk.pool.answers)


def delete(walk):
    walk.pool.delete()
    walk.other.delete()


def nothing_is_left(walk):
    def nothing():
        left = [*walk.pool.objects(), *walk.other.objects()]
        assert [f"{o['kind']}/{o['metadata']['name']}" for o in left] == []

    eventually(nothing, timeout_s=120)


ALONE = {"managed": False}
"""Gateways share no state: the cluster has no image of Valkey."""
STEPS = (
    ("apply", 5, each(start), has(2)),
    ("scale up", 3, scale(4), has(4)),
    ("lost node", 25, lose_a_node, has(4)),
    ("scale down", 3, scale(2), has(2)),
    ("wrong", 1, patch(model={"aliases": ["same", "same"]}), each(is_refused)),
    ("right", 1, patch(model={"aliases": []}), has(2)),
    ("another image", 5, another_image, has(2)),
    ("API server restarts", 5, restart_the_api_server, has(2)),
    ("two gateways", 3, patch(gateway={"replicas": 2, "state": ALONE}), has(2)),
    ("one gateway", 3, patch(gateway={"replicas": 1}), has(2)),
    ("lost objects", 3, each(lose), each(comes_back)),
    ("two pools", 5, each(join), each(both_serve)),
    ("delete", 2, each(delete), each(nothing_is_left)),
)
"""Name, seconds in which the moment of a kill is drawn, what is done, what it should come to."""
USUAL = (
    *("apply", "scale up", "scale down", "wrong", "right", "API server restarts", "lost objects", "delete"),
)
"""Steps of a shorter walk. Engines are replaced while the API server restarts."""


class Killer:
    """Ends the victim in every step once at a write and once at a moment."""

    def __init__(self, victim, seed):
        self.kills = []
        self._victim, self._dice = victim, random.Random(seed)
        self._step, self._writes = "", 0
        self._moment = threading.Timer(0, lambda: None)
        victim.at_write = self._fate

    def begin(self, step, lasts_s):
        self._step, self._writes = step, self._dice.randint(1, FIRST_WRITES)
        after_s = self._dice.uniform(0, lasts_s)
        self._moment = threading.Timer(after_s, self._now, [after_s])
        self._moment.start()

    def end(self):
        """Of a step: not before its moment has come."""
        self._moment.join()
        self._writes = 0

    def _now(self, after_s):
        self._victim.kill()
        self._tell(f"after {after_s:.1f} s")

    def _fate(self, write):
        self._writes -= 1
        if self._writes != 0:
            return Fate.PASS
        fate = self._dice.choice((Fate.KILL_BEFORE, Fate.KILL_AFTER))
        self._tell(f"{write.split('/namespaces/')[-1]}: {fate.value}")
        return fate

    def _tell(self, words):
        self.kills.append(f"{self._step}: {words}")


@pytest.mark.long
def test_a_chart_is_installed_though_its_operators_are_killed(cluster, kube, edge, operator):
    """A pool waits for the first that acts: it is made by whoever comes after them."""
    dice = random.Random(SEED)
    lives_s = [dice.uniform(0, LONGEST_LIFE_S) for _ in range(INSTALL_KILLS)]
    print(f"PERILUNE_SEED={SEED}, lives of {', '.join(f'{life_s:.1f}' for life_s in lives_s)} s")
    kube.helm("uninstall", "perilune", "-n", perilune.NAMESPACE, "--wait")
    pool = LivePool(kube, edge, "early")
    pool.apply(replicas=1, rollout=QUICK)
    try:
        with ThreadPoolExecutor() as beside:
            killing = beside.submit(kill_all_after, lives_s, cluster)
            perilune.install(kube)
            killing.result()
        pool.settles(1)
        eventually(pool.answers)
    finally:
        pool.delete()


def kill_all_after(lives_s, cluster):
    for life_s in lives_s:
        time.sleep(life_s)  # not to synchronise: the moment is the point
        eventually(lambda: cluster.kill("perilune-operator"))


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([step for step in STEPS if step[0] in USUAL], id="usual"),
        pytest.param(STEPS, marks=pytest.mark.long, id="all"),
    ],
)
def test_an_operator_killed_at_any_write_or_moment_comes_to_the_same_end(
    cluster, kube, edge, operator, other_image, tmp_path, steps
):
    walks = [Walk(kube, edge, name) for name in (CALM, KILLED)]
    trial = Trial(cluster, kube, walks, other_image)
    with (
        operators(cluster, kube, tmp_path, CALM, KILLED, namespaces=(CALM, KILLED)) as (calm, victim),
        calm.restarted(),
        victim.restarted(),
    ):
        killer = Killer(victim, SEED)
        print(f"PERILUNE_SEED={SEED}")
        try:
            for name, lasts_s, do, comes_to in steps:
                began = time.monotonic()
                killer.begin(name, lasts_s)
                do(trial)
                killer.end()
                comes_to(trial)
                eventually(lambda: assert_same(walks), timeout_s=60)
                print(f"{time.monotonic() - began:5.1f} s  {name}")
        finally:
            killer.end()
            print(f"killed {len(killer.kills)} times:", *killer.kills, sep="\n  ")
            each(delete)(trial)
        assert calm.lives == 1
        assert victim.lives > len(steps)


def assert_same(walks):
    calm, killed = (walk.state() for walk in walks)
    assert killed == calm
