"""Role switching: by the load that the gateways report, an endpoint that serves becomes one that only
prefills, or the reverse.

    serve ─▶ marked draining, with its next duty ─▶ sessions have left ─▶ prefill
    prefill ─▶ serve, at once: it has no sessions

1. *Ask*: every reading of the last `afterSeconds` says that one side has too much to do (queued prefill per
   endpoint that prefills, or KV in use per endpoint that serves), and that the other side would stay below
   IDLE of its own threshold with an endpoint less. One of each duty always stays.
2. *Choose*: of the endpoints that serve the one whose prefix cache has saved the fewest tokens lately, of
   those that prefill one whose workload begins with serving. Nothing is switched while engines start, leave,
   or are being replaced, nor what a user drains.
3. *Switch* by label. An engine does both duties with the same command line, so it goes on running.

A pod that Kubernetes replaces begins with the duty of its workload. If no endpoint of a duty is left, one is
switched whatever the load is. A switch ends if no other endpoint could serve meanwhile. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from perilune_api import names
from perilune_api.inference_pool.spec import RoleSwitching
from perilune_operator.observe.facts import HOME, Demands, PodFacts
from perilune_operator.observe.timestamps import seconds, timestamp
from perilune_operator.rollout import Mark
from perilune_operator.scaling.readings import current, since

IDLE = 0.5
"""Share of its own threshold below which a side must stay with an endpoint less."""


@dataclass(frozen=True, slots=True)
class Switch:
    """What happens to the roles of endpoints."""

    marks: tuple[Mark, ...] = ()
    waiting: tuple[str, ...] = ()
    """Pods that wait for their sessions to leave."""
    switched: str = ""
    """The pod that takes over its new duty now."""
    to: names.Duty = "serve"
    """The new duty of that pod."""
    again_in: float = inf
    """Seconds until the waiting pods have waited long enough; inf when nothing waits."""


def labels(pods: Sequence[PodFacts]) -> tuple[Mark, ...]:
    """Label pods from before roles were switched with the duty that they have."""
    bare = (pod for pod in pods if pod.duty and not pod.labelled)
    return tuple(Mark(pod.name, pod.uid, {}, {names.DUTY_LABEL: pod.duty}) for pod in bare)


def restored(pods: Sequence[PodFacts]) -> tuple[Mark, ...]:
    """Give all pods the duty of their workload again, because roles are not switched any more."""
    marks = (_mark(pod, HOME[pod.component]) for pod in pods if pod.labelled and pod.component in HOME)
    return tuple(mark for mark in marks if mark.annotations or mark.labels)


def switch(
    spec: RoleSwitching,
    pods: Sequence[PodFacts],
    demands: Demands,
    gateways: frozenset[str],
    session_s: float,
    now: float,
    *,
    steady: bool = True,
) -> Switch:
    """Decide what happens to roles. `pods`: the engines of both duties. `demands`: the readings since roles
    last changed. `gateways`: those that have to answer a draining mark. `session_s`: how long to wait for
    sessions. `now`: seconds since the epoch. `steady`: no engine starts or leaves."""
    prefilling = [pod for pod in pods if pod.duty == "prefill"]
    serving = [pod for pod in pods if pod.duty == "serve"]
    back = sorted(prefilling, key=lambda p: (not p.ready, p.component != "engine", p.name))
    going = sorted(
        (p for p in serving if p.ready and not p.draining),
        key=lambda p: (p.recent_hits_tokens, p.sessions, p.name),
    )
    for pod in serving:
        if pod.next_duty:
            others = any(other is not pod for other in going)
            return _go_on(pod, gateways, session_s, now) if others else Switch((_mark(pod, "serve"),))
    if not serving and len(prefilling) > 1:
        return _switched(back[0], "serve")
    if not steady:
        return Switch()
    lately = {duty: current(read, now) for duty, read in demands.items()}
    wanted = _wanted(spec, len(prefilling), len(serving), lately, now - spec.after_seconds)
    if wanted == "serve":
        return _switched(back[0], "serve")
    if wanted == "prefill" and len(going) > 1:
        mark = Mark(going[0].name, going[0].uid, _leaving(now))
        return Switch((mark,), (going[0].name,), again_in=session_s + 1.0)
    return Switch()


def _leaving(now: float) -> dict[str, str | None]:
    return {names.DRAINING: timestamp(now), names.NEXT_DUTY: "prefill"}


def _go_on(pod: PodFacts, gateways: frozenset[str], session_s: float, now: float) -> Switch:
    """Move on a pod that is on its way from serving to prefilling."""
    since_s = seconds(pod.draining)
    if since_s is None:  # the mark was taken away, for example by a scale-down between
        return Switch((Mark(pod.name, pod.uid, _leaving(now)),), (pod.name,), again_in=session_s + 1.0)
    left = gateways and gateways <= pod.drained_by
    wait_s = 0.0 if left else since_s + session_s - now
    return Switch((), (pod.name,), again_in=wait_s) if wait_s > 0 else _switched(pod, "prefill")


def _switched(pod: PodFacts, to: names.Duty) -> Switch:
    return Switch((_mark(pod, to),), switched=pod.name, to=to)


def _mark(pod: PodFacts, duty: names.Duty) -> Mark:
    """Give the pod this duty, and end its switch. A draining mark that a user wrote, which is not a time,
    stays."""
    own = pod.draining if pod.next_duty and seconds(pod.draining) is not None else ""
    carried = {names.DRAINING: own, names.NEXT_DUTY: pod.next_duty}
    return Mark(
        pod.name,
        pod.uid,
        {name: None for name, value in carried.items() if value},
        {names.DUTY_LABEL: duty} if pod.duty != duty else {},
    )


def _wanted(
    spec: RoleSwitching, prefilling: int, serving: int, demands: Demands, start: float
) -> names.Duty | None:
    """Return the duty that needs one more endpoint and can have it, by the readings since `start`; None if
    both keep theirs."""
    if not prefilling:
        return "prefill"
    queues = [reading.queue_s for reading in since(demands.get("prefill", ()), start)]
    in_use = [reading.kv_in_use for reading in since(demands.get("serve", ()), start)]
    if not queues or not in_use or not serving:
        return None
    if min(queues) > spec.queue_seconds * prefilling:
        return "prefill" if max(in_use) < IDLE * spec.kv_usage * (serving - 1) else None
    if min(in_use) > spec.kv_usage * serving:
        return "serve" if max(queues) < IDLE * spec.queue_seconds * (prefilling - 1) else None
    return None
