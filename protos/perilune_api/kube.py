"""The Kubernetes API server, as the gateway and the operator use it: requests by path, and followed
collections.

The `kubernetes` package (`kubernetes.aio`) finds the server, authenticates, renews tokens, sends requests and
decodes watch streams. Two things remain here:

- `Client` addresses objects by path and leaves them plain JSON, because both programs also handle kinds for
  which the package has no classes.
- `follow` keeps a copy of a collection: it lists, watches from the list's version, resumes after a broken
  stream, and lists again after 410 Gone. The package's informer does the same on threads and the synchronous
  client only; `kubernetes.aio.watch` neither lists nor notices a server that has gone silent. Held by
  tests/gateway/feeds/test_kubernetes.py::test_a_version_that_is_gone_is_listed_again and
  tests/api/test_kube.py::test_following_goes_on_after_each_way_that_a_watch_can_end.

The package is imported where it is used, because that takes long and a gateway that reads its pool from a
file does not need it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import aiohttp
import msgspec

from perilune_api.foreign_bytes import UNREADABLE

if TYPE_CHECKING:
    from kubernetes.aio.client.configuration import Configuration

log = logging.getLogger(__name__)

Object = dict[str, Any]

JSON = "application/json"
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
TIMEOUT_S = 10.0
WATCH_S = 300
"""The server ends a watch after this many seconds; `follow` then resumes from the last version that it
saw."""
PAGE = 250
"""Objects in one page of a list. A node takes up to 30 kB as JSON, most of it the names of its images."""
SILENCE_S = 90.0
"""A watch that delivers no byte for so long counts as broken; the server sends a bookmark every minute."""
RETRY_S = (0.2, 5.0)
"""Shortest and longest pause after a failure. The pause doubles with each failure and is randomised."""


class ApiError(Exception):
    """The API server refused a request."""

    def __init__(
        self, status: int, reason: str, message: str, causes: tuple[tuple[str, str], ...] = ()
    ) -> None:
        """`causes`: the fields of a sent object that are wrong, each with the server's message."""
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.causes = causes


async def connect(environ: Mapping[str, str] = os.environ) -> Client:
    """Connect with the pod's service account, else with $KUBECONFIG, else with ~/.kube/config.

    Raises OSError, which names what is missing.
    """
    from kubernetes.aio import config
    from kubernetes.aio.client.configuration import Configuration

    made = Configuration()
    in_pod = bool(environ.get("KUBERNETES_SERVICE_HOST"))
    path = environ.get("KUBECONFIG") or str(Path.home() / ".kube/config")
    if not in_pod and not any(map(os.path.exists, path.split(os.pathsep))):
        raise OSError(f"no access to a Kubernetes API server: there is no {path}; set KUBECONFIG to a file")
    try:
        if in_pod:
            config.load_incluster_config(made)  # type: ignore[no-untyped-call]
        else:
            await config.load_kube_config(  # type: ignore[no-untyped-call]
                path, client_configuration=made, persist_config=False
            )
    except config.ConfigException as error:
        where = "in this pod" if in_pod else f"at {path}"
        raise OSError(f"no access to a Kubernetes API server {where}: {error}") from error
    return Client(made)


class Client:
    """A connection pool to one API server. Close it after use."""

    def __init__(self, configuration: Configuration) -> None:
        """Without a certificate authority in it, the system's authorities verify the server."""
        from kubernetes.aio.client.api_client import ApiClient

        self.api = ApiClient(configuration)
        """The package's own client, for its typed APIs."""
        self._server = str(configuration.host).rstrip("/")

    async def close(self) -> None:
        await self.api.close()  # type: ignore[no-untyped-call]

    async def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        params: Mapping[str, str] | None = None,
        content_type: str = JSON,
        timeout_s: float = TIMEOUT_S,
    ) -> Object:
        """Send one request and return the decoded answer.

        Raises ApiError when the server refuses it, and OSError when the server cannot be reached.
        """
        try:
            response = await self._send(
                method, path, params or {}, body, content_type, aiohttp.ClientTimeout(total=timeout_s)
            )
            text = await response.read()
        except TimeoutError as error:
            raise _late(method, path, timeout_s) from error
        except aiohttp.ClientError as error:
            raise _unreachable(error) from error
        if response.status >= 400:
            raise _refused(response.status, text)
        return _decoded(text)

    async def fetch(
        self, method: str, path: str, body: Any = None, *, most_bytes: int, timeout_s: float = TIMEOUT_S
    ) -> tuple[int, bytes]:
        """Send one request; return the status and the body as it is, such as that of a pod's page through
        the server's proxy.

        Raises OSError when the server cannot be reached, and ValueError for more than `most_bytes`.
        """
        try:
            response = await self._send(method, path, {}, body, JSON, aiohttp.ClientTimeout(total=timeout_s))
            text = bytearray()
            async for part in response.content.iter_any():
                text += part
                if len(text) > most_bytes:
                    response.close()
                    raise ValueError(f"more than {most_bytes} bytes")
        except TimeoutError as error:
            raise _late(method, path, timeout_s) from error
        except aiohttp.ClientError as error:
            raise _unreachable(error) from error
        return response.status, bytes(text)

    async def watch(self, path: str, params: Mapping[str, str], version: str) -> AsyncIterator[Object]:
        """Yield the events of a collection after `version`, until the server ends the stream.

        Raises as `request` does; ApiError with status 410 when `version` is too old.
        """
        asked = {**params, "watch": "1", "allowWatchBookmarks": "1", "timeoutSeconds": str(WATCH_S)}
        asked["resourceVersion"] = version
        limits = aiohttp.ClientTimeout(sock_connect=TIMEOUT_S, sock_read=SILENCE_S)

        async def stream(**_: Any) -> Any:
            response = await self._send("GET", path, asked, None, JSON, limits)
            if response.status >= 400:
                raise _refused(response.status, await response.read())
            return response

        from kubernetes.aio.client.exceptions import ApiException
        from kubernetes.aio.watch import Watch

        try:
            async with Watch() as watch:  # type: ignore[no-untyped-call]
                # Given a timeout, the package's watch ends with the stream instead of resuming it itself.
                async for event in watch.stream(stream, timeout_seconds=WATCH_S):
                    yield event
        except ApiException as error:
            raise ApiError(error.status or 0, "WatchFailed", str(error.reason)) from error
        except aiohttp.ClientError as error:
            raise _unreachable(error) from error

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
        headers = {"Content-Type": content_type, "Accept": JSON}
        await self.api.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        if content_type == APPLY:
            # The server reads an applied object as YAML, which does not combine JSON's two \u escapes of an
            # emoji. So the characters are sent as they are.
            headers["Content-Type"], body = f"{APPLY}; charset=utf-8", msgspec.json.encode(body)
        answer = await self.api.call_api(method, url, headers, body, _request_timeout=limits)
        response: aiohttp.ClientResponse = answer.response
        return response


