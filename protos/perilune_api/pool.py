"""The pool document: what a gateway must know of one `InferencePool`.

One YAML (or JSON) document, in the shape of the Kubernetes object. The operator writes it with
everything resolved; as a file with a static `spec.endpoints` list it runs a gateway without
Kubernetes. `examples/pool.yaml` is one with comments. Unknown fields and wrong values are refused
with their path:

    SpecError: Expected `int` >= 1 - at `$.spec.engine.blockSize`

Steps of `load`: parse YAML → convert to frozen structs (types, ranges) → `check` (what one field alone
cannot know: duplicate addresses, unknown nodes).
"""

from enum import StrEnum
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from perilune_api import moved_fields
from perilune_api.fields import Name, Positive, Seconds, Share, Struct, Weight
from perilune_api.policies import PolicyChoice
from perilune_api.topology import NIC_GBITS, Bandwidth, Level, Link, Place, distance


class SpecError(ValueError):
    """The user's document is wrong; the message names the field and the cure."""


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


class Lora(Struct, frozen=True):
    """An adapter that the engines serve beside the model."""

    name: Name
    """What a request writes in `model` to get the adapter."""
    path: str = ""
    """vLLM's adapter path; part of its block hashes."""


class Model(Struct, frozen=True):
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


class Hashing(Struct, frozen=True):
    """How the engines hash KV blocks; the gateway has to do the same."""

    algorithm: HashAlgorithm = HashAlgorithm.SHA256
    seed: str = ""
    """PYTHONHASHSEED of the engines; empty: unset (vLLM >= 0.29 then uses a fixed seed)."""
    extra_keys: ExtraKeys = ExtraKeys.TAGGED


class Engine(Struct, frozen=True):
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


class SessionKeys(Struct, frozen=True):
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


class Limits(Struct, frozen=True):
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
    objectives: dict[str, Annotated[int, Meta(ge=-8, le=8)]] = msgspec.field(default_factory=dict)
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


class Migration(Struct, frozen=True):
    """A planner that moves sessions and replicates prefixes ahead of their requests, beside any policy. The
    next request concerned carries out what the planner offers."""

    triggers: tuple[MoveTrigger, ...] = (MoveTrigger.DRAIN,)
    """What it acts on. Empty: it moves nothing, and sessions of a draining endpoint stay until their policy
    or its end moves them."""
    interval_seconds: Seconds = 1.0
    """Seconds between two plans."""
    worth: Annotated[float, Meta(ge=1)] = 1.5
    """A move must bring this many times its cost."""
    cooldown_seconds: Weight = 30.0
    """Seconds that must pass between two moves of one session."""
    moves_per_minute: Annotated[int, Meta(ge=0)] = 50
    """Most moves per minute in the whole pool; 0: none."""
    hot_pending_seconds: Weight = 1.5
    """hot_host, rack_pressure: seconds of queued prefill above which a host, or a rack on average, is hot."""
    rack_pressure: Annotated[float, Meta(ge=1)] = 2.0
    """rack_pressure: mean queue of a rack / of the fleet, above which sessions leave the rack."""
    load_persistence: Share = 0.5
    """Share of the difference between two queues that is left a turn later."""
    max_remaining_turns: Weight = 20.0
    """Most turns that a session is expected to have left."""
    replicate_score: Weight = 0.3
    """replicate: frequency score (uses / square root of the age in seconds) from which a prefix is hot."""


class EnginePriority(Struct, frozen=True):
    """In which order an engine serves the requests that wait there."""

    ageing_weight: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    """Seconds of waiting that a second of uncached prefill weighs; 0: first come, first served. Above 0 the
    engines run with `--scheduling-policy priority` and the gateway writes `priority` into every body, so it
    has to read every body: no decision is taken from headers alone."""


class Routing(Struct, frozen=True):
    """Which endpoint gets a request: policy, sessions, migration, admission."""

    policy: PolicyChoice = PolicyChoice()
    migration: Migration = Migration()
    engine_priority: EnginePriority = EnginePriority()
    allow_policy_header: bool = False
    """A request may choose its policy with x-perilune-policy."""
    session: SessionKeys = SessionKeys()
    limits: Limits = Limits()
    fallbacks: Annotated[int, Meta(ge=0, le=8)] = 2
    """Further endpoints that Envoy may try, in order, after the chosen one."""


class NodePlace(Struct, frozen=True):
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


class Topology(Struct, frozen=True):
    """The fabric: where the nodes stand."""

    nodes: dict[str, NodePlace] = msgspec.field(default_factory=dict)
    """By name."""

    def place(self, node: str) -> Place:
        where = self.nodes.get(node, NodePlace())
        return Place(node, where.rack, where.spine)

    def link(self, a: Place, b: Place, slowdown: float = 1.0) -> Link:
        """Two nodes are joined as fast as the slower one's network cards, where they tell their speed."""
        level = distance(a, b)
        return Link(level, Bandwidth().at(level) * self._scale(level, a, b), slowdown)

    def _scale(self, level: Level, a: Place, b: Place) -> float:
        if level is Level.NODE:
            return 1.0
        told = (self.nodes.get(place.node, NodePlace()).nic_gbits for place in (a, b))
        return min(gbits or NIC_GBITS for gbits in told) / NIC_GBITS


class EndpointSpec(Struct, frozen=True):
    """One vLLM server."""

    address: Address
    """Where it serves HTTP: `ip:port`, IPv6 in brackets."""
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


class Spec(Struct, frozen=True):
    model: Model
    engine: Engine = Engine()
    routing: Routing = Routing()
    topology: Topology = Topology()
    endpoints: tuple[EndpointSpec, ...] = ()


class Metadata(Struct, frozen=True):
    name: Name
    """Name of the pool, for logs and metrics."""
    namespace: Name = "default"
    """Namespace of the pool, likewise."""


class Pool(Struct, frozen=True):
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
        raise SpecError(_moved(text) or str(error)) from None
    check(pool)
    return pool


def _moved(text: bytes | str) -> str:
    """Which fields of a refused document have moved; empty when none has."""
    try:
        document = msgspec.yaml.decode(text)
    except msgspec.DecodeError:
        return ""
    return moved_fields.explain(document.get("spec")) if isinstance(document, dict) else ""


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
    models = [spec.model.name, *spec.model.aliases, *(lora.name for lora in spec.model.loras)]
    for model in models:
        if models.count(model) > 1:
            raise SpecError(f"Model name {model!r} is given twice - at `$.spec.model`")
