"""The copy of the cluster: whose object is whose, who is told of what."""

from typing import Any

import pytest

from perilune_api import kube
from perilune_operator.cluster import GONE_AFTER, Cluster
from perilune_operator.kinds import OPTIONAL
from perilune_operator.observe import Key, PoolName, Rival

Object = dict[str, Any]


class _Watched(Cluster):
    """Fed by hand instead of by watches."""

    def __init__(self, known: frozenset[str] = frozenset()) -> None:
        self.told: list[PoolName | None] = []
        nobody: Any = None
        super().__init__(
            nobody, "", self.told.append, lambda pool, obj: obj["metadata"]["resourceVersion"] in known
        )

    def sees(self, kind: str, *objects: Object) -> list[PoolName | None]:
        """Who is told."""
        self.told.clear()
        self._take("v1", kind, {f"ns/{obj['metadata']['name']}": obj for obj in objects})
        return sorted(self.told, key=str)


def obj(name: str, pool: str = "p", version: str = "1") -> Object:
    labels = {"perilune.dev/pool": pool} if pool else {}
    return {"metadata": {"name": name, "namespace": "ns", "labels": labels, "resourceVersion": version}}


def names(cluster: Cluster, pool: str) -> list[str]:
    return sorted(made["metadata"]["name"] for made in cluster.pods(("ns", pool)))


def test_a_pool_is_told_of_its_own_and_the_first_list_is_everybodys() -> None:
    cluster = _Watched()
    a, b, c = obj("a"), obj("b"), obj("c", "q")
    assert cluster.sees("Pod", a, b, c) == [None]
    assert (names(cluster, "p"), names(cluster, "q")) == (["a", "b"], ["c"])
    assert cluster.sees("Pod", a, b, c) == []
    assert cluster.sees("Pod", a, obj("b", version="2"), c) == [("ns", "p")]
    assert cluster.sees("Pod", a, c, obj("d", "q")) == [("ns", "p"), ("ns", "q")]
    assert (names(cluster, "p"), names(cluster, "q")) == (["a"], ["c", "d"])


def test_an_object_that_changes_hands_concerns_both() -> None:
    cluster = _Watched()
    cluster.sees("Pod", obj("a"))
    assert cluster.sees("Pod", obj("a", "q", "2")) == [("ns", "p"), ("ns", "q")]
    assert (names(cluster, "p"), names(cluster, "q")) == ([], ["a"])


def test_what_is_known_wakes_nobody_and_is_kept() -> None:
    cluster = _Watched(known=frozenset({"2"}))
    cluster.sees("ConfigMap", obj("a"))
    assert cluster.sees("ConfigMap", obj("a", version="2")) == []
    (kept,) = cluster.children(("ns", "p")).values()
    assert kept["metadata"]["resourceVersion"] == "2"
    assert cluster.sees("ConfigMap") == [("ns", "p")]
    assert cluster.children(("ns", "p")) == {}


def test_what_pools_share_is_everybodys_in_the_namespace() -> None:
    cluster = _Watched()
    cluster.sees("ClientTrafficPolicy", obj("shared", ""), obj("mine"))
    keys = {Key("ClientTrafficPolicy", "ns", "shared"), Key("ClientTrafficPolicy", "ns", "mine")}
    assert cluster.children(("ns", "p")).keys() == keys
    assert cluster.children(("ns", "q")).keys() == {Key("ClientTrafficPolicy", "ns", "shared")}
    assert cluster.sees("ClientTrafficPolicy", obj("shared", "", "2")) == [("ns", "p")], "mine is gone"
    said = {**obj("shared", "", "3"), "status": {"ancestors": []}}
    assert cluster.sees("ClientTrafficPolicy", said) == [("ns", "")]


def a_route(pool: str, second: int, version: str = "1", *hosts: str) -> Object:
    made = obj(pool, pool, version)
    made["metadata"]["creationTimestamp"] = f"2026-01-01T00:00:{second:02}Z"
    return made | {"spec": {"parentRefs": [{"name": "g"}], "hostnames": list(hosts)}}


