"""Leadership by a coordination.k8s.io Lease: at most one operator acts, and one always does.

The holder renews every `renew_s`; others take over once the record has not changed for its duration, by their
own clock (nobody compares wall clocks). A holder counts itself leader only until `duration − margin` after it
*sent* its last successful renewal, so it has stopped, even if it was asleep, before another may begin:

    renewed ──── remaining_s ────▶ 0 ── margin ──▶ duration: another takes over

Every write of the record names the resourceVersion it has seen; of two that try, one gets a 409. A write that
was under way when leadership ended can still arrive; it is one whole object of an older plan, and the new
leader's watch sees it and applies its own.
"""

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime

from perilune_api import kube
from perilune_operator.observe import Object

log = logging.getLogger(__name__)

DURATION_S = 10
SHARE = 5
"""A fifth of the duration is between two renewals, and so is the margin."""


class Lease:
    """One candidate."""

    def __init__(
        self,
        client: kube.Client,
        namespace: str,
        name: str,
        identity: str,
        clock: Callable[[], float],
        *,
        duration_s: int = DURATION_S,
    ) -> None:
        self._client = client
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._name = name
        self.identity = identity
        self._clock = clock
        self._duration_s = duration_s
        self._renew_s = self._margin_s = duration_s / SHARE
        self._leads_until = float("-inf")
        self._seen: Object = {}
        self._seen_at = float("-inf")

    def remaining_s(self) -> float:
        """Seconds for which we are surely leader; 0 or less: we are not."""
        return self._leads_until - self._clock()

    async def run(self, on_leading: Callable[[], None]) -> None:
        """Stand for leadership until cancelled; `on_leading` each time that it is won. Then give it back."""
        leading = False
        try:
            while True:
                try:
                    await self._step()
                except (OSError, kube.ApiError) as error:
                    log.warning("lease not reached error=%s", error)
                if leading != (self.remaining_s() > 0):
                    leading = not leading
                    log.info("leadership %s identity=%s", "won" if leading else "lost", self.identity)
                    if leading:
                        on_leading()
                await asyncio.sleep(self._renew_s)
        finally:
            await self._release()

    async def _step(self) -> None:
        sent = self._clock()
        try:
            record = await self._client.request(
                "GET", f"{self._path}/{self._name}", timeout_s=self._renew_s * 2
            )
        except kube.ApiError as error:
            if error.status != 404:
                raise
            record = {}
        if not may_take(record, self.identity, self._age(record)):
            self._leads_until = float("-inf")
            return
        wanted = claim(record, self._name, self.identity, self._duration_s, datetime.now(UTC))
        try:
            self._seen = await self._put(wanted)
        except kube.ApiError as error:
            if error.status != 409:
                raise
            self._leads_until = float("-inf")  # somebody was quicker
        else:
            self._seen_at = sent
            self._leads_until = sent + self._duration_s - self._margin_s

    def _age(self, record: Object) -> float:
        """Seconds since we first saw this very record."""
        now = self._clock()
        if record.get("spec") != self._seen.get("spec"):
            self._seen, self._seen_at = record, now
        return now - self._seen_at

    async def _put(self, wanted: Object) -> Object:
        if "resourceVersion" in wanted["metadata"]:
            return await self._client.request(
                "PUT", f"{self._path}/{self._name}", wanted, timeout_s=self._renew_s * 2
            )
        return await self._client.request("POST", self._path, wanted, timeout_s=self._renew_s * 2)

    async def _release(self) -> None:
        if self.remaining_s() <= 0:
            return
        self._leads_until = float("-inf")
        record = {**self._seen, "spec": {**self._seen["spec"], "holderIdentity": ""}}
        try:
            await asyncio.shield(self._put(record))
        except (OSError, kube.ApiError) as error:
            log.warning("lease not given back, it will expire error=%s", error)


def may_take(record: Object, identity: str, age_s: float) -> bool:
    """Nobody's, ours, or not renewed for its duration."""
    spec = record.get("spec") or {}
    holder = spec.get("holderIdentity") or ""
    return holder in ("", identity) or age_s > spec.get("leaseDurationSeconds", DURATION_S)


def claim(record: Object, name: str, identity: str, duration_s: int, now: datetime) -> Object:
    """The record with us as holder."""
    spec = record.get("spec") or {}
    stamp = now.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    ours = spec.get("holderIdentity") == identity
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": record.get("metadata") or {"name": name},
        "spec": {
            "holderIdentity": identity,
            "leaseDurationSeconds": duration_s,
            "acquireTime": spec.get("acquireTime", stamp) if ours else stamp,
            "renewTime": stamp,
            "leaseTransitions": spec.get("leaseTransitions", 0) + (0 if ours else 1),
        },
    }
