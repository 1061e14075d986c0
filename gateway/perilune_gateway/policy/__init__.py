"""Routing policies: one file each, one function each, chosen by name.

A policy is pure and synchronous: `(request, candidates, params, rng) -> Decision | Refusal | NeedBody`.
Candidates are the endpoints that passed every check, at least one, in the pool's order. Lower cost is
better. It answers NEED_BODY where the headers alone (`request.phase`) do not suffice. It never
records: that is the router's part. To add one: a function, a line here, and a table of cases in the tests.
"""

from collections.abc import Callable, Mapping, Sequence
from random import Random

from perilune_api.pool import PolicyParams
from perilune_gateway.model import Candidate, RequestView, Verdict
from perilune_gateway.policy.ear import ear
from perilune_gateway.policy.least_loaded import least_loaded
from perilune_gateway.policy.power_of_two import power_of_two
from perilune_gateway.policy.random import random
from perilune_gateway.policy.round_robin import round_robin
from perilune_gateway.policy.sticky import sticky

Policy = Callable[[RequestView, Sequence[Candidate], PolicyParams, Random], Verdict]

POLICIES: Mapping[str, Policy] = {
    "ear": ear,
    "least_loaded": least_loaded,
    "power_of_two": power_of_two,
    "random": random,
    "round_robin": round_robin,
    "sticky": sticky,
}
