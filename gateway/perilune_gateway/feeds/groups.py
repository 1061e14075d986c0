"""The pods of an engine that spans nodes, a group of a LeaderWorkerSet, by which its data-parallel ranks are
found. Pure.

The first pod serves; rank r runs in pod r // (ranks per pod), and publishes its KV events there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from perilune_api import names
from perilune_gateway.feeds.pods import address_of

Object = dict[str, Any]
Hosts = Mapping[tuple[str, str], Mapping[int, str]]
"""(Name of the set, number of the group) → number in the group → address; of all pods that have one."""
NO_HOSTS: Hosts = {}


def hosts(pods: Iterable[Object]) -> Hosts:
    """Return where the pods of all groups are."""
    found: dict[tuple[str, str], dict[int, str]] = {}
    for pod in pods:
        host, index = address_of(pod), index_in(pod)
        if host and index is not None:
            found.setdefault(_group(pod), {})[index] = host
    return found


def index_in(pod: Object) -> int | None:
    """Return a pod's number in its group; None for a pod of no group."""
    text = (pod["metadata"].get("labels") or {}).get(names.WORKER_INDEX, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else None


def of_ranks(pod: Object, ranks: int, per_pod: int, known: Hosts) -> tuple[str, ...]:
    """Return the address of each rank's pod; none while one of these pods has no address. `pod`: the first
    one of the group. `per_pod`: ranks in each pod."""
    if ranks <= per_pod:
        return (address_of(pod),) * ranks
    group = known.get(_group(pod), {})
    found = tuple(group.get(rank // per_pod, "") for rank in range(ranks))
    return found if all(found) else ()


def _group(pod: Object) -> tuple[str, str]:
    labels = pod["metadata"].get("labels") or {}
    return labels.get(names.GROUP_SET, ""), labels.get(names.GROUP_INDEX, "")
