"""`spec`: the desired state of a pool, and how the operator applies a change to running engines."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from perilune_api.fields import Name, Struct
from perilune_api.inference_pool.engine import EngineSpec, ModelSpec
from perilune_api.inference_pool.gateway import GatewaySpec
from perilune_api.inference_pool.mooncake import Mooncake
from perilune_api.inference_pool.topology import TopologySpec
from perilune_api.inference_pool.types import Count, OptionalObject, Quantity, Share
from perilune_api.pool import Routing


class Rollout(Struct, frozen=True):
    """How the operator replaces and removes running engines."""

    max_unavailable: Share = 0
    """Maximum number of engines that may be missing while new ones start, as a number or as a percentage of
    replicas."""
    max_surge: Share = 1
    """Maximum number of engines that may exist beyond replicas during a change, as a number or as a
    percentage of replicas. Use 0 where there are no spare GPUs."""
    session_seconds: Annotated[int, Meta(ge=0, le=86_400)] = 90
    """Maximum seconds for which an engine that will be removed, by a scale-down for example or by a rolling
    update of engines that hand KV over, keeps its sessions. It gets no new sessions, and is removed earlier
    once all have left with their KV or have been silent for a minute; where no KV is handed over, nearly
    every engine waits this long if it is less than 60."""
    drain_seconds: Annotated[int, Meta(ge=0, le=86_400)] = 120
    """Maximum seconds for which an engine that is being stopped may finish its running requests."""
    revision: Annotated[str, Meta(max_length=128)] = ""
    """Revision of the operator (its version and default images) that the pool's pods should be made by. If
    empty, pods stay as they are when the operator is upgraded, until a change of the spec replaces them
    anyway. latest: they follow the operator, a few pools at a time. A revision, as status.availableRevision
    names it: they follow an operator of this revision only."""


class Signal(StrEnum):
    """What the number of endpoints follows."""

    METRIC = "metric"
    QUEUE_SECONDS = "queueSeconds"
    KV_USAGE = "kvUsage"
    TTFT_ATTAINMENT = "ttftAttainment"


class Scaling(Struct, frozen=True, kw_only=True):
    """Sets `replicas` by the load, starting from the present number of endpoints. An endpoint that leaves
    first lets its sessions leave (rollout.sessionSeconds). With prefillReplicas the load is that of the
    endpoints that get requests, without those that only prefill."""

    min_replicas: Annotated[int, Meta(ge=0, le=10_000)]
    """Minimum number of endpoints. With 0 the last one leaves when no request has come for downSeconds, and
    the first request starts one: it and those that come until then are refused with 429 and told when to
    come back, or wait, see `routing.sessionAdmission`. Not with signal: metric, nor with prefillReplicas."""
    max_replicas: Annotated[int, Meta(ge=1, le=10_000)]
    """Maximum number of endpoints."""
    signal: Signal = Signal.METRIC
    """What the number of endpoints follows. queueSeconds: seconds of queued prefill per endpoint, without
    what caches save. kvUsage: share of the KV caches in use, 0 to 1. ttftAttainment: share of requests whose
    first token came within ttftSeconds, 0 to 1. For these three the operator reads the gateways' pages, and
    nothing else is needed. metric: a HorizontalPodAutoscaler follows `metric`, for which it needs a metrics
    adapter, such as prometheus-adapter."""
    metric: Name = "perilune_queued_prefill_seconds"
    """Metric to scale by, for signal: metric. The adapter must serve it for the gateway's Service, summed
    over the gateways' pods. A metric that each gateway reports as a whole, such as
    perilune_endpoint_pending_prefill_seconds where they share state, grows with their number."""
    target: Quantity = "2"
    """Target value of the signal per endpoint: the sum over all endpoints is divided by it. For kvUsage at
    most 1, such as 0.7. For ttftAttainment the least share of all requests, below 1, such as 0.95."""
    ttft_seconds: Annotated[float, Meta(gt=0.0, le=60.0)] = 2.0
    """Seconds from a request's arrival within which its first token should come, for signal: ttftAttainment.
    One of 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 4, 5, 7.5, 10, 15, 20, 30, 60, for which gateways
    count."""
    up_seconds: Annotated[int, Meta(ge=0, le=3600)] = 30
    """Seconds for which the load must ask for more endpoints before they are added. signal: metric
    ignores it."""
    down_seconds: Annotated[int, Meta(ge=0, le=3600)] = 600
    """Seconds for which the load must need fewer endpoints before one leaves. signal: metric ignores
    it."""
    sleeping: Annotated[int, Meta(ge=0, le=10_000)] = 0
    """Number of endpoints that may sleep instead of being removed: their pods stay, with their GPUs, and
    their engines give the GPUs' memory back (vLLM's sleep mode). They wake in seconds, before new ones are
    started. With this field vLLM runs in its development mode, whose paths, such as /sleep, anyone who can
    reach the pods may call; clients of the pool cannot. Not with signal: metric, roleSwitching,
    engine.selector, or KV that leaves engines (mooncake)."""


class PrefillScaling(Struct, frozen=True, kw_only=True):
    """Sets the number of endpoints that only prefill by their load, starting from `prefillReplicas`. The
    number in force is that of the Deployment POOL-prefill."""

    min_replicas: Annotated[int, Meta(ge=1, le=10_000)]
    """Minimum number of endpoints that only prefill."""
    max_replicas: Annotated[int, Meta(ge=1, le=10_000)]
    """Maximum number of endpoints that only prefill."""
    signal: Signal = Signal.QUEUE_SECONDS
    """What their number follows. queueSeconds: seconds of queued prefill per endpoint that only prefills.
    ttftAttainment: share of all requests whose first token came within ttftSeconds, while the endpoints that
    only prefill are busy. The operator reads both from the gateways' pages."""
    target: Quantity = "2"
    """Target value of the signal, as in `scaling.target`."""
    ttft_seconds: Annotated[float, Meta(gt=0.0, le=60.0)] = 2.0
    """Seconds from a request's arrival within which its first token should come, as `scaling.ttftSeconds`."""
    up_seconds: Annotated[int, Meta(ge=0, le=3600)] = 30
    """Seconds for which the load must ask for more endpoints before they are added."""
    down_seconds: Annotated[int, Meta(ge=0, le=3600)] = 600
    """Seconds for which the load must need fewer endpoints before one leaves."""


