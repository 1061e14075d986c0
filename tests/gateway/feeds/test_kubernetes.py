"""The pool from the API: pure parts as tables, the feed against a small server of list and watch."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client.configuration import Configuration
from routing_objects import chosen
from waiting import until

from perilune_api import kube, names
from perilune_api.pool import (
    EndpointSpec,
    Metadata,
    Model,
    NodePlace,
    Pool,
    Role,
    Routing,
    Spec,
    SpecError,
    Topology,
    dump,
)
from perilune_gateway.feeds.kubernetes import KubernetesPool, endpoint, with_pods
from perilune_gateway.feeds.leaving import Use

Object = dict[str, Any]


def pod(
    name: str = "a", ip: str = "10.0.0.1", ready: bool = True, started: bool | None = None, **meta: object
) -> Object:
    containers = [{"name": "engine", "started": started}] if started is not None else []
    return {
        "metadata": {"name": name, "namespace": "ns", "resourceVersion": "1", **meta},
        "spec": {"nodeName": "n1"},
        "status": {
            "podIP": ip,
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
            "containerStatuses": containers,
        },
    }


def document(policy: str = "ear", model: str = "m", **topology: Any) -> Pool:
    return Pool(
        Metadata("p", "ns"),
        Spec(Model(name=model), routing=Routing(policy=chosen(policy)), topology=Topology(**topology)),
    )


def test_a_new_pod_at_an_address_is_another_endpoint_however_long_the_old_one_is_listed() -> None:
    giving = {names.BOOTSTRAP_PORT: "8998", names.EVENTS_PORT: "5557"}
    old = pod("old", uid="1", deletionTimestamp="2030-01-01T00:00:00Z", annotations=giving)
    for listed in ([old, pod("new", uid="2", ready=False, started=True)], [pod("new", uid="2")]):
        (found,) = with_pods(document(), listed, giving={"1"}).spec.endpoints
        assert (found.address, found.instance, found.draining) == ("10.0.0.1:8000", "2", False)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param(pod(), EndpointSpec(address="10.0.0.1:8000", node="n1"), id="ready"),
        pytest.param(
            pod(
                labels={"perilune.dev/component": "prefill"},
                annotations={"perilune.dev/kv-bootstrap-port": "8998"},
            ),
            EndpointSpec(address="10.0.0.1:8000", node="n1", bootstrap="10.0.0.1:8998", role=Role.PREFILL),
            id="only prefills",
        ),
        pytest.param(
            pod(annotations={"perilune.dev/kv-peer-port": "5710"}),
            EndpointSpec(address="10.0.0.1:8000", node="n1", peer="10.0.0.1:5710"),
            id="read by peers",
        ),
        pytest.param(pod(ready=False), None, id="not ready"),
        pytest.param(pod(ready=False, started=False), None, id="starting"),
        pytest.param(
            pod(ready=False, started=True),
            EndpointSpec(address="10.0.0.1:8000", node="n1", ready=False),
            id="not ready any more",
        ),
        pytest.param(pod(ip=""), None, id="no address yet"),
        pytest.param(
            pod(labels={"perilune.dev/role": "decode"}, annotations={"perilune.dev/kv-events-port": "5557"}),
            EndpointSpec(
                address="10.0.0.1:8000",
                node="n1",
                events=("tcp://10.0.0.1:5557",),
                replay=("tcp://10.0.0.1:5558",),
            ),
            id="role and events",
        ),
        pytest.param(
            pod(annotations={"perilune.dev/kv-events-port": "5557", "perilune.dev/ranks": "2"}),
            EndpointSpec(
                address="10.0.0.1:8000",
                node="n1",
                events=("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558"),
                replay=("tcp://10.0.0.1:5559", "tcp://10.0.0.1:5560"),
            ),
            id="data-parallel ranks",
        ),
        pytest.param(
            pod(annotations={"perilune.dev/draining": ""}),
            EndpointSpec(address="10.0.0.1:8000", node="n1", draining=True),
            id="draining",
        ),
        pytest.param(pod(ip="fd00::1"), EndpointSpec(address="[fd00::1]:8000", node="n1"), id="IPv6"),
    ],
)
def test_a_pod_is_an_endpoint(given: Object, expected: EndpointSpec | None) -> None:
    assert endpoint(given) == expected


@pytest.mark.parametrize("port", ["", "x", "-1", "0", "65535", "²", "5557 ", "9" * 5000])
def test_a_port_that_is_none_is_no_reason_to_end(port: str) -> None:
    found = endpoint(pod(annotations={"perilune.dev/kv-events-port": port}))
    assert found == EndpointSpec(address="10.0.0.1:8000", node="n1")


def test_a_node_that_the_document_does_not_know_has_a_place_of_its_own() -> None:
    pool = with_pods(document(nodes={"n2": NodePlace("r1")}), [pod()])
    assert pool.spec.topology.nodes == {"n1": NodePlace(), "n2": NodePlace("r1")}


def test_of_two_pods_with_one_address_a_ready_one_counts() -> None:
    """Theirs is their node's. As two endpoints they would have the whole pool refused."""
    pods = [pod("a"), pod("b", ready=False, started=True)]
    for order in (pods, pods[::-1]):
        assert with_pods(document(), order).spec.endpoints == (
            EndpointSpec(address="10.0.0.1:8000", node="n1"),
        )


