"""Which of several pools' routes gets the requests that they all want."""

from typing import Any

import pytest

from perilune_operator.observe.facts import Listener, Rival
from perilune_operator.observe.routes import rivals

Object = dict[str, Any]
ANY = {"ns/g": {"http": Listener()}}
"""A Gateway with one listener, for all hosts."""


def gateway(**hosts: str) -> dict[str, dict[str, Listener]]:
    """One with these listeners, for routes from everywhere."""
    return {"ns/g": {name: Listener(host) for name, host in hosts.items()}}


def route(*hosts: str, of: str = "g", section: str = "", namespace: str = "ns", refused: int = 0) -> Object:
    """`refused`: generation of which a controller said no; 0 if none did."""
    parent = {"name": of, "namespace": "ns"} | ({"sectionName": section} if section else {})
    said = {"type": "Accepted", "status": "False", "observedGeneration": refused}
    return {
        "metadata": {
            "namespace": namespace,
            "generation": 2,
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {"parentRefs": [parent], "hostnames": list(hosts)},
        "status": {"parents": [{"conditions": [said]}] if refused else []},
    }


@pytest.mark.parametrize(
    ("older", "younger", "gateways", "hosts"),
    [
        pytest.param(route(), route(), ANY, (), id="no hosts"),
        pytest.param(route(), route(), {}, (), id="a Gateway that cannot be seen"),
        pytest.param(route(), route(), {"ns/g": {}}, None, id="a Gateway that takes nobody's"),
        pytest.param(route("a"), route("b"), ANY, None, id="a host each"),
        pytest.param(route("a"), route("b", "a"), ANY, ("a",), id="one host of two"),
        pytest.param(route(), route("a"), ANY, None, id="the younger is narrower"),
        pytest.param(route("a"), route(), ANY, None, id="the younger is wider"),
        pytest.param(route("*.a"), route("b.a"), ANY, None, id="a host of a wildcard"),
        pytest.param(route("*.a"), route("*.a"), ANY, ("*.a",), id="one wildcard"),
        pytest.param(route(of="g"), route(of="h"), ANY, None, id="two Gateways"),
        pytest.param(route(section="x"), route(section="y"), gateway(x="", y=""), None, id="a listener each"),
        pytest.param(route(section="x"), route(section="y"), {}, None, id="a listener each, unseen"),
        pytest.param(route(section="x"), route(), gateway(x="", y=""), (), id="one listener of all"),
        pytest.param(route(section="x"), route(), {}, (), id="one listener of all, unseen"),
        pytest.param(route(), route(section="x"), {}, (), id="all listeners, one of them"),
        pytest.param(route(), route(), gateway(x="a", y="b"), ("a", "b"), id="hosts of the listeners"),
        pytest.param(
            route("a.b"), route(section="x"), gateway(x="a.b"), ("a.b",), id="a host and its listener"
        ),
        pytest.param(route("a.b"), route("a.b"), gateway(x="*.c"), None, id="hosts of no listener"),
        pytest.param(
            route("a.b"), route("a.b"), gateway(x="*.b"), ("a.b",), id="hosts of a wildcard listener"
        ),
        pytest.param(
            route(namespace="a"),
            route(namespace="b"),
            {"ns/g": {"x": Listener("", frozenset("a")), "y": Listener("", frozenset("b"))}},
            None,
            id="listeners for a namespace each",
        ),
        pytest.param(
            route(namespace="a"),
            route(namespace="b"),
            {"ns/g": {"x": Listener("h", frozenset("ab")), "y": Listener("", frozenset("b"))}},
            ("h",),
            id="a listener for both",
        ),
        pytest.param(route(refused=2), route(), ANY, None, id="the older is refused"),
        pytest.param(route(refused=1), route(), ANY, (), id="the older was refused before a change"),
    ],
)
def test_the_older_route_has_what_both_want(
    older: Object, younger: Object, gateways: Any, hosts: tuple[str, ...] | None
) -> None:
    later = {**younger["metadata"], "creationTimestamp": "2026-01-01T00:00:59Z"}
    found = rivals({("ns", "z"): older, ("ns", "a"): {**younger, "metadata": later}}, gateways)
    assert found == ({} if hosts is None else {("ns", "a"): Rival(("ns", "z"), hosts)})


def test_of_one_second_the_first_by_name_has_it() -> None:
    routes = {("ns", "b"): route(), ("ns", "a"): route(), ("m", "c"): route(namespace="m")}
    assert rivals(routes, ANY) == {("ns", "a"): Rival(("m", "c"), ()), ("ns", "b"): Rival(("m", "c"), ())}


def test_a_route_to_nowhere_is_nobodys_rival() -> None:
    nowhere = route() | {"spec": {}}
    assert rivals({("ns", "a"): nowhere, ("ns", "b"): route()}, ANY) == {}