def _late(method: str, path: str, timeout_s: float) -> OSError:
    return TimeoutError(f"no answer to {method} {path} within {timeout_s:.1f} s")


def _unreachable(error: aiohttp.ClientError) -> OSError:
    return ConnectionError(str(error) or type(error).__name__)


def _decoded(text: bytes) -> Object:
    made = msgspec.json.decode(text) if text else {}
    return made if isinstance(made, dict) else {}


def _refused(status: int, text: bytes) -> ApiError:
    try:
        answer = _decoded(text)
    except UNREADABLE:
        return ApiError(status, "Unknown", text[:200].decode(errors="replace"))
    causes = (answer.get("details") or {}).get("causes") or ()
    fields = tuple((cause.get("field", ""), cause.get("message", "")) for cause in causes)
    return ApiError(status, answer.get("reason", "Unknown"), answer.get("message", ""), fields)


async def follow(
    client: Client,
    path: str,
    on_change: Callable[[dict[str, Object], Collection[str]], None],
    params: Mapping[str, str] | None = None,
    retry_s: tuple[float, float] = RETRY_S,
    kept: Callable[[Object], Object] = lambda item: item,
) -> None:
    """Call `on_change` with the whole collection and the changed keys, now and after each change.

    Runs until cancelled. `kept` returns the part of an object that the copy needs. The keys are
    `namespace/name`; a changed key that is not in the collection was deleted. While the server cannot be
    reached, the last copy remains.
    """
    objects: dict[str, Object] = {}
    version, failures, params = "", 0, params or {}
    while True:
        try:
            if not version:
                before = objects
                objects, version = await _list(client, path, params, kept)
                keys = before.keys() | objects.keys()
                on_change(objects, {key for key in keys if before.get(key) != objects.get(key)})
            async for event in client.watch(path, params, version):
                failures = 0
                version = event["object"]["metadata"]["resourceVersion"]
                if event["type"] != "BOOKMARK":
                    on_change(objects, (_take(objects, event, kept),))
        except (ApiError, OSError) as error:
            failures += 1
            if isinstance(error, ApiError) and error.status == 410:
                version = ""
            else:
                log.warning("watch failed path=%s error=%s", path, str(error) or type(error).__name__)
        await asyncio.sleep(_pause_s(failures, retry_s))


def slim(item: Object) -> Object:
    """Return a node or pod without the record of who wrote its fields and without its images, by far the most
    of a node."""
    meta, status = item["metadata"], item.get("status") or {}
    return {
        **item,
        "metadata": {name: value for name, value in meta.items() if name != "managedFields"},
        "status": {name: value for name, value in status.items() if name != "images"},
    }


async def _list(
    client: Client, path: str, params: Mapping[str, str], kept: Callable[[Object], Object]
) -> tuple[dict[str, Object], str]:
    """Return the collection and its version, read in pages, so that only one page is in memory as a whole."""
    objects: dict[str, Object] = {}
    asked = {**params, "limit": str(PAGE)}
    while True:
        page = await client.request("GET", path, params=asked)
        objects |= {_key(item): kept(item) for item in page.get("items") or []}
        if not page["metadata"].get("continue"):
            return objects, page["metadata"]["resourceVersion"]
        asked["continue"] = page["metadata"]["continue"]


def _take(objects: dict[str, Object], event: Object, kept: Callable[[Object], Object]) -> str:
    """Apply a watch event to the copy; return the key of the object that changed."""
    key = _key(event["object"])
    if event["type"] == "DELETED":
        objects.pop(key, None)
    else:
        objects[key] = kept(event["object"])
    return key


def _pause_s(failures: int, retry_s: tuple[float, float]) -> float:
    shortest, longest = retry_s
    return min(longest, shortest * float(2 ** min(failures, 10))) * random.uniform(0.5, 1.0)


def _key(item: Object) -> str:
    meta = item["metadata"]
    return f"{meta.get('namespace', '')}/{meta['name']}"
