"""`spec.engine`: what a gateway must know about the engines."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from perilune_api.fields import Positive, Struct


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


class Engine(Struct, frozen=True, kw_only=True):
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
