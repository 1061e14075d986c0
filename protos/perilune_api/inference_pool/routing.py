"""`spec.routing`: which endpoint gets a request. All but the policies' names is the pool document's."""

from enum import StrEnum

from perilune_api import pool


class Policy(StrEnum):
    """Routing policies that a gateway can carry out."""

    CONDUCTOR = "conductor"
    """a holder of the prefix with a short queue, else near one by distance and queue."""
    DYNAMO = "dynamo"
    """prefill and decode blocks added, less what is cached."""
    DYNAMO_PRODUCT = "dynamo_product"
    """the same multiplied."""
    DYNAMO_V1 = "dynamo_v1"
    """overlap against usage and waiting."""
    EAR = "ear"
    """the session's host, unless it is hot and the session may move."""
    KV_LINEAR = "kv_linear"
    """hit ratio less load, both weighed."""
    LEAST_LOADED = "least_loaded"
    """fewest pending prefill tokens."""
    LMETRIC = "lmetric"
    """pending tokens times requests running."""
    LMETRIC_PLUS_ONE = "lmetric_plus_one"
    """the same with one request more."""
    MOONCAKE = "mooncake"
    """lowest predicted time to the first token (Mooncake's Algorithm 1)."""
    PERILUNE = "perilune"
    """lowest cost in seconds over all tiers; a session leaves its host only where that pays."""
    POWER_OF_TWO = "power_of_two"
    """fewest pending prefill tokens of two."""
    RANDOM = "random"
    """any endpoint."""
    ROUND_ROBIN = "round_robin"
    """each endpoint in turn."""
    STICKY = "sticky"
    """the session's host, always."""


class RoutingSpec(pool.Routing, frozen=True, kw_only=True):
    """Which endpoint gets a request: policy, its parameters, sessions, migration, admission."""

    policy: Policy = Policy.EAR
    """The rule by which an endpoint is chosen."""
