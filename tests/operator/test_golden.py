"""Whole plans as files: golden/NAME.in.yaml (the pool, nodes, pods, other pools, which optional APIs there
are) next to golden/NAME.out.yaml (objects and status).

`GOLDEN=write make test ARGS=tests/operator/test_golden.py` writes them again; read the diff. To keep them
short, what every object of a pool shares (labels, owner, namespace) is checked once and left out, and so are
the ConfigMap that repeats the pod templates (test_revision.py) and the preStop hook's program
(test_drain_hook.py).
"""

import os
from pathlib import Path
from typing import Any

import fast_yaml
import pytest
import yaml

from perilune_api.inference_pool.checks import convert
from perilune_api.kube import APPLY, Client
from perilune_api.pool import SpecError
from perilune_operator.kinds import EVERYWHERE, path
from perilune_operator.observe import facts, readers
from perilune_operator.observe.facts import Observed
from perilune_operator.plan import Plan, plan
from perilune_operator.render import drain_hook
from perilune_operator.render.objects import Defaults

Object = dict[str, Any]
FOLDER = Path(__file__).parent / "golden"
CASES = sorted(file.name.removesuffix(".in.yaml") for file in FOLDER.glob("*.in.yaml"))
NOW = 1_760_000_000.0
DEFAULTS = Defaults(
    image="perilune:test",
    engine_image="vllm:test",
    master_image="mooncake:test",
    simulated_image="simulated:test",
    gateways=1,  # so that each file is about its own subject; several gateways are in managed-state
)


class Dumper(yaml.SafeDumper):
    """No anchors; long lines stay whole."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def load(name: str) -> tuple[Object, Observed]:
    given = fast_yaml.load((FOLDER / f"{name}.in.yaml").read_text())
    body = given["pool"]
    nodes = tuple(readers.node(_named(n)) for n in given.get("nodes") or ())
    pods = tuple(readers.pod(_named(p)) for p in given.get("pods") or ())
    children = {facts.key(o): o for o in given.get("children") or ()}
    kinds = frozenset(given.get("kinds") or ())
    others = {o["metadata"]["name"]: readers.other_pool(o) for o in given.get("others") or ()}
    observed = Observed(
        uid="uid-1",
        generation=1,
        status=body.get("status", {}),
        nodes=nodes,
        pods=pods,
        children=children,
        kinds=kinds,
        others=others,
    )
    return body, observed


def _named(obj: Object) -> Object:
    ready = [{"type": "Ready", "status": "True"}]
    status = {"conditions": ready, **obj.get("status", {})}
    return {**obj, "metadata": {"name": obj["name"], **obj.get("metadata", {})}, "status": status}


def made(name: str) -> Plan:
    body, observed = load(name)
    try:
        spec: Any = convert(body["spec"])
    except SpecError as error:
        spec = error
    return plan(body["metadata"]["name"], "ns", spec, observed, NOW, DEFAULTS)


def short(obj: Object) -> Object:
    """Without what all have in common, which is asserted instead."""
    meta = dict(obj["metadata"])
    assert meta.pop("namespace") == "ns"
    owners = meta.pop("ownerReferences")
    assert [o["uid"] for o in owners] == ["uid-1"]
    labels = meta.pop("labels")
    assert labels["app.kubernetes.io/managed-by"] == "perilune-operator"
    data = {k: "Python" if k.endswith(".py") else fast_yaml.load(v) for k, v in obj.get("data", {}).items()}
    rest = {k: v for k, v in obj.items() if k not in ("metadata", "data")}
    return {**rest, "metadata": meta, **({"data": data} if data else {})}


def shown(plan: Plan, only: list[str]) -> str:
    objects = [short(obj) for obj in plan.objects or ()]
    kept = [obj for obj in objects if not only or f"{obj['kind']}/{obj['metadata']['name']}" in only]
    kept = [obj for obj in kept if not obj["metadata"]["name"].endswith("-rendered")]
    names = [f"{obj['kind']}/{obj['metadata']['name']}" for obj in objects]
    conditions = [f"{c.type}={c.status} {c.reason}: {c.message}" for c in plan.status.conditions]
    text = {"objects": names, "ready": plan.status.ready, "conditions": conditions, "shown": kept}
    if plan.marks:
        text["marks"] = [{mark.pod: {**mark.annotations, **mark.labels}} for mark in plan.marks]
    return yaml.dump(text, Dumper=Dumper, sort_keys=False, width=4000)


def _represent(dumper: Dumper, text: str) -> yaml.Node:
    return dumper.represent_str("DRAIN" if text == drain_hook.DRAIN else text)


Dumper.add_representer(str, _represent)


@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_what_it_was(name: str) -> None:
    only = fast_yaml.load((FOLDER / f"{name}.in.yaml").read_text()).get("show") or []
    text, file = shown(made(name), only), FOLDER / f"{name}.out.yaml"
    if os.environ.get("GOLDEN") == "write":
        file.write_text(text)
    assert text == file.read_text()


@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_the_same_each_time(name: str) -> None:
    assert made(name) == made(name)


def test_there_are_cases() -> None:
    assert len(CASES) >= 8


@pytest.mark.parametrize("name", CASES)
async def test_a_real_api_server_takes_every_object(client: Client, namespace: str, name: str) -> None:
    """Kinds that every cluster has, strictly: an unknown or wrong field is an error."""
    for obj in made(name).objects or ():
        if obj["kind"] in EVERYWHERE:
            here = {**obj, "metadata": {**obj["metadata"], "namespace": namespace}}
            params = {"fieldManager": "test", "dryRun": "All", "fieldValidation": "Strict"}
            await client.request("PATCH", path(here), here, params=params, content_type=APPLY)
