"""The whole status of a pool: counts, and the conditions in order, with their transition times and Ready.

A condition keeps its transition time as long as its status, so that the same facts yield the same bytes.
"""

from collections.abc import Sequence

import msgspec

from perilune_api.conditions import Condition, Reason
from perilune_api.inference_pool.status import FabricStatus, InferencePoolStatus, StatusCondition
from perilune_operator.observe.facts import Object, Observed
from perilune_operator.observe.timestamps import timestamp
from perilune_operator.render import endpoints
from perilune_operator.render.objects import Context
from perilune_operator.rollout import Drain, Replaced
from perilune_operator.status import workloads
from perilune_operator.status.fact import Fact
from perilune_operator.status.route import route


def of_pool(
    pool: Context,
    observed: Observed,
    leave: Drain,
    now: float,
    replaced: Replaced,
) -> InferencePoolStatus:
    """The status for an accepted spec. `observed`: without engines of an earlier spec. `now`: seconds since
    the epoch."""
    engines = [p for p in observed.pods if p.component == "engine" and not p.terminating]
    ready, wanted = sum(p.ready and p.name not in leave.leaving for p in engines), pool.spec.replicas
    facts = [
        Fact(Condition.ACCEPTED, "True", Reason.VALID, "The spec is valid."),
        workloads.topology(pool),
        workloads.engines(pool, observed, ready, wanted),
        *([workloads.store(pool, observed)] if pool.spec.mooncake.store.enabled else []),
        workloads.gateway(pool, observed),
        route(pool, observed),
        workloads.progress(pool, observed, replaced),
        workloads.draining(pool, observed, [leave, replaced.drain], replaced),
    ]
    facts.append(_ready(pool, facts))
    fabric, stats = pool.fabric, observed.gateway
    selector = endpoints.engine_labels(pool, "engine")
    return InferencePoolStatus(
        observed_generation=observed.generation,
        replicas=len(engines),
        ready_replicas=sum(p.ready for p in engines),
        ready=f"{ready}/{wanted}",
        selector=",".join(f"{key}={value}" for key, value in selector.items()),
        sessions=stats.sessions if stats else None,
        hit_ratio=f"{stats.hit_ratio:.2f}" if stats and stats.hit_ratio is not None else None,
        fabric=FabricStatus(len(fabric.topology.nodes), fabric.racks, fabric.spines, len(fabric.unlabelled)),
        conditions=_dated(facts, observed, now),
    )


def of_refusal(error: str, observed: Observed, now: float) -> InferencePoolStatus:
    """The status for a refused spec: what runs is left alone, and the rest of the status stays as it was."""
    try:
        old = msgspec.convert(observed.status, InferencePoolStatus)
    except msgspec.ValidationError:
        old = InferencePoolStatus()
    fact = Fact(Condition.ACCEPTED, "False", Reason.INVALID, error)
    kept = tuple(c for c in old.conditions if c.type is not Condition.ACCEPTED)
    return msgspec.structs.replace(
        old,
        observed_generation=observed.generation,
        conditions=(*_dated([fact], observed, now), *kept),
    )


def with_failure(
    status: InferencePoolStatus, error: str, observed: Observed, now: float
) -> InferencePoolStatus:
    """The status when the API server refused to write an object."""
    fact = Fact(Condition.PROGRESSING, "True", Reason.APPLY_FAILED, error)
    (failed,) = _dated([fact], observed, now)
    conditions = tuple(failed if c.type is Condition.PROGRESSING else c for c in status.conditions)
    return msgspec.structs.replace(status, conditions=conditions)


def _dated(facts: Sequence[Fact], observed: Observed, now: float) -> tuple[StatusCondition, ...]:
    """Add transition times, which change only with the condition's status."""
    old = {c["type"]: c for c in observed.status.get("conditions") or ()}

    def since(fact: Fact) -> str:
        before = old.get(fact.type, {})
        same = before.get("status") == fact.status and "lastTransitionTime" in before
        return str(before["lastTransitionTime"]) if same else timestamp(now)

    return tuple(
        StatusCondition(f.type, f.status, f.reason.value, f.message, since(f), observed.generation)
        for f in facts
    )


def changed(old: Object, new: InferencePoolStatus) -> list[StatusCondition]:
    """The conditions to report as events: those with another status or reason than before. A new pool reports
    only whether it is accepted, since everything else is still missing."""
    before = {c["type"]: (c["status"], c["reason"]) for c in old.get("conditions") or ()}
    news = [c for c in new.conditions if before.get(c.type) != (c.status, c.reason)]
    return [c for c in news if before or c.type is Condition.ACCEPTED]


def _ready(pool: Context, facts: Sequence[Fact]) -> Fact:
    """Whether requests are answered: all conditions that concern requests hold, and the spec wants at least
    one engine and one gateway (or failOpen). The first condition that does not hold gives the reason."""
    needed = (
        Condition.ENGINES_READY,
        Condition.STORE_READY,
        Condition.GATEWAY_READY,
        Condition.ROUTE_PROGRAMMED,
    )
    for fact in facts:
        if fact.type in needed and fact.status != "True":
            return Fact(Condition.READY, "False", fact.reason, fact.message)
    if not pool.spec.replicas:
        return Fact(
            Condition.READY, "False", Reason.NO_ENGINES_WANTED, "replicas is 0: no engine answers requests."
        )
    no_gateway = any(fact.reason is Reason.NO_GATEWAY_WANTED for fact in facts)
    if no_gateway and not pool.spec.gateway.fail_open:
        words = "gateway.replicas is 0 and failOpen false: requests get 503."
        return Fact(Condition.READY, "False", Reason.NO_GATEWAY_WANTED, words)
    return Fact(Condition.READY, "True", Reason.SERVING, "Requests are answered.")
