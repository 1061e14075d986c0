"""The pool document: what a gateway must know about one pool.

It is one YAML (or JSON) document in the shape of the Kubernetes `InferencePool`. On Kubernetes the operator
derives it from the `InferencePool`. Without Kubernetes a user writes it, with a static list
`spec.endpoints`; `examples/local/pool.yaml` is an example with comments. `parse` refuses an unknown field or
a wrong value with the field's path:

    SpecError: Expected `int` >= 1 - at `$.spec.engine.blockSize`

`parse_known` reads what the operator wrote, and ignores unknown fields.

`load` parses the YAML, converts it to frozen structs (types and ranges), and calls `check` for the rules
that span several fields, such as duplicate addresses and unknown nodes.
"""

from collections import Counter
from enum import StrEnum
from ipaddress import ip_address
from math import ceil
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import yaml
from msgspec import Meta
from yaml import MarkedYAMLError

from perilune_api import moved_fields, versions
from perilune_api.fields import Name, Positive, Seconds, Share, Struct, Weight
from perilune_api.policies import PolicyChoice
from perilune_api.topology import NIC_GBITS, Bandwidth, Level, Link, Place, distance


class SpecError(ValueError):
    """The user's document is wrong. The message names the field and, where possible, the remedy."""


DECISION_S = 2
"""Seconds for which Envoy waits for a decision of the gateway."""
MAX_DEPTH = 64
"""Maximum depth of a pool document."""
_IP_PORT = r"^([0-9]{1,3}(\.[0-9]{1,3}){3}|\[[0-9A-Fa-f:]+\]):[0-9]{1,5}$"
Address = Annotated[str, Meta(pattern=_IP_PORT)]
"""`ip:port`; IPv6 in brackets."""


ZmqAddress = Annotated[str, Meta(pattern=r"^(tcp|ipc|inproc)://.+")]


class HashAlgorithm(StrEnum):
    """vLLM's `--prefix-caching-hash-algo`."""

    SHA256 = "sha256"
    SHA256_CBOR = "sha256_cbor"
    XXHASH = "xxhash"
    XXHASH_CBOR = "xxhash_cbor"


class ExtraKeys(StrEnum):
    """How vLLM adds LoRA, cache salt and multimodal keys to a block hash. Since 0.31 it adds tagged tuples,
    before that bare values."""

    TAGGED = "tagged"
    BARE = "bare"


LONGEST_CONTEXT = 1_048_576
"""Tokens of the longest context of any model that is served today."""


class Lora(Struct, frozen=True):
    """A LoRA adapter that the engines serve in addition to the model."""

    name: Name
    """Value of `model` in a request that uses this adapter."""
    path: str = ""
    """Path of the adapter as vLLM loads it. vLLM's block hashes include it."""


class Model(Struct, frozen=True):
    """The model that the pool serves, and how the gateway counts its tokens."""

    name: Name
    """Value of `model` in a request for this model."""
    aliases: tuple[Name, ...] = ()
    """Other values of `model` that also mean this model."""
    loras: tuple[Lora, ...] = ()
    """LoRA adapters that the engines serve in addition to the model."""
    tokenizer: str = ""
    """Folder in the gateway's file system with tokenizer.json and the chat template; on Kubernetes,
    gateway.podTemplate mounts it. If empty, the gateway has no local tokenizer (see `tokenize`)."""
    tokenize: Literal["auto", "local", "engine", "estimate"] = "auto"
    """How the gateway tokenizes prompts. local: with `tokenizer`. engine: through the engine's /tokenize.
    estimate: by `bytesPerToken`. auto: local if `tokenizer` is set, else engine, and estimate where that
    fails."""
    bytes_per_token: Annotated[float, Meta(gt=0)] = 4.0
    """Bytes of text per token, for the first estimate of a session. Later estimates use the ratio that the
    engine reported for that session."""
    context_tokens: Annotated[int, Meta(ge=0)] = 0
    """Maximum number of tokens of a prompt and its answer together. On Kubernetes the engines get it as
    `--max-model-len`. With 0 the engines decide: they allow what the model does, or less if their memory does
    not suffice, and the gateway refuses no prompt as too long."""
    kv_bytes_per_token: Positive = 98_304
    """Bytes that one token takes in the KV cache, summed over all layers."""

    @property
    def longest_context(self) -> int:
        """Tokens beyond which no prompt need be looked at."""
        return self.context_tokens or LONGEST_CONTEXT


