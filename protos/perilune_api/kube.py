"""The Kubernetes API server, as gateway and operator use it: plain requests and a followed list.

The `kubernetes` package (its asynchronous half) knows where the server is, who we are, and how tokens are
renewed; `connect` asks it for the pod's service account, else for a kubeconfig. `Client` sends JSON by path,
since both programs handle objects as they are, also of kinds that the package has no classes for. `follow`
keeps a copy of one collection: list, then watch from the list's version; bookmarks move that version on, 410
Gone begins anew, a broken stream is taken up where it was.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp
import msgspec
from kubernetes.aio import config
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration

log = logging.getLogger(__name__)

Object = dict[str, Any]

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
TIMEOUT_S = 10.0
WATCH_S = 300
"""The server ends a watch after so long; it then goes on from the last version seen."""
SILENCE_S = 90.0
"""A watch without a byte for so long is taken for dead: the server sends bookmarks every minute."""
RETRY_S = (0.2, 5.0)
"""Shortest and longest pause after a failure; doubled each time, with dice."""


class ApiError(Exception):
    """The API server refused."""

    def __init__(
        self, status: int, reason: str, message: str, causes: tuple[tuple[str, str], ...] = ()
    ) -> None:
        """`causes`: field and words, of what is wrong in an object that was sent."""
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.causes = causes


async def connect(environ: Mapping[str, str] = os.environ) -> Client:
    """As the pod's service account, else by $KUBECONFIG, else by ~/.kube/config. Raises OSError, naming what
    is missing."""
    made = Configuration()
    path = environ.get("KUBECONFIG") or str(Path.home() / ".kube/config")
    try:
        if environ.get("KUBERNETES_SERVICE_HOST"):
            config.load_incluster_config(made)  # type: ignore[no-untyped-call]
        else:
            await config.load_kube_config(  # type: ignore[no-untyped-call]
                path, client_configuration=made, persist_config=False
            )
    except config.ConfigException as error:
        where = "in this pod" if environ.get("KUBERNETES_SERVICE_HOST") else f"at {path}"
        raise OSError(f"no access to a Kubernetes API server {where}: {error}") from error
    return Client(made)


class Client:
    """One connection pool to one API server; `close` it."""

    def __init__(self, configuration: Configuration) -> None:
        """Without a certificate authority the server's certificate is checked against the system's."""
        self._api = ApiClient(configuration)
        self._server = str(configuration.host).rstrip("/")

    async def close(self) -> None:
        await self._api.close()  # type: ignore[no-untyped-call]

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        params: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        timeout_s: float = TIMEOUT_S,
    ) -> Object:
        """Raises ApiError when the server refuses, OSError when it cannot be reached."""
        try:
            response = await self._send(
                method, path, params or {}, body, content_type, aiohttp.ClientTimeout(total=timeout_s)
            )
            text = await response.read()
        except aiohttp.ClientError as error:
            raise ConnectionError(str(error) or type(error).__name__) from error
        if response.status >= 400:
            raise _error(response.status, text)
        return _object(text)

    async def watch(self, path: str, params: Mapping[str, str]) -> AsyncIterator[Object]:
        """Events until the server ends the stream. Raises as `request`."""
        asked = {**params, "watch": "1", "allowWatchBookmarks": "1", "timeoutSeconds": str(WATCH_S)}
        timeout = aiohttp.ClientTimeout(sock_connect=TIMEOUT_S, sock_read=SILENCE_S)
        try:
            async with await self._send("GET", path, asked, None, "application/json", timeout) as response:
                if response.status >= 400:
                    raise _error(response.status, await response.read())
                rest = b""
                async for chunk in response.content.iter_any():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        if line:
                            yield _object(line)
        except aiohttp.ClientError as error:
            raise ConnectionError(str(error) or type(error).__name__) from error

    async def _send(
        self,
        method: str,
        path: str,
        params: Mapping[str, str],
        body: Any,
        content_type: str,
        limits: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        url = self._server + path + (f"?{urlencode(params)}" if params else "")
        headers = {"Content-Type": content_type, "Accept": "application/json"}
        await self._api.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        if content_type == APPLY:  # read as YAML, without JSON's two \u for an emoji: it goes as it is
            headers["Content-Type"], body = f"{APPLY}; charset=utf-8", msgspec.json.encode(body)
        answer = await self._api.call_api(method, url, headers, body, _request_timeout=limits)
        response: aiohttp.ClientResponse = answer.response
        return response


def _object(text: bytes) -> Object:
    made = msgspec.json.decode(text) if text else {}
    return made if isinstance(made, dict) else {}


def _error(status: int, text: bytes) -> ApiError:
    try:
        said = _object(text)
    except msgspec.DecodeError:
        return ApiError(status, "Unknown", text[:200].decode(errors="replace"))
    causes = (said.get("details") or {}).get("causes") or ()
    fields = tuple((cause.get("field", ""), cause.get("message", "")) for cause in causes)
    return ApiError(status, said.get("reason", "Unknown"), said.get("message", ""), fields)


class Collection:
    """A copy of one list, kept by its watch events."""

    def __init__(self) -> None:
        self.objects: dict[str, Object] = {}
        """By namespace/name."""
        self.version = ""

    def replace(self, listed: Object) -> None:
        self.objects = {_key(item): item for item in listed.get("items") or []}
        self.version = listed["metadata"]["resourceVersion"]

    def apply(self, event: Object) -> bool:
        """Take in one event; whether an object changed. Raises ApiError for an ERROR event."""
        kind, item = event["type"], event["object"]
        if kind == "ERROR":
            raise ApiError(item.get("code", 0), item.get("reason", ""), item.get("message", ""))
        self.version = item["metadata"]["resourceVersion"]
        if kind == "BOOKMARK":
            return False
        if kind == "DELETED":
            self.objects.pop(_key(item), None)
        else:
            self.objects[_key(item)] = item
        return True


def _key(item: Object) -> str:
    meta = item["metadata"]
    return f"{meta.get('namespace', '')}/{meta['name']}"


async def follow(
    client: Client,
    path: str,
    on_change: Callable[[dict[str, Object]], None],
    params: Mapping[str, str] | None = None,
    retry_s: tuple[float, float] = RETRY_S,
) -> None:
    """Hand over the whole collection now and after each change, until cancelled.

    While the server cannot be reached, the last copy stays in force.
    """
    collection = Collection()
    params = params or {}
    pause_s, longest_s = retry_s
    failures = 0
    while True:
        try:
            if not collection.version:
                collection.replace(await client.request("GET", path, params=params))
                on_change(collection.objects)
            events = client.watch(path, {**params, "resourceVersion": collection.version})
            async for event in events:
                failures = 0
                if collection.apply(event):
                    on_change(collection.objects)
        except ApiError as error:
            failures += 1
            if error.status == 410:  # the version is too old to go on from
                collection.version = ""
            else:
                log.warning("watch refused path=%s error=%s", path, error)
        except OSError as error:  # TimeoutError is one
            failures += 1
            log.warning("watch broken path=%s error=%s", path, error or type(error).__name__)
        longest = min(longest_s, pause_s * 2 ** min(failures, 10))
        await asyncio.sleep(longest * (0.5 + random.random() / 2))
