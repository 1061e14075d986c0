"""Pools behind one gateway: what the status of each says of the others, and who is woken by a change."""

from typing import Any

import pytest
from plans import NOW, made

from perilune_operator.observe import readers
from perilune_operator.observe.copies import Copies
from perilune_operator.observe.facts import Key, Observed, PodFacts

Object = dict[str, Any]
SERVED: Object = {"model": {"name": "m"}, "engine": {"kind": "simulated"}, "gateway": {"servedBy": "coder"}}
SERVING: Object = {
    "model": {"name": "m"},
    "engine": {"kind": "simulated"},
    "gateway": {"serves": ["chat"], "failOpen": False},
}
TRUE = {"GatewayReady": "True", "RouteProgrammed": "True", "Ready": "True"}


def other(name: str, gateway: Object, **conditions: str) -> Object:
    """Another pool as it is stored. A condition is its status, or its status and reason."""
    told = [
        {
            "type": kind,
            "status": said.partition(" ")[0],
            "reason": said.partition(" ")[2],
            "message": "It says.",
        }
        for kind, said in conditions.items()
    ]
    meta = {"name": name, "namespace": "ns", "uid": name}
    return {"metadata": meta, "spec": {"gateway": gateway}, "status": {"conditions": told}}


def conditions(spec: Object, *others: Object) -> dict[str, tuple[str, str]]:
    pods = (PodFacts(name="e", component="engine", role="both", node="n", ready=True, terminating=False),)
    known = {pool["metadata"]["name"]: readers.other_pool(pool) for pool in others}
    status = made(spec, Observed(uid="u", generation=1, pods=pods, others=known), NOW).status
    return {c.type: (c.status, c.reason) for c in status.conditions}


@pytest.mark.parametrize(
    ("others", "gateway", "ready"),
    [
        pytest.param([], "NoSuchPool", "NoSuchPool", id="nobody"),
        pytest.param(
            [other("coder", {}, **TRUE)], "NotNamed", "NotNamed", id="a pool that does not serve it"
        ),
        pytest.param(
            [other("coder", {"serves": ["chat"]}, **TRUE)],
            "NotNamed",
            "NotNamed",
            id="one that serves others",
        ),
        pytest.param(
            [other("coder", {"serves": ["p"]})], "WaitingForGateway", "WaitingForGateway", id="a new one"
        ),
        pytest.param(
            [other("coder", {"serves": ["p"]}, **{**TRUE, "GatewayReady": "False WaitingForGateway"})],
            "WaitingForGateway",
            "WaitingForGateway",
            id="its gateway is not ready",
        ),
        pytest.param(
            [other("coder", {"serves": ["p"]}, **{**TRUE, "RouteProgrammed": "False RouteRefused"})],
            "Available",
            "RouteRefused",
            id="its route is refused",
        ),
        pytest.param(
            [other("coder", {"serves": ["p"]}, **TRUE)], "Available", "Serving", id="one that is ready"
        ),
        pytest.param(
            [other("coder", {"serves": ["p"]}, **{**TRUE, "Ready": "False WaitingForEngines"})],
            "Available",
            "Serving",
            id="one whose own engines are not",
        ),
    ],
)
def test_a_served_pool_is_as_ready_as_the_gateway_that_serves_it(
    others: list[Object], gateway: str, ready: str
) -> None:
    told = conditions(SERVED, *others)
    assert (told["GatewayReady"][1], told["Ready"][1]) == (gateway, ready)
    assert (told["Ready"][0] == "True") is (ready == "Serving")


