"""The engines of a pool in Kubernetes: its document and its pods.

Within the cluster they are reached at their addresses, from elsewhere and over TLS through the API server's
proxy, which needs the right to get and create `pods/proxy`, and passes no key on to engines. Nothing is
written.
"""

from __future__ import annotations

import os

import aiohttp
import msgspec

from perilune_api import kube, names
from perilune_api.pool import Pool, SpecError, parse_known
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
    # The CA certificates are in the gateways' pods; the API server's proxy asks for none.
    within = "KUBERNETES_SERVICE_HOST" in os.environ and document.spec.engine.tls is None
    patients = []
    for pod in staying:
        endpoints = read(pod)
        for e in endpoints:
            of, port = pod["metadata"]["name"], e.address.rpartition(":")[2]
            called = of if len(endpoints) == 1 else f"{of}:{port}"
            proxy = f"{at}/pods/{'https:' if document.spec.engine.tls else ''}{of}:{port}/proxy"
            made = direct(http, f"http://{e.address}", called) if within else _proxied(client, proxy, called)
            patients.append(made.known(e.events, e.replay, transfers=bool(e.bootstrap or e.peer)))
    return document, patients


def _proxied(client: kube.Client, proxy: str, name: str) -> Patient:
    """Return an engine that is reached through the API server, at the path `proxy`."""

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

    return Patient(name=name, get=get, post=post, host="")
