"""KV that goes with a request: whether the endpoint that was chosen fetches what another one caches.

    policy's decision ─▶ pull ─┬─▶ `replicate_from`: fetched before the request is sent there, or by it
                               └─▶ `unpulled`: computed there, and why

1. The pool's policy has chosen the endpoint, and may have named where the prefix comes from; a policy that
   knows nothing of transfers gets them all the same.
2. Of the endpoints that hold more of the prompt than the target, and whose engine can hand KV over to the
   target's (`policy.cost.can_pull`), the one is taken with which

       giver's queue + two legs + transfer over the link + prefill of the rest

   is the lowest. It must be clearly less than what the target needs alone, with what its own memory and the
   shared store hold.
3. Nothing is fetched that would hold the request for more than `max_seconds`. The target's queue counts, too,
   because the leg that takes waits there. Policies know of this bound (`policy.cost.pulls`).

What the target then computes is only the rest; the giver computes one block.

Where engines read each other's host memory (`Prefix.from_host`), the target fetches while it has the request:
the giver computes nothing, its queue does not count, nothing is held, and step 3 does not apply. The giver
may drain.

`pull_limits.py` has the limits on what is under way. The functions before `pull` compute what policies are
told: which endpoints can give, how long each needs to begin, and why none can. The simulator calls the same
functions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from math import inf

from msgspec.structs import replace

from perilune_api.pool import Pull
from perilune_gateway.model import (
    NEED_BODY,
    Candidate,
    Decision,
    Endpoint,
    EngineModel,
    Load,
    Location,
    Move,
    MoveReason,
    NeedBody,
    Phase,
    RequestView,
    Subject,
    Unpulled,
)
from perilune_gateway.policy.cost import KvSource, fetches, held_tokens, nearly, pulls, target_of

ANSWER_S = 0.005
"""Seconds until an engine has told what it has in host memory, and begins to send: vLLM 0.33 looks every
millisecond, and is asked twice. Earlier versions answer only between their steps, so busy ones take longer;
what was observed of the link includes that."""


def gives(endpoint: Endpoint, *, ejected: bool = False) -> bool:
    """Return whether an endpoint whose engine can hand KV over does so for requests now. One that drains does
    for sessions that no plan knows, such as those of a gateway that has begun since."""
    return endpoint.ready and not ejected


def waits_s(
    givers: Iterable[tuple[str, Load]], engine: EngineModel, tokens: int, *, first: bool
) -> dict[str, float]:
    """Return the predicted seconds until each giver begins to hand over `tokens`: its queue, because a give
    leg is a request as others are (unless legs are served `first`), and what the two legs take besides."""
    legs_s = 2.0 * engine.leg_overhead_s(tokens)
    return {address: legs_s + (0.0 if first else load.pending_prefill_s) for address, load in givers}


def unpulled(
    locations: Sequence[Location], givers: Collection[str], why_not: Callable[[int], Unpulled | None]
) -> Unpulled | None:
    """Return why the longest prefix cannot be fetched from its holders; None if it can, or if nothing is
    held. `why_not`: of so many leading tokens of the prompt, why no engine can hand them over."""
    if not locations:
        return None
    if not any(address in givers for address, *_ in locations):
        return Unpulled.NO_GIVER
    return why_not(locations[0].tokens)


def pull(
    request: RequestView, decision: Decision, candidates: Sequence[Candidate], rules: Pull
) -> Decision | NeedBody:
    """Return the decision with the endpoint that the target fetches KV from, or with the reason why the
    target computes what another endpoint caches."""
    prefix = request.prefix
    if not (prefix.pullable or request.unpulled) or decision.prefill:
        return decision
    target = target_of(decision, candidates)
    if prefix.tokens <= held_tokens(target):
        return without(decision, target, request)
    engine, prompt = target.engine, request.prompt_tokens
    alone_s, _ = _alone(target, request)
    peers = [(p.fetch_s + engine.prefill_s(prompt - p.tokens, p.tokens), p) for p in pulls(target, request)]
    if not peers:
        return without(decision, target, request, request.unpulled or Unpulled.NO_GIVER)
    bound_s = inf if prefix.from_host else rules.max_seconds
    in_time = [(s, p) for s, p in peers if p.in_time and p.fetch_s <= bound_s]
    pulled_s, (source, tokens, *_) = min(in_time or peers)
    if nearly(pulled_s) >= alone_s:
        return without(decision, target, request, Unpulled.SLOWER)
    if not in_time:
        return without(decision, target, request, Unpulled.SLOW)
    if request.phase is Phase.HEADERS:
        return NEED_BODY
    return replace(
        decision,
        replicate_from=source,
        cached_tokens=tokens,
        estimated_ttft_s=target.load.pending_prefill_s + pulled_s,
    )


def without(
    decision: Decision, target: Candidate, request: RequestView, cause: Unpulled | None = None
) -> Decision:
    """Return the decision with nothing fetched from another endpoint."""
    if not decision.replicate_from:
        return replace(decision, unpulled=cause)
    alone_s, cached = _alone(target, request)
    return replace(
        decision,
        unpulled=cause,
        replicate_from="",
        cached_tokens=cached,
        estimated_ttft_s=target.load.pending_prefill_s + alone_s,
    )


def _alone(target: Candidate, request: RequestView) -> tuple[float, int]:
    """Return (seconds of what the target needs alone, prompt tokens that it need not prefill then)."""
    engine, prompt = target.engine, request.prompt_tokens
    return min(
        (s + engine.prefill_s(prompt - n, n), n)
        for kind, _, n, s in fetches(target, request)
        if kind is not KvSource.PEER
    )


def move_of(subject: Subject, decision: Decision, target: Candidate, *, from_host: bool = False) -> Move:
    """Return the transfer that the decision asks for: its bytes, and its predicted seconds on the link.
    `from_host`: as in `Prefix`."""
    engine, source = target.engine, decision.replicate_from
    here = held_tokens(target) if from_host else target.overlap.device_tokens
    missing, link = decision.cached_tokens - here, target.links[source]
    return Move(
        subject=subject,
        reason=MoveReason.PULL,
        source=source,
        target=target.address,
        transfer_bytes=engine.kv_bytes(missing),
        cost_s=engine.transfer_s(missing, link.bandwidth_bytes_per_s) * link.slowdown,
    )
