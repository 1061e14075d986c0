"""Runs the other policies on a recorded request.

Each policy's own code decides with the values of the record. This costs one decision for each policy, up to 4
ms with 1,000 candidates, so the answers come from an iterator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

from perilune_api.policies import PolicyParams
from perilune_gateway.model import DecisionRecord, NeedBody, Refusal, Verdict
from perilune_gateway.observe.explain.expectation import expected
from perilune_gateway.policy import Policy, PolicyError
from perilune_gateway.policy.cost import find


def counterfactual(
    record: DecisionRecord, policies: Mapping[str, Policy], params: PolicyParams, rng: Random
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, answer) of every policy except the one that decided; yield nothing without candidates.

    An answer has `target`, `reason`, `same` (as decided), `estimated_s`, `cached_tokens` and `moved_from`; or
    `refused` and `message`; or `needs_body`, when the record was decided by its headers and the policy needs
    the body; or `failed`, what is wrong with a policy of a package or its parameters.
    """
    if record.candidates:
        for name, policy in policies.items():
            if name == record.policy:
                continue
            try:
                yield name, _alternative(record, policy(record.view, record.candidates, params, rng))
            except PolicyError as error:
                yield name, {"failed": str(error)}


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