class Hashing(Struct, frozen=True):
    """How the engines hash KV blocks. The gateway computes the same hashes to look prompts up."""

    algorithm: HashAlgorithm = HashAlgorithm.SHA256
    """Must equal the engines' `--prefix-caching-hash-algo`."""
    seed: str = ""
    """PYTHONHASHSEED of the engines. If empty, the variable is not set, and vLLM >= 0.29 uses a fixed
    seed."""
    extra_keys: ExtraKeys = ExtraKeys.TAGGED
    """How vLLM adds LoRA, cache salt and multimodal keys to a block hash. tagged: as tagged tuples, which
    vLLM does since 0.31. bare: as bare values, which earlier versions do."""


class Engine(Struct, frozen=True):
    """What a gateway must know about the engines."""

    block_size: Positive = 16
    """Tokens per KV block. Must equal the engines' `--block-size`."""
    hashing: Hashing = Hashing()
    kv_pool_tokens: Positive = 281_600
    """Number of tokens that fit into the KV cache on one endpoint's GPUs."""
    prefill_scale: Annotated[float, Meta(gt=0)] = 1.0
    """Prefill time of these engines divided by that of one H20 with a 30B-A3B model. It starts the
    predictions, which the gateway then corrects by measurement. 1: as fast as that H20."""
    store: bool = False
    """Whether the engines share a KV store, from which an endpoint can load a moved session's KV."""
    store_master: str = ""
    """Address (`host:port`) of the HTTP server of the store's Mooncake master, which the gateway asks whether
    the memory is still there into which engines have put blocks. If empty, blocks in the store count until
    they expire."""


class SessionKeys(Struct, frozen=True):
    """How the gateway finds the session of a request. Headers take precedence over the body, so that the
    session is the same before and after the body arrives."""

    headers: tuple[Name, ...] = ()
    """Request headers that hold the session id. They take precedence over the well-known headers
    names.SESSION_HEADERS, which always count."""
    cookie: str = ""
    """Name of a cookie that holds the session id. If empty, cookies are not read."""
    body_user: bool = False
    """Whether the body's `user` is taken as the session id."""
    infer: bool = True
    """Whether a prompt that extends an earlier prompt continues that prompt's session when nothing else names
    one."""
    tenant_header: str = ""
    """Request header that names the tenant, which your platform sets on every request. A session is found by
    tenant and session id. If empty, a hash of the request's credential names the tenant: the first of the
    headers Authorization, x-api-key and api-key that it has. A client is then as many tenants as it can send
    first credentials that are accepted."""
    idle_seconds: Seconds = 1800.0
    """Seconds without a request after which the gateway forgets a session."""
    max_sessions: Positive = 100_000
    """Maximum number of sessions that a gateway remembers. Above it, the gateway forgets the session that has
    been idle longest."""
    several_models: bool = False
    """Whether a session asks for the models of several pools behind one gateway, as coding agents do that
    have a small and a large model. The gateway then reads every body to find its model. Otherwise a
    session's requests may go by their headers to the pool that it is bound to. No effect on a gateway with
    one pool."""


class Limits(Struct, frozen=True):
    """When the gateway refuses a request instead of routing it."""

    max_body_bytes: Positive = 32 * 1024 * 1024
    """Maximum size of a request body in bytes. A larger one is refused with 413."""
    max_pending_seconds: Annotated[float, Meta(ge=0)] = 0.0
    """Refuses a request with 429 when every endpoint has more seconds of queued prefill than this. 0 is no
    limit."""
    ttft_slo_seconds: Annotated[float, Meta(ge=0)] = 0.0
    """Refuses a request with 429 when every endpoint's predicted time to the first token is longer than this,
    in seconds. 0 is no limit. A request may set its own limit with names.SLO_TTFT_HEADER."""
    tpot_slo_seconds: Annotated[float, Meta(ge=0)] = 0.0
    """Refuses a request with 429 when every endpoint's predicted mean time per output token is longer than
    this, in seconds. 0 is no limit. A request may set its own limit with names.SLO_TPOT_HEADER."""
    objectives: dict[str, Annotated[int, Meta(ge=-8, le=8)]] = msgspec.field(default_factory=dict)
    """Priority level of each objective; a request names its objective with names.OBJECTIVE_HEADERS. Each
    level above 0 doubles the queue at which the gateway refuses the request, each level below 0 halves it."""
    decision_seconds: Seconds = 1.5
    """Maximum seconds that tokenizing a prompt may take. After that, the gateway routes the request by an
    estimate of its length. Must stay below Envoy's messageTimeout, which is 2 s on Kubernetes."""


