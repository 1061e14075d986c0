"""Puts endpoints to sleep instead of removing them, and wakes them before new ones are started.

    fewer wanted: drain as in a scale-down ─▶ sessions have left ─▶ to sleep: the pod stays
    more wanted:  a sleeping pod wakes, in seconds ─▶ only then does the workload start another one

1. The workload has as many replicas as endpoints are wanted, and one more for each that sleeps
   (`scaling.sleeping` at most).
2. Pods that sleep are not part of rollout.py's decision. One whose sessions have left, and which would be
   removed now, is marked asleep instead while there is a place, those first whose prefix cache saved most.
3. The gateways read the marks (names.ASLEEP) and have the engines sleep and wake. They keep their draining
   mark while they sleep, so that no gateway sends them anything, whatever their engines do.
4. If fewer may sleep than do, the others wake, and leave as any endpoint does.

Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from perilune_api import names
from perilune_operator.observe.facts import Object, PodFacts
from perilune_operator.rollout import Drain, Mark

ASLEEP, AWAKE = "true", "false"


@dataclass(frozen=True, slots=True)
class Night:
    """Who sleeps before a decision about who leaves, and who is to wake."""

    awake: tuple[PodFacts, ...]
    """All that do not sleep, or are to wake."""
    asleep: tuple[PodFacts, ...] = ()
    woken: tuple[PodFacts, ...] = ()

    def without_sleepers(self, workload: Object | None) -> Object | None:
        """Return the workload as if there were no pods that sleep."""
        if workload is None or not self.asleep:
            return workload
        spec = workload.get("spec", {})
        number = spec.get("replicas", 1) - len(self.asleep)
        return {**workload, "spec": {**spec, "replicas": max(0, number)}}


def night(pods: Sequence[PodFacts], wanted: int, most: int) -> Night:
    """Return who sleeps. `wanted`: how many endpoints the spec asks for. `most`: how many may sleep."""
    awake = [pod for pod in pods if not pod.asleep]
    asleep = sorted((p for p in pods if p.asleep and not p.terminating), key=lambda p: (p.created, p.name))
    short = max(0, wanted - sum(not pod.terminating for pod in awake), len(asleep) - most)
    woken = [replace(pod, asleep=False) for pod in asleep[:short]]
    return Night((*awake, *woken), tuple(asleep[short:]), tuple(woken))


def _can_sleep(pod: PodFacts) -> bool:
    """Return whether it may stay: not one that starts, nor one that is replaced, nor one that spans nodes."""
    return pod.ready and pod.chosen and not pod.superseded and pod.group < 0


def falling_asleep(before: Night, leave: Drain, most: int) -> Drain:
    """Return the decision about who leaves, in which those who may sleep do so instead. `leave`: the decision
    about those that are awake."""
    leaves_now = leave.leaving if not leave.waits else ()
    places = max(0, most - len(before.asleep))
    going = sorted(
        (pod for pod in before.awake if pod.name in leaves_now and _can_sleep(pod)),
        key=lambda pod: (-pod.recent_hits_tokens, pod.name),
    )[:places]
    to_bed = {pod.name for pod in going}
    sleepers = {names.ASLEEP: ASLEEP, names.DELETION_COST: None}
    return replace(
        leave,
        replicas=leave.replicas + len(before.asleep) + len(going),
        marks=(
            *(mark for mark in leave.marks if mark.pod not in to_bed),
            *(Mark(pod.name, pod.uid, sleepers) for pod in going),
            *(Mark(pod.name, pod.uid, {names.ASLEEP: AWAKE}) for pod in before.woken),
        ),
        leaving=tuple(name for name in leave.leaving if name not in to_bed),
        asleep=tuple(sorted((*(pod.name for pod in before.asleep), *to_bed))),
    )
