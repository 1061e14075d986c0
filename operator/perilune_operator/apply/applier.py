"""Applies the plan of one pool: server-side apply with one field manager, pruning, marks, status.

    rehearse ─▶ scale and mark ─▶ Secret ─▶ roles, accounts, configuration ─▶ the rest ─▶ prune

Nothing is written when nothing changes. An object is skipped when the digest that it carries is that of the
wanted object, and the operator's field manager owns exactly the fields that it owned after its last apply.
The digest reveals a changed plan and a late write of another operator. The fields reveal a change by any
other client, because a client that changes a field takes over its ownership. After a start every object is
applied once, which changes nothing on the server.

Objects with parts that a user wrote (podTemplates, host names) are rehearsed first: the API server validates
them in a dry run. If it refuses one, nothing at all is written, and everything keeps running as it is. An
object that has the wanted name but does not belong to the pool is left alone.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import NamedTuple

import msgspec

from perilune_api import kube
from perilune_api.crd import KIND
from perilune_api.inference_pool.status import InferencePoolStatus
from perilune_operator.apply import certificate
from perilune_operator.apply.ownership import Owner, digest, is_shared, owned_fields, owner_uids
from perilune_operator.apply.refusal import Refusal, causes
from perilune_operator.apply.writer import Writer
from perilune_operator.kinds import collection, path
from perilune_operator.observe.facts import Key, Object, key, version
from perilune_operator.plan import Plan
from perilune_operator.render import shared_state
from perilune_operator.render.secrets import ENGINE_SECRET, STATE_PASSWORD
from perilune_operator.revision import TEMPLATES
from perilune_operator.rollout import Mark

log = logging.getLogger(__name__)

WATCH_LAG_S = 3.0
"""How long an object that was written may be missing from the watch before it counts as deleted."""
SECOND_WAVE = frozenset({"RoleBinding", "Deployment", "LeaderWorkerSet", "HorizontalPodAutoscaler"})
"""Kinds that refer to objects of the first wave: the API server refuses a binding without its role, and pods
without their account."""
REHEARSED = frozenset(
    {"Deployment", "LeaderWorkerSet", "HorizontalPodAutoscaler", "HTTPRoute", "NetworkPolicy"}
)
"""Kinds with parts that a user wrote and that no schema of the operator can check."""
_CONDITION = re.compile(r"^status\.conditions\[(\d+)\]\.type$")
GONE_OR_REPLACED = frozenset({404, 409})
"""Status codes of a write that names a uid, when the object is gone or another one has its name."""

ABSENT_OR_FORBIDDEN = frozenset({403, 404})
"""Status codes of a read, when the object does not exist, or reading it is forbidden as writing will be."""


class Failure(NamedTuple):
    """A write that the API server refused."""

    message: str
    lasts: bool
    """Whether the API server will refuse it again until a person acts."""


@dataclass(frozen=True, slots=True)
class Applied:
    """The result of applying a plan."""

    refused: tuple[Refusal, ...] = ()
    """The rehearsed objects that the API server refuses. If there are any, nothing was written."""
    errors: tuple[Failure, ...] = ()
    """The writes that it refused."""
    rolling: tuple[str, ...] = ()
    """Workloads that were written and that no watch has shown yet."""
    settled: bool = True
    """Whether the watches have shown everything that was written. If not, look again after WATCH_LAG_S."""


class Applier:
    """Applies plans of one pool, and remembers which fields the operator owns in each of its objects."""

    def __init__(self, writer: Writer, owner: Owner, clock: Callable[[], float]) -> None:
        self._writer = writer
        self._owner = owner
        self._clock = clock
        self._applied: dict[Key, tuple[str, str]] = {}
        """Digest and owned fields of each object after its last apply."""
        self._unseen: dict[Key, tuple[Object, float]] = {}
        """Objects that were written and that no watch has shown yet, with the time of the write."""
        self._rehearsed: dict[Key, str] = {}
        """Digest, without replicas, of each object that the API server accepted in a dry run."""

        self._secrets: set[str] = set()
        """Secrets that are there."""
        self._scaled: tuple[int, int] | None = None
        """The pool's version after its replicas were written last, and their number."""

    def is_own_write(self, obj: Object) -> bool:
        """Return whether this version of an object is the one that was written last."""
        written = self._unseen.get(key(obj))
        return written is not None and version(written[0]) == version(obj)

    def newest(self, children: Mapping[Key, Object]) -> Mapping[Key, Object]:
        """Return the pool's objects; one that the watches do not show yet as it was last written."""
        written = ((k, obj) for k, (obj, _) in self._unseen.items() if k in children)
        return {**children, **{k: obj for k, obj in written if version(children[k]) < version(obj)}}

    async def apply(self, plan: Plan, children: Mapping[Key, Object]) -> Applied:
        """Carry out a plan. Raises NotLeaderError, ApiError and OSError."""
        wanted = plan.objects or ()
        foreign, refused = await self.look(wanted, children)
        if refused:
            return Applied(refused)
        if plan.scale_to is not None:
            await self._scale(plan.scale_to)
        errors: list[Failure | None] = [
            Failure(f"{k.kind} {k.name} exists and is not this pool's: rename one of them", lasts=True)
            for k in sorted(foreign, key=lambda k: (k.kind, k.name))
        ]
        errors += await asyncio.gather(*(self._mark(mark) for mark in plan.marks))
        mine = [obj for obj in wanted if key(obj) not in foreign]
        if plan.secret is not None:
            errors.append(await self._create_secret(plan.secret, _random))
        if plan.certificate is not None:
            errors.append(await self._create_secret(plan.certificate, self._certificate))
        for wave in (False, True):
            due = [obj for obj in mine if (obj["kind"] in SECOND_WAVE) is wave]
            due = [obj for obj in due if not self._is_as_wanted(obj, children.get(key(obj)))]
            errors += await asyncio.gather(*(self._write(obj, children.get(key(obj))) for obj in due))
        keys = {key(obj) for obj in wanted}
        gone = [child for k, child in children.items() if k not in keys | plan.kept]
        errors += await asyncio.gather(*(self._remove(child) for child in gone))
        unseen = self._unseen.keys() & keys
        rolling = sorted(k.name for k in unseen if k.kind in TEMPLATES)
        return Applied((), tuple(filter(None, errors)), tuple(rolling), not unseen)

    # -- before anything is written ----------------------------------------------------------------

    async def look(
        self, wanted: Sequence[Object], children: Mapping[Key, Object]
    ) -> tuple[frozenset[Key], tuple[Refusal, ...]]:
        """Return the objects that belong to someone else, and what the API server would refuse. Raises
        NotLeaderError, ApiError and OSError."""
        unknown = [obj for obj in wanted if key(obj) not in children and key(obj) not in self._applied]
        others, refused = await asyncio.gather(
            asyncio.gather(*(self._is_foreign(obj) for obj in unknown)),
            asyncio.gather(*(self._rehearse(obj) for obj in wanted if self._is_new(obj, children))),
        )
        foreign = frozenset(key(obj) for obj, is_foreign in zip(unknown, others, strict=True) if is_foreign)
        return foreign, tuple(refusal for refusal in refused if refusal and key(refusal.obj) not in foreign)

    async def _is_foreign(self, obj: Object) -> bool:
        """Return whether an object of this name exists that the operator does not watch: a user's own, or one
        of an earlier pool that is being deleted."""
        if is_shared(obj):
            return False
        try:
            found = await self._writer.read(path(obj))
        except kube.ApiError as error:
            if error.status not in ABSENT_OR_FORBIDDEN:
                raise
            return False
        return not self._owner.controls(found)

    def _is_new(self, obj: Object, children: Mapping[Key, Object]) -> bool:
        """Return whether an object has to be rehearsed: a user wrote a part of it, and this form of it is
        neither stored nor accepted yet."""
        live = children.get(key(obj))
        stored = self._owner.applied_digest(live) if live else ""
        is_as_stored = obj["kind"] not in REHEARSED or digest(obj) == stored
        return not is_as_stored and self._rehearsed.get(key(obj)) != _digest_but_replicas(obj)

    async def _rehearse(self, obj: Object) -> Refusal | None:
        try:
            await self._writer.rehearse(path(obj), obj, self._owner.manager(obj))
        except kube.ApiError as error:
            if found := causes(error):
                return Refusal(obj, found)
            # Any other refusal is not the spec's fault; the write will meet it too.
        self._rehearsed[key(obj)] = _digest_but_replicas(obj)
        return None

    # -- objects -----------------------------------------------------------------------------------

    async def _certificate(self) -> Mapping[str, str]:
        return await certificate.make(
            self._owner.name, shared_state.host(self._owner.name, self._owner.namespace)
        )

    async def _create_secret(
        self, secret: Object, values: Callable[[], Awaitable[Mapping[str, str]]]
    ) -> Failure | None:
        """Create a Secret of values that are made up, once. One that exists stays as it is: the operator
        cannot read it. Return a failure if the API server refused it."""
        name = secret["metadata"]["name"]
        if name in self._secrets:
            return None
        try:
            made = dict(await values())
        except OSError as error:
            return Failure(f"Secret {name}: {error}", lasts=False)
        try:
            where = collection("v1", self._owner.namespace, "secrets")
            await self._writer.create(where, "Secret", {**secret, "stringData": made})
        except kube.ApiError as error:
            if error.status != 409:
                return _failure(f"Secret {name}", error)
        else:
            log.info("created kind=Secret object=%s/%s", self._owner.namespace, name)
        self._secrets.add(name)
        return None

    def _is_as_wanted(self, obj: Object, live: Object | None) -> bool:
        k, owner = key(obj), self._owner
        live = self._newest(k, live)
        if live is None:
            return False
        fields = owned_fields(live, owner.manager(obj))
        is_as_applied = self._applied.get(k) == (digest(obj), fields)
        return is_as_applied and owner.applied_digest(live) == digest(obj)

    async def _write(self, obj: Object, live: Object | None) -> Failure | None:
        """Apply one object. Return a failure if the API server refused it."""
        k, owner, meta = key(obj), self._owner, obj["metadata"]
        live = self._newest(k, live)
        annotations = {**(meta.get("annotations") or {}), owner.hash_annotation(obj): digest(obj)}
        body = {**obj, "metadata": {**meta, "annotations": annotations}}
        try:
            made = await self._writer.apply(path(obj), k.kind, body, owner.manager(obj))
        except kube.ApiError as error:
            if error.status == 404 and "namespace" in error.message:
                raise OSError(error.message) from error  # nothing else of this pool can be written either
            if error.status == 409 and "resourceVersion" in meta:
                return None  # planned from an older version; the watch will show the newer one and wake it
            return _failure(f"{k.kind} {k.name}", error)
        if live is None or made["metadata"]["resourceVersion"] != live["metadata"]["resourceVersion"]:
            log.info("applied kind=%s object=%s/%s", k.kind, k.namespace, k.name)
            self._unseen[k] = made, self._clock()
        self._applied[k] = digest(obj), owned_fields(made, owner.manager(obj))
        return None

    def _newest(self, k: Key, live: Object | None) -> Object | None:
        """Return the newer one of what the watch shows and what was last written."""
        if k not in self._unseen:
            return live
        written, at = self._unseen[k]
        if live is None and self._clock() - at < WATCH_LAG_S:
            return written
        if live is not None and version(live) < version(written):
            return written
        del self._unseen[k]
        return live

    async def _remove(self, live: Object) -> Failure | None:
        """Delete an object of the pool, or give up the pool's part of a shared one. Return a failure if the
        API server refused it."""
        k, meta, owner = key(live), live["metadata"], self._owner
        shares = is_shared(live) and owner.uid in owner_uids(live)
        if "deletionTimestamp" in meta or not (shares or owner.controls(live)):
            return None
        try:
            if shares:
                await self._leave(live)
            else:
                await self._writer.delete(path(live), k.kind, {"uid": meta["uid"]})
        except kube.ApiError as error:
            if error.status not in GONE_OR_REPLACED:
                return _failure(f"{k.kind} {k.name}", error)
        else:
            log.info("pruned kind=%s object=%s/%s", k.kind, k.namespace, k.name)
        for known in (self._applied, self._unseen, self._rehearsed):
            known.pop(k, None)
        return None

    async def _leave(self, live: Object) -> None:
        """Remove this pool's owner reference from a shared object. The last owner deletes it."""
        owner = self._owner
        if owner_uids(live) != {owner.uid}:
            # Applying an empty object removes the fields that only this pool's manager owns.
            named = {part: live["metadata"][part] for part in ("name", "namespace", "uid")}
            nothing = {"apiVersion": live["apiVersion"], "kind": live["kind"], "metadata": named}
            live = await self._writer.apply(path(live), live["kind"], nothing, owner.manager(live))
        if owner_uids(live) <= {owner.uid}:
            # Delete this version only: another pool might own a newer one.
            this = {part: live["metadata"][part] for part in ("uid", "resourceVersion")}
            await self._writer.delete(path(live), live["kind"], this)

    # -- the pool and its pods ---------------------------------------------------------------------

    async def _scale(self, replicas: int) -> None:
        """Write the pool's own replicas. Raises ApiError."""
        stored = await self._writer.merge(f"{self._owner.path}/scale", KIND, {"spec": {"replicas": replicas}})
        self._scaled = version(stored), replicas

    def take_overwritten(self, pool: Object) -> bool:
        """Return whether somebody has changed the number of endpoints that was written last; true once for
        each change."""
        if self._scaled is None or version(pool) <= self._scaled[0]:
            return False
        _, written = self._scaled
        now = pool["spec"].get("replicas", 1)
        self._scaled = version(pool), now
        return bool(now != written)

    async def _mark(self, mark: Mark) -> Failure | None:
        """Annotate and label a pod through its status, so that the operator needs no right to change pods.
        Return a failure if the API server refused it."""
        written = {"annotations": dict(mark.annotations), "labels": dict(mark.labels)}
        body = {"metadata": {"uid": mark.uid, **{name: value for name, value in written.items() if value}}}
        where = f"{collection('v1', self._owner.namespace, 'pods')}/{mark.pod}/status"
        try:
            await self._writer.merge(where, "Pod", body)
        except kube.ApiError as error:
            if error.status not in GONE_OR_REPLACED:
                return _failure(f"Pod {mark.pod}", error)
        return None

    async def write_status(self, old: Object, new: InferencePoolStatus) -> Object | None:
        """Write the status where it differs, and return the pool as it is then stored. Return None when
        nothing differs or the pool is gone. Raises NotLeaderError, ApiError and OSError."""
        wanted = msgspec.json.decode(msgspec.json.encode(new))
        if {name: value for name, value in wanted.items() if value is not None} == old:
            return None
        try:
            return await self._merge_status(wanted)
        except kube.ApiError as error:
            if error.status in GONE_OR_REPLACED:
                return None
            unknown = {int(i) for field, _ in error.causes for i in _CONDITION.findall(field)}
            if not unknown:
                raise
            # A CRD from before this version lists the conditions that it takes.
            conditions = [c for i, c in enumerate(wanted["conditions"]) if i not in unknown]
            return await self._merge_status({**wanted, "conditions": conditions})

    async def _merge_status(self, status: Object) -> Object:
        body = {"metadata": {"uid": self._owner.uid}, "status": status}
        return await self._writer.merge(f"{self._owner.path}/status", KIND, body)


async def _random() -> Mapping[str, str]:
    return {key: token_hex(32) for key in (ENGINE_SECRET, STATE_PASSWORD)}


def _failure(what: str, error: kube.ApiError) -> Failure:
    """Return the failure, and whether it lasts. Refusals of a conflict, of a missing object and of too many
    requests pass, as errors of the server do."""
    lasts = 400 <= error.status < 500 and error.status not in (404, 409, 429)
    return Failure(f"{what}: {error.message}", lasts)


def _digest_but_replicas(obj: Object) -> str:
    return digest({**obj, "spec": {name: value for name, value in obj["spec"].items() if name != "replicas"}})
