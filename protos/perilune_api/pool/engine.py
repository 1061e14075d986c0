"""`spec.engine`: what a gateway must know about the engines."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from perilune_api.fields import LabelKey, LabelValue, PortOrName, Positive, Struct


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


class Selector(Struct, frozen=True, kw_only=True):
    """Engines that others run: pods of the pool's namespace with these labels. Nothing is written to them,
    and nothing is created for them. What the gateway needs to know, it reads in their arguments and asks
    them; docs/adopt.md says what."""

    labels: Annotated[dict[LabelKey, LabelValue], Meta(min_length=1, max_length=16)]
    """Labels that a pod must have."""
    port: PortOrName = 8000
    """Port of the engines' HTTP server, by its number or by its name in the pod."""
    further_ports: Annotated[tuple[PortOrName, ...], Meta(max_length=15)] = ()
    """Ports of further HTTP servers in each pod: engines of their own, or data-parallel ranks that each have
    an HTTP server. Each counts as an engine, and publishes its KV events at the port after that of the one
    before."""
    events_port: Annotated[int, Meta(ge=0, le=65_535)] = 0
    """Port at which the engines publish their KV events; that of the first data-parallel rank, the others
    have the next ones. 0: as each pod's arguments (`--kv-events-config`), its annotations or its labels tell.
    A pod that does not tell publishes none, and the gateway estimates what it caches."""
    replay_port: Annotated[int, Meta(ge=0, le=65_535)] = 0
    """Port at which missed events are replayed, if `eventsPort` is given. 0: they are not replayed."""


class EngineTls(Struct, frozen=True):
    """TLS to the engines. They are called by their addresses, and their certificate is for one name."""

    ca_file: str = ""
    """PEM file with the CA certificates by which the gateway trusts engines. It is read again when it
    changes."""
    hostname: Annotated[str, Meta(max_length=253, pattern=r"^[-.A-Za-z0-9]*$")] = ""
    """Name for which the engines' certificate is issued."""


Seconds = Annotated[float, Meta(ge=0)]


class CostModel(Struct, frozen=True, kw_only=True):
    """How long these engines take, as `perilune profile` measures it. Predictions start from it, and the
    gateway corrects them by measurement. What is left out is as on one H20 with a 30B-A3B model."""

    request_seconds: Seconds | None = None
    """Seconds of each request for HTTP and scheduling. That H20: 0.04."""
    request_token_seconds: Seconds | None = None
    """Seconds for each token of the prompt, also for those that are cached. That H20: 0.0000011."""
    prefill_seconds: Seconds | None = None
    """Seconds of each prefill, however short it is. That H20: 0.03."""
    prefill_token_seconds: Seconds | None = None
    """Seconds for each token that is prefilled. That H20: 0.0000455."""
    attention_seconds: Seconds | None = None
    """Seconds for each pair of a token that is prefilled and a token before it. That H20: 0.0000000059."""
    decode_seconds: Seconds | None = None
    """Least seconds of a step that generates a token for each running request. That H20: 0.0058."""
    decode_scale: Annotated[float, Meta(gt=0)] | None = None
    """Seconds in which such a step reads weights and KV, divided by those of that H20. That H20: 1."""
    transfer_seconds: Seconds | None = None
    """Seconds of each transfer of KV, however short it is. That H20: 0.0025."""


class Engine(Struct, frozen=True, kw_only=True):
    """What a gateway must know about the engines."""

    selector: Selector | None = None
    """Selects pods that others run, instead of engines of the pool's own. Only on Kubernetes. The engines
    tell the model's name, its context, and `blockSize`, `hashing.algorithm` and `kvPoolTokens`."""
    block_size: Positive = 16
    """Tokens per KV block. Must equal the engines' `--block-size`."""
    hashing: Hashing = Hashing()
    kv_pool_tokens: Positive = 281_600
    """Number of tokens that fit into the KV cache on one endpoint's GPUs."""
    prefill_scale: Annotated[float, Meta(gt=0)] = 1.0
    """Prefill time of these engines divided by that of one H20 with a 30B-A3B model. It starts the
    predictions, which the gateway then corrects by measurement. 1: as fast as that H20, or as `costModel`
    says."""
    cost_model: CostModel = CostModel()
    tls: EngineTls | None = None
    """TLS to the engines: from Envoy, and from the gateway. Without it they are asked in plain text."""
    store: bool = False
    """Whether the engines share a KV store, from which an endpoint can load a moved session's KV."""
    store_master: str = ""
    """Address (`host:port`) of the HTTP server of the store's Mooncake master, which the gateway asks whether
    the memory is still there into which engines have put blocks. If empty, blocks in the store count until
    they expire."""
