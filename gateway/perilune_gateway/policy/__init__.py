"""Routing policies: one file each, one function each, chosen by name.

A policy is pure and synchronous: `(request, candidates, params, rng) -> Decision | Refusal | NeedBody`.
Candidates are the endpoints that passed every check, at least one, in the pool's order. Lower cost is
better. It answers NEED_BODY where the headers alone (`request.phase`) do not suffice. It never
records: that is the router's part. To add one: a function, a line here, and a table of cases in the tests.

Where some candidate is for prefill only, policies that know roles choose an endpoint for each part; only the
simulator has such candidates. SIMULATED_ONLY names those that make no sense otherwise.
"""

from collections.abc import Callable, Mapping, Sequence
from random import Random

from perilune_api.pool import PolicyParams
from perilune_gateway.model import Candidate, RequestView, Verdict
from perilune_gateway.policy.conductor import conductor
from perilune_gateway.policy.dynamo import dynamo
from perilune_gateway.policy.dynamo_disagg import dynamo_disagg
from perilune_gateway.policy.dynamo_product import dynamo_product
from perilune_gateway.policy.dynamo_v1 import dynamo_v1
from perilune_gateway.policy.ear import ear
from perilune_gateway.policy.kv_linear import kv_linear
from perilune_gateway.policy.least_loaded import least_loaded
from perilune_gateway.policy.lmetric import lmetric
from perilune_gateway.policy.lmetric_plus_one import lmetric_plus_one
from perilune_gateway.policy.mooncake import mooncake
from perilune_gateway.policy.perilune import perilune
from perilune_gateway.policy.power_of_two import power_of_two
from perilune_gateway.policy.random import random
from perilune_gateway.policy.round_robin import round_robin
from perilune_gateway.policy.static_pd import static_pd
from perilune_gateway.policy.sticky import sticky

Policy = Callable[[RequestView, Sequence[Candidate], PolicyParams, Random], Verdict]

POLICIES: Mapping[str, Policy] = {
    "conductor": conductor,
    "dynamo": dynamo,
    "dynamo_disagg": dynamo_disagg,
    "dynamo_product": dynamo_product,
    "dynamo_v1": dynamo_v1,
    "ear": ear,
    "kv_linear": kv_linear,
    "least_loaded": least_loaded,
    "lmetric": lmetric,
    "lmetric_plus_one": lmetric_plus_one,
    "mooncake": mooncake,
    "perilune": perilune,
    "power_of_two": power_of_two,
    "random": random,
    "round_robin": round_robin,
    "static_pd": static_pd,
    "sticky": sticky,
}

SIMULATED_ONLY: Mapping[str, str] = {
    "dynamo_disagg": "it puts prefills into a queue of their own",
    "static_pd": "it prefills on one endpoint and decodes on another",
}
"""Policies that a gateway cannot carry out, and why: an external processor cannot issue the prefill leg."""

LIVE: Mapping[str, Policy] = {name: policy for name, policy in POLICIES.items() if name not in SIMULATED_ONLY}

MOVES_SESSIONS = frozenset({"ear", "perilune"})
"""Policies that move sessions from hot hosts in their own decisions."""