class SessionAdmission(Struct, frozen=True):
    """Whether new sessions wait while the contexts of active sessions fill the pool's KV. Requests of
    sessions that have begun never wait."""

    enabled: bool = False
    """Whether new sessions wait. Envoy then waits for the gateway's answers as much longer as
    `maxWaitSeconds`, also where a gateway does not answer at all."""
    max_wait_seconds: Annotated[float, Meta(gt=0, le=600)] = 60.0
    """Seconds for which a new session waits at most. After that it is refused with 429 and told when to try
    again. On Kubernetes, Envoy's timeout for an answer of the gateway follows from it."""
    max_waiting: Positive = 1000
    """Number of requests of new sessions that may wait at one gateway; more are refused at once. The gateway
    keeps the body of each, at most 256 MiB in all."""


class MoveTrigger(StrEnum):
    """Situations in which the migration planner moves sessions or replicates prefixes."""

    DRAIN = "drain"
    """An endpoint drains: its sessions move to other endpoints."""
    HOT_HOST = "hot_host"
    """An endpoint has too much queued prefill: sessions leave it. Has no effect with the policies ear and
    perilune, which move sessions from hot endpoints themselves."""
    RACK_PRESSURE = "rack_pressure"
    """A rack has far more queued prefill than the others: sessions leave it."""
    REPLICATE = "replicate"
    """Many new sessions begin with one prefix: further endpoints get a copy of it."""


class Migration(Struct, frozen=True):
    """A background planner, independent of the policy, that proposes to move a session or to replicate a
    prefix. The next request of that session, or with that prefix, carries the proposal out."""

    triggers: tuple[MoveTrigger, ...] = (MoveTrigger.DRAIN,)
    """Situations in which the planner acts. If empty, it proposes nothing, and the sessions of a draining
    endpoint stay there until their policy moves them or the endpoint ends."""
    interval_seconds: Seconds = 1.0
    """Seconds between two runs of the planner."""
    worth: Annotated[float, Meta(ge=1)] = 1.5
    """The expected gain of a move divided by its cost must be at least this."""
    cooldown_seconds: Weight = 30.0
    """Minimum seconds between two moves of one session."""
    moves_per_minute: Annotated[int, Meta(ge=0)] = 50
    """Maximum number of moves per minute in the whole pool. With 0 there are none."""
    token_memory_bytes: Annotated[int, Meta(ge=0)] = 256 * 1024 * 1024
    """Memory in bytes for the token ids of announced blocks, which a gateway needs to let one endpoint hand a
    session's KV over to another. A block of 16 tokens takes about 210 bytes. Endpoints without a bootstrap
    page need none."""
    hot_pending_seconds: Weight = 1.5
    """For hot_host and rack_pressure: seconds of queued prefill above which an endpoint, or a rack on
    average, is overloaded."""
    rack_pressure: Annotated[float, Meta(ge=1)] = 2.0
    """For rack_pressure: mean queue of a rack divided by the mean queue of the fleet, above which sessions
    leave the rack."""
    load_persistence: Share = 0.5
    """Share of the difference between two endpoints' queues that is expected to remain one turn later."""
    max_remaining_turns: Weight = 20.0
    """Upper bound of the number of turns that a session is expected to have left."""
    replicate_score: Weight = 0.3
    """For replicate: score (number of uses divided by the square root of the age in seconds) from which a
    prefix is replicated."""


class EnginePriority(Struct, frozen=True):
    """The order in which an engine serves its waiting requests: first come, first served, unless a field says
    otherwise. Then the engines run with `--scheduling-policy priority` and the gateway writes `priority` into
    every request body, so it waits for every body before it decides."""

    ageing_weight: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    """Ranks a request as if it had arrived this many seconds later for each second of uncached prefill that
    it needs, so that short prompts overtake long ones. With 0 its length does not count."""
    fair_share: bool = False
    """Ranks a request as if it had arrived later by the time that its tenant's queued prefill takes at the
    tenant's share of the pool, so that tenants with little in the queues overtake those with much. Tenants
    that are alone are served as before. Name the tenants with `session.tenantHeader` where clients could
    otherwise pass for several."""

    @property
    def used(self) -> bool:
        """Whether requests are ranked at all."""
        return self.fair_share or self.ageing_weight > 0


