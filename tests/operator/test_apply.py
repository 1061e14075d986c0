"""What the applier does when the cluster is not, by the time it writes, what the plan was made from."""

import pytest
from appliers import applier, plan_of

from perilune_api import kube
from perilune_operator.apply.ownership import Owner
from perilune_operator.observe.facts import Object, key


async def test_a_number_read_is_not_written_over_a_newer_one(client: kube.Client, namespace: str) -> None:
    """On the way to autoscaling: replicas that we read hold only for the version they were read from."""
    owner = await client.request(
        "POST", f"/api/v1/namespaces/{namespace}/configmaps", {"metadata": {"name": "owner"}}
    )
    pool = Owner(namespace, "p", owner["metadata"]["uid"])
    under_test = applier(client, pool)
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments/p-gateway"

    async def apply(replicas: int, image: str, live: Object | None) -> None:
        wanted = _deployment(namespace, pool.uid, replicas, image)
        if live is not None:
            wanted["metadata"]["resourceVersion"] = live["metadata"]["resourceVersion"]
        children = {} if live is None else {key(live): live}
        applied = await under_test.apply(plan_of([wanted]), children)
        assert applied.errors == ()

    await apply(3, "a", None)
    read = await client.request("GET", path)
    await client.request("PATCH", f"{path}/scale", {"spec": {"replicas": 5}}, content_type=kube.MERGE)
    await apply(3, "b", read)
    now = await client.request("GET", path)
    assert (now["spec"]["replicas"], _image(now)) == (5, "a")

    while _image(now) != "b":  # a controller may write between our reading and our writing, too
        await apply(5, "b", now)
        now = await client.request("GET", path)
    assert now["spec"]["replicas"] == 5


async def test_what_several_pools_own_goes_with_the_last(client: kube.Client, namespace: str) -> None:
    """Even if that one has not seen the other go."""
    where = f"/api/v1/namespaces/{namespace}/configmaps"

    async def pool(name: str) -> tuple[Owner, Object]:
        """Return a pool (a ConfigMap stands for it), and what it wants to share."""
        made = await client.request("POST", where, {"metadata": {"name": name}})
        uid = made["metadata"]["uid"]
        reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": name, "uid": uid}
        meta = {"name": "shared", "namespace": namespace, "ownerReferences": [reference]}
        wanted = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"a": "b"}}
        return Owner(namespace, name, uid), wanted

    async def shared() -> Object:
        return {**await client.request("GET", f"{where}/shared"), "apiVersion": "v1", "kind": "ConfigMap"}

    (p, by_p), (q, by_q) = await pool("p"), await pool("q")
    of_p, of_q = applier(client, p), applier(client, q)
    assert (await of_p.apply(plan_of([by_p]), {})).errors == ()
    assert (await of_q.apply(plan_of([by_q]), {})).errors == ()
    both = await shared()
    assert {o["uid"] for o in both["metadata"]["ownerReferences"]} == {p.uid, q.uid}
    await of_p.apply(plan_of([]), {key(both): both})
    left = await shared()
    assert ([o["uid"] for o in left["metadata"]["ownerReferences"]], left["data"]) == ([q.uid], {"a": "b"})
    await of_p.apply(plan_of([]), {key(left): left})
    assert await shared() == left, "nothing of p's is there any more"
    await of_q.apply(plan_of([]), {key(both): both})
    with pytest.raises(kube.ApiError, match="404"):
        await shared()


def _image(deployment: Object) -> str:
    return str(deployment["spec"]["template"]["spec"]["containers"][0]["image"])


def _deployment(namespace: str, owner: str, replicas: int, image: str) -> Object:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": "p-gateway",
            "namespace": namespace,
            "ownerReferences": [
                {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner, "controller": True}
            ],
        },
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"a": "b"}},
            "template": {
                "metadata": {"labels": {"a": "b"}},
                "spec": {"containers": [{"name": "c", "image": image}]},
            },
        },
    }
