"""Token ids → block hashes: our own chain, vLLM's, and Dynamo's.

A prompt is cut into full blocks of `block_size` tokens; the incomplete tail is dropped. A *chained* hash
covers its block and every block before it, so an equal hash means an equal prefix: one number names block
and prefix together, and an index over such numbers needs no tree.

    ours     h_i = low 60 bits of xxh3-64(tokens_i as little-endian uint32, seed h_{i-1}),
             h_{-1} = prefix_root(lora, salt)
    vLLM     h_i = H((h_{i-1}, tokens_i, extra keys)),  h_{-1} = H(seed): see `vllm_hashes`
    Dynamo   local hash: xxh3-64, seed 1337, each block alone; sequence hash: chained local hashes

Ours costs about 0.4 µs a block (16 tokens), vLLM's about 3 µs: routing uses ours, and engine hashes are
only mapped to it (`state.engine_blocks`); vLLM's is for the self-check (`parity`) and for store keys.
Sixty bits, because Python then keeps a number in 32 bytes instead of 48. Such keys are not collision-proof
against somebody who chooses the tokens on purpose; a wrong match costs a wrong estimate, never a wrong
answer.

A conversation is hashed again with every turn: `Chains` remembers rows of hashes and finds them by a hash of
the whole row, which makes a known prompt of 33,600 tokens cost a sixth.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from struct import iter_unpack

import cbor2
import xxhash

from perilune_api.pool import ExtraKeys, HashAlgorithm, Hashing, SpecError

NONE_HASH_SEED = "vllm-none-hash"
"""What vLLM >= 0.29 hashes as root of the sha256 algorithms when PYTHONHASHSEED is unset."""

DYNAMO_SEED = 1337

MmKeys = Sequence[tuple[str, int]]
"""Multimodal inputs that touch one block: identifier, offset relative to the block."""

_xxh3 = xxhash.xxh3_64_intdigest
_60_BITS = (1 << 60) - 1


def prefix_root(lora: str, salt: str) -> int:
    """Where a chain begins: prefixes of another LoRA or cache salt never meet. O(1); 0 for neither."""
    if not lora and not salt:
        return 0
    name = lora.encode()
    return _xxh3(len(name).to_bytes(4, "little") + name + salt.encode(), 1)


def chain(
    token_ids: Sequence[int], block_size: int, root: int, extra: Sequence[bytes | None] | None = None
) -> list[int]:
    """Our chained hashes (60 bits), one per full block.

    `extra`: per block, further bytes that its hash must cover (multimodal content), or None.
    Raises ValueError for an id outside 0 … 2³²−1.
    """
    previous, cut = root, _cut(_little_endian(token_ids), 4 * block_size)
    if extra is None:
        mask, xxh3 = _60_BITS, _xxh3
        return [previous := xxh3(block, previous) & mask for (block,) in cut]
    hashes: list[int] = []
    for (block,) in cut:
        previous = _xxh3(block, previous) & _60_BITS
        if (more := extra[len(hashes)]) is not None:
            previous = _xxh3(more, previous) & _60_BITS
        hashes.append(previous)
    return hashes


def text_chain(text: bytes, block_bytes: int, root: int) -> list[int]:
    """Chained hashes of `block_bytes` bytes each, for prompts of unknown tokens. Never meets `chain`."""
    previous = _text_root(root)
    return [previous := _xxh3(block, previous) & _60_BITS for (block,) in _cut(text, block_bytes)]


def _text_root(root: int) -> int:
    return _xxh3(b"text", root)


class Chains:
    """`chain` and `text_chain` for prompts that mostly begin like one before.

    Rows of hashes are found by a hash of what they are made from: as many long rows as fit, then shorter
    ones. What is left at the end, the tail, is found by the row before it: the next turn goes on there. At
    most 2 × `max_rows` rows (4 kB at most) are remembered, those used lately, and as many tails.
    """

    ROWS = (512, 64)
    """Blocks of a row."""

    def __init__(self, max_rows: int = 4_096) -> None:
        self._max_rows = max_rows
        self._rows: dict[int, array[int]] = {}
        self._older: dict[int, array[int]] = {}
        self._tails: dict[int, tuple[int, array[int]]] = {}
        """By the name of the row before: their own name, their hashes."""

    def tokens(self, token_ids: Sequence[int], block_size: int, root: int) -> array[int]:
        """The numbers of `chain`, which see. Cheapest for an array of unsigned ints."""
        return self._chain(_little_endian(token_ids), 4 * block_size, root)

    def text(self, text: bytes | memoryview, block_bytes: int, root: int) -> array[int]:
        """The numbers of `text_chain`."""
        return self._chain(text, block_bytes, _text_root(root))

    def _chain(self, prompt: bytes | memoryview, size: int, root: int) -> array[int]:
        data = memoryview(prompt)
        data = data[: len(data) // size * size]
        hashes = array("Q")
        name, at = root, 0
        for blocks in self.ROWS:
            end = at + blocks * size
            while end <= len(data):
                part = data[at:end]
                before, name = name, _xxh3(part, name ^ size)
                row = self._recall(name)
                if row is None:
                    row = self._made(part, size, before, hashes[-1] if hashes else root)
                    self._remember(name, row)
                hashes.extend(row)
                at, end = end, end + blocks * size
        if at < len(data):
            part = data[at:]
            row = self._made(part, size, name, hashes[-1] if hashes else root)
            if len(self._tails) >= 2 * self._max_rows:
                self._tails.clear()
            self._tails[name] = _xxh3(part, name ^ size), row
            hashes.extend(row)
        return hashes

    def _made(self, part: memoryview, size: int, name: int, previous: int) -> array[int]:
        """The hashes of what comes after the row of that name, whose last hash is `previous`. Their beginning
        may be known: by shorter rows, then by a tail, which a shorter prompt has left."""
        row = array("Q")
        at, end = 0, self.ROWS[-1] * size
        while end < len(part) and (known := self._recall(after := _xxh3(part[at:end], name ^ size))):
            row.extend(known)
            name = after
            at, end = end, end + self.ROWS[-1] * size
        if name in self._tails:
            tail_name, tail = self._tails[name]
            end = at + len(tail) * size
            if end <= len(part) and tail_name == _xxh3(part[at:end], name ^ size):
                row.extend(tail)
                at = end
        if row:
            previous = row[-1]
        mask, xxh3, cut = _60_BITS, _xxh3, _cut(part[at:], size)
        row.extend(array("Q", [previous := xxh3(block, previous) & mask for (block,) in cut]))
        return row

    def _recall(self, name: int) -> array[int] | None:
        row = self._rows.get(name)
        if row is None and (row := self._older.get(name)):
            self._remember(name, row)
        return row

    def _remember(self, name: int, row: array[int]) -> None:
        if len(self._rows) >= self._max_rows:
            self._rows, self._older = {}, self._rows
        self._rows[name] = row


def dynamo_local_hashes(token_ids: Sequence[int], block_size: int) -> list[int]:
    """Dynamo's `compute_block_hash_for_seq`: each full block alone, unchained."""
    return [_xxh3(block, DYNAMO_SEED) for (block,) in _cut(_little_endian(token_ids), 4 * block_size)]


