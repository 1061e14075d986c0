"""The engines of a pool in Kubernetes: its document and its pods.

Within the cluster they are reached at their addresses, from elsewhere through the API server's proxy, which
needs the right to get and create `pods/proxy`, and passes no key on to engines. Nothing is written.
"""

from __future__ import annotations

import os

import aiohttp
import msgspec

from perilune_api import kube, names
from perilune_api.pool import EndpointSpec, Pool, SpecError, parse_known
from perilune_gateway.feeds.kubernetes import reader, selected
from perilune_lab.doctor.examine import TIMEOUT_S, Patient, direct


async def pool(
    client: kube.Client, namespace: str, name: str, http: aiohttp.ClientSession
) -> tuple[Pool, list[Patient]]:
    """Return a pool's document and its started engines. Raises SpecError without such a pool, OSError and
    kube.ApiError."""
    at = f"/api/v1/namespaces/{namespace}"
    try:
        found = await client.request("GET", f"{at}/configmaps/{names.gateway_name(name)}")
    except kube.ApiError as error:
        if error.status == 404:
            words = (
                f"There is no pool {name} in namespace {namespace}, or the operator has not accepted it yet"
            )
            raise SpecError(words) from None
        raise
    document, _ = parse_known(found.get("data", {}).get(names.POOL_DOCUMENT, ""))
    listed = await client.request("GET", f"{at}/pods", params=selected(document))
    read = reader(document)
    staying = (pod for pod in listed.get("items") or () if "deletionTimestamp" not in pod["metadata"])
    there = {pod["metadata"]["name"]: endpoint for pod in staying if (endpoint := read(pod))}
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        made = [direct(http, f"http://{e.address}", pod) for pod, e in there.items()]
    else:
        made = [_proxied(client, at, pod, endpoint) for pod, endpoint in there.items()]
    return document, [
        patient.known(e.events, e.replay, transfers=bool(e.bootstrap or e.peer))
        for patient, e in zip(made, there.values(), strict=True)
    ]


def _proxied(client: kube.Client, at: str, pod: str, endpoint: EndpointSpec) -> Patient:
    proxy = f"{at}/pods/{pod}:{endpoint.address.rpartition(':')[2]}/proxy"

    async def get(path: str, most: int) -> bytes | str:
        try:
            status, page = await client.fetch("GET", proxy + path, most_bytes=most, timeout_s=TIMEOUT_S)
        except (OSError, ValueError) as error:
            return f"{path}: {type(error).__name__} {error}"[:200]
        return page if status == 200 else f"{path} answers {status}"

    async def post(path: str, body: bytes, most: int) -> bytes | None:
        try:
            status, page = await client.fetch(
                "POST", proxy + path, msgspec.json.decode(body), most_bytes=most, timeout_s=TIMEOUT_S
            )
        except (OSError, ValueError):
            return None
        return page if status == 200 else None

    return Patient(name=pod, get=get, post=post, host="")