@pytest.mark.parametrize(
    ("others", "told"),
    [
        pytest.param([], ("False", "NoSuchPool"), id="missing"),
        pytest.param([other("chat", {}, **TRUE)], ("False", "NotNamed"), id="with a gateway of its own"),
        pytest.param([other("chat", {"servedBy": "x"}, **TRUE)], ("False", "NotNamed"), id="of another"),
        pytest.param([other("chat", {"servedBy": "p"})], ("False", "PoolNotReady"), id="new"),
        pytest.param(
            [other("chat", {"servedBy": "p"}, Ready="False WaitingForEngines")],
            ("False", "PoolNotReady"),
            id="not ready",
        ),
        pytest.param([other("chat", {"servedBy": "p"}, **TRUE)], ("True", "Available"), id="ready"),
    ],
)
def test_a_serving_pool_says_which_pools_it_misses(others: list[Object], told: tuple[str, str]) -> None:
    """Its own model does not depend on them."""
    found = conditions(SERVING, *others)
    assert found["ServedPoolsReady"] == told
    assert found["Ready"] == conditions({**SERVING, "gateway": {"failOpen": False}})["Ready"]


@pytest.mark.parametrize("served", [False, True])
@pytest.mark.parametrize("serving", [False, True])
def test_pools_that_share_a_gateway_have_tls_to_engines_or_none(*, serving: bool, served: bool) -> None:
    def engine(tls: bool) -> Object:
        return {"kind": "simulated", **({"tls": {"secret": "s"}} if tls else {})}

    chat = other("chat", {"servedBy": "p"}, **TRUE)
    chat["spec"]["engine"] = engine(served)
    told = conditions({**SERVING, "engine": engine(serving)}, chat)["ServedPoolsReady"]
    assert told == (("True", "Available") if serving is served else ("False", "TlsDiffers"))


@pytest.mark.parametrize("spec", [None, "x", {"gateway": "x", "engine": "x"}, {"gateway": {"serves": None}}])
def test_a_spec_that_is_none_names_no_pool(spec: object) -> None:
    """The operator sees such a pool, too, and refuses it."""
    assert not readers.other_pool({"metadata": {"name": "p"}, "spec": spec}).serves


def test_a_change_wakes_the_pools_that_name_it_or_that_it_names() -> None:
    copies = Copies()

    def take(name: str, gateway: Object | None, **conditions: Any) -> set[tuple[str, str]]:
        body = None if gateway is None else other(name, gateway, **conditions)
        return copies.take_pool(("ns", name), body)

    assert take("coder", {"serves": ["chat"]}) == set()
    assert take("chat", {}) == {("ns", "coder")}
    assert take("alone", {}) == set()
    assert copies.others(("ns", "chat")).keys() == {"coder"}
    assert copies.others(("ns", "coder")).keys() == {"chat"}
    assert copies.others(("ns", "alone")) == {}
    assert take("chat", {"servedBy": "coder"}, **TRUE) == {("ns", "coder")}
    assert take("chat", {"servedBy": "coder"}, **TRUE) == set(), "nothing has changed"
    assert take("coder", {}) == {("ns", "chat")}
    assert take("chat", None) == {("ns", "coder")}


def engine(name: str, server: str = "", duty: str = "serve", *, ready: bool = True) -> PodFacts:
    return PodFacts(
        name=name,
        component="engine",
        role="both",
        node="n",
        ready=ready,
        terminating=False,
        duty=duty,
        server=server,
    )


ROUTED: Object = {**SERVING, "gateway": {**SERVING["gateway"], "parent": {"name": "g"}}}
ENVOY = frozenset({"gateway.networking.k8s.io/HTTPRoute", "gateway.envoyproxy.io/EnvoyExtensionPolicy"})
CHAT = {"chat": readers.other_pool(other("chat", {"servedBy": "p"}, **TRUE))}


def backends(*backends: str, service: bool = True, **facts: Any) -> list[str]:
    """Return the backends of the next route, made from a route with these; without any there is none yet."""
    spec = {"rules": [{"backendRefs": [{"name": name} for name in backends]}]}
    route = {"kind": "HTTPRoute", "metadata": {"name": "p", "namespace": "ns"}, "spec": spec}
    there = {"kind": "Service", "metadata": {"name": "p-models", "namespace": "ns"}}
    children = {Key("HTTPRoute", "ns", "p"): route} if backends else {}
    children |= {Key("Service", "ns", "p-models"): there} if service else {}
    objects = made(
        ROUTED, Observed(uid="u", generation=1, children=children, kinds=ENVOY, others=CHAT, **facts), NOW
    ).objects
    (found,) = [o for o in objects or () if o["kind"] == "HTTPRoute"]
    return [backend["name"] for backend in found["spec"]["rules"][0]["backendRefs"]]


