"""What only the API server knows of a spec, and which field it blames: asked of a real one."""

from typing import Any

import pytest
from appliers import applier

from perilune_api import kube
from perilune_api.inference_pool.checks import convert
from perilune_api.kube import APPLY, ApiError
from perilune_operator.apply import refusal
from perilune_operator.apply.ownership import HASH, Owner, digest
from perilune_operator.kinds import path
from perilune_operator.observe.facts import Object, Observed, key
from perilune_operator.plan import plan
from perilune_operator.render.objects import Defaults

MODEL: Object = {"model": {"name": "m"}}


def rendered(namespace: str, spec: Object) -> list[Object]:
    made = plan(
        "p", namespace, convert(MODEL | spec), Observed(uid="u", generation=1), 0.0, Defaults(gateways=1)
    )
    assert made.objects is not None, made.status.conditions[0].message
    return list(made.objects)


def engine_of(objects: list[Object]) -> Object:
    (found,) = (o for o in objects if (o["kind"], o["metadata"]["name"]) == ("Deployment", "p-engine"))
    return found


def engine(**pod: Any) -> Object:
    return {"engine": {"podTemplate": {"spec": pod}}}


def container(**fields: Any) -> Object:
    return engine(containers=[{"name": "side", "image": "i"}, {"name": "engine", **fields}])


