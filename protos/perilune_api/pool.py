"""The pool document: what a gateway must know of one `InferencePool`.

One YAML (or JSON) document, in the shape of the Kubernetes object. The operator writes it with
everything resolved; as a file with a static `spec.endpoints` list it runs a gateway without
Kubernetes. `examples/pool.yaml` is one with comments. Unknown fields and wrong values are refused
with their path:

    SpecError: Expected `int` >= 1 - at `$.spec.engine.blockSize`

Steps of `load`: parse YAML → convert to frozen structs (types, ranges) → `check` (what one field alone
cannot know: duplicate addresses, unknown nodes, bandwidths that grow with distance).
"""

from enum import StrEnum
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from perilune_api.topology import Level, Link, Place, distance


class SpecError(ValueError):
    """The user's document is wrong; the message names the field and the cure."""


class _Struct(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """A part of the document; subclasses repeat `frozen` for the type checker."""


Name = Annotated[str, Meta(min_length=1, max_length=253)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
Address = Annotated[str, Meta(pattern=r"^(\d{1,3}(\.\d{1,3}){3}|\[[0-9A-Fa-f:]+\]):\d{1,5}$")]
"""`ip:port`; IPv6 in brackets."""


ZmqAddress = Annotated[str, Meta(pattern=r"^(tcp|ipc|inproc)://.+")]


class HashAlgorithm(StrEnum):
    """vLLM's `--prefix-caching-hash-algo`."""

    SHA256 = "sha256"
    SHA256_CBOR = "sha256_cbor"
    XXHASH = "xxhash"
    XXHASH_CBOR = "xxhash_cbor"


class ExtraKeys(StrEnum):
    """How LoRA, cache salt and multimodal keys enter vLLM's hash: tagged tuples since 0.31, bare before."""

    TAGGED = "tagged"
    BARE = "bare"


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class Lora(_Struct, frozen=True):
    """An adapter that the engines serve beside the model."""

    name: Name
    """What a request writes in `model` to get the adapter."""
    path: str = ""
    """vLLM's adapter path; part of its block hashes."""


class Model(_Struct, frozen=True):
    name: Name
    """What a request writes in `model`."""
    aliases: tuple[Name, ...] = ()
    """Further names that requests may write in `model`."""
    loras: tuple[Lora, ...] = ()
    """Adapters that the engines serve beside it."""
    tokenizer: str = ""
    """A folder of the gateway with tokenizer.json and the chat template (on Kubernetes gateway.podTemplate
    mounts it); empty: ask the engine, see `tokenize`."""
    tokenize: Literal["auto", "local", "engine", "estimate"] = "auto"
    """auto: local where `tokenizer` is set, else the engine's /tokenize, else estimate."""
    bytes_per_token: Annotated[float, Meta(gt=0)] = 4.0
    """Bytes of text per token, to begin estimates with; each session learns its own."""
    context_tokens: Positive = 131_072
    """Longest prompt and answer together, in tokens."""
    kv_bytes_per_token: Positive = 98_304
    """Bytes of one token in the KV cache, all layers together."""


class Hashing(_Struct, frozen=True):
    """How the engines hash KV blocks; the gateway has to do the same."""

    algorithm: HashAlgorithm = HashAlgorithm.SHA256
    seed: str = ""
    """PYTHONHASHSEED of the engines; empty: unset (vLLM >= 0.29 then uses a fixed seed)."""
    extra_keys: ExtraKeys = ExtraKeys.TAGGED


class Engine(_Struct, frozen=True):
    """What a gateway must know of the engines."""

    block_size: Positive = 16
    """Tokens per KV block; must equal the engines' `--block-size`."""
    hashing: Hashing = Hashing()
    kv_pool_tokens: Positive = 281_600
    """Tokens that one endpoint's device KV pool holds."""
    prefill_scale: Annotated[float, Meta(gt=0)] = 1.0
    """Seconds of prefill here / seconds on one H20 with a 30B-A3B model, as a first belief."""
    store: bool = False
    """The engines share a KV store pool, so that a moved session's KV follows it."""


class SessionKeys(_Struct, frozen=True):
    """How a request tells its session. Headers come first, so that it is the same without the body."""

    headers: tuple[Name, ...] = ()
    """Headers that name the session, asked before the well-known ones (names.SESSION_HEADERS)."""
    cookie: str = ""
    """Name of a cookie that holds the session id; empty: none is read."""
    body_user: bool = False
    """Take the body's `user` as session id."""
    infer: bool = True
    """A prompt that extends an earlier prompt continues its session."""
    tenant_header: str = ""
    """Names the tenant; empty: a hash of the Authorization value. A binding is found under both."""
    idle_seconds: Seconds = 1800.0
    """A session that was silent for so many seconds is forgotten."""
    max_sessions: Positive = 100_000
    """Sessions that a gateway remembers; the longest silent is forgotten first."""


class ConductorArm(StrEnum):
    """The three arms of Conductor's experiment."""

    NO_SCHEDULING = "no_scheduling"
    """Any endpoint, drawn."""
    CACHE_AWARE = "cache_aware"
    CACHE_AWARE_MIGRATION = "cache_aware_migration"
    """And a hot prefix is copied to the chosen endpoint."""


Share = Annotated[float, Meta(ge=0, le=1)]
Weight = Annotated[float, Meta(ge=0)]
Factor = Annotated[float, Meta(ge=0, le=1e6)]
"""What costs are multiplied by: however large those are, the product is a number."""


class PolicyParams(_Struct, frozen=True):
    """Every policy's parameters; each reads the ones that it names."""

    hot_pending_tokens: Positive = 16_384
    """ear: T_hot, pending prefill tokens above which a host is hot."""
    cooldown_seconds: Weight = 30.0
    """ear, migration: T_cool, seconds between two moves of one session."""

    conductor_arm: ConductorArm = ConductorArm.CACHE_AWARE_MIGRATION
    max_queue_length: Positive = 10
    """conductor: a holder of the prefix with a longer queue is passed over."""
    min_hit_ratio: Share = 0.1
    """conductor: a prefix that covers less of the prompt is not used. (None is published.)"""
    hot_cache_threshold: Weight = 0.3
    """conductor, migration: a prefix with a lower frequency score is not migrated; published as
    migration_threshold."""

    kvcache_balancing_threshold: Annotated[float, Meta(ge=1)] = 2.0
    """mooncake: best holder's prefix / an endpoint's own, above which the prefix is transferred. (Tuned by
    hand in the paper, no value is published.)"""

    dynamo_temperature: Weight = 0.0
    """dynamo: 0: lowest cost; above: softmax over the normalised costs. Dynamo's router_temperature."""
    dynamo_prefill_load_scale: Factor = 1.0
    """dynamo: weight of prefill against decode blocks. Dynamo's prefill_load_scale."""
    dynamo_device_credit: Factor = 1.0
    """dynamo: blocks credited for each block on the device. Dynamo's overlap_score_credit."""
    dynamo_host_credit: Factor = 0.75
    """dynamo: the same for blocks that only the host's memory holds. Dynamo's host_cache_hit_weight."""
    dynamo_disk_credit: Factor = 0.25
    """dynamo: the same for blocks that only the store holds. Dynamo's disk_cache_hit_weight."""
    dynamo_v1_overlap_weight: Factor = 2.0
    """dynamo_v1: weight of the overlap against usage and waiting."""
    max_local_prefill_tokens: Positive = 1_000
    """dynamo_disagg (simulations only): a prompt with more uncached tokens is prefilled remotely. Dynamo's
    max_local_prefill_length."""
    max_prefill_queue: Positive = 2
    """dynamo_disagg (simulations only): unless so many prompts wait there. Dynamo's
    max_prefill_queue_size."""

    kv_linear_hit_weight: Factor = 1.0
    """kv_linear: weight of the hit ratio, which counts for an endpoint."""
    kv_linear_load_weight: Factor = 1.0
    """kv_linear: weight of the normalised load, which counts against it."""

    migration_worth: Annotated[float, Meta(ge=1)] = 1.5
    """migration: a move must bring this many times its cost."""
    hot_pending_seconds: Weight = 1.5
    """migration: seconds of queued prefill above which a host is hot."""
    rack_pressure: Annotated[float, Meta(ge=1)] = 2.0
    """migration: mean queue of a rack / of the fleet, above which sessions leave the rack."""
    load_persistence: Share = 0.5
    """migration: how much of the difference between two queues is left a turn later."""
    max_remaining_turns: Weight = 20.0
    """migration: a session is never expected to have more turns left."""
    migrations_per_minute: Annotated[int, Meta(ge=0)] = 50
    """migration: most moves per minute in the whole pool; 0: none."""
    migration_link_bytes: Annotated[int, Meta(ge=0)] = 16_000_000_000
    """migration: most bytes on their way between two endpoints."""
    expected_output_tokens: Positive = 128
    """perilune: tokens that an answer is expected to have, or fewer where the request allows no more."""
    interference_weight: Factor = 1.0
    """perilune: seconds that a second of prefill costs each request in flight beside it. Above 1 it counts as
    well that KV is held meanwhile, for which that of idle sessions is evicted."""
    least_gain_seconds: Weight = 4.0
    """perilune: a move that brings fewer seconds is not made, those of its fetch counted once more. Lower
    where turns take less than a second."""
    ageing_weight: Factor = 0.0
    """Engine priority: seconds of waiting that a second of uncached prefill weighs; 0: first come first
    served. Above 0 the engines run with `--scheduling-policy priority` and the gateway writes `priority` into
    every body, which it must then read: no decision is taken from headers alone."""


class Limits(_Struct, frozen=True):
    """When a request is refused instead of routed."""

    max_body_bytes: Positive = 32 * 1024 * 1024
    """A request with a larger body is refused, in bytes."""
    max_pending_seconds: Annotated[float, Meta(ge=0)] = 0.0
    """Refuse with 429 when every endpoint has more seconds of queued prefill than this; 0: never."""
    ttft_slo_seconds: Annotated[float, Meta(ge=0)] = 0.0
    """Refuse with 429 when no endpoint is predicted to give the first token in time; 0: none. A request may
    set its own (names.SLO_TTFT_HEADER)."""
    tpot_slo_seconds: Annotated[float, Meta(ge=0)] = 0.0
    """The same for the mean time per further token (names.SLO_TPOT_HEADER)."""
    objectives: dict[str, Annotated[int, Meta(ge=-8, le=8)]] = {}
    """Priority level by the objective that a request names (names.OBJECTIVE_HEADERS): each level doubles the
    backlog at which it is refused, each below 0 halves it."""
    decision_seconds: Seconds = 1.5
    """A tokenizer that takes more seconds is given up for this request, which is then routed by estimate."""


class MoveTrigger(StrEnum):
    """What the migration planner acts on."""

    DRAIN = "drain"
    """An endpoint drains: its sessions leave it."""
    HOT_HOST = "hot_host"
    """Too much prefill is queued on an endpoint. Left out for policies that move sessions from hot hosts
    themselves (ear, perilune): two judges of one question disagree."""
    RACK_PRESSURE = "rack_pressure"
    """A rack has far more queued than the others."""
    REPLICATE = "replicate"
    """Many new sessions begin with one prefix: more endpoints get it."""


class Migration(_Struct, frozen=True):
    """The planner that moves sessions and copies prefixes ahead of their requests, beside any policy. What it
    offers is carried out by the next request concerned; how it weighs is in params."""

    triggers: tuple[MoveTrigger, ...] = (MoveTrigger.DRAIN,)
    """What it acts on. Empty: it moves nothing, and sessions of a draining endpoint stay until their policy
    or its end moves them."""
    interval_seconds: Seconds = 1.0
    """Seconds between two plans."""


class Routing(_Struct, frozen=True):
    """How endpoints are chosen."""

    policy: Name = "ear"
    """Name of the rule by which an endpoint is chosen."""
    params: PolicyParams = PolicyParams()
    migration: Migration = Migration()
    allow_policy_header: bool = False
    """A request may choose its policy with x-perilune-policy."""
    session: SessionKeys = SessionKeys()
    limits: Limits = Limits()
    fallbacks: Annotated[int, Meta(ge=0, le=8)] = 2
    """Further endpoints that Envoy may try, in order, after the chosen one."""


class NodePlace(_Struct, frozen=True):
    """Where a node stands in the fabric, and what it brings."""

    rack: str = ""
    """Top-of-rack switch; empty: unknown."""
    spine: str = ""
    """Group of racks under one spine; empty: unknown."""
    gpu: str = ""
    """GPU product, as GPU feature discovery names it (NVIDIA-H20); empty: unknown."""
    nics: Annotated[int, Meta(ge=0)] = 0
    """Network cards that carry KV, for display; 0: unknown."""
    nic_gbits: Weight = 0.0
    """Speed of each, in Gbit/s; 0: unknown."""


class Bandwidth(_Struct, frozen=True):
    """Bytes per second of one transfer, by the narrowest level that holds both ends."""

    node: Annotated[float, Meta(gt=0)] = 200e9
    """Within a node, in bytes per second."""
    rack: Annotated[float, Meta(gt=0)] = 9.7e9
    """Within a rack, in bytes per second."""
    spine: Annotated[float, Meta(gt=0)] = 9.7e9
    """Between racks under one spine, in bytes per second."""
    fabric: Annotated[float, Meta(gt=0)] = 4.0e9
    """Between spines, in bytes per second."""


class Topology(_Struct, frozen=True):
    """The fabric: nodes, and how fast they are joined."""

    nodes: dict[str, NodePlace] = {}
    """By name."""
    bandwidth: Bandwidth = Bandwidth()
    nic_gbits: Weight = 0.0
    """Speed of the network cards that `bandwidth` is for, in Gbit/s: a link between two nodes is scaled by
    the slower one's cards, where they tell; 0: none is scaled."""

    def place(self, node: str) -> Place:
        where = self.nodes.get(node, NodePlace())
        return Place(node, where.rack, where.spine)

    def link(self, a: Place, b: Place, slowdown: float = 1.0) -> Link:
        level = distance(a, b)
        by_level = {
            Level.NODE: self.bandwidth.node,
            Level.RACK: self.bandwidth.rack,
            Level.SPINE: self.bandwidth.spine,
            Level.FABRIC: self.bandwidth.fabric,
        }
        return Link(level, by_level[level] * self._scale(level, a, b), slowdown)

    def _scale(self, level: Level, a: Place, b: Place) -> float:
        if not self.nic_gbits or level is Level.NODE:
            return 1.0
        told = (self.nodes.get(place.node, NodePlace()).nic_gbits for place in (a, b))
        return min(gbits or self.nic_gbits for gbits in told) / self.nic_gbits


class EndpointSpec(_Struct, frozen=True):
    """One vLLM server."""

    address: Address
    """Where it serves HTTP: `ip:port`, IPv6 in brackets."""
    role: Role = Role.BOTH
    """Endpoints with the role prefill get no requests."""
    node: str = ""
    """Name of the node that it runs on, one of topology.nodes; empty: unknown, and far from everything."""
    events: tuple[ZmqAddress, ...] = ()
    """ZMQ addresses of its KV events, one per data-parallel rank (`tcp://ip:port`); none: approximate."""
    replay: tuple[ZmqAddress, ...] = ()
    """ZMQ addresses that replay missed events, in the order of `events`."""
    draining: bool = False
    """Known sessions finish here, new ones go elsewhere."""
    ready: bool = True
    """False: what it holds stays known, and nobody is sent there."""


class Spec(_Struct, frozen=True):
    model: Model
    engine: Engine = Engine()
    routing: Routing = Routing()
    topology: Topology = Topology()
    endpoints: tuple[EndpointSpec, ...] = ()


class Metadata(_Struct, frozen=True):
    name: Name
    """Name of the pool, for logs and metrics."""
    namespace: Name = "default"
    """Namespace of the pool, likewise."""


class Pool(_Struct, frozen=True):
    metadata: Metadata
    spec: Spec
    api_version: Literal["perilune.dev/v1alpha1"] = "perilune.dev/v1alpha1"
    kind: Literal["InferencePool"] = "InferencePool"


def load(path: Path) -> Pool:
    """Read and check a pool document. Raises SpecError with the field's path, OSError as the system does."""
    return parse(path.read_bytes())


def parse(text: bytes | str) -> Pool:
    """YAML or JSON → a checked pool. Raises SpecError."""
    try:
        pool = msgspec.yaml.decode(text, type=Pool)
    except msgspec.DecodeError as error:  # ValidationError is one of them
        raise SpecError(str(error)) from None
    check(pool)
    return pool


def dump(pool: Pool) -> bytes:
    """YAML that `parse` reads back to an equal pool."""
    return msgspec.yaml.encode(pool)


def _is_ip_port(address: str) -> bool:
    """Whether the numbers of an `Address` are in range."""
    host, _, port = address.rpartition(":")
    try:
        ip_address(host.strip("[]"))
    except ValueError:
        return False
    return 0 < int(port) < 65_536


def check(pool: Pool) -> None:
    """What one field alone cannot know. Raises SpecError."""
    spec = pool.spec
    seen: set[str] = set()
    for i, endpoint in enumerate(spec.endpoints):
        at = f"at `$.spec.endpoints[{i}]"
        if not _is_ip_port(endpoint.address):
            raise SpecError(f"There is no address {endpoint.address} - {at}.address`")
        if endpoint.address in seen:
            raise SpecError(f"Address {endpoint.address} is listed twice - {at}.address`")
        seen.add(endpoint.address)
        if endpoint.node and spec.topology.nodes and endpoint.node not in spec.topology.nodes:
            raise SpecError(
                f"Unknown node {endpoint.node!r}, known are {sorted(spec.topology.nodes)} - {at}.node`"
            )
        if endpoint.replay and len(endpoint.replay) != len(endpoint.events):
            raise SpecError(f"As many replay as event addresses are needed - {at}.replay`")
    band = spec.topology.bandwidth
    if not band.node >= band.rack >= band.spine >= band.fabric:
        raise SpecError(
            "Bandwidth must not grow with distance (node >= rack >= spine >= fabric)"
            " - at `$.spec.topology.bandwidth`"
        )
    models = [spec.model.name, *spec.model.aliases, *(lora.name for lora in spec.model.loras)]
    for model in models:
        if models.count(model) > 1:
            raise SpecError(f"Model name {model!r} is given twice - at `$.spec.model`")
