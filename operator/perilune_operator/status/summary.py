"""The whole status of a pool: counts, and the conditions in order, with their transition times and Ready.

A condition keeps its transition time as long as its status, so that the same facts yield the same bytes.

Each condition names the generation of the pool that it is about. That of Ready stays at an earlier generation
until the present one is in force as a whole, so `kubectl wait --for=condition=Ready` after a change waits
for the change, and a refused change leaves Ready true of the generation that still answers.
"""

from collections.abc import Sequence

import msgspec

from perilune_api import versions
from perilune_api.conditions import Condition, Reason, Truth
from perilune_api.inference_pool.status import FabricStatus, InferencePoolStatus, StatusCondition
from perilune_api.trial import State
from perilune_operator.canary import Trying
from perilune_operator.observe.facts import Object, Observed
from perilune_operator.observe.timestamps import timestamp
from perilune_operator.render import endpoints
from perilune_operator.render.objects import Context
from perilune_operator.revision import Revised
from perilune_operator.roles import Switch
from perilune_operator.rollout import Drain, Replaced
from perilune_operator.status import others, progress, workloads
from perilune_operator.status.fact import Fact
from perilune_operator.status.route import route


def of_pool(
    pool: Context,
    observed: Observed,
    leave: Drain,
    prefills: Drain,
    now: float,
    replaced: Replaced,
    made: Revised,
    switch: Switch,
    tried: Trying | None = None,
) -> InferencePoolStatus:
    """Return the status for an accepted spec. `observed`: without engines of an earlier spec. `leave`,
    `prefills`: what happens to the endpoints that serve, and that only prefill. `now`: seconds since the
    epoch."""
    engines = [
        p
        for p in observed.pods
        if p.component == "engine" and not p.terminating and p.name not in leave.asleep
    ]
    exists, are_ready = len(engines), sum(p.ready for p in engines)
    ready, wanted = sum(p.ready and p.name not in leave.leaving for p in engines), pool.spec.replicas
    if others_run := pool.spec.engine.selector is not None:
        stats = observed.gateway
        exists = wanted = len(stats.ready_at) if stats else 0
        are_ready = ready = int(sum(stats.ready_at.values())) if stats else 0
    stalled = progress.stalled(pool, observed)
    awake = pool.replicas_now - len(leave.asleep)
    reconciling = progress.reconciling(pool, observed, replaced, made, stalled, awake)
    facts = [
        Fact(Condition.ACCEPTED, "True", Reason.VALID, "The spec is valid."),
        workloads.topology(pool),
        workloads.engines(pool, observed, ready, wanted, len(leave.asleep)),
        *([exact] if (exact := workloads.exactness(pool, observed)) else []),
        *([workloads.store(pool, observed)] if pool.spec.mooncake.store.enabled else []),
        workloads.gateway(pool, observed),
        route(pool, observed),
        *([served] if (served := others.served(pool, observed)) else []),
        *([behind] if (behind := workloads.events(observed)) else []),
        *([contested] if (contested := others.contested(pool, observed)) else []),
        *([_canary(tried)] if tried else []),
        reconciling,
        workloads.draining(pool, observed, [leave, prefills, replaced.drain], replaced, switch),
        *([stalled] if stalled else []),
    ]
    facts.append(_ready(pool, facts))
    in_force = stalled is None and reconciling.status == "False"
    fabric, stats = pool.fabric, observed.gateway
    selector = endpoints.engine_labels(pool, "engine")
    return InferencePoolStatus(
        observed_generation=observed.generation,
        replicas=exists,
        ready_replicas=are_ready,
        ready=f"{ready}/{wanted}",
        ranks=each if not others_run and (each := endpoints.ranks(pool)) > 1 else None,
        selector="" if others_run else ",".join(f"{key}={value}" for key, value in selector.items()),
        sessions=stats.sessions if stats else None,
        hit_ratio=f"{stats.hit_ratio:.2f}" if stats and stats.hit_ratio is not None else None,
        revision=made.revision,
        available_revision=made.available or None,
        fabric=FabricStatus(len(fabric.topology.nodes), fabric.racks, fabric.spines, len(fabric.unlabelled)),
        canary=tried.status if tried else None,
        conditions=_dated(facts, observed, now, observed.generation if in_force else _answering(observed)),
    )


def _canary(tried: Trying) -> Fact:
    """Return condition CanaryPromoted."""
    holds: dict[State, Truth] = {
        State.RUNNING: "Unknown",
        State.PROMOTED: "True",
        State.ROLLED_BACK: "False",
    }
    return Fact(Condition.CANARY_PROMOTED, holds[tried.status.state], tried.reason, tried.message)


def of_refusal(
    error: str, last: InferencePoolStatus | None, observed: Observed, now: float
) -> InferencePoolStatus:
    """Return the status for a refused spec, which leaves alone what runs. `last`: the present status by the
    last accepted spec; None without one."""
    facts = [Fact(Condition.ACCEPTED, "False", Reason.INVALID, error)]
    replaced = [
        Fact(Condition.RECONCILING, "False", Reason.INVALID, error),
        Fact(Condition.STALLED, "True", Reason.INVALID, error),
    ]
    if last is None:
        replaced.append(Fact(Condition.READY, "False", Reason.INVALID, error))
    return _with(last or InferencePoolStatus(), [*facts, *replaced], observed, now)


