"""What the other policies would have done with a recorded request.

Each is run on the record's own values, so what is said of a policy is what that policy's code does, not a
description of it. Costs one decision each: up to 4 ms among 1,000 candidates, so they come one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

from perilune_api.policies import PolicyParams
from perilune_gateway.model import DecisionRecord, NeedBody, Refusal, Verdict
from perilune_gateway.observe.explain.expectation import expected
from perilune_gateway.policy import Policy
from perilune_gateway.policy.cost import find


def counterfactual(
    record: DecisionRecord, policies: Mapping[str, Policy], params: PolicyParams, rng: Random
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, answer) of every policy but the one that decided; none where there were no candidates.

    An answer has `target`, `reason`, `same` (as decided), `estimated_s`, `cached_tokens` and `moved_from`; or
    `refused` and `message`; or `needs_body`, where the decision was taken from the headers and the policy
    wants more.
    """
    if record.candidates:
        for name, policy in policies.items():
            if name != record.policy:
                yield name, _alternative(record, policy(record.view, record.candidates, params, rng))


def _alternative(record: DecisionRecord, verdict: Verdict) -> dict[str, Any]:
    if isinstance(verdict, NeedBody):
        return {"needs_body": True}
    if isinstance(verdict, Refusal):
        return {"refused": verdict.reason.value, "message": verdict.message}
    chosen = find(record.candidates, verdict.target)
    assert chosen is not None, "a policy chooses among the candidates"
    there = expected(chosen, record.view, verdict)
    return {
        "target": verdict.target,
        "reason": verdict.reason.value,
        "same": verdict.target == record.target,
        "moved_from": verdict.moved_from,
        "cached_tokens": there.cached_tokens,
        "estimated_s": there.ttft_s,
    }