class Ejection(Struct, frozen=True):
    """When an endpoint gets no requests for a while because its answers fail or come far too late, although
    its metrics can be read. At least half of the pool's endpoints always stay. After a pause one request is
    sent there as a trial."""

    enabled: bool = True
    """Whether endpoints are ejected."""
    failure_share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    """Ejects an endpoint when at least this share of its latest answers failed (status 500 and above except
    501, and with `engine.apiKey` 401 and 403) or came too late, at least this share of its tenants see that,
    and the other endpoints do less than half as badly."""
    slow_factor: Annotated[float, Meta(ge=1)] = 1.5
    """A request is too late when its first token takes this many times longer than that of 99 of 100 requests
    of the pool takes, compared with each request's predicted time."""
    pause_seconds: Seconds = 2.0
    """Seconds from an ejection to the first trial. Each failed trial doubles the pause, up to three times its
    first length."""
    session_failures: Positive = 3
    """A session leaves its host after this many failed answers in a row, whether the host is ejected or
    not."""


class Disaggregation(Struct, frozen=True):
    """When a prompt is prefilled on another endpoint than the one that decodes. Has an effect only where
    endpoints have the role `prefill`."""

    local_tokens: Annotated[int, Meta(ge=0)] = 1000
    """A prompt is prefilled at its decoding endpoint if at most this many of its tokens are not cached
    there."""
    queue: Positive = 2
    """Number of prompts at a prefill endpoint that wait or are being prefilled, from which on it gets no
    more. While all prefill endpoints have so many, prompts are prefilled where they are decoded."""
    max_seconds: Seconds = 30.0
    """A prompt whose remote prefill would take more seconds than this, queue included, is prefilled where it
    is decoded. At most half of the time for which engines keep KV that is not fetched
    (`VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT`)."""
    accept_seconds: Annotated[float, Meta(gt=0, le=1)] = 0.3
    """Seconds for which the gateway holds a request until the prefill endpoint has accepted its prompt. After
    that, the prompt is prefilled where it is decoded. Together with `limits.decisionSeconds`, it must stay
    below Envoy's messageTimeout, which is 2 s on Kubernetes."""


class Pull(Struct, frozen=True):
    """When an endpoint fetches what another one caches of a request's prompt. Has an effect only where
    engines hand KV over to each other, or read each other's host memory (`mooncake.transfer: handoff` or
    `offload` on Kubernetes)."""

    enabled: bool = True
    """Whether the gateway lets endpoints fetch KV for a request."""
    max_seconds: Annotated[float, Meta(gt=0, le=1)] = 0.4
    """Where engines hand KV over: seconds for which the gateway holds a request at the most while its KV is
    fetched. A fetch that would take longer is not begun; one that does is given up, and the endpoint computes
    the prompt itself. Together with `limits.decisionSeconds`, it must stay below Envoy's messageTimeout,
    which is 2 s on Kubernetes. Engines that read each other's host memory fetch while they have the request,
    so nothing is held."""


