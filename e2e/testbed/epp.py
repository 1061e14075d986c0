"""The inference extension's own endpoint picker: its image, its kinds, and its objects for a pool.

It reads the InferencePool, its pods and their metrics, and is asked over TLS with a certificate of its own
making. 1.5 is the last version of the extension that has it. The picker of 1.6 (`lwepp`) answers each piece
of a body with a message that Envoy takes for spurious where bodies are streamed both ways, so that every
request fails.
"""

from pathlib import Path
from typing import Any

from testbed import images, programs

IMAGE = "perilune.test/epp:1"

Object = dict[str, Any]


def archive() -> Path:
    """Return an OCI archive of it. Build it if it is missing, which takes some minutes, once."""
    programs.module(*programs.PICKER)
    programs.ensure(("epp",))
    return images.archive(IMAGE, programs.path("epp"), "epp")


def kinds() -> list[Path]:
    """Return the files of the CRDs that it reads, besides InferencePools."""
    folder = programs.module(*programs.PICKER) / "config" / "crd" / "bases"
    return [
        folder / f"inference.networking.x-k8s.io_inference{kind}.yaml"
        for kind in ("objectives", "modelrewrites")
    ]


def objects(name: str, namespace: str, pool: str) -> list[Object]:
    """Return everything that the picker of an InferencePool needs; `name`: of its Service, at port 9002."""
    meta = {"name": name, "namespace": namespace}
    rights = [
        {"apiGroups": ["inference.networking.k8s.io"], "resources": ["inferencepools"]},
        {
            "apiGroups": ["inference.networking.x-k8s.io"],
            "resources": ["inferenceobjectives", "inferencemodelrewrites"],
        },
        {"apiGroups": [""], "resources": ["pods"]},
    ]
    container = {
        "name": "picker",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "args": [f"--pool-name={pool}", f"--pool-namespace={namespace}", "--metrics-endpoint-auth=false"],
        "ports": [{"containerPort": 9002}],
        "readinessProbe": {"grpc": {"port": 9003, "service": "inference-extension"}, "periodSeconds": 1},
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}},
    }
    template = {
        "metadata": {"labels": {"app": name}},
        "spec": {"serviceAccountName": name, "containers": [container]},
    }
    subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    group = "rbac.authorization.k8s.io"
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta},
        {
            "apiVersion": f"{group}/v1",
            "kind": "Role",
            "metadata": meta,
            "rules": [{**right, "verbs": ["get", "list", "watch"]} for right in rights],
        },
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": meta,
            "roleRef": {"apiGroup": group, "kind": "Role", "name": name},
            "subjects": [subject],
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": meta,
            "spec": {"selector": {"app": name}, "ports": [{"port": 9002, "targetPort": 9002}]},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": meta,
            "spec": {"replicas": 1, "selector": {"matchLabels": {"app": name}}, "template": template},
        },
    ]
