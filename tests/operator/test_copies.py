"""The copies of the cluster's objects: to which pool they belong, and which pools a change concerns."""

from typing import Any

from perilune_operator.observe.copies import Copies
from perilune_operator.observe.facts import Key, PoolName, Rival

Object = dict[str, Any]


class Watched:
    """Copies that are given whole lists, as they come from watches."""

    def __init__(self, known: frozenset[str] = frozenset()) -> None:
        self.copies = Copies(lambda pool, obj: obj["metadata"]["resourceVersion"] in known)
        self.lists: dict[str, dict[str, Object]] = {}

    def sees(self, kind: str, *objects: Object) -> list[PoolName] | None:
        """Return the pools that the change concerns; None means all of them."""
        before = self.lists.get(kind, {})
        now = self.lists[kind] = {f"ns/{made['metadata']['name']}": made for made in objects}
        changed = {name for name in before | now if before.get(name) is not now.get(name)}
        concerned = self.copies.take(kind, now, changed)
        return None if concerned is None else sorted(concerned)


def obj(name: str, pool: str = "p", version: str = "1") -> Object:
    labels = {"perilune.dev/pool": pool} if pool else {}
    return {"metadata": {"name": name, "namespace": "ns", "labels": labels, "resourceVersion": version}}


def names(watched: Watched, pool: str) -> list[str]:
    return sorted(made["metadata"]["name"] for made in watched.copies.pods(("ns", pool)))


def test_a_pool_is_told_of_its_own_and_the_first_list_is_everybodys() -> None:
    watched = Watched()
    a, b, c = obj("a"), obj("b"), obj("c", "q")
    assert watched.sees("Pod", a, b, c) is None
    assert (names(watched, "p"), names(watched, "q")) == (["a", "b"], ["c"])
    assert watched.sees("Pod", a, b, c) == []
    assert watched.sees("Pod", a, obj("b", version="2"), c) == [("ns", "p")]
    assert watched.sees("Pod", a, c, obj("d", "q")) == [("ns", "p"), ("ns", "q")]
    assert (names(watched, "p"), names(watched, "q")) == (["a"], ["c", "d"])


def test_an_object_that_changes_hands_concerns_both() -> None:
    watched = Watched()
    watched.sees("Pod", obj("a"))
    assert watched.sees("Pod", obj("a", "q", "2")) == [("ns", "p"), ("ns", "q")]
    assert (names(watched, "p"), names(watched, "q")) == ([], ["a"])


def test_what_is_known_wakes_nobody_and_is_kept() -> None:
    watched = Watched(known=frozenset({"2"}))
    watched.sees("ConfigMap", obj("a"))
    assert watched.sees("ConfigMap", obj("a", version="2")) == []
    (kept,) = watched.copies.children(("ns", "p")).values()
    assert kept["metadata"]["resourceVersion"] == "2"
    assert watched.sees("ConfigMap") == [("ns", "p")]
    assert watched.copies.children(("ns", "p")) == {}


def test_what_pools_share_is_everybodys_in_the_namespace() -> None:
    watched = Watched()
    watched.sees("ClientTrafficPolicy", obj("shared", ""), obj("mine"))
    keys = {Key("ClientTrafficPolicy", "ns", "shared"), Key("ClientTrafficPolicy", "ns", "mine")}
    assert watched.copies.children(("ns", "p")).keys() == keys
    assert watched.copies.children(("ns", "q")).keys() == {Key("ClientTrafficPolicy", "ns", "shared")}
    assert watched.sees("ClientTrafficPolicy", obj("shared", "", "2")) == [("ns", "p")], "mine is gone"
    said = {**obj("shared", "", "3"), "status": {"ancestors": []}}
    assert watched.sees("ClientTrafficPolicy", said) == [("ns", "")]


def a_route(pool: str, second: int, version: str = "1", *hosts: str) -> Object:
    made = obj(pool, pool, version)
    made["metadata"]["creationTimestamp"] = f"2026-01-01T00:00:{second:02}Z"
    return made | {"spec": {"parentRefs": [{"name": "g"}], "hostnames": list(hosts)}}


def test_who_has_another_rival_is_told() -> None:
    watched = Watched()
    p, q, r = (a_route(name, second) for second, name in enumerate("pqr"))
    assert watched.sees("HTTPRoute", p, q) is None
    assert watched.copies.rival(("ns", "p")) is None
    assert watched.copies.rival(("ns", "q")) == Rival(("ns", "p"), ())
    assert watched.sees("HTTPRoute", p, q, r) == [("ns", "r")], "of the others' rivals none has changed"
    assert watched.sees("HTTPRoute", q, r) == [("ns", "p"), ("ns", "q"), ("ns", "r")]
    assert [watched.copies.rival(("ns", name)) for name in "qr"] == [None, Rival(("ns", "q"), ())]
    apart = a_route("r", 2, "2", "r.test")
    assert watched.sees("HTTPRoute", q, apart) == [("ns", "r")]
    assert watched.copies.rival(("ns", "r")) is None


def test_a_route_that_is_named_unlike_its_pool_is_not_the_pools() -> None:
    watched = Watched()
    fake = a_route("a", 0)
    fake["metadata"]["labels"]["perilune.dev/pool"] = "q"
    watched.sees("HTTPRoute", fake, a_route("p", 1))
    assert watched.copies.rival(("ns", "p")) is None


def some_nodes(**racks: str) -> dict[str, Object]:
    return {
        f"/{name}": {"metadata": {"name": name, "labels": {"rack": rack}}} for name, rack in racks.items()
    }


def test_only_a_fact_about_a_node_is_a_change() -> None:
    copies = Copies()

    def nodes() -> list[tuple[str, str]]:
        return [(node.name, node.labels["rack"]) for node in copies.nodes]

    seen = some_nodes(b="r1", a="r1")
    assert copies.take_nodes(seen, seen)
    assert nodes() == [("a", "r1"), ("b", "r1")]
    before = copies.nodes
    assert not copies.take_nodes(seen | some_nodes(a="r1"), ["/a"]), "a heartbeat"
    assert copies.nodes is before, "what was computed from them still holds"
    assert copies.take_nodes(some_nodes(b="r2"), ["/a", "/b"])
    assert nodes() == [("b", "r2")]


def test_everything_has_to_be_listed_once() -> None:
    copies = Copies()
    assert not copies.has_all([])
    copies.take_nodes({}, [])
    assert copies.has_all([])
    assert not copies.has_all(["Pod", "HTTPRoute"])
    for kind in ("Pod", "HTTPRoute"):
        copies.take(kind, {}, [])
    assert not copies.has_all(["Pod", "HTTPRoute"]), "nor are the routes' Gateways"
    copies.take_parents({})
    assert copies.has_all(["Pod", "HTTPRoute"])