@pytest.mark.parametrize(
    ("ready", "chosen"),
    [
        pytest.param([True, True, True, False], [True, True, True, False], id="one is not"),
        pytest.param([True, False], [True, False], id="half are"),
        pytest.param([True, False, False], [True, True, True], id="fewer than half are"),
        pytest.param([False], [True], id="none is"),
    ],
)
def test_when_most_are_not_ready_all_are_chosen_from(ready: list[bool], chosen: list[bool]) -> None:
    pods = [pod(f"p{i}", f"10.0.0.{i + 1}", said, started=True) for i, said in enumerate(ready)]
    starting = pod("new", "10.0.0.9", ready=False, started=False)
    assert [e.ready for e in with_pods(document(), [*pods, starting]).spec.endpoints] == chosen


LEAVES = {"deletionTimestamp": "2026-01-01T00:00:00Z"}


@pytest.mark.parametrize(
    ("pods", "chosen"),
    [
        pytest.param([pod("a"), pod("b", "10.0.0.2", **LEAVES)], ["10.0.0.1:8000"], id="another stays"),
        pytest.param(
            [pod("a", ready=False, started=True), pod("b", "10.0.0.2", **LEAVES)],
            ["10.0.0.1:8000"],
            id="another stays, which is not ready",
        ),
        pytest.param([pod("a", **LEAVES)], ["10.0.0.1:8000"], id="nobody else"),
        pytest.param(
            [pod("a", **LEAVES), pod("b", "10.0.0.2", ready=False, started=False)],
            ["10.0.0.1:8000"],
            id="another starts",
        ),
        pytest.param([pod("a", ready=False, started=True, **LEAVES)], [], id="nobody else, and it has ended"),
    ],
)
def test_a_terminating_pod_is_chosen_only_when_all_are(pods: list[Object], chosen: list[str]) -> None:
    assert [e.address for e in with_pods(document(), pods).spec.endpoints if e.ready] == chosen


HANDS_OVER = {"annotations": {"perilune.dev/kv-bootstrap-port": "8998"}}
GIVES = HANDS_OVER | LEAVES


