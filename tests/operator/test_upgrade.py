"""An upgrade on a real API server: operators of two versions, and a CRD that is a version ahead or behind."""

import asyncio
import copy
import signal
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import fast_yaml
import pytest
from api_server import ROOT, ApiServer, new_namespace, program, until
from operator_process import Operator
from pool_objects import becomes, condition, config_maps, deployments, merge, pool, pools
from waiting import HANG

from perilune_api.inference_pool.checks import convert
from perilune_api.kube import APPLY, ApiError, Client
from perilune_api.pool import parse

Object = dict[str, Any]
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/inferencepools.perilune.dev"


def upgraded(server: ApiServer, namespace: str, name: str, *flags: str) -> Operator:
    """Return an operator of another version, which has other default images."""
    return Operator(server, namespace, name, flags=("--simulated-image=sim:2", "--image=perilune:2", *flags))


async def image(client: Client, namespace: str, name: str) -> str:
    found = await client.request("GET", deployments(namespace, f"/{name}"))
    return str(found["spec"]["template"]["spec"]["containers"][0]["image"])


async def test_a_new_operator_rolls_pools_when_asked_and_one_after_the_other(
    client: Client, namespace: str, operator: Operator, api_server: ApiServer
) -> None:
    names = ("a", "b", "c")
    for name in names:
        await client.request("POST", pools(namespace), pool(name))
    for name in names:
        await becomes(client, pools(namespace, f"/{name}"), lambda p: bool(condition(p, "Ready")))
    before = {name: await client.request("GET", deployments(namespace, f"/{name}-engine")) for name in names}
    operator.stop()

    newer = upgraded(api_server, namespace, "two", "--pools-at-once=1")
    try:
        for name in names:
            await becomes(client, pools(namespace, f"/{name}"), lambda p: "availableRevision" in p["status"])
            now = await client.request("GET", deployments(namespace, f"/{name}-engine"))
            assert now["metadata"]["generation"] == before[name]["metadata"]["generation"]

        for name in ("a", "b"):
            await merge(client, pools(namespace, f"/{name}"), {"spec": {"rollout": {"revision": "latest"}}})

        async def rolled() -> list[str]:
            return [name for name in names if await image(client, namespace, f"{name}-engine") == "sim:2"]

        (first,) = await until(rolled, lambda found: len(found) == 1)
        (second,) = {"a", "b"} - {first}
        body = await becomes(
            client, pools(namespace, f"/{second}"), lambda p: condition(p, "Reconciling")["status"] == "True"
        )
        assert condition(body, "Reconciling")["reason"] == "WaitingForTurn"
        for part in ("engine", "gateway"):  # pods never run here: say that the first one's rollout is done
            await finish_rollout(client, namespace, f"{first}-{part}")
        await until(rolled, lambda found: set(found) == {"a", "b"})
        assert await image(client, namespace, "c-engine") != "sim:2"  # nobody asked
    finally:
        newer.stop(signal.SIGKILL)


async def finish_rollout(client: Client, namespace: str, name: str) -> None:
    """Do a kubelet's part: the pods of the workload run."""
    component = "engine" if name.endswith("-engine") else "gateway"
    owner = name.removesuffix(f"-{component}")
    selector = f"perilune.dev/pool={owner},perilune.dev/component={component}"
    where = f"/api/v1/namespaces/{namespace}/pods"

    async def run() -> bool:
        listed = await client.request("GET", where, params={"labelSelector": selector})
        for item in listed["items"]:
            status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
            await merge(client, f"{where}/{item['metadata']['name']}/status", {"status": status})
            if "deletionTimestamp" in item["metadata"]:
                await client.request(
                    "DELETE", f"{where}/{item['metadata']['name']}", {"gracePeriodSeconds": 0}
                )
        found = (await client.request("GET", deployments(namespace, f"/{name}")))["status"]
        return bool(
            found.get("updatedReplicas", 0) == found.get("replicas", 0) == found.get("availableReplicas")
        )

    await until(run, bool)


