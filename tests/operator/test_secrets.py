"""The secrets that a pool's pods share: random, made once, and changed without a refused request."""

import json
import re
from typing import Any

import pytest
from plans import NOW

from perilune_api.inference_pool.checks import convert
from perilune_operator.observe.facts import Key, Observed, key
from perilune_operator.plan import Plan, plan
from perilune_operator.render.objects import Defaults

Object = dict[str, Any]
SPEC: Object = {"model": {"name": "m"}, "gateway": {"replicas": 2}}
SECRET, PREVIOUS, PASSWORD = (
    "PERILUNE_ENGINE_SECRET",
    "PERILUNE_ENGINE_SECRET_PREVIOUS",
    "PERILUNE_STATE_PASSWORD",
)
LITERAL = "0123456789abcdef" * 4
"""A secret of an earlier version, which pods carry as it is."""
PRESENT, NEWER = Defaults(), Defaults(version="9.9.9")


def with_literals(value: Any) -> Any:
    """Return the same value with LITERAL for each reference to a Secret, also in texts that are JSON."""
    if isinstance(value, str) and value.startswith("{"):
        return json.dumps(with_literals(json.loads(value)))
    if isinstance(value, list):
        return [with_literals(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "secretKeyRef" in value.get("valueFrom", ()):
        return {"name": value["name"], "value": LITERAL}
    return {name: with_literals(each) for name, each in value.items()}


class Pool:
    """A pool, planned again and again; what is planned is there, and rolled out when told."""

    def __init__(self) -> None:
        self.children: dict[Key, Object] = {}
        self.made: Plan | None = None

    def plan(self, *, rolled: bool = True, defaults: Defaults = PRESENT, **change: Any) -> "Pool":
        """Plan the pool once more. `rolled`: whether the pods of the plan before are there."""
        for child in self.children.values():
            if child["kind"] == "Deployment":
                replicas = child["spec"].get("replicas", 1)
                new = replicas if rolled else 0
                child["status"] = {"observedGeneration": 1, "replicas": replicas, "updatedReplicas": new}
        observed = Observed(uid="uid", generation=1, children=self.children)
        self.made = plan("p", "ns", convert({**SPEC, **change}), observed, NOW, defaults)
        self.children = {key(obj): obj for obj in json.loads(json.dumps(self.made.objects))}
        for child in self.children.values():
            child["metadata"]["generation"] = 1
        return self

    def earlier(self) -> "Pool":
        """Give all pods literal secrets, as an earlier version did."""
        self.children = {k: with_literals(child) for k, child in self.children.items()}
        return self

    def sees(self, name: str) -> tuple[str, str]:
        """Return the secret, and the one before, that the pods of a Deployment see: by their Secret, or as
        they are."""
        return self._source(name, SECRET), self._source(name, PREVIOUS)

    def password(self, name: str) -> str:
        """Return the password of the server of shared state that the pods of a Deployment have."""
        return self._source(name, PASSWORD)

    def _source(self, name: str, variable: str) -> str:
        (container,) = self.children[Key("Deployment", "ns", name)]["spec"]["template"]["spec"]["containers"]
        entry = {entry["name"]: entry for entry in container["env"]}.get(variable, {})
        reference: Object = entry.get("valueFrom", {}).get("secretKeyRef", {})
        return str(reference.get("name", entry.get("value", "")))

    @property
    def secret(self) -> str:
        """The Secret that is to be there."""
        assert self.made is not None
        assert self.made.secret is not None
        return str(self.made.secret["metadata"]["name"])


def test_nothing_of_a_secret_is_in_what_the_operator_plans() -> None:
    """Its name is; its values are made up when it is created."""
    pool = Pool().plan()
    assert pool.made is not None
    assert not re.search(r"[0-9a-f]{64}", json.dumps([pool.made.objects, pool.made.secret]))
    assert pool.sees("p-engine") == pool.sees("p-gateway") == (pool.secret, "")
    assert pool.password("p-state") == pool.secret
    assert pool.made.secret is not None
    assert pool.made.secret["metadata"]["ownerReferences"][0]["uid"] == "uid"


def test_a_secret_that_is_given_by_name_is_used_and_none_is_made() -> None:
    pool = Pool().plan(secrets={"name": "mine"})
    assert pool.made is not None
    assert pool.made.secret is None
    assert {*pool.sees("p-engine"), *pool.sees("p-gateway"), pool.password("p-state")} == {"mine", ""}


def test_a_rotation_refuses_nobody() -> None:
    """Engines first, which accept both; then gateways. Then nothing moves any more."""
    pool = Pool().plan()
    old = pool.secret
    again = {"secrets": {"rotation": "2026"}}
    new = pool.plan(**again).secret
    assert new != old
    assert (pool.sees("p-engine"), pool.sees("p-gateway")) == ((new, old), (old, ""))
    pool.plan(rolled=False, **again)
    assert (pool.sees("p-engine"), pool.sees("p-gateway")) == ((new, old), (old, ""))
    pool.plan(**again)
    assert (pool.sees("p-engine"), pool.sees("p-gateway")) == ((new, old), (new, old))
    before = pool.sees("p-gateway")
    pool.plan(**again)
    assert (pool.sees("p-engine"), pool.sees("p-gateway")) == ((new, old), before)


def test_an_upgrade_restarts_nothing() -> None:
    pool = Pool().plan().earlier()
    templates = {k: child["spec"]["template"] for k, child in pool.children.items() if k.kind == "Deployment"}
    assert pool.sees("p-engine") == (LITERAL, "")
    pool.plan(defaults=NEWER)
    assert {k: pool.children[k]["spec"]["template"] for k in templates} == templates


def test_after_an_upgrade_gateways_send_what_engines_know() -> None:
    """Whichever of them changes first."""
    pool = Pool().plan().earlier().plan(defaults=NEWER)
    verbose = {"gateway": {"replicas": 2, "logLevel": "debug"}}
    pool.plan(defaults=NEWER, **verbose)
    assert (pool.sees("p-engine"), pool.sees("p-gateway")) == ((LITERAL, ""), (LITERAL, ""))
    assert "--log-level=debug" in str(pool.children[Key("Deployment", "ns", "p-gateway")])
    longer = {**verbose, "engine": {"args": ["--max-num-seqs=8"]}}
    pool.plan(defaults=NEWER, **longer)
    assert (pool.sees("p-engine"), pool.sees("p-gateway")) == ((pool.secret, LITERAL), (LITERAL, ""))
    pool.plan(defaults=NEWER, **longer)
    assert pool.sees("p-gateway") == (pool.secret, LITERAL)


@pytest.mark.parametrize(
    ("change", "follows"),
    [
        pytest.param({}, False, id="an upgrade alone"),
        pytest.param({"secrets": {"rotation": "2026"}}, True, id="a rotation"),
        pytest.param({"rollout": {"revision": "latest"}}, True, id="pods that follow the new version"),
    ],
)
def test_the_server_of_shared_state_and_its_gateways_change_the_password_together(
    change: Object, *, follows: bool
) -> None:
    pool = Pool().plan().earlier().plan(defaults=NEWER, **change)
    assert pool.password("p-state") == pool.password("p-gateway") == (pool.secret if follows else LITERAL)
