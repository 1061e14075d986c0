"""perilune: the lowest cost in seconds over all tiers, with affinity by hysteresis.

1. Every endpoint's cost in seconds (cost.py): queue, fetching from the cheapest tier at learned speeds,
   prefill of the rest, decodes and sessions that it delays, company while decoding, missing KV room.
2. No host (or it is gone): the lowest cost; of those that no prediction tells apart (cost.py, `nearly`) the
   fewest sessions. A host that drains: the lowest cost of the others.
3. A host: the session leaves it for the endpoint where that brings most, and only if benefit >
   `migration_worth` × cost, benefit > `least_gain_seconds`, and it last moved more than `cooldown_seconds`
   ago. Benefit = what the host's load costs more than the other's, now and over the turns it is expected to
   have left (each meets a share `load_persistence` of the difference before); cost = what its KV costs more
   there. If that cost is below 0, because the host has lost the prefix, it counts as benefit, once.
4. Headers alone suffice while the session stays and its host is known to hold its context (its tail tells);
   what other endpoints hold is then taken as nothing. A host that has lost the tail, or a prompt that was
   rewritten, means a long prefill: against that the body costs little, and it tells where what is left lies.

Where links are slow a move costs more and happens less: nothing else has to be switched off. No promise past
saturation, where nothing dominates.
"""

from collections.abc import Iterable, Mapping, Sequence
from random import Random

from perilune_api.pool import PolicyParams
from perilune_gateway.model import (
    NEED_BODY,
    Candidate,
    Cost,
    Decision,
    NeedBody,
    Phase,
    Reason,
    RequestView,
)
from perilune_gateway.policy.cost import (
    Seconds,
    all_seconds,
    cheapest,
    draw,
    host_of,
    lasting_turns,
    nearly_cheapest,
)
from perilune_gateway.rows import Costs, addresses


def perilune(
    request: RequestView, candidates: Sequence[Candidate], params: PolicyParams, rng: Random
) -> Decision | NeedBody:
    """Lowest cost, or the host unless leaving it pays."""
    each, named = all_seconds(candidates, request, params), addresses(candidates)
    costs = Costs(named, [there.total_s for there in each], lambda at: each[at].terms)
    here = dict(zip(named, each, strict=True))
    host = host_of(request, candidates)
    if host is None or request.session is None:
        if request.phase is Phase.HEADERS:
            return NEED_BODY
        target = nearly_cheapest(candidates, costs, rng)
        return _decision(target, Reason.COLD, here, costs)
    others = [c for c in candidates if c is not host]
    if not others:
        return _decision(host, Reason.HOST, here, costs)
    if (
        request.phase is Phase.HEADERS
        and request.prompt_tokens > request.block_size > host.overlap.device_tokens
    ):
        return NEED_BODY
    turns = 1.0 if host.draining else lasting_turns(request.session.turns, params)
    mine = here[host.address]
    gains = gain(mine, (there for there in each if there is not mine), turns, params)
    best = draw(others, [-g for g in gains], rng)
    worth = host.draining or max(gains) > 0
    cooled = host.draining or request.session.seconds_since_move > params.cooldown_seconds
    if worth and cooled:
        if request.phase is Phase.HEADERS:
            return NEED_BODY
        target = cheapest(others, costs, rng) if host.draining else best
        return _decision(target, Reason.MOVED, here, costs, moved_from=host.address)
    if worth:
        return _decision(host, Reason.HOT_COOLDOWN, here, costs)
    is_cheapest = mine.total_s <= here[best.address].total_s
    return _decision(host, Reason.HOST if is_cheapest else Reason.NOT_WORTH, here, costs)


def gain(host: Seconds, others: Iterable[Seconds], turns: float, params: PolicyParams) -> list[float]:
    """Benefit − worth × cost of leaving the host for each other one, in seconds; above 0 it pays. What pays
    must bring at least `least_gain_seconds`, or sessions follow noise: most queues are gone before the next
    turn."""
    standing_s, arriving_s = host.standing_s, host.arriving_s
    least_s, worth = params.least_gain_seconds, params.migration_worth
    gains: list[float] = []
    for other in others:
        saved_s = arriving_s - other.arriving_s
        benefit_s = (standing_s - other.standing_s) * turns + max(0.0, saved_s)
        gains.append(benefit_s - max(least_s, worth * max(0.0, -saved_s)))
    return gains


def _decision(
    target: Candidate,
    reason: Reason,
    here: Mapping[str, Seconds],
    costs: Sequence[Cost],
    moved_from: str = "",
) -> Decision:
    there = here[target.address]
    return Decision(
        target.address,
        reason,
        costs,
        moved_from,
        replicate_from=there.peer,
        cached_tokens=there.cached_tokens,
        estimated_ttft_s=there.ttft_s,
    )
