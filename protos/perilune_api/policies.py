"""`routing.policy`: the routing policy of a pool, and a block of parameters for each policy that has any.

    policy:
      name: perilune                     # a PolicyName
      perilune: {leastGainSeconds: 4}    # optional; the defaults are each policy's own
      outside: {mine: {}}                # the blocks of policies that packages bring, by their names

Each policy reads its own block only. A pool may still set several blocks, because a request header, `perilune
whatif` and `perilune explain` evaluate policies other than the pool's with these parameters. The policies
themselves are in `perilune_gateway.policy`.
"""

from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta, field, to_builtins
from msgspec.structs import replace

from perilune_api.fields import Factor, Positive, Share, Struct, Weight

OUTSIDE_NAME = r"^[a-z][a-z0-9_]{0,62}$"
"""What the name of a policy looks like."""
Block = Annotated[dict[str, Any], Meta(max_length=64)]
"""Parameters of a policy of a package. Which there are, the gateway knows, which has the package."""


class PolicyName(StrEnum):
    """Names of the routing policies."""

    CONDUCTOR = "conductor"
    """an endpoint that caches the prefix and has a short queue, else one near such an endpoint, by distance
    and queue (Mooncake Conductor)."""
    DYNAMO = "dynamo"
    """the fewest KV blocks to prefill plus to decode, with credit for cached blocks (NVIDIA Dynamo)."""
    DYNAMO_PRODUCT = "dynamo_product"
    """like dynamo, with prefill blocks multiplied by decode blocks instead of added."""
    DYNAMO_V1 = "dynamo_v1"
    """the highest cached share of the prompt minus KV usage minus waiting requests (Dynamo's first
    router)."""
    EAR = "ear"
    """the endpoint that served the session last, until that endpoint is overloaded."""
    KV_LINEAR = "kv_linear"
    """the highest weighted hit ratio minus weighted load."""
    LEAST_LOADED = "least_loaded"
    """the fewest pending prefill tokens."""
    LLM_D = "llm_d"
    """the highest weighted sum of a short queue, free KV memory and hit ratio (llm-d's default scorers)."""
    LMETRIC = "lmetric"
    """the lowest product of pending prefill tokens and running requests."""
    LMETRIC_PLUS_ONE = "lmetric_plus_one"
    """like lmetric, with one request added everywhere, so that caches count on idle endpoints too."""
    MOONCAKE = "mooncake"
    """the lowest predicted time to the first token (Mooncake's Algorithm 1)."""
    PERILUNE = "perilune"
    """the lowest predicted cost in seconds; a session leaves its endpoint only if that saves enough."""
    POWER_OF_TWO = "power_of_two"
    """the less loaded of two random endpoints."""
    RANDOM = "random"
    """a random endpoint."""
    ROUND_ROBIN = "round_robin"
    """each endpoint in turn."""
    STICKY = "sticky"
    """the endpoint that served the session first, always."""


class EarParams(Struct, frozen=True):
    """Parameters of the policy ear."""

    hot_pending_tokens: Positive = 16_384
    """Number of pending prefill tokens above which an endpoint is overloaded, so that sessions may leave it
    (T_hot)."""
    cooldown_seconds: Weight = 30.0
    """Minimum seconds between two moves of one session (T_cool)."""


class PeriluneParams(Struct, frozen=True):
    """Parameters of the policy perilune."""

    least_gain_seconds: Weight = 4.0
    """Seconds that a move of a session has to save, as predicted, if the other endpoint has nothing of the
    prompt. They are seconds of an H20 with a 30B model: where the two endpoints are measured to take twice as
    long for a prefill, twice as many."""
    least_gain_with_kv_seconds: Weight = 1.0
    """The same, in seconds, if the other endpoint has all of the prompt's KV, or fetches it from the
    store or a peer. With half of it, a move has to save the mean of the two values, and so on. A value
    above leastGainSeconds counts as that."""
    interference_weight: Factor = 1.0
    """Seconds by which one second of prefill delays each request in flight on the same endpoint. The default
    1 counts that delay alone; a higher value also charges for the KV memory that the delayed requests keep
    occupied. It counts half where the endpoint has or fetches all of the prompt's KV, and in proportion for
    a share."""
    expected_output_tokens: Positive = 128
    """Number of output tokens that a request is assumed to generate. A request with a lower limit counts with
    its limit."""


class ConductorArm(StrEnum):
    """Variants of Mooncake Conductor's published experiment."""

    NO_SCHEDULING = "no_scheduling"
    """a random endpoint."""
    CACHE_AWARE = "cache_aware"
    """an endpoint that caches the prefix, or one near it."""


