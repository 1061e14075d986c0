"""The engines of a pool in Kubernetes, or of a standard InferencePool: its document and its pods.

Within the cluster they are reached at their addresses, from elsewhere and over TLS through the API server's
proxy, which needs the right to get and create `pods/proxy`, and passes no key on to engines. Nothing is
written.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any, Literal

import aiohttp
import msgspec

from perilune_api import kube, names
from perilune_api.conditions import Condition
from perilune_api.foreign_bytes import UNREADABLE
from perilune_api.pool import Pool, SpecError, parse_known
from perilune_gateway.feeds import engine_words, pool_origin
from perilune_gateway.feeds.kubernetes import reader, selected
from perilune_lab.doctor.examine import TIMEOUT_S, Patient, direct

WAIT_S, LOOK_S = 20.0, 0.5
"""Seconds for which a pool is waited for that the operator has not rendered yet, and between two looks."""


async def pool(
    client: kube.Client, namespace: str, name: str, http: aiohttp.ClientSession
) -> tuple[Pool, list[Patient]]:
    """Return a pool's document and its started engines. A pool that the operator has not rendered yet is
    waited for. Raises SpecError without such a pool and for one that is refused, OSError, kube.ApiError."""
    at = f"/api/v1/namespaces/{namespace}"
    document = await _document(client, namespace, name)
    listed = await client.request("GET", f"{at}/pods", params=selected(document))
    read = reader(document, listed.get("items") or ())
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


async def _document(client: kube.Client, namespace: str, name: str) -> Pool:
    """Return the document that the operator has rendered of a pool, or that of an InferencePool of the
    inference extension, which another program's Gateway serves. Raises as `pool`."""
    where = f"/api/v1/namespaces/{namespace}/configmaps/{names.gateway_name(name)}"
    until = time.monotonic() + WAIT_S
    while (found := await _found(client, where)) is None:
        if not await _is_ours(client, namespace, name):
            at = f"{pool_origin.EXTENSION}/namespaces/{namespace}/inferencepools/{name}"
            if (other := await _found(client, at)) is None:
                raise SpecError(f"There is no pool {name} in namespace {namespace}")
            return pool_origin.document(other, ())
        if time.monotonic() > until:
            raise SpecError(f"The operator has not accepted the pool {name} for {WAIT_S:g} s: does it run?")
        await asyncio.sleep(LOOK_S)
    document, _ = parse_known(found.get("data", {}).get(names.POOL_DOCUMENT, ""))
    return document


async def _found(client: kube.Client, where: str) -> dict[str, Any] | None:
    """Return an object; None without it."""
    try:
        found: dict[str, Any] = await client.request("GET", where)
    except kube.ApiError as error:
        if error.status != 404:
            raise
        return None
    return found


async def _is_ours(client: kube.Client, namespace: str, name: str) -> bool:
    """Return whether a pool of that name is there. Raises SpecError if the operator refuses it."""
    where = f"/apis/{names.GROUP}/v1alpha1/namespaces/{namespace}/inferencepools/{name}"
    if (pool := await _found(client, where)) is None:
        return False
    for condition in pool.get("status", {}).get("conditions") or ():
        if (condition["type"], condition["status"]) == (Condition.ACCEPTED, "False"):
            raise SpecError(f"The operator refuses the pool {name}: {condition['message']}")
    return True


def _proxied(client: kube.Client, proxy: str, name: str) -> Patient:
    """Return an engine that is reached through the API server, at the path `proxy`."""

    async def get(path: str, most: int) -> bytes | str:
        try:
            status, page = await client.fetch("GET", proxy + path, most_bytes=most, timeout_s=TIMEOUT_S)
        except (OSError, ValueError) as error:
            return f"{path}: {type(error).__name__} {error}"[:200]
        return page if status == 200 else _unread(path, status, page)

    async def post(path: str, body: bytes, most: int) -> bytes | None:
        try:
            status, page = await client.fetch(
                "POST", proxy + path, msgspec.json.decode(body), most_bytes=most, timeout_s=TIMEOUT_S
            )
        except (OSError, ValueError):
            return None
        return page if status == 200 else None

    return Patient(name=name, get=get, post=post, host="")


class _Status(msgspec.Struct):
    """The API server's own answer, in place of that of a pod."""

    kind: Literal["Status"]
    message: str = ""


def _unread(path: str, status: int, page: bytes) -> str:
    """Return why a page with this status is not read."""
    try:
        told = msgspec.json.decode(page, type=_Status)
    except UNREADABLE:
        words = engine_words.unread(path, status)
        return f"{words}, which the API server's proxy passes to no pod" if status == 401 else words
    return f"the API server answers {status}: {told.message}"[:500]