TEMPLATE = "$.spec.engine.podTemplate.spec"
BAD: list[Any] = [
    pytest.param(
        {"gateway": {"clients": [{"podSelector": {}}, {"podSelector": {"matchLabel": {}}}]}},
        "field not declared in schema - at `$.spec.gateway.clients[1].podSelector.matchLabel`",
        id="a peer that no network policy knows",
    ),
    pytest.param(engine(foo=1), f"field not declared in schema - at `{TEMPLATE}.foo`", id="no such field"),
    pytest.param(
        engine(nodeSelector="gpu"), f"expected map - at `{TEMPLATE}.nodeSelector`", id="text for fields"
    ),
    pytest.param(
        container(image=5),
        f"expected string - at `{TEMPLATE}.containers[1].image`",
        id="number for text, in a container that has another place with us",
    ),
    pytest.param(
        engine(containers=[{"name": "side"}]),
        f"Required value - at `{TEMPLATE}.containers[0].image`",
        id="what a container of the user's own lacks",
    ),
    pytest.param(
        engine(containers=[{"name": "Side_", "image": "i"}]),
        f"- at `{TEMPLATE}.containers[0].name`",
        id="no name for a container",
    ),
    pytest.param(
        container(volumeMounts=[{"name": "nowhere", "mountPath": "/n"}]),
        f'Not found: "nowhere" - at `{TEMPLATE}.containers[1].volumeMounts[0].name`',
        id="a mount of no volume",
    ),
    pytest.param(
        container(ports=[{"name": "more", "containerPort": 99_999}]),
        f"must be between 1 and 65535, inclusive - at `{TEMPLATE}.containers[1].ports[0].containerPort`",
        id="no port",
    ),
    pytest.param(
        engine(volumes=[{"name": "tmp", "emptyDir": {}, "hostPath": {"path": "/"}}]),
        f"may not specify more than 1 volume type - at `{TEMPLATE}.volumes[0].hostPath`",
        id="a volume from two sources",
    ),
    pytest.param(
        engine(restartPolicy="Never"),
        f'Unsupported value: "Never": supported values: "Always" - at `{TEMPLATE}.restartPolicy`',
        id="an engine that ends",
    ),
    pytest.param(
        engine(tolerations=[{"operator": "Maybe"}]), f"`{TEMPLATE}.tolerations[0].operator`", id="toleration"
    ),
    pytest.param(
        {"engine": {"resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}}},
        "must be less than or equal to cpu limit of 1 - at `$.spec.engine.resources.requests`",
        id="more asked for than allowed",
    ),
    pytest.param(
        {"engine": {"resources": {"requests": {"gpu": "1"}}}},
        "must be a standard resource type or fully qualified - at `$.spec.engine.resources.requests.gpu`",
        id="no such resource",
    ),
    pytest.param(
        container(resources={"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}),
        f"cpu limit of 1 - at `{TEMPLATE}.containers[1].resources.requests`",
        id="the same in a podTemplate",
    ),
    pytest.param(
        {"engine": {"env": [{"name": "A"}, {"name": "B", "valueFrom": {"secretKeyRef": {"nme": "s"}}}]}},
        "field not declared in schema - at `$.spec.engine.env[1].valueFrom.secretKeyRef.nme`",
        id="a typo in a reference",
    ),
    pytest.param(
        {"engine": {"env": [{"name": "B", "valueFrom": {"secretKeyRef": {"name": "s"}}}]}},
        "Required value - at `$.spec.engine.env[0].valueFrom.secretKeyRef.key`",
        id="half a reference",
    ),
    pytest.param(
        {"engine": {"env": [{"name": "A=B", "value": "1"}]}},
        "- at `$.spec.engine.env[0].name`",
        id="no name for a variable",
    ),
    pytest.param(
        {"rollout": {"maxUnavailable": "200%"}},
        "must not be greater than 100% - at `$.spec.rollout.maxUnavailable`",
        id="more than all",
    ),
    pytest.param(
        {"gateway": {"podTemplate": {"spec": {"nodeName": 5}}}},
        "expected string - at `$.spec.gateway.podTemplate.spec.nodeName`",
        id="the gateway's",
    ),
    pytest.param(
        {"gateway": {"resources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "1Gi"}}}},
        "- at `$.spec.gateway.resources.requests`",
        id="a limit below what is asked for",
    ),
    pytest.param(
        {
            "mooncake": {
                "store": {"enabled": True},
                "master": {"podTemplate": {"spec": {"containers": [{"name": "master", "stdin": "yes"}]}}},
            }
        },
        "expected boolean - at `$.spec.mooncake.master.podTemplate.spec.containers[0].stdin`",
        id="the master's",
    ),
    pytest.param(
        {"scaling": {"minReplicas": 1, "maxReplicas": 2, "metric": "a/b"}},
        "- at `$.spec.scaling.metric`",
        id="no metric",
    ),
]


@pytest.mark.parametrize(("spec", "words"), BAD)
async def test_a_refusal_names_the_pools_field(
    client: kube.Client, namespace: str, spec: Object, words: str
) -> None:
    under_test = applier(client, Owner(namespace, "p", "u"))
    foreign, refused = await under_test.look(rendered(namespace, spec), {})
    assert foreign == frozenset()
    assert words in refusal.message(refused, MODEL | spec)
    listed = await client.request("GET", f"/apis/apps/v1/namespaces/{namespace}/deployments")
    assert listed["items"] == []


async def test_what_is_taken_is_asked_once(client: kube.Client, namespace: str) -> None:
    """And never for another number of replicas."""
    asked = []

    class Counting:
        async def request(self, method: str, where: str, *args: Any, **more: Any) -> Object:
            if method == "PATCH":
                asked.append("/".join(where.rsplit("/", 2)[1:]))
            return await client.request(method, where, *args, **more)

    counted = applier(Counting(), Owner(namespace, "p", "u"))
    for spec in ({"replicas": 1}, {"replicas": 1}, {"replicas": 7}):
        assert await counted.look(rendered(namespace, spec), {}) == (frozenset(), ())
    kinds = ("deployments", "networkpolicies")
    assert sorted(asked) == [f"{kind}/p-{part}" for kind in kinds for part in ("engine", "gateway")]
    await counted.look(rendered(namespace, {"engine": {"image": "other"}}), {})
    assert asked[4:] == ["deployments/p-engine"]


async def test_an_object_that_is_as_wanted_is_not_asked_about() -> None:
    """As an operator finds it that has just begun."""
    objects = rendered("ns", {})
    there = {key(o): {"metadata": {**o["metadata"], "annotations": {HASH: digest(o)}}} for o in objects}

    class Silent:
        async def request(self, *args: Any, **more: Any) -> Object:
            raise AssertionError(args)

    assert await applier(Silent(), Owner("ns", "p", "u")).look(objects, there) == (frozenset(), ())


async def test_somebody_elses_object_is_not_the_specs_fault(client: kube.Client, namespace: str) -> None:
    """A Deployment of that name with a selector of its own: applying will say so."""
    ours = engine_of(rendered(namespace, {}))
    where = path(ours)
    theirs = {**ours, "metadata": {"name": "p-engine", "namespace": namespace}}
    labels = {"app": "mine"}
    template = {**ours["spec"]["template"], "metadata": {"labels": labels}}
    theirs["spec"] = {**ours["spec"], "selector": {"matchLabels": labels}, "template": template}
    await client.request("PATCH", where, theirs, params={"fieldManager": "them"}, content_type=APPLY)
    under_test = applier(client, Owner(namespace, "p", "u"))
    assert await under_test.look([ours], {}) == ({key(ours)}, ())


async def test_an_object_that_could_not_be_read_is_not_written_over() -> None:
    """It may be somebody else's."""

    class Busy:
        async def request(self, method: str, *args: Any, **more: Any) -> Object:
            if method == "GET":
                raise ApiError(429, "TooManyRequests", "busy")
            return {}

    with pytest.raises(ApiError, match="busy"):
        await applier(Busy(), Owner("ns", "p", "u")).look(rendered("ns", {}), {})


@pytest.mark.parametrize(
    ("error", "found"),
    [
        pytest.param(ApiError(403, "Forbidden", "no", (("a", "b"),)), (), id="a right"),
        pytest.param(ApiError(500, "", "etcd is slow"), (), id="the server's own trouble"),
        pytest.param(ApiError(422, "Invalid", "", (("spec.a", "bad"),)), (("spec.a", "bad"),), id="invalid"),
        pytest.param(
            ApiError(
                500,
                "",
                "failed to create typed patch object (n/p; apps/v1, Kind=Deployment): errors:\n"
                '  .spec.a: expected map, got &{1}\n  .spec.l[name="x"].b: field not declared in schema',
            ),
            ((".spec.a", "expected map"), ('.spec.l[name="x"].b', "field not declared in schema")),
            id="several",
        ),
        pytest.param(
            ApiError(
                500,
                "",
                "failed to convert new object (n/p; apps/v1, Kind=Deployment) to proper version: unable to "
                "convert unstructured object to apps/v1, Kind=Deployment: quantities must match",
            ),
            (("", "quantities must match"),),
            id="no field",
        ),
    ],
)
def test_a_refusal_names_fields_and_messages(error: ApiError, found: tuple[tuple[str, str], ...]) -> None:
    assert refusal.causes(error) == found


@pytest.mark.parametrize(
    ("field", "spec", "path"),
    [
        pytest.param(
            "spec.template.spec.containers[0].livenessProbe.periodSeconds",
            {},
            "Deployment p-engine: spec.template.spec.containers[0].livenessProbe.periodSeconds",
            id="ours alone",
        ),
        pytest.param("", {}, "Deployment p-engine", id="no field"),
        pytest.param(
            ".spec.template.metadata.labels.app.kubernetes.io/name",
            {"engine": {"podTemplate": {"metadata": {"labels": {"app.kubernetes.io/name": "x"}}}}},
            "$.spec.engine.podTemplate.metadata.labels.app.kubernetes.io/name",
            id="a key with dots",
        ),
        pytest.param(
            "spec.template.spec.topologySpreadConstraints[0].topologyKey",
            {"topology": {"placement": [{"level": "rack", "mode": "spread"}]}},
            "$.spec.topology.placement",
            id="placement",
        ),
    ],
)
def test_whose_field_it_is(field: str, spec: Object, path: str) -> None:
    assert refusal.blame(engine_of(rendered("ns", spec)), MODEL | spec, field) == path


async def test_a_mistake_in_two_containers_is_told_once(client: kube.Client, namespace: str) -> None:
    """The one that waits for the store asks for what the engine asks for."""
    spec: Object = {"engine": {"resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}}}
    spec["mooncake"] = {"store": {"enabled": True}}
    objects = [engine_of(rendered(namespace, spec))]
    _, refused = await applier(client, Owner(namespace, "p", "u")).look(objects, {})
    assert len(refused[0].causes) == 2
    where = "must be less than or equal to cpu limit of 1 - at `$.spec.engine.resources.requests`"
    assert refusal.message(refused, MODEL | spec).endswith(where)
    assert refusal.message(refused, MODEL | spec).count("$.spec") == 1


def test_a_long_list_is_cut() -> None:
    obj = engine_of(rendered("ns", {}))
    many = refusal.Refusal(obj, tuple((f"spec.{i}", "bad") for i in range(9)))
    assert refusal.message([many, many], MODEL).endswith("bad - at `Deployment p-engine: spec.4`; and 4 more")
