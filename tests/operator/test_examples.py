"""Every file of examples/ is one that `kubectl apply` takes, and that the operator carries out."""

import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import fast_yaml
import pytest
from api_server import ApiServer, program

from perilune_api import kube
from perilune_api.inference_pool.checks import convert
from perilune_operator.observe.facts import Observed
from perilune_operator.plan import plan
from perilune_operator.render.objects import Defaults

Object = dict[str, Any]
FOLDER = Path(__file__).parents[2] / "examples"
FILES = sorted(file.name for file in FOLDER.glob("*.yaml"))
KINDS = frozenset(
    {
        "gateway.networking.k8s.io/HTTPRoute",
        "gateway.envoyproxy.io/EnvoyExtensionPolicy",
        "leaderworkerset.x-k8s.io/LeaderWorkerSet",
        "cert-manager.io/Certificate",
    }
)


def documents(name: str) -> list[Object]:
    return list(fast_yaml.load_all((FOLDER / name).read_text()))


def test_kubectl_applies_them_beside_each_other(
    routed_server: ApiServer, routed: tuple[kube.Client, str]
) -> None:
    """Into one namespace, validated by the server as strictly as kubectl does; none changes another's."""
    command = [
        *(str(program("kubectl")), f"--kubeconfig={routed_server.kubeconfig()}"),
        *(f"--namespace={routed[1]}", f"--cache-dir={routed_server.folder / 'kubectl'}", "apply"),
        *(f"--filename={FOLDER / name}" for name in FILES),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    assert len(said) == sum(len(documents(name)) for name in FILES), done.stdout
    made_before = {
        "gatewayclass.gateway.networking.k8s.io/eg"
    }  # it is in no namespace, and others need it, too
    assert {name for name, end in said.items() if end != "created"} <= made_before, done.stdout


def test_no_two_of_them_have_an_object_of_one_name() -> None:
    named = Counter((d["kind"], d["metadata"]["name"]) for name in FILES for d in documents(name))
    assert [which for which, times in named.items() if times > 1] == []


@pytest.mark.parametrize("name", [name for name in FILES if name not in ("gateway.yaml", "picker.yaml")])
def test_the_operator_carries_it_out(name: str) -> None:
    pools = [document for document in documents(name) if document["kind"] == "InferencePool"]
    assert pools
    for pool in pools:
        observed = Observed(uid="u", generation=1, kinds=KINDS)
        made = plan(pool["metadata"]["name"], "ns", convert(pool["spec"]), observed, 0.0, Defaults())
        assert made.objects, made.status.conditions
        kinds = {obj["kind"] for obj in made.objects}
        own_route = set() if pool["spec"].get("gateway", {}).get("servedBy") else {"HTTPRoute"}
        assert kinds >= {"NetworkPolicy", *own_route}
        assert kinds & {"Deployment", "LeaderWorkerSet"}


def test_there_is_one_for_everything_that_takes_more_than_a_field() -> None:
    assert {"hf-token", "pvc-cache", "lora", "store", "rdma", "tls", "keda", "multi-node", "two-models"} <= {
        name.removesuffix(".yaml") for name in FILES
    }


def test_a_policy_of_ones_own_is_on_the_path_of_the_gateways_python() -> None:
    (pool,) = documents("own-policy.yaml")
    made = plan(
        "own-policy",
        "ns",
        convert(pool["spec"]),
        Observed(uid="u", generation=1, kinds=KINDS),
        0.0,
        Defaults(),
    )
    (pod,) = [
        obj["spec"]["template"]["spec"]
        for obj in made.objects
        if obj["kind"] == "Deployment" and obj["metadata"]["name"] == "own-policy-gateway"
    ]
    (container,) = pod["containers"]
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    wheel = Path(variables["PYTHONPATH"])
    assert wheel.suffix == ".whl"
    assert volumes[mounts[str(wheel.parent)]]["emptyDir"] == {}
    (copies,) = pod["initContainers"]
    assert copies["command"] == ["cp", f"/{wheel.name}", f"{wheel.parent}/"]
    assert [mount["mountPath"] for mount in copies["volumeMounts"]] == [str(wheel.parent)]
    assert {"POD_NAME"} <= variables.keys()