class Routing(Struct, frozen=True):
    """How the gateway chooses the endpoint of a request: policy, sessions, migration, admission."""

    policy: PolicyChoice = PolicyChoice()
    migration: Migration = Migration()
    engine_priority: EnginePriority = EnginePriority()
    disaggregation: Disaggregation = Disaggregation()
    pull: Pull = Pull()
    decision_header: Literal["name", "address", "off"] = "name"
    """What a client learns that asks with the header names.DECISION_HEADER: the endpoint, the reason and the
    request id. name: the endpoint as a name that tells nothing of its address. address: its address, for
    pools that only trusted clients use. off: nothing."""
    cache_salt: Literal["client", "tenant"] = "client"
    """What keeps equal prompts apart in the engines' KV caches. client: the body's `cache_salt`, if any.
    tenant: a salt that the gateway derives from the tenant and the body's `cache_salt`, so that no tenant
    uses or notices what another one has cached. The gateway then writes into every request body, so it waits
    for every body before it decides."""
    allow_policy_header: bool = False
    """Whether a request may choose its policy with the header names.POLICY_HEADER."""
    session: SessionKeys = SessionKeys()
    limits: Limits = Limits()
    ejection: Ejection = Ejection()
    session_admission: SessionAdmission = SessionAdmission()
    weight: Annotated[int, Meta(ge=0, le=1_000_000)] = 100
    """Where several pools behind one gateway serve a model of the same name: this pool's share of that name's
    new sessions, relative to the weights of the others. A session stays with its pool. With 0 it gets no new
    sessions, unless all have 0."""
    fallbacks: Annotated[int, Meta(ge=0, le=8)] = 2
    """Number of further endpoints that the gateway gives to Envoy, which passes over those that it does not
    know. If the one that it chose fails before it answers, it tries one more."""

    @property
    def message_timeout_s(self) -> int:
        """Seconds for which Envoy waits for an answer of the gateway: for a decision, and before that for a
        new session to begin, if new sessions wait."""
        admission = self.session_admission
        return DECISION_S + (ceil(admission.max_wait_seconds) if admission.enabled else 0)


class NodePlace(Struct, frozen=True):
    """Where a node stands in the fabric, and its hardware."""

    rack: str = ""
    """Name of the rack, or of its top-of-rack switch. Empty if unknown."""
    spine: str = ""
    """Name of the spine, a group of racks. Empty if unknown."""
    gpu: str = ""
    """GPU product as GPU feature discovery names it, such as NVIDIA-H20. Empty if unknown."""
    nics: Annotated[int, Meta(ge=0)] = 0
    """Number of network cards that carry KV transfers; shown only, never used in a prediction. 0 if
    unknown."""
    nic_gbits: Weight = 0.0
    """Speed of each of these network cards in Gbit/s. The predicted time of a KV transfer between two nodes
    follows the slower node's cards. 0 if unknown; predictions then assume 200."""


class Topology(Struct, frozen=True):
    """The fabric: where each node stands."""

    nodes: dict[str, NodePlace] = msgspec.field(default_factory=dict)
    """Place and hardware of each node, by the node's name."""

    def place(self, node: str) -> Place:
        where = self.nodes.get(node, NodePlace())
        return Place(node, where.rack, where.spine)

    def link(self, a: Place, b: Place, slowdown: float = 1.0) -> Link:
        """Return the link between two places, as fast as the slower node's network cards."""
        level = distance(a, b)
        return Link(level, Bandwidth().at(level) * self._scale(level, a, b), slowdown)

    def _scale(self, level: Level, a: Place, b: Place) -> float:
        """Return the speed of the slower node's network cards divided by NIC_GBITS."""
        if level is Level.NODE:
            return 1.0
        known = (self.nodes.get(place.node, NodePlace()).nic_gbits for place in (a, b))
        return min(gbits or NIC_GBITS for gbits in known) / NIC_GBITS


class Role(StrEnum):
    """The part of the work that an endpoint does."""

    PREFILL = "prefill"
    """It prefills prompts for endpoints that decode, and gets no requests of clients."""
    DECODE = "decode"
    """It gets clients' requests, and fetches the KV of long prompts from an endpoint that prefills."""
    BOTH = "both"
    """It gets clients' requests, and like `decode` fetches the KV of long prompts where another endpoint has
    the role `prefill`."""


class EndpointSpec(Struct, frozen=True):
    """One vLLM server."""

    address: Address
    """Address of its HTTP server: `ip:port`, with IPv6 in brackets."""
    node: str = ""
    """Name of the node that it runs on, one of topology.nodes. Empty if unknown; every transfer to or from it
    is then predicted at the speed of the widest level."""
    events: tuple[ZmqAddress, ...] = ()
    """ZMQ addresses of its KV events, one per data-parallel rank (`tcp://ip:port`). If empty, the gateway
    estimates what the endpoint caches from the requests that it routed there."""
    replay: tuple[ZmqAddress, ...] = ()
    """ZMQ addresses that replay missed events, in the order of `events`. If empty, missed events are not
    replayed."""
    draining: bool = False
    """Whether the endpoint drains: it keeps its sessions' requests and gets no new sessions."""
    ready: bool = True
    """Whether the endpoint may get requests. false: the gateway sends it none, but remembers what it
    caches."""
    bootstrap: Annotated[str, Meta(pattern=r"^$|" + _IP_PORT)] = ""
    """Address of the bootstrap page of its KV connector (vLLM's MooncakeConnector), `ip:port`. The gateway
    moves a session's KV between endpoints whose pages answer. If empty, it hands no KV over."""
    role: Role = Role.BOTH
    """prefill: it prefills long prompts for the other endpoints. decode and both: it gets clients' requests.
    An endpoint with the role `prefill` needs a bootstrap page."""
    peer: Annotated[str, Meta(pattern=r"^$|" + _IP_PORT)] = ""
    """Address at which other engines read its host memory, `ip:port`: the tier `p2p` of vLLM's
    OffloadingConnector, of vLLM >= 0.27. With several data-parallel ranks it is that of the first; the others
    have the next ports. If empty, others cannot read it. No endpoint of a pool has both this and
    `bootstrap`."""
    instance: str = ""
    """Names what is at the address, such as the uid of a pod. An endpoint with another name at the same
    address is another one, and inherits nothing from the one before. If empty, the address alone names it."""


