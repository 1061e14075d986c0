"""Routing policies: one file and one function for each. Policies of other systems are in `others/`.

A policy is a pure function: `(request, candidates, parameters, rng) -> Decision | Refusal | NeedBody`. A
policy without parameters leaves them out. The candidates are the endpoints that passed every admission check;
there is at least one, and they come in the pool's order. A lower cost is better. A policy returns NEED_BODY
when the headers alone (`request.phase`) do not suffice. The router records decisions; a policy never does.

To add a policy, write the function, a line in OURS, a member of `PolicyName` (perilune_api/policies.py), a
table of cases in the tests, and, if it has parameters, a struct and a field of `PolicyParams`. Packages bring
policies of their own (contract.py, packages.py); POLICIES has both.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from random import Random
from typing import TypeVar

from perilune_api.policies import PolicyName, PolicyParams
from perilune_gateway.model import Candidate, RequestView, Verdict
from perilune_gateway.policy.contract import GROUP
from perilune_gateway.policy.ear import ear
from perilune_gateway.policy.least_loaded import least_loaded
from perilune_gateway.policy.others.conductor import conductor
from perilune_gateway.policy.others.dynamo import dynamo
from perilune_gateway.policy.others.dynamo_product import dynamo_product
from perilune_gateway.policy.others.dynamo_v1 import dynamo_v1
from perilune_gateway.policy.others.kv_linear import kv_linear
from perilune_gateway.policy.others.llm_d import llm_d
from perilune_gateway.policy.others.lmetric import lmetric
from perilune_gateway.policy.others.lmetric_plus_one import lmetric_plus_one
from perilune_gateway.policy.others.mooncake import mooncake
from perilune_gateway.policy.packages import FaultKind, PolicyError
from perilune_gateway.policy.perilune import perilune
from perilune_gateway.policy.power_of_two import power_of_two
from perilune_gateway.policy.random import random
from perilune_gateway.policy.registry import Policies, Policy
from perilune_gateway.policy.round_robin import round_robin
from perilune_gateway.policy.sticky import sticky

__all__ = ["FALLBACK", "OURS", "POLICIES", "FaultKind", "Policies", "Policy", "PolicyError"]

Plain = Callable[[RequestView, Sequence[Candidate], Random], Verdict]
"""A policy without parameters."""
_Block = TypeVar("_Block")


def with_block(
    policy: Callable[[RequestView, Sequence[Candidate], _Block, Random], Verdict],
    block: Callable[[PolicyParams], _Block],
) -> Policy:
    """Return the policy, called with its own block of the parameters."""

    def decide(
        request: RequestView, candidates: Sequence[Candidate], params: PolicyParams, rng: Random
    ) -> Verdict:
        return policy(request, candidates, block(params), rng)

    return decide


def without_block(policy: Plain) -> Policy:
    """Return the policy, called without parameters."""

    def decide(
        request: RequestView, candidates: Sequence[Candidate], params: PolicyParams, rng: Random
    ) -> Verdict:
        return policy(request, candidates, rng)

    return decide


OURS: Mapping[str, Policy] = {
    PolicyName.CONDUCTOR: with_block(conductor, lambda params: params.conductor),
    PolicyName.DYNAMO: with_block(dynamo, lambda params: params.dynamo),
    PolicyName.DYNAMO_PRODUCT: with_block(dynamo_product, lambda params: params.dynamo_product),
    PolicyName.DYNAMO_V1: with_block(dynamo_v1, lambda params: params.dynamo_v1),
    PolicyName.EAR: with_block(ear, lambda params: params.ear),
    PolicyName.KV_LINEAR: with_block(kv_linear, lambda params: params.kv_linear),
    PolicyName.LEAST_LOADED: without_block(least_loaded),
    PolicyName.LLM_D: with_block(llm_d, lambda params: params.llm_d),
    PolicyName.LMETRIC: without_block(lmetric),
    PolicyName.LMETRIC_PLUS_ONE: without_block(lmetric_plus_one),
    PolicyName.MOONCAKE: without_block(mooncake),
    PolicyName.PERILUNE: with_block(perilune, lambda params: params.perilune),
    PolicyName.POWER_OF_TWO: without_block(power_of_two),
    PolicyName.RANDOM: without_block(random),
    PolicyName.ROUND_ROBIN: without_block(round_robin),
    PolicyName.STICKY: without_block(sticky),
}
"""Perilune's policies by name."""

FALLBACK = PolicyName.PERILUNE
"""Decides where a policy of a package cannot."""


POLICIES = Policies(OURS, lambda: entry_points(group=GROUP))
"""All policies by name."""
