"""Plan → cluster: the only writer. Server-side apply with one field manager, pruning, status, events.

Nothing is written when nothing changes: an object is skipped when its stored hash (an annotation) is that of
what we want and our field manager still owns exactly the fields that it owned after our last apply. The first
catches a change of ours or a late write of another operator, the second anyone else's: who changes a field
takes it from us. After a start every object is applied once, which the server finds to be the same.

Every write first asks the fence (we are leader, for so many seconds more) and may take no longer than that.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from perilune_api import kube, names
from perilune_api.crd import KIND, PLURAL, VERSION, InferencePoolStatus, StatusCondition
from perilune_operator.observe import MANAGER, Key, Object, key

log = logging.getLogger(__name__)

HASH = "perilune.dev/hash"
SETTLE_S = 3.0
"""How long an object that we wrote may be missing from the watch."""

PLURALS: Mapping[str, str] = {
    "ConfigMap": "configmaps",
    "Service": "services",
    "ServiceAccount": "serviceaccounts",
    "Deployment": "deployments",
    "LeaderWorkerSet": "leaderworkersets",
    "Role": "roles",
    "RoleBinding": "rolebindings",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "HorizontalPodAutoscaler": "horizontalpodautoscalers",
    "NetworkPolicy": "networkpolicies",
    "HTTPRoute": "httproutes",
    "BackendTrafficPolicy": "backendtrafficpolicies",
    "EnvoyExtensionPolicy": "envoyextensionpolicies",
    "ClientTrafficPolicy": "clienttrafficpolicies",
    "InferencePool": "inferencepools",
    "PodMonitor": "podmonitors",
}
"""Every kind that we render."""


class NotLeaderError(Exception):
    """Another operator acts, or may by now."""


class Fence(Protocol):
    """lease.Lease."""

    def remaining_s(self) -> float:
        """Seconds for which we are surely leader; 0 or less: we are not."""


@dataclass(frozen=True, slots=True)
class Pool:
    """The object whose children and status are written."""

    namespace: str
    name: str
    uid: str


def path(obj: Object) -> str:
    """Where the API server keeps it."""
    api, meta = obj["apiVersion"], obj["metadata"]
    root = f"/apis/{api}" if "/" in api else f"/api/{api}"
    return f"{root}/namespaces/{meta['namespace']}/{PLURALS[obj['kind']]}/{meta['name']}"


def digest(obj: Object) -> str:
    return hashlib.sha256(msgspec.json.encode(obj, order="deterministic")).hexdigest()[:16]


class Applier:
    """Remembers of each object what we own in it."""

    def __init__(
        self,
        client: kube.Client,
        fence: Fence,
        clock: Callable[[], float],
        on_write: Callable[[str, str], None] = lambda verb, kind: None,
    ) -> None:
        self._client = client
        self._fence = fence
        self._clock = clock
        self._on_write = on_write
        self._ours: dict[Key, tuple[str, str]] = {}
        """Hash and owned fields after our last apply."""
        self._written: dict[Key, tuple[Object, float]] = {}

    async def apply(self, pool: Pool, wanted: Sequence[Object], children: Mapping[Key, Object]) -> list[str]:
        """Returns what the API server refused, in words. Raises NotLeaderError, OSError."""
        errors = []
        for obj in wanted:
            try:
                await self._apply(pool, obj, children.get(key(obj)))
            except kube.ApiError as error:
                if error.status == 404 and "namespace" in error.message:
                    raise OSError(error.message) from error
                errors.append(f"{obj['kind']} {obj['metadata']['name']}: {error.message}")
        keep = {key(obj) for obj in wanted}
        for gone in children.keys() - keep:
            try:
                await self._delete(pool, children[gone])
            except kube.ApiError as error:
                errors.append(f"{gone.kind} {gone.name}: {error.message}")
        return errors

    async def status(self, pool: Pool, old: Object, new: InferencePoolStatus) -> Object | None:
        """Write the status where it differs; the pool as it then is. None: as it was, or gone by now."""
        wanted = msgspec.json.decode(msgspec.json.encode(new))
        if {k: v for k, v in wanted.items() if v is not None} == old:
            return None
        where = f"/apis/{names.GROUP}/{VERSION}/namespaces/{pool.namespace}/{PLURAL}/{pool.name}/status"
        body = {"metadata": {"uid": pool.uid}, "status": wanted}
        try:
            return await self._send("PATCH", where, KIND, body, content_type=kube.MERGE)
        except kube.ApiError as error:
            if error.status not in (404, 409):
                raise
            return None

    async def event(self, pool: Pool, condition: StatusCondition, now: str, number: int) -> None:
        """Tell of one changed condition. An event that cannot be written is not worth a failed round."""
        bad = condition.status == "False" and condition.type in ("Accepted", "Ready")
        body = {
            "metadata": {"name": f"{pool.name}.{number:x}", "namespace": pool.namespace},
            "involvedObject": {
                "apiVersion": f"{names.GROUP}/{VERSION}",
                "kind": KIND,
                "namespace": pool.namespace,
                "name": pool.name,
                "uid": pool.uid,
            },
            "type": "Warning" if bad or condition.reason == "ApplyFailed" else "Normal",
            "reason": condition.reason,
            "message": f"{condition.type}={condition.status}: {condition.message}"[:1000],
            "source": {"component": MANAGER},
            "reportingComponent": MANAGER,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            await self._send("POST", f"/api/v1/namespaces/{pool.namespace}/events", "Event", body)
        except kube.ApiError as error:
            log.warning("event not written pool=%s error=%s", pool.name, error)

    def forget(self, namespace: str, pool: str) -> None:
        """A pool is gone; garbage collection takes its objects."""
        for known in (self._ours, self._written):
            for k in [k for k in known if k.namespace == namespace and k.name.startswith(pool)]:
                del known[k]

    async def _apply(self, pool: Pool, obj: Object, live: Object | None) -> None:
        k, stamped, manager = key(obj), digest(obj), _manager(pool, obj)
        live = self._newest(k, live)
        hash_name, meta = _hash_name(pool, obj), obj["metadata"]
        if live is not None:
            stored = (live["metadata"].get("annotations") or {}).get(hash_name)
            if stored == stamped and self._ours.get(k) == (stamped, _owned(live, manager)):
                return
        annotations = {**(meta.get("annotations") or {}), hash_name: stamped}
        body = {**obj, "metadata": {**meta, "annotations": annotations}}
        params = {"fieldManager": manager, "force": "true"}
        made = await self._send("PATCH", path(obj), obj["kind"], body, params=params, content_type=kube.APPLY)
        before = live["metadata"]["resourceVersion"] if live else ""
        if made["metadata"]["resourceVersion"] != before:
            log.info("applied kind=%s object=%s/%s", k.kind, k.namespace, k.name)
        self._ours[k] = (stamped, _owned(made, manager))
        self._written[k] = (made, self._clock())

    async def _delete(self, pool: Pool, live: Object) -> None:
        if "deletionTimestamp" in live["metadata"] or not _owned_by(pool, live):
            return
        body = {
            "propagationPolicy": "Background",
            "preconditions": {"uid": live["metadata"]["uid"]},
        }
        try:
            await self._send("DELETE", path(live), live["kind"], body)
        except kube.ApiError as error:
            if error.status not in (404, 409):  # gone, or another one of that name by now
                raise
        else:
            log.info("pruned kind=%s object=%s/%s", live["kind"], pool.namespace, live["metadata"]["name"])
        self._ours.pop(key(live), None)
        self._written.pop(key(live), None)

    def _newest(self, k: Key, live: Object | None) -> Object | None:
        """What the watch says, unless what we wrote is newer."""
        written, at = self._written.get(k, (None, 0.0))
        if written is None:
            return live
        if live is None:
            return written if self._clock() - at < SETTLE_S else None
        newer = int(written["metadata"]["resourceVersion"]) > int(live["metadata"]["resourceVersion"])
        return written if newer else live

    async def _send(
        self,
        method: str,
        where: str,
        kind: str,
        body: Object,
        *,
        params: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Object:
        left = self._fence.remaining_s()
        if left <= 0:
            raise NotLeaderError
        self._on_write(method, kind)
        return await self._client.request(
            method,
            where,
            body,
            params=params,
            content_type=content_type,
            timeout_s=min(left, kube.TIMEOUT_S),
        )


def _manager(pool: Pool, obj: Object) -> str:
    """An object that several pools own has a manager for each, or each would take away the others' owner."""
    return f"{MANAGER}-{pool.uid[:8]}" if _is_shared(obj) else MANAGER


def _hash_name(pool: Pool, obj: Object) -> str:
    return f"{HASH}-{pool.uid[:8]}" if _is_shared(obj) else HASH


def _is_shared(obj: Object) -> bool:
    return not any(owner.get("controller") for owner in obj["metadata"].get("ownerReferences") or ())


def _owned_by(pool: Pool, live: Object) -> bool:
    owners = live["metadata"].get("ownerReferences") or ()
    return any(owner["uid"] == pool.uid and owner.get("controller") for owner in owners)


def _owned(live: Object, manager: str) -> str:
    """Hash of the fields that `manager` owns."""
    for entry in live["metadata"].get("managedFields") or ():
        if entry["manager"] == manager and entry["operation"] == "Apply" and not entry.get("subresource"):
            return digest(entry["fieldsV1"])
    return ""
