"""A plan's objects → cluster: server-side apply with one field manager, and pruning.

Nothing is written when nothing changes: an object is skipped when its stored hash (an annotation) is that of
what we want and our field manager still owns exactly the fields that it owned after our last apply. The first
catches a change of ours or a late write of another operator, the second anyone else's: who changes a field
takes it from us. After a start every object is applied once, which the server finds to be the same.

    look ─▶ write what others name (roles, accounts, configuration) ─▶ write the rest ─▶ prune

*Looking* comes before anything is written. Of an object that is to be made, the name is looked up: what is
there and not the pool's is left alone. And what has users' own words in it (podTemplates, host names) is
rehearsed: the API server is asked what it would say (a dry run). If it refuses one, nothing at all is to be
written, so that what runs goes on as it was.

Objects of a pool are asked about and written side by side. Over all pools at most REQUESTS_AT_ONCE are on
their way, a status or an event beside them: a small API server answers a few fast sooner than many slowly.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from perilune_api import kube
from perilune_operator.kinds import path
from perilune_operator.observe import MANAGER, Key, Object, PoolName, key, version
from perilune_operator.refusal import Refusal, causes
from perilune_operator.writer import ANOTHER, Owner, Writer

log = logging.getLogger(__name__)

HASH = "perilune.dev/hash"
WATCH_LAG_S = 3.0
"""How long an object that we wrote may be missing from the watch."""
REQUESTS_AT_ONCE = 16
SECOND_WAVE = frozenset({"RoleBinding", "Deployment", "LeaderWorkerSet", "HorizontalPodAutoscaler"})
"""They name objects of the first: a binding is refused without its role, pods without their account."""

REHEARSED = frozenset({"Deployment", "LeaderWorkerSet", "HorizontalPodAutoscaler", "HTTPRoute"})
"""They have words of the user in them that no schema of ours can check."""


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of a plan's objects."""

    errors: tuple[str, ...]
    """What the API server refused, in words."""
    settled: bool
    """The watches have shown all that we wrote. If not, look again after WATCH_LAG_S, whatever they say."""


def digest(obj: Object) -> str:
    """Of what we want, whichever version of it that was planned from."""
    if "resourceVersion" in obj.get("metadata", ()):
        obj = {**obj, "metadata": {k: v for k, v in obj["metadata"].items() if k != "resourceVersion"}}
    return hashlib.sha256(msgspec.json.encode(obj, order="deterministic")).hexdigest()[:16]


@dataclass(slots=True)
class _Memory:
    """Of one pool's objects."""

    ours: dict[Key, tuple[str, str]] = field(default_factory=dict)
    """Hash and owned fields after our last apply."""
    written: dict[Key, tuple[Object, float]] = field(default_factory=dict)
    """What we wrote and no watch has shown yet."""
    rehearsed: dict[Key, str] = field(default_factory=dict)
    """Hash of what the API server would take, whatever its number of replicas."""