class ConductorParams(Struct, frozen=True):
    """Parameters of the policy conductor."""

    arm: ConductorArm = ConductorArm.CACHE_AWARE
    """Variant of the published experiment."""
    max_queue_length: Positive = 10
    """Maximum number of prompts that may wait on an endpoint that caches the prefix. With more, the policy
    looks for an endpoint near it."""
    min_hit_ratio: Share = 0.1
    """Smallest share of the prompt that a cached prefix must cover to be considered. No value is
    published."""


class DynamoCredits(Struct, frozen=True):
    """Parameters that Dynamo's policies share: credits for cached blocks, and the sampling temperature."""

    temperature: Weight = 0.0
    """With 0 the lowest cost is chosen. Above 0 the choice is random, weighted by softmax over the normalised
    costs; higher values are more even. Dynamo's router_temperature."""
    device_credit: Factor = 1.0
    """Prefill blocks saved by each block that the GPU caches. Dynamo's overlap_score_credit."""
    host_credit: Factor = 0.75
    """Prefill blocks saved by each block that only host memory caches. Dynamo's host_cache_hit_weight."""
    disk_credit: Factor = 0.25
    """Prefill blocks saved by each block that only the shared store holds. Dynamo's disk_cache_hit_weight."""


class DynamoParams(DynamoCredits, frozen=True):
    """Parameters of the policy dynamo."""

    prefill_load_scale: Factor = 1.0
    """Weight of a prefill block relative to a decode block. Dynamo's prefill_load_scale."""


class DynamoProductParams(DynamoCredits, frozen=True):
    """Parameters of the policy dynamo_product."""


class DynamoV1Params(Struct, frozen=True):
    """Parameters of the policy dynamo_v1."""

    overlap_weight: Factor = 2.0
    """Weight of the cached share of the prompt relative to KV usage and waiting requests."""


class KvLinearParams(Struct, frozen=True):
    """Parameters of the policy kv_linear."""

    hit_weight: Factor = 1.0
    """Weight of the hit ratio, which raises an endpoint's score."""
    load_weight: Factor = 1.0
    """Weight of the normalised load, which lowers an endpoint's score."""


class LlmDParams(Struct, frozen=True):
    """Parameters of the policy llm_d."""

    queue_weight: Factor = 2.0
    """Weight of a short queue. llm-d's queue-scorer."""
    kv_usage_weight: Factor = 2.0
    """Weight of free KV memory. llm-d's kv-cache-utilization-scorer."""
    prefix_weight: Factor = 3.0
    """Weight of the hit ratio. llm-d's prefix-cache-scorer."""


class PolicyParams(Struct, frozen=True, kw_only=True):
    """A block of parameters for each policy that has any."""

    ear: EarParams = EarParams()
    perilune: PeriluneParams = PeriluneParams()
    conductor: ConductorParams = ConductorParams()
    dynamo: DynamoParams = DynamoParams()
    dynamo_product: DynamoProductParams = DynamoProductParams()
    dynamo_v1: DynamoV1Params = DynamoV1Params()
    kv_linear: KvLinearParams = KvLinearParams()
    llm_d: LlmDParams = LlmDParams()


class PolicyChoice(PolicyParams, frozen=True, kw_only=True):
    """The policy that chooses the endpoint of a request, and a block of parameters for each policy."""

    name: Annotated[str, Meta(pattern=OUTSIDE_NAME, max_length=63)] = PolicyName.PERILUNE.value
    """Policy of the pool: one of Perilune's, or one of a package that is installed where the gateway runs
    (docs/policies.md), which needs its block in outside."""
    outside: Annotated[dict[str, Block], Meta(max_length=16)] = field(default_factory=dict)
    """Parameters of policies of packages, by the policy's name. A block may be empty; perilune policies NAME
    lists what it may have. The gateway refuses what the policy does not know."""

    @property
    def is_known(self) -> bool:
        """Whether the policy is one of Perilune's, or one of a package that has its block."""
        return self.name in tuple(PolicyName) or self.name in self.outside

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of the policy itself: what its block gives, and of ours only what is no default."""
        block = getattr(self, self.name, None) if self.name in tuple(PolicyName) else None
        if block is None:
            return self.outside.get(self.name, {})
        given, defaults = to_builtins(block), to_builtins(type(block)())
        return {name: value for name, value in given.items() if value != defaults[name]}

    def of(self, name: str) -> "PolicyChoice":
        """Return the choice of another policy, with the same parameters. One of a package gets an empty
        block if it has none."""
        known = name in tuple(PolicyName) or name in self.outside
        return replace(self, name=name, outside=self.outside if known else {**self.outside, name: {}})


def unknown_policy(name: str) -> str:
    """Return what is wrong with a policy's name that is not `PolicyChoice.is_known`, and the cure."""
    return (
        f"Unknown policy {name!r}, Perilune's are {', '.join(PolicyName)}; a policy of a package needs its"
        f" block, which may be empty: outside: {{{name}: {{}}}}"
    )
