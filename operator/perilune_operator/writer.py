"""The one way to write: through the fence. And what is written of a pool beside its objects: replicas handed
over, status, events, marks on pods. (The objects are `apply.py`'s.)

Every write first asks the fence (we are leader, for so many seconds more) and may take no longer than that.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from perilune_api import kube
from perilune_api.conditions import Condition, Reason
from perilune_api.crd import API_VERSION, KIND, PLURAL
from perilune_api.inference_pool.status import InferencePoolStatus, StatusCondition
from perilune_operator.kinds import collection
from perilune_operator.observe import MANAGER, Object
from perilune_operator.rollout import Mark

log = logging.getLogger(__name__)

ANOTHER = frozenset({404, 409})
"""What the API server answers to a write that names a uid: it is gone, or another one of that name by now."""


class NotLeaderError(Exception):
    """Another operator acts, or may by now."""


class Fence(Protocol):
    """lease.Lease."""

    def remaining_s(self) -> float:
        """Seconds for which we are surely leader; 0 or less: we are not."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The pool that something is written for."""

    namespace: str
    name: str
    uid: str

    @property
    def path(self) -> str:
        return f"{collection(API_VERSION, self.namespace, PLURAL)}/{self.name}"


class Writer:
    """All of its methods raise NotLeaderError, and OSError where the API server cannot be reached."""

    def __init__(
        self,
        client: kube.Client,
        fence: Fence,
        on_write: Callable[[str, str], None] = lambda method, kind: None,
    ) -> None:
        self._client = client
        self._fence = fence
        self._on_write = on_write

    async def send(
        self,
        method: str,
        where: str,
        kind: str,
        body: Object,
        *,
        params: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Object:
        """`kind`: what is written; empty: nothing, it is a rehearsal. Raises ApiError, too."""
        left = self._fence.remaining_s()
        if left <= 0:
            raise NotLeaderError
        if kind:
            self._on_write(method, kind)
        return await self._client.request(
            method,
            where,
            body,
            params=params,
            content_type=content_type,
            timeout_s=min(left, kube.TIMEOUT_S),
        )

    async def mark(self, owner: Owner, mark: Mark) -> str:
        """Annotate a pod. Through its status, which is all that the right to do so then covers. Returns what
        the API server refused, in words; empty: nothing."""
        body = {"metadata": {"uid": mark.uid, "annotations": dict(mark.annotations)}}
        where = f"{collection('v1', owner.namespace, 'pods')}/{mark.pod}/status"
        try:
            await self.send("PATCH", where, "Pod", body, content_type=kube.MERGE)
        except kube.ApiError as error:
            if error.status not in ANOTHER:
                return f"Pod {mark.pod}: {error.message}"
        return ""

    async def scale(self, owner: Owner, replicas: int) -> None:
        """Write the pool's own replicas: once, when an autoscaler takes over. Raises ApiError."""
        body = {"spec": {"replicas": replicas}}
        await self.send("PATCH", f"{owner.path}/scale", KIND, body, content_type=kube.MERGE)

    async def status(self, owner: Owner, old: Object, new: InferencePoolStatus) -> Object | None:
        """Write the status where it differs; the pool as it then is. None: as it was, or gone by now. Raises
        ApiError."""
        wanted = msgspec.json.decode(msgspec.json.encode(new))
        if {k: v for k, v in wanted.items() if v is not None} == old:
            return None
        body = {"metadata": {"uid": owner.uid}, "status": wanted}
        try:
            return await self.send("PATCH", f"{owner.path}/status", KIND, body, content_type=kube.MERGE)
        except kube.ApiError as error:
            if error.status not in ANOTHER:
                raise
            return None

    async def event(self, owner: Owner, condition: StatusCondition, now: str, number: int) -> None:
        """Tell of one changed condition; `number` makes the event's name. One that cannot be written is not
        worth a failed round."""
        bad = condition.status == "False" and condition.type in (Condition.ACCEPTED, Condition.READY)
        body = {
            "metadata": {"name": f"{owner.name}.{number:x}", "namespace": owner.namespace},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "namespace": owner.namespace,
                "name": owner.name,
                "uid": owner.uid,
            },
            "type": "Warning" if bad or condition.reason == Reason.APPLY_FAILED else "Normal",
            "reason": condition.reason,
            "message": f"{condition.type}={condition.status}: {condition.message}"[:1000],
            "source": {"component": MANAGER},
            "reportingComponent": MANAGER,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            await self.send("POST", collection("v1", owner.namespace, "events"), "Event", body)
        except kube.ApiError as error:
            log.warning("event not written pool=%s error=%s", owner.name, error)