class RoleSwitching(Struct, frozen=True):
    """Lets endpoints change between serving and only prefilling while they run, one at a time: when one side
    has too much to do and the other one would stay below half of its threshold with an endpoint less. The
    sessions of an endpoint leave before it only prefills (rollout.sessionSeconds)."""

    queue_seconds: Annotated[float, Meta(gt=0.0, le=3600.0)] = 2.0
    """Seconds of queued prefill per endpoint that prefills, above which another one is to prefill."""
    kv_usage: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.8
    """Share of the KV caches in use on the endpoints that serve, above which another one is to serve."""
    after_seconds: Annotated[int, Meta(ge=0, le=3600)] = 60
    """Seconds for which the load must ask for a switch before it is made, and at least between two of
    them."""


class SecretsSpec(Struct, frozen=True):
    """The secrets that the pool's pods share: the one by which engines know their gateways, and the password
    of the operator's Valkey."""

    name: OptionalObject = ""
    """Secret in the pool's namespace with the keys engine-secret and state-password, each of 32 random
    letters or more. If empty, the operator makes one, POOL-secrets-…, of random values. It may create Secrets
    and cannot read them."""
    rotation: Annotated[str, Meta(max_length=64)] = ""
    """Any word, such as a date. Another one asks for a new Secret: engines roll, and when all of them accept
    the new secret, gateways follow."""


class InferencePoolSpec(Struct, frozen=True, kw_only=True):
    """The desired state of the pool."""

    model: ModelSpec = ModelSpec()
    replicas: Count = 1
    """Number of endpoints that get requests. `kubectl scale` sets it."""
    prefill_replicas: Count = 0
    """Number of further endpoints that only prefill long prompts for those that get requests. Needs
    `mooncake.transfer: handoff`; `routing.disaggregation` says which prompts are long. With 0 every endpoint
    prefills its prompts itself."""
    engine: EngineSpec = EngineSpec()
    mooncake: Mooncake = Mooncake()
    topology: TopologySpec = TopologySpec()
    routing: Routing = Routing()
    gateway: GatewaySpec = GatewaySpec()
    rollout: Rollout = Rollout()
    scaling: Scaling | None = None
    prefill_scaling: PrefillScaling | None = None
    role_switching: RoleSwitching | None = None
    secrets: SecretsSpec = SecretsSpec()
    image_pull_secrets: Annotated[tuple[Name, ...], Meta(max_length=16)] = ()
    """Secrets of the pool's namespace with which all of its pods pull their images, besides those that the
    operator names for all pools."""