def dynamo_sequence_hashes(local: Sequence[int], parent: int | None = None) -> list[int]:
    """Local hashes chained: the first stands for itself, each later one covers (parent, local)."""
    hashes: list[int] = []
    for block in local:
        if parent is None:
            parent = block
        else:
            parent = _xxh3(parent.to_bytes(8, "little") + block.to_bytes(8, "little"), DYNAMO_SEED)
        hashes.append(parent)
    return hashes


def _cut(data: bytes | memoryview, size: int) -> Iterator[tuple[bytes]]:
    """Full blocks of `size` bytes, each as a 1-tuple: a third cheaper than slicing."""
    return iter_unpack(f"{size}s", memoryview(data)[: len(data) // size * size])


def _little_endian(token_ids: Sequence[int]) -> memoryview:
    """Not copied where it is an array of unsigned ints."""
    if sys.byteorder == "little" and isinstance(token_ids, array) and token_ids.typecode == "I":
        return memoryview(token_ids).cast("B")
    try:
        words = array("I", token_ids)
    except OverflowError:
        raise ValueError("token id outside 0 … 2**32-1") from None
    if sys.byteorder == "big":
        words.byteswap()
    return memoryview(words).cast("B")


# vLLM's hashes (vllm/v1/core/kv_cache_utils.py and vllm/utils/hashing.py, read in 0.15 … 0.33).


def _sha256(value: object) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=5)).digest()


