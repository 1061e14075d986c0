"""The inference extension's own conformance suite, with our gateways or the extension's own as its endpoint
pickers.

Steps: the suite's base manifests, read from its Go module → the same objects, but each picker is our gateway
or the extension's picker 1.5 (`epp`), asked over TLS, and the model servers' image is one that was made here
of the same echo server → for our gateways each pool's document, once its pods have addresses → the suite as a
program (`../conformance`), which applies no base manifests of its own.
"""

import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from perilune_api.names import POOL_DOCUMENT
from perilune_api.pool import EndpointSpec, Metadata, Model, Pool, Routing, Spec, dump
from testbed import epp, images, perilune_image, programs
from testbed.kube import Kube
from testbed.paths import GO_MODULES
from testbed.pki import server_secret

CLASS = "conformance"
NAMESPACES = ("inference-conformance-infra", "inference-conformance-app-backend")
"""The suite's namespaces: the first has its Gateways, the second everything else."""
ECHO = "perilune.test/echo-basic:1"
_BASE = GO_MODULES / "@".join(programs.CONFORMANCE_SUITE) / "resources" / "base.yaml"
_TLS = "picker-tls"
_FOLDER = "/etc/perilune"
_CHOOSES = """
apiVersion: inference.networking.x-k8s.io/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: header-based-testing-filter}
- {type: destination-endpoint-served-verifier}
- {type: random-picker}
- {type: single-profile-handler}
schedulingProfiles:
- name: default
  plugins: [{pluginRef: header-based-testing-filter}, {pluginRef: random-picker}]
"""
"""As the suite's tests want it, the extension's picker obeys the header that names endpoints, and answers
which one Envoy says has served."""
_RESULT = re.compile(r"^    --- (PASS|FAIL|SKIP): Conformance/(\w+) ", re.MULTILINE)

Object = dict[str, Any]


def archive() -> Path:
    """Return an OCI archive of the suite's echo server. Build it and the suite if they are missing."""
    programs.module(*programs.CONFORMANCE_SUITE)
    programs.ensure(("echo-basic", "conformance"))
    return images.archive(ECHO, programs.path("echo-basic"), "echo-basic")


def prepare(kube: Kube, folder: Path, *, their_pickers: bool = False) -> None:
    """Wait until all that the suite expects runs. `folder`: where certificates may be written.
    `their_pickers`: the extension's own instead of our gateways."""
    text = _BASE.read_text().replace("{GATEWAY_CLASS_NAME}", CLASS)
    objects: list[Object] = [document for document in yaml.safe_load_all(text) if document]
    pools = {o["metadata"]["name"]: o for o in objects if o["kind"] == "InferencePool"}
    pickers = {pool: o for o in objects if (pool := _picks_for(o))}
    others = [o for o in objects if o not in pickers.values()]
    servers = [o for o in others if o["kind"] == "Deployment"]
    for container in (c for o in servers for c in o["spec"]["template"]["spec"]["containers"]):
        container |= {"image": ECHO, "imagePullPolicy": "Never"}
    kube.apply(_gateway_class(), *others, _pod())
    _ready(kube, servers)
    if their_pickers:
        for picker in pickers.values():
            _be_theirs(picker["spec"]["template"]["spec"])
        kube.apply(*_their_rights(), *pickers.values())
        _ready(kube, pickers.values())
        return
    documents = [_document(kube, pools[name]) for name in pickers]
    for name, picker in pickers.items():
        picker["spec"]["template"]["spec"] = _gateway(name)
    secret = server_secret(folder / "pki", _TLS, NAMESPACES[1], f"*.{NAMESPACES[1]}.svc")
    kube.apply(secret, *documents, *pickers.values())
    _ready(kube, pickers.values())


def remove(kube: Kube) -> None:
    kube.ctl("delete", "namespace", *NAMESPACES, "--ignore-not-found", "--timeout=120s", timeout_s=130)
    kube.ctl("delete", "gatewayclass", CLASS, "--ignore-not-found")


def run(kube: Kube, skipped: Iterable[str], timeout_s: float) -> Mapping[str, str]:
    """Run the suite with its output on ours, and return the result of each test: PASS, FAIL or SKIP."""
    flags = ("-test.v", f"-gateway-class={CLASS}", "-allow-crds-mismatch", f"-skip-tests={','.join(skipped)}")
    command = kube.command(str(programs.path("conformance")), *flags)
    ended = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s, check=False
    )
    print(ended.stdout)
    return {name: result for result, name in _RESULT.findall(ended.stdout)}