def test_who_has_another_rival_is_told() -> None:
    cluster = _Watched()
    p, q, r = (a_route(name, second) for second, name in enumerate("pqr"))
    assert cluster.sees("HTTPRoute", p, q) == [None]
    assert cluster.rival(("ns", "p")) is None
    assert cluster.rival(("ns", "q")) == Rival(("ns", "p"), ())
    assert cluster.sees("HTTPRoute", p, q, r) == [("ns", "r")], "of the others' rivals none has changed"
    assert cluster.sees("HTTPRoute", q, r) == [("ns", "p"), ("ns", "q"), ("ns", "r")]
    assert [cluster.rival(("ns", name)) for name in "qr"] == [None, Rival(("ns", "q"), ())]
    apart = a_route("r", 2, "2", "r.test")
    assert cluster.sees("HTTPRoute", q, apart) == [("ns", "r")]
    assert cluster.rival(("ns", "r")) is None


def test_a_route_that_is_named_unlike_its_pool_is_not_the_pools() -> None:
    cluster = _Watched()
    fake = a_route("a", 0)
    fake["metadata"]["labels"]["perilune.dev/pool"] = "q"
    cluster.sees("HTTPRoute", fake, a_route("p", 1))
    assert cluster.rival(("ns", "p")) is None


def some_nodes(**racks: str) -> dict[str, Object]:
    return {
        f"/{name}": {"metadata": {"name": name, "labels": {"rack": rack}}} for name, rack in racks.items()
    }


def test_a_change_of_nodes_concerns_everybody_and_a_heartbeat_nobody() -> None:
    cluster = _Watched()
    seen = some_nodes(b="r1", a="r1")
    cluster._take_nodes(seen)
    assert [(node.name, node.labels["rack"]) for node in cluster.nodes] == [("a", "r1"), ("b", "r1")]
    cluster._take_nodes(seen | some_nodes(a="r1"))
    assert cluster.told == [None]
    cluster._take_nodes(some_nodes(b="r2"))
    assert [(node.name, node.labels["rack"]) for node in cluster.nodes] == [("b", "r2")]
    assert cluster.told == [None, None]


def test_a_pool_that_is_not_there_any_more_is_gone_by_its_uid() -> None:
    gone: list[tuple[PoolName, str]] = []
    nobody: Any = None
    cluster = Cluster(nobody, "", lambda pool: None, on_gone=lambda pool, uid: gone.append((pool, uid)))

    def sees(**uids: str) -> None:
        metas = ({"namespace": "ns", "name": name, "uid": uid} for name, uid in uids.items())
        cluster._take_pools({f"ns/{meta['name']}": {"metadata": meta} for meta in metas})

    sees(p="1", q="2")
    sees(p="1", q="3")
    assert gone == [(("ns", "q"), "2")], "another one of that name is there"
    sees(q="3")
    assert gone[1:] == [(("ns", "p"), "1")]


class _Api:
    """An API server's discovery, as far as it knows its CRDs."""

    def __init__(self) -> None:
        self.status = 200

    async def request(self, method: str, path: str) -> Object:
        if self.status != 200:
            raise kube.ApiError(self.status, "NotFound", path)
        return {"resources": [{"kind": kind} for kind in OPTIONAL[path.removeprefix("/apis/")]]}


@pytest.mark.parametrize("status", [pytest.param(404, id="not known yet"), pytest.param(503, id="starting")])
async def test_an_api_server_that_starts_takes_no_kind_away(status: int) -> None:
    told: list[PoolName | None] = []
    api: Any = _Api()
    cluster = Cluster(api, "", told.append)
    await cluster._discover()
    everything = cluster.kinds
    assert (len(everything) > 5, told) == (True, [None])
    for _ in range(2):
        api.status = status
        for _ in range(GONE_AFTER - 1):
            await cluster._discover()
        api.status = 200
        await cluster._discover()
    assert (cluster.kinds, told) == (everything, [None])


async def test_a_kind_that_stays_away_is_gone() -> None:
    told: list[PoolName | None] = []
    api: Any = _Api()
    cluster = Cluster(api, "", told.append)
    await cluster._discover()
    api.status = 404
    for _ in range(GONE_AFTER):
        await cluster._discover()
    assert (cluster.kinds, told) == (frozenset(), [None, None])
