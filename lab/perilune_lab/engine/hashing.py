"""vLLM's block hashes, written from its description and tested against its captures.

1. The root is H(seed): the PYTHONHASHSEED string, or, unset, the fixed "vllm-none-hash" with the sha256
   algorithms and random bytes with the xxhash ones.
2. A full block's digest is H((parent digest, tuple of its token ids, extra keys or None)).
3. H serializes (pickle protocol 5, or canonical CBOR) and digests (SHA-256, or xxh3-128).
4. Extra keys are tagged tuples (vLLM >= 0.31): LoRA in every block, the cache salt in the first one.

An event carries a digest's low 64 bits. Sequences share prefixes, so digests are remembered by (parent,
tokens): a known block costs 0.5 µs, a new one about 4 µs. The memory is two generations of at most
`GENERATION` digests. Multimodal keys and prompt embeddings are not produced.
"""

import hashlib
import os
import pickle
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import cbor2
import xxhash

GENERATION = 1 << 16
_FIXED_SEED = "vllm-none-hash"

ExtraKeys = tuple[tuple[str, ...], ...]
"""Tagged extra keys of one block; without any, None enters the hash."""


class Algorithm(StrEnum):
    """vLLM's `--prefix-caching-hash-algo`."""

    SHA256 = "sha256"
    SHA256_CBOR = "sha256_cbor"
    XXHASH = "xxhash"
    XXHASH_CBOR = "xxhash_cbor"


def _pickle(value: object) -> bytes:
    return pickle.dumps(value, protocol=5)


def _cbor(value: object) -> bytes:
    return cbor2.dumps(value, canonical=True)


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


_PARTS: dict[Algorithm, tuple[Callable[[object], bytes], Callable[[bytes], bytes]]] = {
    Algorithm.SHA256: (_pickle, _sha256),
    Algorithm.SHA256_CBOR: (_cbor, _sha256),
    Algorithm.XXHASH: (_pickle, xxhash.xxh3_128_digest),
    Algorithm.XXHASH_CBOR: (_cbor, xxhash.xxh3_128_digest),
}


@dataclass(frozen=True, slots=True)
class Namespace:
    """What keeps blocks of equal tokens apart: an adapter, a cache salt."""

    salt: str = ""
    lora_name: str = ""
    lora_path: str = ""
    lora_id: int = 0
    """vLLM counts adapters from 1; 0 is the base model."""

    def keys(self, block: int) -> ExtraKeys:
        """Return the keys that enter the hash of the block with this index."""
        keys: list[tuple[str, ...]] = []
        if self.lora_name:
            keys.append(("lora", self.lora_name, self.lora_path))
        if self.salt and block == 0:
            keys.append(("cache_salt", self.salt))
        return tuple(keys)

    def announced(self, block: int) -> list[str] | None:
        """Return the same keys as an event shows them: bare; None for no keys."""
        keys = [self.lora_name] if self.lora_name else []
        if self.salt and block == 0:
            keys.append(self.salt)
        return keys or None


BASE = Namespace()


class BlockHasher:
    """Digests of full blocks, for one algorithm, seed and block size."""

    def __init__(self, algorithm: Algorithm, block_size: int, seed: str = "") -> None:
        self.algorithm = algorithm
        self.block_size = block_size
        serialize, self._digest = _PARTS[algorithm]
        self._serialize = serialize
        if not seed and algorithm in (Algorithm.XXHASH, Algorithm.XXHASH_CBOR):
            self.root = os.urandom(32)
        else:
            self.root = self._digest(serialize(seed or _FIXED_SEED))
        self._young: dict[bytes, bytes] = {}
        self._old: dict[bytes, bytes] = {}

    def chain(self, tokens: Sequence[int], namespace: Namespace = BASE) -> list[bytes]:
        """Return the digests of every full block of `tokens`; the incomplete tail is dropped."""
        size = self.block_size
        raw = array("I", tokens[: len(tokens) // size * size]).tobytes()
        width = size * 4
        digests: list[bytes] = []
        parent = self.root
        for block in range(len(raw) // width):
            keys = namespace.keys(block) if namespace is not BASE else ()
            memo = parent + raw[block * width : (block + 1) * width]
            if keys:
                memo += repr(keys).encode()
            known = self._young.get(memo)
            if known is None:
                known = self._remember(memo, parent, tokens[block * size : (block + 1) * size], keys)
            digests.append(known)
            parent = known
        return digests

    def block(self, parent: bytes, tokens: Sequence[int], keys: ExtraKeys) -> bytes:
        """Return the digest of one block of `block_size` tokens after `parent`."""
        return self._digest(self._serialize((parent, tuple(tokens), keys or None)))

    def _remember(self, memo: bytes, parent: bytes, tokens: Sequence[int], keys: ExtraKeys) -> bytes:
        digest = self._old.get(memo) or self.block(parent, tokens, keys)
        if len(self._young) >= GENERATION:
            self._old, self._young = self._young, {}
        self._young[memo] = digest
        return digest


def low64(digest: bytes) -> int:
    """Return the number by which an event names a block."""
    return int.from_bytes(digest[-8:], "big")
