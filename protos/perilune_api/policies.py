"""`routing.policy`: the routing policy of a pool, and one block of parameters for each policy that has some.

    policy:
      name: ear                          # a PolicyName
      ear: {hotPendingTokens: 16384}     # optional; the defaults are each policy's own

Each policy reads its own block and no other. A pool may set several blocks: a request header, `perilune
whatif` and the counterfactuals of `perilune explain` evaluate other policies with the pool's block for each.
The policies themselves are `perilune_gateway.policy`.
"""

from enum import StrEnum

from perilune_api.fields import Factor, Positive, Share, Struct, Weight


class PolicyName(StrEnum):
    """Routing policies that a gateway can carry out."""

    CONDUCTOR = "conductor"
    """an endpoint that holds the prefix and has a short queue, else one near it, by distance and queue."""
    DYNAMO = "dynamo"
    """fewest KV blocks to prefill and to decode, cached ones credited."""
    DYNAMO_PRODUCT = "dynamo_product"
    """prefill blocks multiplied by decode blocks instead of added."""
    DYNAMO_V1 = "dynamo_v1"
    """cached share of the prompt, less KV usage and waiting requests."""
    EAR = "ear"
    """the session's host, unless it is hot and the session may move."""
    KV_LINEAR = "kv_linear"
    """weighted hit ratio less weighted load."""
    LEAST_LOADED = "least_loaded"
    """fewest pending prefill tokens."""
    LMETRIC = "lmetric"
    """pending prefill tokens times running requests."""
    LMETRIC_PLUS_ONE = "lmetric_plus_one"
    """lmetric with one more request counted everywhere, so that the cache counts on idle endpoints."""
    MOONCAKE = "mooncake"
    """lowest predicted time to the first token (Mooncake's Algorithm 1)."""
    PERILUNE = "perilune"
    """lowest cost in seconds over all tiers; a session leaves its host only where that pays."""
    POWER_OF_TWO = "power_of_two"
    """the less loaded of two endpoints that are drawn."""
    RANDOM = "random"
    """any endpoint, drawn."""
    ROUND_ROBIN = "round_robin"
    """each endpoint in turn."""
    STICKY = "sticky"
    """the session's host, always."""


class EarParams(Struct, frozen=True):
    """Parameters of ear."""

    hot_pending_tokens: Positive = 16_384
    """T_hot: pending prefill tokens above which a host is hot."""
    cooldown_seconds: Weight = 30.0
    """T_cool: seconds that must pass between two moves of one session."""


class PeriluneParams(Struct, frozen=True):
    """Parameters of perilune."""

    least_gain_seconds: Weight = 4.0
    """A session moves only where that saves more seconds than this and its fetch once more. Lower it where
    turns take less than a second."""
    interference_weight: Factor = 1.0
    """Seconds that a second of prefill costs each request in flight on the same endpoint. A value above 1
    also counts the KV that those requests hold meanwhile, for which KV of idle sessions is evicted."""
    expected_output_tokens: Positive = 128
    """Expected tokens of an answer; fewer count where the request allows fewer."""


class ConductorArm(StrEnum):
    """The arms of Conductor's experiment that a gateway can carry out."""

    NO_SCHEDULING = "no_scheduling"
    """any endpoint, drawn."""
    CACHE_AWARE = "cache_aware"
    """an endpoint near the cached prefix."""


class ConductorParams(Struct, frozen=True):
    """Parameters of conductor."""

    arm: ConductorArm = ConductorArm.CACHE_AWARE
    """The arm of the published experiment that decides."""
    max_queue_length: Positive = 10
    """An endpoint that holds the prefix is passed over when more prompts than this wait there."""
    min_hit_ratio: Share = 0.1
    """A cached prefix that covers a smaller share of the prompt is ignored. No value is published."""


class DynamoCredits(Struct, frozen=True):
    """What Dynamo's policies credit for cached blocks, and how they draw."""

    temperature: Weight = 0.0
    """0 chooses the lowest cost; above 0 the choice is drawn by softmax over the normalised costs. Dynamo's
    router_temperature."""
    device_credit: Factor = 1.0
    """Prefill blocks credited for each block that the device holds. Dynamo's overlap_score_credit."""
    host_credit: Factor = 0.75
    """Prefill blocks credited for each block that only the host's memory holds. Dynamo's
    host_cache_hit_weight."""
    disk_credit: Factor = 0.25
    """Prefill blocks credited for each block that only the shared store holds. Dynamo's
    disk_cache_hit_weight."""


class DynamoParams(DynamoCredits, frozen=True):
    """Parameters of dynamo."""

    prefill_load_scale: Factor = 1.0
    """Weight of prefill blocks against decode blocks. Dynamo's prefill_load_scale."""


class DynamoProductParams(DynamoCredits, frozen=True):
    """Parameters of dynamo_product."""


class DynamoV1Params(Struct, frozen=True):
    """Parameters of dynamo_v1."""

    overlap_weight: Factor = 2.0
    """Weight of the cached share of the prompt against KV usage and waiting requests."""


class KvLinearParams(Struct, frozen=True):
    """Parameters of kv_linear."""

    hit_weight: Factor = 1.0
    """Weight of the hit ratio, which speaks for an endpoint."""
    load_weight: Factor = 1.0
    """Weight of the normalised load, which speaks against it."""


class PolicyParams(Struct, frozen=True, kw_only=True):
    """One block of parameters for each policy that has some. A policy that is not named here has none."""

    ear: EarParams = EarParams()
    perilune: PeriluneParams = PeriluneParams()
    conductor: ConductorParams = ConductorParams()
    dynamo: DynamoParams = DynamoParams()
    dynamo_product: DynamoProductParams = DynamoProductParams()
    dynamo_v1: DynamoV1Params = DynamoV1Params()
    kv_linear: KvLinearParams = KvLinearParams()


class PolicyChoice(PolicyParams, frozen=True, kw_only=True):
    """The rule by which an endpoint is chosen, and the parameters of each policy in a block of its name."""

    name: PolicyName = PolicyName.EAR
    """The policy of requests that do not choose one themselves."""