@pytest.mark.parametrize(
    ("leaving", "draining"),
    [
        pytest.param(pod("b", "10.0.0.2", uid="b", **GIVES), ["10.0.0.2:8000"], id="hands KV over"),
        pytest.param(pod("b", "10.0.0.2", uid="b", **LEAVES), [], id="hands nothing over"),
        pytest.param(pod("b", "10.0.0.2", uid="c", **GIVES), [], id="its time is over"),
        pytest.param(pod("b", "10.0.0.2", ready=False, started=True, uid="b", **GIVES), [], id="has ended"),
        pytest.param(
            pod("b", "10.0.0.2", uid="b", labels={"perilune.dev/component": "prefill"}, **GIVES),
            [],
            id="only prefills",
        ),
    ],
)
def test_a_terminating_pod_that_hands_kv_over_drains(leaving: Object, draining: list[str]) -> None:
    endpoints = with_pods(document(), [pod("a"), leaving], {"b"}).spec.endpoints
    assert [e.address for e in endpoints if e.draining] == draining
    assert [e.address for e in endpoints if not e.draining] == ["10.0.0.1:8000"]


class Api:
    """One API server's list and watch of two collections."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Object]] = {"configmaps": {}, "pods": {}}
        self.version = 10
        self.lists = {"configmaps": 0, "pods": 0}
        self.watchers: dict[str, asyncio.Queue[Object]] = {k: asyncio.Queue() for k in self.objects}
        self.queries: list[dict[str, str]] = []
        self.gone = False
        self.wall = 1_800_000_000.0
        """The time of day."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        kind = request.match_info["kind"]
        self.queries.append(dict(request.query))
        if "watch" not in request.query:
            self.lists[kind] += 1
            items = list(self.objects[kind].values())
            return web.json_response({"metadata": {"resourceVersion": str(self.version)}, "items": items})
        answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            event = await self.watchers[kind].get()
            if event["type"] == "HANGUP":
                return answer
            await answer.write(json.dumps(event).encode() + b"\n")

    def put(self, kind: str, item: Object, event: str = "MODIFIED") -> None:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        if event == "DELETED":
            self.objects[kind].pop(item["metadata"]["name"], None)
        else:
            self.objects[kind][item["metadata"]["name"]] = item
        self.watchers[kind].put_nowait({"type": event, "object": item})

    def document(self, pool: Pool | bytes, **data: str) -> None:
        text = pool if isinstance(pool, bytes) else dump(pool)
        meta = {"name": "p-gateway", "namespace": "ns"}
        self.put("configmaps", {"metadata": meta, "data": {"pool.yaml": text.decode(), **data}})


