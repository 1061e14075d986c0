"""A pool of the cluster as a scenario sees it: its object, pods and conditions, and a client that asks it."""

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from perilune_api import names
from testbed.http import Client, eventually
from testbed.kube import Kube

KINDS = (
    *("deployment", "replicaset", "pod", "service", "configmap", "serviceaccount", "role", "rolebinding"),
    *("networkpolicy", "poddisruptionbudget", "horizontalpodautoscaler", "httproute"),
    *("backendtrafficpolicy", "envoyextensionpolicy"),
)
"""What a pool is made of."""
_ALL = "inferencepools.perilune.dev"  # the inference extension has a kind of the same name
LEAVES_SOON = {
    "spec": {
        "tolerations": [
            {
                "key": f"node.kubernetes.io/{why}",
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": 5,
            }
            for why in ("not-ready", "unreachable")
        ]
    }
}
"""A podTemplate of engines that leave a lost node within seconds; the operator's own wait for 300."""


def document(name: str, namespace: str = "default", **spec: Any) -> dict[str, Any]:
    """Return a pool of simulated engines behind the Gateway `edge/edge`, for requests of host `NAME.test`."""
    usual = {
        "model": {"name": f"{name}-30b"},
        "engine": {"kind": "simulated", "imagePullPolicy": "Never"},
        "gateway": {"parent": {"name": "edge", "namespace": "edge"}, "hostnames": [f"{name}.test"]},
        "rollout": {"sessionSeconds": 5, "drainSeconds": 20},
        "routing": {"decisionHeader": "address"},
    }
    return {
        "apiVersion": "perilune.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {**usual, **spec},
    }


class LivePool:
    def __init__(self, kube: Kube, edge: str, name: str, namespace: str = "default") -> None:
        self.kube = kube
        self.name = name
        self.namespace = namespace
        self.client = Client(edge, f"{name}.test", f"{name}-30b")

    # -- what the API server says of it ------------------------------------------------------------

    def get(self) -> Any:
        return self.kube.get(_ALL, self.name, "-n", self.namespace)

    def exists(self) -> bool:
        return self.name in [pool["metadata"]["name"] for pool in self.kube.get(_ALL, "-n", self.namespace)]

    def conditions(self) -> dict[str, tuple[str, str]]:
        """Type → status, reason."""
        said = self.get().get("status", {}).get("conditions", ())
        return {c["type"]: (c["status"], c["reason"]) for c in said}

    def message(self, condition: str) -> str:
        said = self.get().get("status", {}).get("conditions", ())
        return next((c["message"] for c in said if c["type"] == condition), "")

    def pods(self, component: str = "engine") -> list[Any]:
        """Those that are not leaving."""
        return [pod for pod in self.all_pods(component) if "deletionTimestamp" not in pod["metadata"]]

    def all_pods(self, component: str = "engine") -> list[Any]:
        labels = f"{names.POOL_LABEL}={self.name},{names.COMPONENT_LABEL}={component}"
        found: list[Any] = self.kube.get("pod", "-n", self.namespace, "-l", labels)
        return found

    def engines(self) -> dict[str, str]:
        """Address → node of the engines that serve and are not leaving."""
        return {address(pod): pod["spec"]["nodeName"] for pod in self.pods() if is_ready(pod)}

    def uids(self) -> set[str]:
        """Of every pod."""
        return {pod["metadata"]["uid"] for part in ("engine", "gateway") for pod in self.all_pods(part)}

    def objects(self) -> list[Any]:
        """Everything that has its label."""
        labels = f"{names.POOL_LABEL}={self.name}"
        found: list[Any] = self.kube.get(",".join(KINDS), "-n", self.namespace, "-l", labels)
        return found

    # -- what a user does to it --------------------------------------------------------------------

    def apply(self, **spec: Any) -> None:
        """Apply the whole spec, as a file that a user applies."""
        self.kube.apply(document(self.name, self.namespace, **spec))

    def patch(self, **spec: Any) -> None:
        """Change some fields of the spec; None removes one."""
        words = ("patch", _ALL, self.name, "-n", self.namespace, "--type=merge", "-p")
        self.kube.ctl(*words, json.dumps({"spec": spec}))

    def scale(self, replicas: int) -> None:
        self.kube.ctl("scale", _ALL, self.name, "-n", self.namespace, f"--replicas={replicas}")

    def delete(self) -> None:
        """Delete the pool, and wait until it is gone; its objects follow."""
        words = ("delete", _ALL, self.name, "-n", self.namespace, "--ignore-not-found", "--timeout=60s")
        self.kube.ctl(*words, timeout_s=70)

    def admin(self, path: str) -> Any:
        """Return a page of its gateway."""
        return self.kube.admin(f"deployment/{names.gateway_name(self.name)}", self.namespace, path)

    def admins(self, path: str) -> dict[str, Any]:
        """Return that page of each of its gateways, by pod."""
        pods = [pod["metadata"]["name"] for pod in self.pods("gateway") if is_ready(pod)]
        return {pod: self.kube.admin(f"pod/{pod}", self.namespace, path) for pod in pods}

    def gateways_count(self, metric: str, by: str, **labels: str) -> dict[str, float]:
        """Return a metric with these labels, summed over its gateways, by the values of the label `by`."""
        found = defaultdict[str, float](float)
        for pod in self.pods("gateway"):
            text = self.kube.page(f"pod/{pod['metadata']['name']}", self.namespace, "/metrics")
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name == metric and labels.items() <= sample.labels.items():
                        found[sample.labels[by]] += sample.value
        return found

    # -- what it should come to --------------------------------------------------------------------

    def answers(self) -> None:
        answer = self.client.complete()
        assert answer.status == 200, answer.body
        assert answer.decided, "the gateway was not asked"

    def has_engines(self, count: int) -> None:
        """Assert that so many serve, and that the status of just this spec says so."""
        pool = self.get()
        status = pool.get("status", {"observedGeneration": -1})
        assert status["observedGeneration"] == pool["metadata"]["generation"]
        assert {c["type"]: c["status"] for c in status["conditions"]}.get("Ready") == "True", status
        assert status["readyReplicas"] == count
        assert len(self.engines()) == count

    def becomes(self, engines: int, timeout_s: float = 120) -> None:
        eventually(lambda: self.has_engines(engines), timeout_s)

    def has_gateways(self, count: int) -> None:
        """Assert that there are so many, all of them ready, and that each of them hears the others and has an
        engine that is ready."""
        assert [is_ready(pod) for pod in self.pods("gateway")] == [True] * count
        assert all(is_ready(pod) for pod in self.pods("state"))
        for health in self.admins("/api/health").values():
            assert not {"shared_state", "no_endpoint"} & {problem["kind"] for problem in health["problems"]}

    def settles(self, engines: int, timeout_s: float = 180) -> None:
        """Wait until so many serve and nothing is leaving or on its way."""

        def settled() -> None:
            self.has_engines(engines)
            pods = self.all_pods()
            said = {pod["metadata"]["name"]: pod["metadata"].get("annotations") for pod in pods}
            assert len(pods) == engines, (said, self.conditions())
            assert self.conditions()["Reconciling"][0] == "False"

        eventually(settled, timeout_s)


def address(pool_pod: Mapping[str, Any]) -> str:
    return f"{pool_pod['status'].get('podIP', '')}:{names.ENGINE_PORT}"


def is_ready(pod: Mapping[str, Any]) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ()))