def newer_crd() -> Object:
    """Ours with a block that an operator of this version does not know, filled in by default."""
    crd: Object = fast_yaml.load((ROOT / "crds/inferencepools.perilune.dev.yaml").read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    wings = {"type": "object", "default": {"number": 2}, "properties": {"number": {"type": "integer"}}}
    schema["spec"]["properties"]["wings"] = wings
    schema["spec"]["properties"]["engine"]["properties"]["pedals"] = {"type": "integer", "default": 3}
    schema["status"]["properties"]["altitude"] = {"type": "integer"}
    return crd


def older_crd() -> Object:
    """Ours as it was before: it lists the conditions that it takes, and has no revision."""
    crd: Object = fast_yaml.load((ROOT / "crds/inferencepools.perilune.dev.yaml").read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    kinds = schema["status"]["properties"]["conditions"]["items"]["properties"]["type"]
    kinds["enum"] = ["Accepted", "EnginesReady", "GatewayReady", "RouteProgrammed", "Draining", "Ready"]
    for name in ("revision", "availableRevision"):
        del schema["status"]["properties"][name]
    del schema["spec"]["properties"]["rollout"]["properties"]["revision"]
    return crd


async def taken(client: Client) -> Object:
    """Return the spec that the API server makes of fields that other CRDs refuse, drop or add to."""
    body = pool("probe", routing={"policy": {"name": "sticky"}}, rollout={"revision": "latest"})
    made = await client.request("POST", pools("default"), body, params={"dryRun": "All"})
    return dict(made["spec"])


@pytest.fixture
async def other_crd(own_server: ApiServer) -> AsyncIterator[Client]:
    """Yield a client. Afterwards the API server has our CRD again, as the tests that follow need it."""
    made = Client(own_server.access)
    ours, before = await made.request("GET", CRD), await taken(made)
    yield made
    now = await made.request("GET", CRD)
    await made.request("PUT", CRD, {**ours, "metadata": now["metadata"]})
    await until(lambda: taken(made), lambda spec: spec == before)
    await made.close()


def crd_of_0_1_0() -> Object:
    """Ours, with the policy as the text that it was, which its default writes into every pool."""
    crd: Object = fast_yaml.load((ROOT / "crds/inferencepools.perilune.dev.yaml").read_text())
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    routing = schema["spec"]["properties"]["routing"]
    routing["properties"]["policy"] = {"type": "string", "default": "ear"}
    routing["default"]["policy"] = "ear"
    return crd


async def replace_crd(client: Client, crd: Object, *, takes: Object) -> None:
    """Give the API server this CRD, and wait until it takes a pool with this policy."""
    kept = await client.request("GET", CRD)
    await client.request("PUT", CRD, {**copy.deepcopy(crd), "metadata": kept["metadata"]})

    async def made() -> Object:
        body, dry = pool("probe", routing={"policy": takes}), {"dryRun": "All"}
        return await client.request("POST", pools("default"), body, params=dry)

    await until(made, lambda found: found["spec"]["routing"]["policy"] == takes)


async def test_a_pool_that_0_1_0_stored_can_be_changed(other_crd: Client) -> None:
    """Its policy is a text, which today's CRD takes only where it is already."""
    client, ours = other_crd, fast_yaml.load((ROOT / "crds/inferencepools.perilune.dev.yaml").read_text())
    await replace_crd(client, crd_of_0_1_0(), takes="sticky")
    namespace = await new_namespace(client)
    await client.request("POST", pools(namespace), pool())
    await replace_crd(client, ours, takes={"name": "sticky"})
    where = pools(namespace, "/p")
    await merge(client, where, {"metadata": {"finalizers": ["example.com/kept"]}})
    await merge(client, where, {"metadata": {"finalizers": None}, "spec": {"engine": {"startupSeconds": 9}}})
    await merge(client, f"{where}/status", {"status": {"ready": "0/1"}})
    await merge(client, f"{where}/scale", {"spec": {"replicas": 3}})
    found = await client.request("GET", where)
    assert (found["spec"]["replicas"], found["spec"]["routing"]["policy"]) == (3, "ear")
    assert convert(found["spec"]).routing.policy.name == "ear"
    whole = {"apiVersion": found["apiVersion"], "kind": found["kind"], "metadata": {"name": "p"}}
    applied, by = {**whole, "spec": {"replicas": 2}}, {"fieldManager": "someone", "force": "true"}
    with pytest.raises(ApiError, match="expected map"):  # as docs/operations.md says
        await client.request("PATCH", where, applied, content_type=APPLY, params=by)
    with pytest.raises(ApiError, match="policy"):
        await merge(client, where, {"spec": {"routing": {"policy": "sticky"}}})
    with pytest.raises(ApiError, match="Unsupported value"):
        await merge(client, where, {"spec": {"routing": {"policy": {"name": "fastest"}}}})
    await merge(client, where, {"spec": {"routing": {"policy": {"name": "sticky"}}}})
    await client.request("PATCH", where, applied, content_type=APPLY, params=by)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "crd", [pytest.param(newer_crd(), id="newer"), pytest.param(older_crd(), id="older")]
)
async def test_an_operator_works_with_a_crd_of_the_version_beside_it(
    other_crd: Client, own_server: ApiServer, crd: Object
) -> None:
    client = other_crd
    kept, ours = await client.request("GET", CRD), await taken(client)
    await client.request("PUT", CRD, {**copy.deepcopy(crd), "metadata": kept["metadata"]})
    await until(lambda: taken(client), lambda spec: spec != ours)
    namespace = await new_namespace(client)
    running = Operator(own_server, namespace)
    try:
        body = await client.request("POST", pools(namespace), pool(replicas=2))
        if "wings" in body["spec"]:
            assert (body["spec"]["wings"], body["spec"]["engine"]["pedals"]) == ({"number": 2}, 3)
            await merge(client, pools(namespace, "/p/status"), {"status": {"altitude": 7}})
        await becomes(client, deployments(namespace, "/p-engine"), lambda d: d["spec"]["replicas"] == 2)
        told = await becomes(client, pools(namespace, "/p"), lambda p: condition(p, "Accepted") != {})
        assert condition(told, "Accepted")["status"] == "True"
        assert (condition(told, "Ready")["status"], told["status"]["ready"]) == ("False", "0/2")
        await merge(client, pools(namespace, "/p"), {"spec": {"engine": {"args": ["--listen=x"]}}})
        refused = await becomes(
            client, pools(namespace, "/p"), lambda p: condition(p, "Accepted")["status"] == "False"
        )
        assert "$.spec.engine.args[0]" in condition(refused, "Accepted")["message"]
    finally:
        running.stop(signal.SIGKILL)


async def test_a_gateway_of_the_version_before_reads_what_is_written_for_it(
    client: Client, namespace: str, operator: Operator
) -> None:
    """The document names nothing that its user did not name, so an older gateway, which refuses unknown
    fields, finds none."""
    await client.request("POST", pools(namespace), pool())
    found = await becomes(client, config_maps(namespace, "/p-gateway"))
    document = fast_yaml.load(found["data"]["pool.yaml"])
    assert set(document["spec"]) <= {"model", "topology"}
    assert parse(found["data"]["pool.yaml"]).spec.model.name == "m"


async def test_kubectl_wait_and_the_columns_tell_the_truth(
    client: Client, namespace: str, operator: Operator, api_server: ApiServer
) -> None:
    kubectl = [program("kubectl"), f"--kubeconfig={api_server.kubeconfig()}", f"--namespace={namespace}"]

    async def run(*args: str) -> subprocess.CompletedProcess[str]:
        command = [*map(str, kubectl), f"--cache-dir={api_server.folder / 'kubectl'}", *args]
        return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)

    def row(text: str) -> dict[str, str]:
        """Columns by their place, since a cell may be empty."""
        head, line = text.splitlines()
        names = head.split()
        starts = [head.index(name) for name in names]
        ends = [*starts[1:], None]
        return {n: line[a:b].strip() for n, a, b in zip(names, starts, ends, strict=True)}

    await client.request("POST", pools(namespace), pool(gateway={"mode": "none"}))
    for part in ("engine", "gateway"):
        await finish_rollout(client, namespace, f"p-{part}")
    waited = await run("wait", "--for=condition=Ready", "ipool/p", f"--timeout={HANG:.0f}s")
    assert waited.returncode == 0, waited.stderr
    columns = row((await run("get", "ipool", "p")).stdout)
    assert (columns["ENDPOINTS"], columns["READY"], columns["STALLED"]) == ("1/1", "True", "")

    await merge(client, pools(namespace, "/p"), {"spec": {"engine": {"args": ["--listen=x"]}}})
    stalled = await run("wait", "--for=condition=Stalled", "ipool/p", f"--timeout={HANG:.0f}s")
    assert stalled.returncode == 0, stalled.stderr
    ready = await run("wait", "--for=condition=Ready", "ipool/p", "--timeout=1s")
    assert ready.returncode != 0  # it is of the generation before
    columns = row((await run("get", "ipool", "p")).stdout)
    assert (columns["READY"], columns["STATUS"], columns["STALLED"]) == ("True", "Serving", "Invalid")

    await client.request(
        "POST", pools(namespace), pool("q", engine={"kind": "simulated", "args": ["--name=x"]})
    )
    assert (await run("wait", "--for=condition=Stalled", "ipool/q", f"--timeout={HANG:.0f}s")).returncode == 0
    columns = row((await run("get", "ipool", "q")).stdout)
    assert (columns["READY"], columns["STATUS"], columns["STALLED"]) == ("False", "Invalid", "Invalid")
