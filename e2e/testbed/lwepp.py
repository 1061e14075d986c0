"""The inference extension's own endpoint picker, the lightweight one: its image, and its objects for a pool.

It reads the InferencePool and its pods, takes them in turn, and is asked over TLS with a certificate of its
own making.
"""

from pathlib import Path
from typing import Any

from testbed import images, programs

IMAGE = "perilune.test/lwepp:1"

Object = dict[str, Any]


def archive() -> Path:
    """Return an OCI archive of it. Build it if it is missing, which takes two minutes, once."""
    programs.module(*programs.INFERENCE_EXTENSION)
    programs.ensure(("lwepp",))
    return images.archive(IMAGE, programs.path("lwepp"), "lwepp")


def objects(name: str, namespace: str, pool: str) -> list[Object]:
    """Return everything that the picker of an InferencePool needs; `name`: of its Service, at port 9002."""
    meta = {"name": name, "namespace": namespace}
    rights = [
        {"apiGroups": ["inference.networking.k8s.io"], "resources": ["inferencepools"]},
        {"apiGroups": [""], "resources": ["pods"]},
    ]
    container = {
        "name": "picker",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "args": [f"--pool-name={pool}", f"--pool-namespace={namespace}"],
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
