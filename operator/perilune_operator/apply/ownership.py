"""Tells which pool an object belongs to, and whether it is still as it was last applied. Pure."""

import hashlib
from dataclasses import dataclass

import msgspec

from perilune_api.crd import API_VERSION, PLURAL
from perilune_operator.kinds import collection
from perilune_operator.observe.facts import MANAGER, Object

HASH = "perilune.dev/hash"
"""Annotation: the digest of what was applied."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The pool for which something is written."""

    namespace: str
    name: str
    uid: str

    @property
    def path(self) -> str:
        return f"{collection(API_VERSION, self.namespace, PLURAL)}/{self.name}"

    def controls(self, live: Object) -> bool:
        references = live["metadata"].get("ownerReferences") or ()
        return any(reference["uid"] == self.uid and reference.get("controller") for reference in references)

    def manager(self, obj: Object) -> str:
        """Return the field manager. Each owner of a shared object has its own, or applying it for one pool
        would remove the other pools' owner references."""
        return f"{MANAGER}-{self.uid[:8]}" if is_shared(obj) else MANAGER

    def hash_annotation(self, obj: Object) -> str:
        """Return the name of the annotation that holds the digest of what was applied for this pool."""
        return f"{HASH}-{self.uid[:8]}" if is_shared(obj) else HASH

    def applied_digest(self, obj: Object) -> str:
        """Return the digest that an object carries; empty if nothing was applied for this pool."""
        return str((obj["metadata"].get("annotations") or {}).get(self.hash_annotation(obj), ""))


def digest(obj: Object) -> str:
    """Return a hash of a wanted object, whichever version of the live object it was planned from."""
    if "resourceVersion" in obj.get("metadata", ()):
        obj = {**obj, "metadata": {k: v for k, v in obj["metadata"].items() if k != "resourceVersion"}}
    return hashlib.sha256(msgspec.json.encode(obj, order="deterministic")).hexdigest()[:16]


def owned_fields(live: Object, manager: str) -> str:
    """Return a hash of the names of the fields that `manager` has applied; empty if there are none."""
    for entry in live["metadata"].get("managedFields") or ():
        if entry["manager"] == manager and entry["operation"] == "Apply" and not entry.get("subresource"):
            return digest(entry["fieldsV1"])
    return ""


def is_shared(obj: Object) -> bool:
    """Return whether several pools may own the object: then none of its owners controls it."""
    return not any(owner.get("controller") for owner in obj["metadata"].get("ownerReferences") or ())


def owner_uids(obj: Object) -> frozenset[str]:
    return frozenset(owner["uid"] for owner in obj["metadata"].get("ownerReferences") or ())