def test_one_service_selects_the_engines_of_all_pools_of_a_gateway() -> None:
    """So that a pool without engines, or one that is gone, takes no request of another."""
    objects = made(ROUTED, Observed(uid="u", generation=1, kinds=ENVOY), NOW).objects or ()
    (service,) = [o for o in objects if (o["kind"], o["metadata"]["name"]) == ("Service", "p-models")]
    assert service["spec"]["selector"] == {"perilune.dev/server": "p"}
    assert backends(service=False) == ["p-models"]


@pytest.mark.parametrize(
    ("facts", "switched"),
    [
        pytest.param({"service": False, "pods": (engine("a", "p"),)}, False, id="the Service is not there"),
        pytest.param({"pods": (engine("a"),)}, False, id="its own engine has no label yet"),
        pytest.param(
            {"pods": (engine("a", "p"),), "served_pods": (engine("b"),)}, False, id="nor has the other pool's"
        ),
        pytest.param(
            {"pods": (engine("a", "p"),), "served_pods": (engine("b", "p"), engine("c", ready=False))},
            True,
            id="every engine that serves has it",
        ),
        pytest.param(
            {"pods": (engine("a", "p"), engine("b", duty="prefill"))}, True, id="those that prefill do not"
        ),
    ],
)
def test_a_route_of_an_earlier_version_changes_when_no_engine_would_be_missing(
    facts: Object, *, switched: bool
) -> None:
    old = ["p", "chat"]
    assert backends(*old, **facts) == (["p-models"] if switched else old)
    assert backends("p-models", **facts) == ["p-models"], "it does not go back"


@pytest.mark.parametrize(
    ("spec", "others", "pods", "marks"),
    [
        pytest.param(SERVING, [], [engine("a")], {"a": "p"}, id="of the pool with the gateway"),
        pytest.param(SERVING, [], [engine("a", "p")], {}, id="labelled already"),
        pytest.param(
            SERVING, [], [engine("a", "p", duty="prefill")], {"a": None}, id="one that only prefills now"
        ),
        pytest.param(
            SERVED, [other("coder", {"serves": ["p"]})], [engine("a")], {"a": "coder"}, id="of a served pool"
        ),
        pytest.param(SERVED, [other("coder", {})], [engine("a")], {}, id="of a pool that nobody serves"),
        pytest.param(SERVED, [], [engine("a", "coder")], {"a": None}, id="the serving pool is gone"),
        pytest.param(
            {"model": {"name": "m"}}, [], [engine("a", "coder")], {"a": None}, id="not served any more"
        ),
    ],
)
def test_running_engines_are_labelled_and_none_is_restarted(
    spec: Object, others: list[Object], pods: list[PodFacts], marks: dict[str, str | None]
) -> None:
    known = {pool["metadata"]["name"]: readers.other_pool(pool) for pool in others}
    planned = made(spec, Observed(uid="u", generation=1, pods=tuple(pods), others=known), NOW)
    told = {
        m.pod: m.labels["perilune.dev/server"] for m in planned.marks if "perilune.dev/server" in m.labels
    }
    assert told == marks
    templates = [o["spec"]["template"] for o in planned.objects or () if o["kind"] == "Deployment"]
    assert templates
    assert "perilune.dev/server" not in str(templates)


def test_an_engine_of_a_served_pool_wakes_the_pool_with_the_gateway() -> None:
    copies = Copies()
    copies.take_pool(("ns", "coder"), other("coder", {"serves": ["chat"]}))
    copies.take_pool(("ns", "chat"), other("chat", {"servedBy": "coder"}))
    labels = {"perilune.dev/pool": "chat"}
    copies.take("Pod", {}, [])
    pod = {"metadata": {"name": "a", "namespace": "ns", "labels": labels, "resourceVersion": "1"}}
    assert copies.take("Pod", {"ns/a": pod}, ["ns/a"]) == {("ns", "chat"), ("ns", "coder")}
