"""The same cluster on kind, where there is Docker: `make cluster KIND=1`, `make e2e KIND=1`. Not run yet.

Nothing is built from source but our image, by `docker build`; Envoy is pulled and given the name that the
manifests use. What differs from the cluster of namespaces: all links are equally fast, there are no cables to
pull, and scenarios that need either are skipped. Services are reached by routes to the nodes' containers:
only on Linux, and only root may set them.
"""

import json
import os
import shutil

from testbed import images, network, perilune_image
from testbed.kube import Kube, installed
from testbed.nodes import gpus, labels
from testbed.paths import CHECKOUT, state
from testbed.shell import ClusterError, run, step

ENVOY = "docker.io/envoyproxy/envoy:distroless-v1.39.1"
"""What this version of Envoy Gateway asks for."""
BASE = "docker.io/library/debian:trixie-slim"


class Kind:
    """A handle; making one starts nothing. Raises ClusterError without kind and what it needs."""

    def __init__(self, name: str, nodes: int) -> None:
        if missing := [tool for tool in ("docker", "kind", "kubectl", "helm") if shutil.which(tool) is None]:
            raise ClusterError(f"KIND=1 needs {', '.join(missing)}")
        self.name = name
        self.home = state(name)
        self.sites = network.sites(nodes)
        self._config = self.home / "kind.kubeconfig"

    @property
    def kube(self) -> Kube:
        return Kube((), str(self._config), installed)

    @property
    def is_up(self) -> bool:
        return self._config.exists() and self.name in run(["kind", "get", "clusters"]).split()

    def up(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        with step("images"):
            base = ("--build-arg", f"BASE={BASE}")
            run(["docker", "build", *base, "--tag", perilune_image.NAME, CHECKOUT], timeout_s=1800)
            engine = ("--target", "engine", "--tag", perilune_image.ENGINE_NAME)
            run(["docker", "build", *base, *engine, CHECKOUT], timeout_s=1800)
            run(["docker", "pull", "--quiet", ENVOY], timeout_s=1800)
            run(["docker", "tag", ENVOY, images.ENVOY])
        with step(f"{len(self.sites)} nodes"):
            create = ("kind", "create", "cluster", "--name", self.name, "--config", "-", "--wait", "180s")
            run([*create, "--kubeconfig", self._config], stdin=json.dumps(self._document()), timeout_s=900)
            names = [f"{self.name}-worker{site.index + 1 if site.index else ''}" for site in self.sites]
            self.kube.apply(*map(gpus, names), flags=("--subresource=status",))
        with step("images to nodes"):
            for name in (perilune_image.NAME, perilune_image.ENGINE_NAME, images.ENVOY):
                run(["kind", "load", "docker-image", name, "--name", self.name], timeout_s=900)
        self._reach_services()

    def down(self) -> None:
        run(["kind", "delete", "cluster", "--name", self.name], timeout_s=300)
        shutil.rmtree(self.home, ignore_errors=True)

    def _document(self) -> dict[str, object]:
        """kind's configuration: a control plane, and a worker per node, labelled from the beginning."""
        workers = [{"role": "worker", "labels": labels(site)} for site in self.sites]
        return {
            "kind": "Cluster",
            "apiVersion": "kind.x-k8s.io/v1alpha4",
            "networking": {"serviceSubnet": network.SERVICES, "podSubnet": network.PODS},
            "nodes": [{"role": "control-plane"}, *workers],
        }

    def _reach_services(self) -> None:
        """Reach Services through one node and pods through theirs, as from a machine outside the cluster."""
        if os.geteuid() != 0:
            print("kind: not root, so no routes to Services are set; requests need kubectl port-forward")
            return
        addresses = {}
        for node in self.kube.get("node"):
            internal = next(a for a in node["status"]["addresses"] if a["type"] == "InternalIP")["address"]
            addresses[node["spec"]["podCIDR"]] = internal
        for subnet, through in {**addresses, network.SERVICES: next(iter(addresses.values()))}.items():
            run(["ip", "route", "replace", subnet, "via", through])