class Spec(Struct, frozen=True):
    """The pool: its model, engines, routing, fabric and endpoints."""

    model: Model
    engine: Engine = Engine()
    routing: Routing = Routing()
    topology: Topology = Topology()
    endpoints: tuple[EndpointSpec, ...] = ()
    """Static list of endpoints. On Kubernetes it is empty: the gateway watches the engine pods instead."""


class Metadata(Struct, frozen=True):
    """Names the pool."""

    name: Name
    """Name of the pool in logs and metrics."""
    namespace: Name = "default"
    """Namespace of the pool in logs and metrics."""


class Pool(Struct, frozen=True):
    """A whole pool document."""

    metadata: Metadata
    spec: Spec
    api_version: Literal["perilune.dev/v1alpha1"] = "perilune.dev/v1alpha1"
    kind: Literal["InferencePool"] = "InferencePool"


def load(path: Path) -> Pool:
    """Read and check a pool document.

    Raises SpecError with the field's path, and OSError when the file cannot be read.
    """
    return parse(path.read_bytes())


def parse(text: bytes | str) -> Pool:
    """Parse YAML or JSON into a checked pool. Raises SpecError."""
    _check_depth(text)
    try:
        pool = msgspec.yaml.decode(text, type=Pool)
    except msgspec.DecodeError as error:  # the base class of ValidationError
        raise SpecError(_explain(text) or _in_one_line(error)) from None
    except _WRONG_SCALAR as error:
        raise SpecError(_unreadable(text) or str(error)) from None
    check(pool)
    listed = pool.spec.endpoints
    if listed and all(endpoint.role is Role.PREFILL for endpoint in listed):
        raise SpecError(
            "All endpoints have the role prefill: give one the role decode or both - at `$.spec.endpoints`"
        )
    return pool


def _check_depth(text: bytes | str) -> None:
    """Refuse a document that is nested so deeply that building it would overflow the stack. Raises
    SpecError. Leaves text that is not YAML to `parse`."""
    depth = 0
    try:
        for event in yaml.parse(text, yaml.CSafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                mark = event.start_mark
                line = mark.line + 1 if mark else 1
                raise SpecError(f"The document is nested too deeply - in line {line}")
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, SpecError):
            raise


_WRONG_SCALAR = (ValueError, OverflowError, AttributeError)
"""What PyYAML raises for a scalar that its type's pattern admits and its type does not."""