class Applier:
    """Remembers of each object what we own in it."""

    def __init__(self, client: kube.Client, writer: Writer, clock: Callable[[], float]) -> None:
        self._client = client
        self._writer = writer
        self._clock = clock
        self._memories: dict[PoolName, tuple[str, _Memory]] = {}
        """Uid, and what is known of the pool that has it."""
        self._turns = asyncio.Semaphore(REQUESTS_AT_ONCE)

    async def look(
        self, owner: Owner, wanted: Sequence[Object], children: Mapping[Key, Object]
    ) -> tuple[frozenset[Key], tuple[Refusal, ...]]:
        """Which of them are somebody else's, and what the API server would refuse for what is in it. Raises
        NotLeaderError, OSError."""
        memory = self._memory(owner)
        unseen = [obj for obj in wanted if key(obj) not in children and key(obj) not in memory.ours]
        others, refused = await asyncio.gather(
            asyncio.gather(*(self._is_anothers(owner, obj) for obj in unseen)),
            self._rehearse_new(memory, wanted, children),
        )
        foreign = frozenset(key(obj) for obj, is_ in zip(unseen, others, strict=True) if is_)
        return foreign, tuple(refusal for refusal in refused if key(refusal.obj) not in foreign)

    async def _rehearse_new(
        self, memory: _Memory, wanted: Sequence[Object], children: Mapping[Key, Object]
    ) -> list[Refusal]:
        new = []
        for obj in wanted:
            live = children.get(key(obj))
            stored = (live["metadata"].get("annotations") or {}).get(HASH) if live else None
            if obj["kind"] in REHEARSED and digest(obj) != stored:
                stamped = digest({**obj, "spec": {k: v for k, v in obj["spec"].items() if k != "replicas"}})
                if memory.rehearsed.get(key(obj)) != stamped:
                    new.append((obj, stamped))
        said = await asyncio.gather(*(self._rehearse(obj) for obj, _ in new))
        for (obj, stamped), refusal in zip(new, said, strict=True):
            if refusal is None:
                memory.rehearsed[key(obj)] = stamped
        return list(filter(None, said))

    async def _rehearse(self, obj: Object) -> Refusal | None:
        params = {"fieldManager": MANAGER, "force": "true", "dryRun": "All"}
        try:
            async with self._turns:
                await self._writer.send("PATCH", path(obj), "", obj, params=params, content_type=kube.APPLY)
        except kube.ApiError as error:
            found = causes(error)
            return Refusal(obj, found) if found else None  # for another reason: the write will meet it too
        return None

    async def apply(
        self,
        owner: Owner,
        wanted: Sequence[Object],
        children: Mapping[Key, Object],
        foreign: frozenset[Key] = frozenset(),
        before_workloads: Callable[[], Awaitable[None]] | None = None,
        kept: frozenset[Key] = frozenset(),
    ) -> Applied:
        """Make it so, but for what is somebody else's. `before_workloads`: awaited where one of those is to
        be written. `kept`: not wanted any more, and not to go yet. Raises NotLeaderError, OSError."""
        keep = {key(obj) for obj in wanted}
        errors = [
            f"{k.kind} {k.name} is there already and not this pool's: rename one of them" for k in foreign
        ]
        mine = [obj for obj in wanted if key(obj) not in foreign]
        for wave in (False, True):
            now = [obj for obj in mine if (obj["kind"] in SECOND_WAVE) is wave]
            now = [obj for obj in now if not self._is_as_wanted(owner, obj, children.get(key(obj)))]
            if wave and now and before_workloads is not None:
                await before_workloads()
            errors += await asyncio.gather(*(self._apply(owner, obj, children.get(key(obj))) for obj in now))
        gone = [child for k, child in children.items() if k not in keep | kept]
        errors += await asyncio.gather(*(self._remove(owner, child) for child in gone))
        return Applied(tuple(filter(None, errors)), not any(k in self._memory(owner).written for k in keep))

    def wrote(self, pool: PoolName, obj: Object) -> bool:
        """Whether this very version of it is what we wrote last: no news."""
        _, memory = self._memories.get(pool, ("", _Memory()))
        written = memory.written.get(key(obj))
        return written is not None and version(written[0]) == version(obj)

    def forget(self, pool: PoolName) -> None:
        """A pool is gone; garbage collection takes its objects."""
        self._memories.pop(pool, None)

    def _memory(self, owner: Owner) -> _Memory:
        uid, memory = self._memories.get((owner.namespace, owner.name), ("", _Memory()))
        if uid != owner.uid:
            memory = _Memory()
            self._memories[owner.namespace, owner.name] = owner.uid, memory
        return memory

    def _is_as_wanted(self, owner: Owner, obj: Object, live: Object | None) -> bool:
        k, stamped, memory = key(obj), digest(obj), self._memory(owner)
        live = self._newest(memory, k, live)
        if live is None:
            return False
        stored = (live["metadata"].get("annotations") or {}).get(_hash_name(owner, obj))
        return stored == stamped and memory.ours.get(k) == (stamped, _owned(live, _manager(owner, obj)))

    async def _apply(self, owner: Owner, obj: Object, live: Object | None) -> str:
        """What the API server refused, in words; empty: nothing."""
        k, stamped, manager = key(obj), digest(obj), _manager(owner, obj)
        memory, meta = self._memory(owner), obj["metadata"]
        live = self._newest(memory, k, live)
        annotations = {**(meta.get("annotations") or {}), _hash_name(owner, obj): stamped}
        body = {**obj, "metadata": {**meta, "annotations": annotations}}
        params = {"fieldManager": manager, "force": "true"}
        try:
            async with self._turns:
                made = await self._writer.send(
                    "PATCH", path(obj), obj["kind"], body, params=params, content_type=kube.APPLY
                )
        except kube.ApiError as error:
            if error.status == 404 and "namespace" in error.message:
                raise OSError(error.message) from error
            if error.status == 409 and "resourceVersion" in meta:
                return ""  # planned from what is no more: the watch will show what is, and wake us
            return f"{obj['kind']} {meta['name']}: {error.message}"
        before = live["metadata"]["resourceVersion"] if live else ""
        if made["metadata"]["resourceVersion"] != before:
            log.info("applied kind=%s object=%s/%s", k.kind, k.namespace, k.name)
            memory.written[k] = (made, self._clock())
        memory.ours[k] = (stamped, _owned(made, manager))
        return ""

    async def _is_anothers(self, owner: Owner, obj: Object) -> bool:
        """An object of that name that we do not watch: a user's own, or that of an earlier pool, going."""
        if _is_shared(obj):
            return False
        try:
            async with self._turns:
                found = await self._client.request(
                    "GET", path(obj), params={"resourceVersion": "0"}, timeout_s=kube.TIMEOUT_S
                )
        except kube.ApiError:
            return False  # not there; or an error that the write will meet too
        return not _owned_by(owner, found)

    async def _remove(self, owner: Owner, live: Object) -> str:
        """What the API server refused, in words; empty: nothing. Of what several pools own each gives up its
        part, and the last deletes it."""
        k, meta, owners = key(live), live["metadata"], _owners(live)
        shares = _is_shared(live) and owner.uid in owners
        if "deletionTimestamp" in meta or not (shares or _owned_by(owner, live)):
            return ""
        try:
            async with self._turns:
                if shares and len(owners) > 1:
                    live = await self._give_up(owner, live)
                if not shares or _owners(live) <= {owner.uid}:
                    # of what is shared, this very version: another pool might want it by now
                    known_by = ("uid", "resourceVersion") if shares else ("uid",)
                    this = {part: live["metadata"][part] for part in known_by}
                    body = {"propagationPolicy": "Background", "preconditions": this}
                    await self._writer.send("DELETE", path(live), k.kind, body)
        except kube.ApiError as error:
            if error.status not in ANOTHER:
                return f"{k.kind} {k.name}: {error.message}"
        else:
            log.info("pruned kind=%s object=%s/%s", k.kind, k.namespace, k.name)
        memory = self._memory(owner)
        for known in (memory.ours, memory.written, memory.rehearsed):
            known.pop(k, None)
        return ""

    async def _give_up(self, owner: Owner, live: Object) -> Object:
        """Apply nothing: what only this pool wanted of it goes, its owner reference above all."""
        named = {part: live["metadata"][part] for part in ("name", "namespace", "uid")}
        nothing = {"apiVersion": live["apiVersion"], "kind": live["kind"], "metadata": named}
        params = {"fieldManager": _manager(owner, live), "force": "true"}
        return await self._writer.send(
            "PATCH", path(live), live["kind"], nothing, params=params, content_type=kube.APPLY
        )

    def _newest(self, memory: _Memory, k: Key, live: Object | None) -> Object | None:
        """What the watch says, unless it has not come to what we wrote yet."""
        if k not in memory.written:
            return live
        written, at = memory.written[k]
        if live is None and self._clock() - at < WATCH_LAG_S:
            return written
        if live is not None and version(live) < version(written):
            return written
        del memory.written[k]
        return live


def _manager(owner: Owner, obj: Object) -> str:
    """An object that several pools own has a manager for each, or each would take away the others' owner."""
    return f"{MANAGER}-{owner.uid[:8]}" if _is_shared(obj) else MANAGER


def _hash_name(owner: Owner, obj: Object) -> str:
    return f"{HASH}-{owner.uid[:8]}" if _is_shared(obj) else HASH


def _is_shared(obj: Object) -> bool:
    return not any(named.get("controller") for named in obj["metadata"].get("ownerReferences") or ())


def _owners(obj: Object) -> frozenset[str]:
    """Uids."""
    return frozenset(named["uid"] for named in obj["metadata"].get("ownerReferences") or ())


def _owned_by(owner: Owner, live: Object) -> bool:
    references = live["metadata"].get("ownerReferences") or ()
    return any(named["uid"] == owner.uid and named.get("controller") for named in references)


def _owned(live: Object, manager: str) -> str:
    """Hash of the fields that `manager` owns."""
    for entry in live["metadata"].get("managedFields") or ():
        if entry["manager"] == manager and entry["operation"] == "Apply" and not entry.get("subresource"):
            return digest(entry["fieldsV1"])
    return ""
