"""The CRDs of Gateway API, Envoy Gateway and the inference extension, as Go's module cache has them."""

import asyncio
import time

import yaml
from api_server import ApiServer, binaries

from perilune_api import kube

MODULES = "go/mod"
"""Beside the binaries' folder."""
ENVOY_GATEWAY = "github.com/envoyproxy/gateway@v1.9.1/charts/gateway-helm/charts/crds/crds"
INFERENCE = "sigs.k8s.io/gateway-api-inference-extension@v1.5.0/config/crd/bases"
FOLDERS = (ENVOY_GATEWAY, f"{ENVOY_GATEWAY}/generated", INFERENCE)


def missing() -> list[str]:
    """Folders that the cache has not."""
    modules = binaries().parent / MODULES
    return [str(modules / folder) for folder in FOLDERS if not (modules / folder).is_dir()]


async def install(server: ApiServer) -> None:
    """Returns when all of them are served."""
    modules = binaries().parent / MODULES
    texts = [file.read_text() for folder in FOLDERS for file in sorted((modules / folder).glob("*.yaml"))]
    made = [crd for text in texts for crd in yaml.load_all(text, yaml.CSafeLoader) if crd]
    crds = [crd for crd in made if crd["kind"] == "CustomResourceDefinition"]
    client = kube.Client(server.access)
    where = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    try:
        for crd in crds:
            await client.request("POST", where, crd)
        until = time.monotonic() + 60
        for crd in crds:
            while True:
                said = await client.request("GET", f"{where}/{crd['metadata']['name']}")
                conditions = (said.get("status") or {}).get("conditions") or ()
                if any(c["type"] == "Established" and c["status"] == "True" for c in conditions):
                    break
                assert time.monotonic() < until, said["metadata"]["name"]
                await asyncio.sleep(0.1)
    finally:
        await client.close()