def _unreadable(text: bytes | str) -> str:
    """Return which scalar has the form of a number or a date and is none, such as 2026-13-01; empty if there
    is no such scalar."""
    loader = yaml.SafeLoader("")
    nodes = [("$", yaml.compose(text, yaml.SafeLoader))]
    seen: set[int] = set()
    while nodes:
        path, node = nodes.pop()
        if id(node) in seen:  # an alias, perhaps of a node around it
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            nodes += [(f"{path}.{key.value}", value) for key, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            nodes += [(f"{path}[{i}]", value) for i, value in enumerate(node.value)]
        elif node is not None:
            try:
                loader.construct_object(node)
            except _WRONG_SCALAR:
                kind = node.tag.rpartition(":")[2]
                return f"{node.value[:40]!r} is no valid {kind}; put a text into quotes - at `{path}`"
    return ""


_OBJECT_ONLY = ("gateway", "mooncake", "prefillReplicas", "prefillScaling", "replicas", "rollout", "scaling")
"""Fields of `spec` that an InferencePool on Kubernetes has and a pool document does not have."""


def _in_one_line(error: msgspec.DecodeError) -> str:
    """Return the message of a refused document; for text that is not YAML, with the place of the mistake."""
    cause = error.__context__  # msgspec hides it, but keeps it
    if isinstance(cause, MarkedYAMLError) and cause.problem_mark:
        mark = cause.problem_mark
        return f"Not YAML: {cause.problem} - in line {mark.line + 1}, column {mark.column + 1}"
    return " ".join(str(error).split())


def _explain(text: bytes | str) -> str:
    """Return a better message for a refused document where there is one, else an empty string."""
    try:
        document = msgspec.yaml.decode(text)
    except msgspec.DecodeError:
        return ""
    spec = document.get("spec") if isinstance(document, dict) else None
    if moved := moved_fields.explain(spec):
        return moved
    field = next((field for field in _OBJECT_ONLY if isinstance(spec, dict) and field in spec), "")
    if not field:
        return ""
    return (
        "This looks like the Kubernetes object InferencePool, which the operator reads. The gateway reads a "
        "pool document: model, engine, routing, topology and a list of endpoints, such as "
        f"examples/local/pool.yaml - at `$.spec.{field}`"
    )


def parse_known(text: bytes | str) -> tuple[Pool, tuple[str, ...]]:
    """Parse a document that another program wrote, which may be of a newer version: return the pool without
    the fields that are unknown here, and the paths of these fields. Raises SpecError."""
    _check_depth(text)
    try:
        document, unknown = versions.known(msgspec.yaml.decode(text), Pool)
        rest = msgspec.yaml.encode(document)
    except msgspec.DecodeError as error:
        raise SpecError(_in_one_line(error)) from None
    except _WRONG_SCALAR as error:
        raise SpecError(_unreadable(text) or str(error)) from None
    return parse(rest), unknown


def dump(pool: Pool) -> bytes:
    """Return YAML that `parse` reads back to an equal pool. It leaves out every field that has its default,
    so that gateways of another version can read it."""
    head = {"apiVersion": pool.api_version, "kind": pool.kind}
    return msgspec.yaml.encode({**head, **versions.stated(pool)})


def _is_ip_port(address: str) -> bool:
    """Return whether the numbers of an `Address` are in range."""
    host, _, port = address.rpartition(":")
    try:
        ip_address(host.strip("[]"))
    except ValueError:
        return False
    return 0 < int(port) < 65_536


def check(pool: Pool) -> None:
    """Check the rules that span several fields. Raises SpecError."""
    spec = pool.spec
    seen: set[str] = set()
    for i, endpoint in enumerate(spec.endpoints):
        at = f"at `$.spec.endpoints[{i}]"
        if not _is_ip_port(endpoint.address):
            raise SpecError(f"{endpoint.address} is not a valid IP address and port - {at}.address`")
        if endpoint.address in seen:
            raise SpecError(f"Address {endpoint.address} is listed twice - {at}.address`")
        seen.add(endpoint.address)
        if endpoint.node and spec.topology.nodes and endpoint.node not in spec.topology.nodes:
            raise SpecError(
                f"Node {endpoint.node!r} is not one of {sorted(spec.topology.nodes)} - {at}.node`"
            )
        if endpoint.role is Role.PREFILL and not endpoint.bootstrap:
            raise SpecError(
                "An endpoint with the role prefill hands KV over, so it needs the address of its connector's"
                f" bootstrap page - {at}.bootstrap`"
            )
        if endpoint.peer and not _is_ip_port(endpoint.peer):
            raise SpecError(f"{endpoint.peer} is not a valid IP address and port - {at}.peer`")
        if endpoint.peer and any(other.bootstrap for other in spec.endpoints):
            raise SpecError(f"A pool's KV goes in one way: give bootstrap or peer - {at}.peer`")
        if endpoint.replay and len(endpoint.replay) != len(endpoint.events):
            raise SpecError(f"replay must have as many addresses as events - {at}.replay`")
    models = [spec.model.name, *spec.model.aliases, *(lora.name for lora in spec.model.loras)]
    for model, times in Counter(models).items():
        if times > 1:
            raise SpecError(f"Model name {model!r} is given twice - at `$.spec.model`")
