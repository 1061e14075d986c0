"""What the operator writes: as often as something changes, and what others have changed of its own."""

from math import nan
from typing import Any

from api_server import until
from operator_process import Operator
from pool_objects import (
    becomes,
    condition,
    config_maps,
    deployments,
    engines,
    merge,
    pool,
    pools,
    quiet,
    run_pods,
)

from perilune_api.kube import APPLY, Client
from perilune_api.names import DUTY_LABEL

Object = dict[str, Any]


async def test_nothing_is_written_when_nothing_changes(
    client: Client, namespace: str, operator: Operator
) -> None:
    await client.request("POST", pools(namespace), pool())
    await becomes(client, pools(namespace, "/p"), lambda p: bool(condition(p, "Ready")))
    await run_pods(client, namespace, 2)
    await becomes(
        client,
        pools(namespace, "/p"),
        lambda p: (
            condition(p, "GatewayReady").get("status") == "True"
            and condition(p, "EnginesReady").get("status") == "True"
            and condition(p, "Reconciling").get("status") == "False"
        ),
    )
    rounds = await operator.metric("perilune_operator_rounds_total")
    writes, before = nan, {}
    for i in range(
        4
    ):  # each wakes the pool, none changes what should be; the first waits for the last events
        if i == 1:
            writes, before = await operator.writes(), await client.request("GET", pools(namespace, "/p"))
        note = {"metadata": {"annotations": {"note": str(i)}}}
        await merge(client, pools(namespace, "/p"), note)
        rounds = await until(
            lambda: operator.metric("perilune_operator_rounds_total"), lambda n, seen=rounds: n > seen
        )
    assert await operator.writes() == writes
    after = await client.request("GET", pools(namespace, "/p"))
    assert after["status"] == before["status"]


async def test_writes_are_as_many_as_changes(client: Client, namespace: str, operator: Operator) -> None:
    """Of four pools one is scaled: its Deployment is written once, and nothing of the others."""
    for name in "abcd":
        await client.request("POST", pools(namespace), pool(name, replicas=1))
    for name in "abcd":
        await becomes(
            client,
            deployments(namespace, f"/{name}-gateway"),
            lambda d: d["status"].get("unavailableReplicas") == 1,
        )
    before = await quiet(operator)
    scale = {"spec": {"replicas": 2}}
    await merge(client, pools(namespace, "/a/scale"), scale)
    await becomes(client, deployments(namespace, "/a-engine"), lambda d: d["status"].get("replicas") == 2)
    after = await quiet(operator)
    made = {kind: number - before.get(kind, 0) for kind, number in after.items()}
    assert {kind for kind, number in made.items() if number} - {"Event"} == {"Deployment", "InferencePool"}
    assert made.get("Event", 0) <= 1, "what changed, told once"
    assert made["Deployment"] == 1
    assert made["InferencePool"] <= 3, "status: wanted number, rollout, its end"


async def test_another_hand_is_undone(client: Client, namespace: str, operator: Operator) -> None:
    await client.request("POST", pools(namespace), pool())
    await becomes(client, deployments(namespace, "/p-gateway"))
    image = {"spec": {"template": {"spec": {"containers": [{"name": "gateway", "image": "evil"}]}}}}
    await client.request(
        "PATCH",
        deployments(namespace, "/p-gateway"),
        image,
        content_type="application/strategic-merge-patch+json",
    )
    await becomes(
        client,
        deployments(namespace, "/p-gateway"),
        lambda d: "evil" not in str(d["spec"]["template"]["spec"]),
    )
    await client.request("DELETE", config_maps(namespace, "/p-gateway"))
    await becomes(client, config_maps(namespace, "/p-gateway"))


async def test_a_late_write_of_an_older_plan_is_overwritten(
    client: Client, namespace: str, operator: Operator
) -> None:
    """As an operator would do that was stopped between its check and its write."""
    await client.request("POST", pools(namespace), pool(replicas=2))
    engine = await becomes(client, deployments(namespace, "/p-engine"))
    await becomes(client, pools(namespace, "/p"), lambda p: bool(condition(p, "Ready")))
    late = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": "p-engine",
            "labels": engine["metadata"]["labels"],
            "ownerReferences": engine["metadata"]["ownerReferences"],
            "annotations": {"perilune.dev/hash": "older"},
        },
        "spec": {**engine["spec"], "replicas": 9},
    }
    await client.request(
        "PATCH",
        deployments(namespace, "/p-engine"),
        late,
        params={"fieldManager": "perilune-operator", "force": "true"},
        content_type=APPLY,
    )
    await becomes(client, deployments(namespace, "/p-engine"), lambda d: d["spec"]["replicas"] == 2)


async def test_engines_from_before_roles_were_switched_get_their_duty_as_a_label(
    client: Client, namespace: str, operator: Operator
) -> None:
    """The Service selects them by it from then on, so they may not be without it for a moment."""
    split = pool(replicas=2, prefillReplicas=1, mooncake={"transfer": "handoff"})
    await client.request("POST", pools(namespace), split)
    before = await until(lambda: engines(client, namespace), lambda found: len(found) == 2)
    await merge(client, pools(namespace, "/p"), {"spec": {"roleSwitching": {}}})

    def labelled(found: list[Object]) -> bool:
        labels = {pod["metadata"]["name"]: pod["metadata"]["labels"] for pod in found}
        return all(labels[pod["metadata"]["name"]].get(DUTY_LABEL) == "serve" for pod in before)

    await until(lambda: engines(client, namespace), labelled)
