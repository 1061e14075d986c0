"""Block hashes equal vLLM's, of every algorithm."""

import json
from pathlib import Path

import cbor2
import pytest
import xxhash

from perilune_lab.engine.hashing import BASE, Algorithm, BlockHasher, Namespace, low64

GOLDEN = json.loads((Path(__file__).parents[2] / "fixtures" / "vllm-hash" / "golden_sha256.json").read_text())
PLAIN = [
    case
    for case in GOLDEN["cases"]
    if "token_ids" in case
    and not any(case.get(key) for key in ("lora_name", "lora_name_repeat", "cache_salt"))
    and min(case["token_ids"]) >= 0
]


@pytest.mark.parametrize("vector", GOLDEN["seed_root_vectors"], ids=lambda v: f"seed {v['python_hash_seed']}")
def test_root_follows_from_the_seed(vector):
    hasher = BlockHasher(Algorithm.SHA256, 16, vector["python_hash_seed"])
    assert hasher.root.hex() == vector["root_digest"]


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case["name"])
def test_golden_chains_without_extra_keys(case):
    hasher = BlockHasher(Algorithm.SHA256, case["block_size"], "0")
    tokens = case["token_ids"]
    chain = hasher.chain(tokens)
    assert [digest.hex() for digest in chain] == [block["digest"] for block in case["expected"]]
    assert [str(low64(digest)) for digest in chain] == [b["projected_decimal"] for b in case["expected"]]


def test_xxhash_variants_digest_the_same_serializations():
    for algorithm, serialize in (
        (Algorithm.XXHASH_CBOR, lambda value: cbor2.dumps(value, canonical=True)),
        (Algorithm.SHA256_CBOR, None),
    ):
        hasher = BlockHasher(algorithm, 2, seed="7")
        if serialize is None:
            assert len(hasher.root) == 32
            continue
        root = xxhash.xxh3_128_digest(serialize("7"))
        first = xxhash.xxh3_128_digest(serialize((root, (1, 2), None)))
        assert hasher.chain([1, 2, 3]) == [first]


def test_xxhash_without_seed_has_a_root_of_its_own():
    assert BlockHasher(Algorithm.XXHASH, 16).root != BlockHasher(Algorithm.XXHASH, 16).root


def test_incomplete_tail_is_dropped():
    hasher = BlockHasher(Algorithm.SHA256, 4)
    assert hasher.chain([1, 2, 3]) == []
    assert hasher.chain([1, 2, 3, 4, 5]) == hasher.chain([1, 2, 3, 4])


def test_salt_and_adapter_separate_equal_tokens_and_enter_where_vllm_puts_them():
    hasher = BlockHasher(Algorithm.SHA256, 2)
    tokens = [1, 2, 3, 4]
    salted, tuned = Namespace(salt="a"), Namespace(lora_name="l", lora_path="/p", lora_id=1)
    chains = [hasher.chain(tokens, space) for space in (BASE, salted, tuned, Namespace(salt="b"))]
    assert len({chain[0] for chain in chains}) == len({chain[1] for chain in chains}) == 4
    assert [salted.keys(i) for i in (0, 1)] == [(("cache_salt", "a"),), ()]
    assert [tuned.keys(i) for i in (0, 1)] == [(("lora", "l", "/p"),)] * 2
    assert [salted.announced(i) for i in (0, 1)] == [["a"], None]


def test_remembered_digests_equal_computed_ones(monkeypatch):
    monkeypatch.setattr("perilune_lab.engine.hashing.GENERATION", 8)
    hasher = BlockHasher(Algorithm.SHA256, 2)
    for start in (0, 40, 0, 10, 0):
        tokens = list(range(start, start + 40))
        assert hasher.chain(tokens) == BlockHasher(Algorithm.SHA256, 2).chain(tokens)
