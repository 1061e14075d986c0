"""The CRDs of Gateway API, Envoy Gateway, the inference extension and KEDA, from the cache of Go modules."""

import asyncio
import time

import yaml
from api_server import ApiServer
from waiting import HANG

from perilune_api import kube
from perilune_operator.kinds import KINDS
from testbed import programs
from testbed.paths import GO_MODULES

ENVOY_GATEWAY = programs.CHART / "charts/crds/crds"
INFERENCE = GO_MODULES / "@".join(programs.INFERENCE_EXTENSION) / "config/crd/bases"
KEDA = GO_MODULES / "@".join(programs.KEDA) / "config/crd/bases"
USED = {*KINDS, "Gateway", "GatewayClass", "ScaledObject"}
"""Kinds that the operator writes, and those of our examples. The API server takes seconds for all others."""
FOLDERS = (ENVOY_GATEWAY, ENVOY_GATEWAY / "generated", INFERENCE, KEDA)


def missing() -> list[str]:
    """Folders that the cache does not have."""
    return [str(folder) for folder in FOLDERS if not folder.is_dir()]


async def install(server: ApiServer) -> None:
    """Install those of kinds in use, and wait until all of them are served."""
    texts = [file.read_text() for folder in FOLDERS for file in sorted(folder.glob("*.yaml"))]
    made = [crd for text in texts for crd in yaml.load_all(text, yaml.CSafeLoader) if crd]
    crds = [
        crd
        for crd in made
        if crd["kind"] == "CustomResourceDefinition" and crd["spec"]["names"]["kind"] in USED
    ]
    client = kube.Client(server.access)
    where = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    try:
        for crd in crds:
            await client.request("POST", where, crd)
        until = time.monotonic() + HANG
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