def with_failure(
    status: InferencePoolStatus, error: str, observed: Observed, now: float
) -> InferencePoolStatus:
    """Return the status when the API server refused to write an object for a reason that lasts."""
    facts = [
        Fact(Condition.RECONCILING, "False", Reason.APPLY_FAILED, error),
        Fact(Condition.STALLED, "True", Reason.APPLY_FAILED, error),
    ]
    return _with(status, facts, observed, now)


def with_more_to_do(
    status: InferencePoolStatus, words: str, reason: Reason, observed: Observed, now: float
) -> InferencePoolStatus:
    """Return the status when something was written whose effect cannot be seen yet, or will be written
    again."""
    if any(c.type is Condition.STALLED for c in status.conditions):
        return status
    return _with(status, [Fact(Condition.RECONCILING, "True", reason, words)], observed, now)


def _with(
    status: InferencePoolStatus, facts: Sequence[Fact], observed: Observed, now: float
) -> InferencePoolStatus:
    """Return the status with these conditions in place of, or besides, its own. The present generation is not
    in force then."""
    made = {c.type: c for c in (*status.conditions, *_dated(facts, observed, now, observed.generation))}
    if Condition.READY in {c.type for c in status.conditions}:
        of = min(made[Condition.READY].observed_generation, _answering(observed))
        made[Condition.READY] = msgspec.structs.replace(made[Condition.READY], observed_generation=of)
    conditions = tuple(made[kind] for kind in Condition if kind in made)
    return msgspec.structs.replace(status, observed_generation=observed.generation, conditions=conditions)


def stored(observed: Observed) -> InferencePoolStatus | None:
    """Return the pool's status as stored; None for a pool that has none, or none that can be read here."""
    try:
        told = msgspec.convert(versions.known(observed.status, InferencePoolStatus)[0], InferencePoolStatus)
    except msgspec.ValidationError:
        return None
    return told if any(c.type is Condition.READY for c in told.conditions) else None


def carried_out(observed: Observed) -> int:
    """Return the generation of the spec that was accepted last, by the stored status."""
    return _generation_of(Condition.ENGINES_READY, observed)


def is_in_force(made: InferencePoolStatus) -> bool:
    """Return whether the present spec is in force as a whole."""
    told = {c.type: c.status for c in made.conditions}
    return told.get(Condition.RECONCILING) == "False" and told.get(Condition.STALLED) != "True"


def _answering(observed: Observed) -> int:
    """Return the generation that was last in force as a whole; the present one if none ever was."""
    return min(_generation_of(Condition.READY, observed), observed.generation)


def _generation_of(kind: Condition, observed: Observed) -> int:
    """Return the generation that a stored condition is about; the present one without it."""
    for told in observed.status.get("conditions") or ():
        if told["type"] == kind:
            return int(told.get("observedGeneration", observed.generation))
    return observed.generation


def _dated(
    facts: Sequence[Fact], observed: Observed, now: float, ready_of: int
) -> tuple[StatusCondition, ...]:
    """Add transition times, which change only with the condition's status, and generations. `ready_of`: the
    generation of Ready."""
    old = {c["type"]: c for c in observed.status.get("conditions") or ()}

    def since(fact: Fact) -> str:
        before = old.get(fact.type, {})
        same = before.get("status") == fact.status and "lastTransitionTime" in before
        return str(before["lastTransitionTime"]) if same else timestamp(now)

    return tuple(
        StatusCondition(
            type=f.type,
            status=f.status,
            reason=f.reason.value,
            message=f.message,
            last_transition_time=since(f),
            observed_generation=ready_of if f.type is Condition.READY else observed.generation,
        )
        for f in facts
    )


def changed(old: Object, new: InferencePoolStatus) -> list[StatusCondition]:
    """Return the conditions to report as events: those with another status or reason than before. A new pool
    reports only whether it is accepted, since everything else is still missing."""
    before = {c["type"]: (c["status"], c["reason"]) for c in old.get("conditions") or ()}
    news = [c for c in new.conditions if before.get(c.type) != (c.status, c.reason)]
    return [c for c in news if before or c.type is Condition.ACCEPTED]


def _ready(pool: Context, facts: Sequence[Fact]) -> Fact:
    """Return whether requests are answered: all conditions that concern requests hold, and the spec wants at
    least one engine and one gateway (or failOpen). The first condition that does not hold gives the
    reason."""
    needed = (
        Condition.ENGINES_READY,
        Condition.STORE_READY,
        Condition.GATEWAY_READY,
        Condition.ROUTE_PROGRAMMED,
    )
    for fact in facts:
        if fact.type in needed and fact.status != "True":
            return Fact(Condition.READY, "False", fact.reason, fact.message)
    if not pool.spec.replicas and workloads.starts_on_demand(pool):
        words = "No endpoint runs. The next request starts one, and is told when to come back."
        return Fact(Condition.READY, "True", Reason.ZERO_ENDPOINTS, words)
    if not pool.spec.replicas:
        return Fact(
            Condition.READY, "False", Reason.NO_ENGINES_WANTED, "replicas is 0: no engine answers requests."
        )
    no_gateway = any(fact.reason is Reason.NO_GATEWAY_WANTED for fact in facts)
    if no_gateway and not pool.spec.gateway.fail_open:
        words = "gateway.replicas is 0 and failOpen false: requests get 503."
        return Fact(Condition.READY, "False", Reason.NO_GATEWAY_WANTED, words)
    return Fact(Condition.READY, "True", Reason.SERVING, "Requests are answered.")