def _sha256_cbor(value: object) -> bytes:
    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()


def _xxhash(value: object) -> bytes:
    return xxhash.xxh3_128_digest(pickle.dumps(value, protocol=5))


def _xxhash_cbor(value: object) -> bytes:
    return xxhash.xxh3_128_digest(cbor2.dumps(value, canonical=True))


DIGESTS: dict[HashAlgorithm, Callable[[object], bytes]] = {
    HashAlgorithm.SHA256: _sha256,
    HashAlgorithm.SHA256_CBOR: _sha256_cbor,
    HashAlgorithm.XXHASH: _xxhash,
    HashAlgorithm.XXHASH_CBOR: _xxhash_cbor,
}


def low64(digest: bytes) -> int:
    """What KV events carry of a digest: its last eight bytes, big-endian."""
    return int.from_bytes(digest[-8:], "big")


def none_hash(hashing: Hashing) -> bytes:
    """vLLM's NONE_HASH, the parent of a first block.

    With PYTHONHASHSEED it is the digest of that string. Without, it is fixed for the sha256 algorithms
    (vLLM >= 0.29; random before) and random for the xxhash ones, which nobody can compute: SpecError.
    """
    if not hashing.seed and hashing.algorithm in (HashAlgorithm.XXHASH, HashAlgorithm.XXHASH_CBOR):
        raise SpecError(
            "vLLM's xxhash root is random unless the engines set PYTHONHASHSEED; set it there and"
            " - at `$.spec.engine.hashing.seed`"
        )
    return DIGESTS[hashing.algorithm](hashing.seed or NONE_HASH_SEED)


def vllm_hashes(
    token_ids: Sequence[int],
    block_size: int,
    hashing: Hashing,
    lora_name: str = "",
    lora_path: str = "",
    salt: str = "",
    extra: Sequence[MmKeys] = (),
    parent: bytes | None = None,
) -> list[bytes]:
    """vLLM's full block digests, one per full block (32 bytes, 16 for the xxhash algorithms).

    `extra[i]` are the multimodal keys of block i (missing ones: none). `parent`: the digest before the
    first block, when the tokens continue a chain; the salt then plays no part. Raises SpecError like
    `none_hash`.
    """
    digest = DIGESTS[hashing.algorithm]
    tagged = hashing.extra_keys is ExtraKeys.TAGGED
    lora: tuple[object, ...] = ()
    if lora_name:
        # pickle writes a repeated object as a reference: name and path must be two objects, as in vLLM
        lora = (("lora", lora_name, "".join(list(lora_path))),) if tagged else (lora_name,)
    salted: tuple[object, ...] = ()
    if salt and parent is None:
        salted = (("cache_salt", salt),) if tagged else (salt,)
    previous = none_hash(hashing) if parent is None else parent
    hashes: list[bytes] = []
    for i in range(len(token_ids) // block_size):
        mm = extra[i] if i < len(extra) else ()
        keys = lora + tuple(("mm", *key) if tagged else tuple(key) for key in mm) + (salted if i == 0 else ())
        tokens = tuple(token_ids[i * block_size : (i + 1) * block_size])
        previous = digest((previous, tokens, keys or None))
        hashes.append(previous)
    return hashes
