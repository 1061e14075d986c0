"""Sends the requests that carry out a plan to the API server.

Each write first asks the fence (lease.Lease) how long this process certainly leads, and may take no longer
than that. Held by e2e/test_operators.py::test_one_that_slept_past_its_lease_does_no_harm.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from perilune_api import kube
from perilune_operator.observe.facts import Object

REQUESTS_AT_ONCE = 16
"""The most requests at a time, over all pools. A small API server is faster with few of them."""


class NotLeaderError(Exception):
    """Another operator leads, or may lead by now."""


class Fence(Protocol):
    """Tells a write how long this process leads."""

    def remaining_s(self) -> float:
        """Return the seconds for which this process certainly leads; 0 or less when it does not."""


class Writer:
    """Reads and writes of all pools. Every method raises ApiError, and OSError when the server cannot be
    reached."""

    def __init__(
        self,
        client: kube.Client,
        fence: Fence,
        on_write: Callable[[str, str], None] = lambda method, kind: None,
    ) -> None:
        """`on_write` is called with method and kind of each write."""
        self._client = client
        self._fence = fence
        self._on_write = on_write
        self._turns = asyncio.Semaphore(REQUESTS_AT_ONCE)

    async def read(self, where: str) -> Object:
        """Read one object as it is stored now."""
        async with self._turns:
            return await self._client.request("GET", where)

    async def rehearse(self, where: str, obj: Object, manager: str) -> None:
        """Ask the server to validate an object without storing it. Raises NotLeaderError."""
        params = {"fieldManager": manager, "force": "true", "dryRun": "All"}
        await self._send("PATCH", where, "", obj, kube.APPLY, params)

    async def apply(self, where: str, kind: str, obj: Object, manager: str) -> Object:
        """Apply an object on the server's side; return it as stored. Raises NotLeaderError."""
        params = {"fieldManager": manager, "force": "true"}
        return await self._send("PATCH", where, kind, obj, kube.APPLY, params)

    async def create(self, where: str, kind: str, obj: Object) -> None:
        """Create an object. Raises NotLeaderError."""
        await self._send("POST", where, kind, obj, kube.JSON)

    async def merge(self, where: str, kind: str, body: Object) -> Object:
        """Merge fields into an object; return it as stored. Raises NotLeaderError."""
        return await self._send("PATCH", where, kind, body, kube.MERGE)

    async def delete(self, where: str, kind: str, preconditions: Mapping[str, str]) -> None:
        """Delete an object that still has this uid and, where given, this resourceVersion. Raises
        NotLeaderError."""
        body = {"propagationPolicy": "Background", "preconditions": dict(preconditions)}
        await self._send("DELETE", where, kind, body, kube.JSON)

    async def _send(
        self,
        method: str,
        where: str,
        kind: str,
        body: Object,
        content_type: str,
        params: Mapping[str, str] | None = None,
    ) -> Object:
        """Send one request. `kind` is empty for a rehearsal, which does not count as a write."""
        async with self._turns:
            left_s = self._fence.remaining_s()
            if left_s <= 0:
                raise NotLeaderError
            if kind:
                self._on_write(method, kind)
            return await self._client.request(
                method,
                where,
                body,
                params=params,
                content_type=content_type,
                timeout_s=min(left_s, kube.TIMEOUT_S),
            )
