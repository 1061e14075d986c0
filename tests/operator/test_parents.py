"""What is written into an InferencePool's status on plain Envoy Gateway."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from perilune_api.kube import ApiError
from perilune_operator.extension_server.parents import parents, picker_service
from perilune_operator.extension_server.statuses import ENVOY_GATEWAY, POOLS, Statuses

Object = dict[str, Any]
NOW, LATER = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"
OTHERS = {"parentRef": {"name": "g", "namespace": "ns"}, "controllerName": "other.dev/x", "conditions": []}
BY_DEFAULT = {"parentRef": {"kind": "Status", "name": "default"}, "conditions": []}


def pool(*there: Object, picker: Object | None = None) -> Object:
    reference = {"name": "epp", "port": {"number": 9002}} if picker is None else picker
    return {
        "metadata": {"namespace": "ns", "name": "p", "generation": 3, "resourceVersion": "7"},
        "spec": {"endpointPickerRef": reference} if reference else {},
        "status": {"parents": list(there)},
    }


def route(name: str, *gateways: str, accepted: str = "", to: str = "p", group: str = "") -> Object:
    backend = {
        "group": group or "inference.networking.k8s.io",
        "kind": "InferencePool",
        "name": to,
    }
    said = [
        {"parentRef": {"name": gateway}, "conditions": [{"type": "Accepted", "status": accepted}]}
        for gateway in gateways
        if accepted
    ]
    return {
        "metadata": {"namespace": "ns", "name": name},
        "spec": {"parentRefs": [{"name": g} for g in gateways], "rules": [{"backendRefs": [backend]}]},
        "status": {"parents": said},
    }


def told(
    of: Object, *routes: Object, has_picker: bool = True, now: str = NOW, gateways: str = "gh"
) -> list[Object]:
    there = {("ns", name) for name in gateways}
    return parents(of, routes, there, controller=ENVOY_GATEWAY, has_picker=has_picker, now=now)


def words(entries: list[Object]) -> dict[str, tuple[str, ...]]:
    """Gateway → status and reason of each condition."""
    return {
        entry["parentRef"]["name"]: tuple(f"{c['status']} {c['reason']}" for c in entry["conditions"])
        for entry in entries
    }


GOOD = ("True Accepted", "True ResolvedRefs")


@pytest.mark.parametrize(
    ("routes", "expected"),
    [
        pytest.param([route("r", "g", accepted="True")], {"g": GOOD}, id="accepted"),
        pytest.param([route("r", "g", "h", accepted="True")], {"g": GOOD, "h": GOOD}, id="by two Gateways"),
        pytest.param(
            [route("r", "g", accepted="False"), route("s", "g", accepted="True")],
            {"g": GOOD},
            id="by one route",
        ),
        pytest.param(
            [route("r", "g", accepted="False")],
            {"g": ("False HTTPRouteNotAccepted", "True ResolvedRefs")},
            id="not accepted",
        ),
        pytest.param([route("r", "g")], {"g": ("Unknown Pending", "True ResolvedRefs")}, id="not told yet"),
        pytest.param([], {}, id="no route"),
        pytest.param([route("r", "g", accepted="True", to="q")], {}, id="another pool's route"),
        pytest.param([route("r", "g", accepted="True", group="x.dev")], {}, id="another kind of pool"),
        pytest.param([route("r", "z", accepted="True")], {}, id="a Gateway of another controller"),
    ],
)
def test_a_pools_parents_are_the_gateways_of_its_routes(
    routes: list[Object], expected: dict[str, tuple[str, ...]]
) -> None:
    assert words(told(pool(), *routes)) == expected


@pytest.mark.parametrize("verdicts", [("True", "False"), ("False", "True")])
def test_a_route_that_one_listener_accepts_is_accepted(verdicts: tuple[str, str]) -> None:
    made = route("r", "g", "g")
    at = [{"name": "g", "sectionName": name} for name in ("http", "https")]
    made["spec"]["parentRefs"] = at
    made["status"]["parents"] = [
        {"parentRef": reference, "conditions": [{"type": "Accepted", "status": verdict}]}
        for reference, verdict in zip(at, verdicts, strict=True)
    ]
    assert words(told(pool(), made)) == {"g": GOOD}


def test_a_picker_that_is_not_there_is_named() -> None:
    (entry,) = told(pool(), route("r", "g", accepted="True"), has_picker=False)
    accepted, resolved = entry["conditions"]
    assert (accepted["status"], resolved["status"], resolved["reason"]) == (
        "True",
        "False",
        "InvalidExtensionRef",
    )
    assert resolved["message"] == "There is no Service epp in its namespace that could be its picker's"


def test_a_pool_without_a_picker_is_not_accepted() -> None:
    of = pool(picker={})
    assert picker_service(of) is None
    found = words(told(of, route("r", "g", accepted="True"), has_picker=False))
    assert found == {"g": ("False EndpointPickerRefMissing", "False InvalidExtensionRef")}


def test_a_picker_that_is_no_service_is_not_looked_up() -> None:
    assert picker_service(pool(picker={"kind": "Pod", "name": "epp"})) is None
    assert picker_service(pool()) == ("ns", "epp")


def test_others_entries_stay_and_the_crds_own_leaves() -> None:
    entries = told(pool(BY_DEFAULT, OTHERS), route("r", "g", accepted="True"))
    assert [entry.get("controllerName") for entry in entries] == ["other.dev/x", ENVOY_GATEWAY]


def test_a_condition_keeps_its_time_until_it_says_something_else() -> None:
    before = told(pool(), route("r", "g", accepted="True"))
    assert told(pool(*before), route("r", "g", accepted="True"), now=LATER) == before
    (after,) = told(pool(*before), route("r", "g", accepted="True"), now=LATER, has_picker=False)
    assert [c["lastTransitionTime"] for c in after["conditions"]] == [NOW, LATER]


class ApiServer:
    """Answers as an API server with one Service; keeps the patches."""

    def __init__(self) -> None:
        self.patches: list[tuple[str, Object]] = []

    async def request(self, method: str, path: str, body: Any = None, **_: Any) -> Object:
        if method == "PATCH":
            self.patches.append((path, body))
            return {}
        if path != "/api/v1/namespaces/ns/services/epp":
            raise ApiError(404, "NotFound", "not found")
        return {}


def statuses(server: ApiServer, of: Object, *routes: Object) -> Statuses:
    made = Statuses(server, clock=lambda: 0.0)  # type: ignore[arg-type]
    there = {"namespace": "ns", "name": "g"}
    made.found = {
        "pools": {"ns/p": of},
        "routes": {r["metadata"]["name"]: r for r in routes},
        "gateways": {"ns/g": {"metadata": there, "spec": {"gatewayClassName": "envoy"}}},
        "classes": {"envoy": {"metadata": {"name": "envoy"}, "spec": {"controllerName": ENVOY_GATEWAY}}},
    }
    return made


async def test_what_differs_is_written_once() -> None:
    server, of = ApiServer(), pool(BY_DEFAULT)
    await statuses(server, of, route("r", "g", accepted="True")).look()
    ((path, body),) = server.patches
    assert path == f"{POOLS.replace('v1/', 'v1/namespaces/ns/')}/p/status"
    assert body["metadata"] == {"resourceVersion": "7"}
    assert words(body["status"]["parents"]) == {"g": GOOD}
    after = pool(*body["status"]["parents"])
    await statuses(server, after, route("r", "g", accepted="True")).look()
    assert len(server.patches) == 1


async def test_an_entry_goes_with_the_last_route() -> None:
    server = ApiServer()
    before = told(pool(), route("r", "g", accepted="True"))
    await statuses(server, pool(*before)).look()
    assert [body["status"] for _, body in server.patches] == [{"parents": []}]


async def test_pools_that_no_envoy_gateway_serves_are_left_alone() -> None:
    server = ApiServer()
    await statuses(server, pool(OTHERS)).look()
    await statuses(server, pool(BY_DEFAULT), route("r", "z", accepted="True")).look()
    assert server.patches == []


class Cluster(ApiServer):
    """Lists objects; the first list of `late` ends with an error."""

    def __init__(self, found: dict[str, Any], late: str, error: Exception) -> None:
        super().__init__()
        self.patched = asyncio.Event()
        self._found, self._late, self._error = found, late, error

    async def request(self, method: str, path: str, body: Any = None, **_: Any) -> Object:
        kind = path.rpartition("/")[2]
        if method == "GET" and kind == self._late:
            self._late = ""
            raise self._error
        if method == "GET" and kind in self._found:
            return {"metadata": {"resourceVersion": "1"}, "items": list(self._found[kind].values())}
        answer = await super().request(method, path, body)
        if method == "PATCH":
            self.patched.set()
        return answer

    async def watch(self, *_: Any) -> AsyncIterator[Object]:
        await asyncio.Event().wait()
        yield {}


@pytest.mark.parametrize("late", ["httproutes", "gateways", "gatewayclasses"])
@pytest.mark.parametrize(
    "error",
    [
        pytest.param(ApiError(403, "Forbidden", "not yet allowed"), id="refused"),
        pytest.param(KeyError("metadata"), id="unexpected"),
    ],
)
async def test_nothing_is_written_before_everything_is_listed(late: str, error: Exception) -> None:
    """An entry that left for want of its Gateway would come back with another time."""
    routed = route("r", "g", accepted="True")
    before = told(pool(), routed, has_picker=False)
    names = {"inferencepools": "pools", "httproutes": "routes", "gateways": "gateways"}
    found = statuses(ApiServer(), pool(*before), routed).found
    listed = {kind: found[what] for kind, what in (names | {"gatewayclasses": "classes"}).items()}
    server = Cluster(listed, late, error)
    running = asyncio.create_task(Statuses(server).run())  # type: ignore[arg-type]
    patched = asyncio.create_task(server.patched.wait())
    await asyncio.wait((running, patched), return_when=asyncio.FIRST_COMPLETED)
    running.cancel()
    await asyncio.wait((running,))
    patched.cancel()
    (_, body) = server.patches[0]
    assert words(body["status"]["parents"]) == {"g": GOOD}
    assert body["status"]["parents"][0]["conditions"][0]["lastTransitionTime"] == NOW