def _be_theirs(pod: Object) -> None:
    """Make the pod of the suite's picker one of the picker that we have built."""
    pod["terminationGracePeriodSeconds"] = 10
    (container,) = pod["containers"]
    container |= {"image": epp.IMAGE, "imagePullPolicy": "Never"}
    container["args"] += ["--metrics-endpoint-auth=false", "--config-text", _CHOOSES]


def _their_rights() -> list[Object]:
    """Return what the picker that we have built reads in addition to the suite's."""
    meta = {"name": "their-picker", "namespace": NAMESPACES[1]}
    group = "rbac.authorization.k8s.io"
    rule = {
        "apiGroups": ["inference.networking.x-k8s.io"],
        "resources": ["inferenceobjectives", "inferencemodelrewrites"],
        "verbs": ["get", "list", "watch"],
    }
    subject = {"kind": "ServiceAccount", "name": "default", "namespace": NAMESPACES[1]}
    return [
        {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": meta, "rules": [rule]},
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": meta,
            "roleRef": {"apiGroup": group, "kind": "Role", "name": meta["name"]},
            "subjects": [subject],
        },
    ]


def _picks_for(made: Object) -> str:
    """Return the pool whose picker's Deployment this is; else an empty text."""
    if made["kind"] != "Deployment":
        return ""
    arguments: list[str] = made["spec"]["template"]["spec"]["containers"][0].get("args", [])
    return arguments[arguments.index("--pool-name") + 1] if "--pool-name" in arguments else ""


def _gateway_class() -> Object:
    """Envoys as those of the Gateway `edge/edge`."""
    envoy = {"group": "gateway.envoyproxy.io", "kind": "EnvoyProxy", "name": "edge", "namespace": "edge"}
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "GatewayClass",
        "metadata": {"name": CLASS},
        "spec": {
            "controllerName": "gateway.envoyproxy.io/gatewayclass-controller",
            "parametersRef": envoy,
        },
    }


def _pod() -> Object:
    """Return a placeholder in the Gateways' namespace, where the suite waits for pods; Envoy Gateway runs all
    Envoys in its own."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "placeholder", "namespace": NAMESPACES[0]},
        "spec": {"containers": [{"name": "pause", "image": images.PAUSE, "imagePullPolicy": "Never"}]},
    }


def _document(kube: Kube, pool: Object) -> Object:
    """Return the ConfigMap with the pool's document: all its ports of all its pods. It names no fallbacks,
    see `ai_gateway`."""
    name, namespace = pool["metadata"]["name"], pool["metadata"]["namespace"]
    labels = ",".join(f"{key}={value}" for key, value in pool["spec"]["selector"]["matchLabels"].items())
    addresses = [
        f"{pod['status']['podIP']}:{port['number']}"
        for pod in kube.get("pod", "-n", namespace, "-l", labels)
        for port in pool["spec"]["targetPorts"]
    ]
    spec = Spec(
        Model(name="conformance-fake-model"),
        routing=Routing(fallbacks=0),
        endpoints=tuple(EndpointSpec(address=a) for a in addresses),
    )
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": namespace},
        "data": {POOL_DOCUMENT: dump(Pool(Metadata(name, namespace), spec)).decode()},
    }


def _gateway(pool: str) -> Object:
    """Return the pod of a pool's picker: our gateway, which obeys the header that names endpoints."""
    arguments = (
        *(f"--pool={_FOLDER}/pool/{POOL_DOCUMENT}", "--listen=0.0.0.0:9002", "--admin=0.0.0.0:9003"),
        *(f"--tls-cert={_FOLDER}/tls/tls.crt", f"--tls-key={_FOLDER}/tls/tls.key", "--conformance"),
    )
    container = {
        "name": "gateway",
        "image": perilune_image.NAME,
        "imagePullPolicy": "Never",
        "command": ["perilune-gateway"],
        "args": list(arguments),
        "readinessProbe": {"httpGet": {"path": "/healthz", "port": 9003}, "periodSeconds": 1},
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}},
        "volumeMounts": [{"name": part, "mountPath": f"{_FOLDER}/{part}"} for part in ("pool", "tls")],
    }
    return {
        "terminationGracePeriodSeconds": 10,
        "containers": [container],
        "volumes": [
            {"name": "pool", "configMap": {"name": pool}},
            {"name": "tls", "secret": {"secretName": _TLS}},
        ],
    }


def _ready(kube: Kube, deployments: Iterable[Object]) -> None:
    for meta in (o["metadata"] for o in deployments):
        where = (f"deployment/{meta['name']}", "-n", meta["namespace"])
        kube.ctl("rollout", "status", *where, "--timeout=120s", timeout_s=130)
