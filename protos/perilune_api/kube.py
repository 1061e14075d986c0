"""The Kubernetes API server, as far as gateway and operator need it: plain requests and a followed list.

`Access` says where it is and who we are: the pod's service account, or a kubeconfig with a token or a client
certificate (no exec plugins). `Client` sends JSON. `follow` keeps a copy of one collection: list, then watch
from the list's version; bookmarks move that version on, 410 Gone begins anew, a broken stream is taken up
where it was. A service account's token is read again once a minute, since the kubelet renews it.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import random
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import yaml

log = logging.getLogger(__name__)

Object = dict[str, Any]

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
TIMEOUT_S = 10.0
WATCH_S = 300
"""The server ends a watch after so long; it then goes on from the last version seen."""
SILENCE_S = 90.0
"""A watch without a byte for so long is taken for dead: the server sends bookmarks every minute."""
TOKEN_S = 60.0
RETRY_S = (0.2, 5.0)
"""Shortest and longest pause after a failure; doubled each time, with dice."""


class ApiError(Exception):
    """The API server refused."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message


@dataclass(frozen=True, slots=True)
class Access:
    """Where the API server is, and who we are."""

    server: str
    tls: ssl.SSLContext | None = None
    token: str = ""
    token_file: Path | None = None
    namespace: str = "default"


def in_cluster(account: Path = SERVICE_ACCOUNT, environ: Mapping[str, str] = os.environ) -> Access:
    """The pod's own service account. Raises OSError outside a pod."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise OSError("not in a Kubernetes pod: KUBERNETES_SERVICE_HOST is not set")
    host = f"[{host}]" if ":" in host else host
    return Access(
        f"https://{host}:{port}",
        ssl.create_default_context(cafile=str(account / "ca.crt")),
        token_file=account / "token",
        namespace=(account / "namespace").read_text().strip(),
    )


def from_kubeconfig(path: Path) -> Access:
    """The current context of a kubeconfig. Raises OSError, KeyError for one that lacks a part."""
    config = yaml.safe_load(path.read_text())
    context = _named(config["contexts"], config["current-context"])["context"]
    cluster = _named(config["clusters"], context["cluster"])["cluster"]
    user = _named(config["users"], context["user"])["user"]
    tls = None
    if cluster["server"].startswith("https:"):
        ca = _text(cluster, "certificate-authority")
        tls = ssl.create_default_context(cadata=ca or None)
        if cluster.get("insecure-skip-tls-verify"):
            tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
        certificate, key = _text(user, "client-certificate"), _text(user, "client-key")
        if certificate:
            with tempfile.NamedTemporaryFile("w", suffix=".pem") as pem:  # ssl reads files only
                pem.write(certificate + "\n" + key)
                pem.flush()
                tls.load_cert_chain(pem.name)
    token_file = user.get("tokenFile")
    return Access(
        cluster["server"],
        tls,
        user.get("token", ""),
        Path(token_file) if token_file else None,
        context.get("namespace", "default"),
    )


def find_access(environ: Mapping[str, str] = os.environ) -> Access:
    """The pod's service account, else $KUBECONFIG, else ~/.kube/config."""
    if environ.get("KUBERNETES_SERVICE_HOST") and (SERVICE_ACCOUNT / "token").exists():
        return in_cluster(environ=environ)
    return from_kubeconfig(Path(environ.get("KUBECONFIG") or Path.home() / ".kube/config"))


def _named(items: list[Object], name: str) -> Object:
    return next(item for item in items if item["name"] == name)


def _text(part: Object, key: str) -> str:
    """PEM given inline or by file."""
    if inline := part.get(f"{key}-data"):
        return base64.b64decode(inline).decode()
    return Path(part[key]).read_text() if part.get(key) else ""


class Client:
    """One connection pool to one API server; `close` it."""

    def __init__(self, access: Access, clock: Callable[[], float] = time.monotonic) -> None:
        self.access = access
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None
        self._token = access.token
        self._token_read_at = float("-inf")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

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
        data = None if body is None else msgspec.json.encode(body)
        headers = {**self._headers(), "Content-Type": content_type}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._open().request(
                method, self.access.server + path, data=data, params=params, headers=headers, timeout=timeout
            ) as response:
                text, status = await response.read(), response.status
        except aiohttp.ClientError as error:
            raise ConnectionError(str(error) or type(error).__name__) from error
        if status >= 400:
            raise _error(status, text)
        return _object(text)

    async def watch(self, path: str, params: Mapping[str, str]) -> AsyncIterator[Object]:
        """Events until the server ends the stream. Raises as `request`."""
        asked = {**params, "watch": "1", "allowWatchBookmarks": "1", "timeoutSeconds": str(WATCH_S)}
        timeout = aiohttp.ClientTimeout(sock_connect=TIMEOUT_S, sock_read=SILENCE_S)
        try:
            async with self._open().get(
                self.access.server + path, params=asked, headers=self._headers(), timeout=timeout
            ) as response:
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

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(ssl=self.access.tls or False)
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session

    def _headers(self) -> dict[str, str]:
        file, now = self.access.token_file, self._clock()
        if file is not None and now - self._token_read_at >= TOKEN_S:
            self._token, self._token_read_at = file.read_text().strip(), now
        return {"Authorization": f"Bearer {self._token}"} if self._token else {}


def _object(text: bytes) -> Object:
    made = msgspec.json.decode(text) if text else {}
    return made if isinstance(made, dict) else {}


def _error(status: int, text: bytes) -> ApiError:
    try:
        said = _object(text)
    except msgspec.DecodeError:
        return ApiError(status, "Unknown", text[:200].decode(errors="replace"))
    return ApiError(status, said.get("reason", "Unknown"), said.get("message", ""))


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