class Taker:
    """Stands for ServedPool.on_pool: remembers pools, and refuses another model."""

    def __init__(self) -> None:
        self.pools: list[Pool] = []

    def __call__(self, pool: Pool) -> None:
        if pool.spec.model.name != "m":
            raise SpecError("Cannot change while running - at `$.spec.model`")
        self.pools.append(pool)

    def addresses(self) -> list[str]:
        return [e.address for e in self.pools[-1].spec.endpoints] if self.pools else []


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture
async def watched(api: Api) -> AsyncIterator[KubernetesPool]:
    app = web.Application()
    app.router.add_get("/api/v1/namespaces/ns/{kind}", api.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    client = kube.Client(Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}"))
    try:
        yield KubernetesPool(client, "ns", "p", wall_clock=lambda: api.wall)
    finally:
        await client.close()
        await runner.cleanup()


@pytest.fixture
async def taker(api: Api, watched: KubernetesPool) -> AsyncIterator[Taker]:
    """Yield a running feed that has seen one document and pod `a`."""
    api.document(document())
    api.put("pods", pod())
    made = Taker()
    made.pools.append(await watched.first())
    for queue in api.watchers.values():
        while not queue.empty():
            queue.get_nowait()
    task = asyncio.create_task(watched.run(made, lambda address: Use(0, in_flight=1)))
    yield made
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_first_pool_is_document_and_pods(api: Api, taker: Taker) -> None:
    assert taker.addresses() == ["10.0.0.1:8000"]
    assert {"fieldSelector": "metadata.name=p-gateway"} in api.queries
    components = "perilune.dev/component in (engine,engine-worker,prefill)"
    assert {"labelSelector": f"perilune.dev/pool=p,{components}"} in api.queries


async def test_a_pod_comes_and_another_leaves_at_once(api: Api, taker: Taker) -> None:
    api.put("pods", pod("b", "10.0.0.2"), "ADDED")
    await until(lambda: taker.addresses() == ["10.0.0.1:8000", "10.0.0.2:8000"])
    api.put("pods", pod("a", deletionTimestamp="2026-01-01T00:00:00Z"))
    await until(lambda: taker.addresses() == ["10.0.0.2:8000"])


async def test_a_pod_that_hands_kv_over_drains_until_its_time_is_over(api: Api, taker: Taker) -> None:
    """Its time lies ahead at first; that it is left is no event of the API server."""
    api.put("pods", pod("b", "10.0.0.2", uid="b", **HANDS_OVER), "ADDED")
    leaves = {"deletionTimestamp": "2100-01-01T00:00:00Z", "deletionGracePeriodSeconds": 150}
    api.put("pods", pod("b", "10.0.0.2", uid="b", **HANDS_OVER | leaves))
    await until(lambda: any(e.draining for e in taker.pools[-1].spec.endpoints))
    api.wall = datetime(2100, 1, 1, tzinfo=UTC).timestamp()
    await until(lambda: taker.addresses() == ["10.0.0.1:8000"])


async def test_the_document_names_the_other_pools_of_the_gateway(
    api: Api, watched: KubernetesPool, taker: Taker
) -> None:
    """A change of theirs is none of the pool's own; while the object is gone, they stay."""
    assert list(watched.serves) == []
    api.document(document(), **{names.SERVED_POOLS: "p\nq\nr"})
    await watched.serves_others.wait()
    assert (list(watched.serves), len(taker.pools)) == (["q", "r"], 1)
    watched.serves_others.clear()
    api.put("configmaps", api.objects["configmaps"]["p-gateway"], "DELETED")
    api.document(document("sticky"), **{names.SERVED_POOLS: "q\nr"})
    await until(lambda: taker.pools[-1].spec.routing.policy.name == "sticky")
    assert not watched.serves_others.is_set()


async def test_an_edited_document_is_taken(api: Api, taker: Taker) -> None:
    api.document(document("sticky"))
    await until(lambda: taker.pools[-1].spec.routing.policy.name == "sticky")
    assert taker.addresses() == ["10.0.0.1:8000"]


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        pytest.param(b"spec: {", "", id="no YAML"),
        pytest.param(dump(document(model="other")), "Cannot change while running", id="needs a restart"),
    ],
)
async def test_a_bad_document_changes_nothing_and_pods_go_on(
    api: Api, taker: Taker, watched: KubernetesPool, bad: bytes, error: str
) -> None:
    api.document(bad)
    api.put("pods", pod("b", "10.0.0.2"), "ADDED")
    await until(lambda: len(taker.addresses()) == 2 and bool(watched.last_error))
    assert error in watched.last_error
    assert taker.pools[-1].spec.model.name == "m"


async def test_a_version_that_is_gone_is_listed_again(api: Api, taker: Taker) -> None:
    lists = api.lists["pods"]
    api.objects["pods"] = {"c": pod("c", "10.0.0.3")}
    status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
    api.watchers["pods"].put_nowait({"type": "ERROR", "object": status})
    await until(lambda: taker.addresses() == ["10.0.0.3:8000"])
    assert api.lists["pods"] == lists + 1


async def test_a_watch_that_ends_goes_on_from_the_last_bookmark(api: Api, taker: Taker) -> None:
    lists = dict(api.lists)
    bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "77"}}}
    api.watchers["pods"].put_nowait(bookmark)
    api.watchers["pods"].put_nowait({"type": "HANGUP"})
    api.watchers["pods"].put_nowait({"type": "ADDED", "object": pod("b", "10.0.0.2")})
    await until(lambda: len(taker.addresses()) == 2)
    assert api.lists["pods"] <= lists["pods"] + 1
    assert [q["resourceVersion"] for q in api.queries if "resourceVersion" in q][-1] == "77"
