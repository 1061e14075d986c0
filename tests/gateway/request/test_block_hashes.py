"""Block hashes are chained, stable, and separate what must not share a cache."""

import json
from array import array

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from perilune_api.pool import ExtraKeys, HashAlgorithm, Hashing, SpecError
from perilune_gateway.request import block_hashes as blocks

TOKENS = list(range(100, 164))
SIXTY = (1 << 60) - 1


def golden(fixtures):
    return json.loads((fixtures / "vllm-hash" / "golden_sha256.json").read_text())


def repeated(case, key, default):
    if f"{key}_repeat" in case:
        repeat = case[f"{key}_repeat"]
        value = repeat["value"]
        return value * repeat["count"] if isinstance(value, str) else [value] * repeat["count"]
    return case.get(key, default) or default


def test_digests_equal_those_that_vllm_computed(fixtures):
    checked = 0
    for case in golden(fixtures)["cases"]:
        chain = blocks.vllm_chain(
            repeated(case, "token_ids", []),
            case["block_size"],
            Hashing(HashAlgorithm.SHA256, "0", ExtraKeys.BARE),
            lora_name=repeated(case, "lora_name", ""),
            salt=repeated(case, "cache_salt", ""),
        )
        digests = list(chain)
        assert [d.hex() for d in digests] == [e["digest"] for e in case["expected"]], case["name"]
        assert [blocks.low64(d) for d in digests] == [int(e["projected_decimal"]) for e in case["expected"]]
        checked += len(digests)
    assert checked >= 20


def test_roots_equal_those_that_vllm_computed(fixtures):
    for vector in golden(fixtures)["seed_root_vectors"]:
        root = blocks.none_hash(Hashing(HashAlgorithm.SHA256, vector["python_hash_seed"]))
        assert root.hex() == vector["root_digest"]


@pytest.mark.parametrize("algorithm", list(HashAlgorithm))
def test_a_chain_can_be_continued_from_its_parent(algorithm):
    hashing = Hashing(algorithm, "42")
    whole = list(blocks.vllm_chain(TOKENS, 16, hashing, salt="s"))
    tail = blocks.vllm_chain(TOKENS[16:], 16, hashing, salt="s", parent=whole[0])
    assert list(tail) == whole[1:]
    assert len(whole[0]) == (16 if "xxhash" in algorithm else 32)


def test_settings_never_share_a_digest():
    variants = [
        {"hashing": Hashing(algorithm, seed, keys), "lora_name": lora, "salt": salt, "extra": extra}
        for algorithm in HashAlgorithm
        for seed in ("0", "1")
        for keys in ExtraKeys
        for lora, salt, extra in (
            ("a", "", ()),
            ("", "b", ()),
            ("a", "b", ()),
            ("", "", [[("a", 0)]]),
            ("", "", [[("a", 1)]]),
        )
    ]
    first = [next(blocks.vllm_chain(TOKENS, 16, **variant)) for variant in variants]
    assert len(set(first)) == len(first)


def test_equal_lora_name_and_path_hash_like_two_objects():
    name = "adapter"
    same = blocks.vllm_chain(TOKENS, 16, Hashing(), lora_name=name, lora_path=name)
    two = blocks.vllm_chain(TOKENS, 16, Hashing(), lora_name=name, lora_path="".join(list(name)))
    assert list(same) == list(two)


@pytest.mark.parametrize(
    ("hashing", "computable"),
    [
        pytest.param(Hashing(HashAlgorithm.SHA256), True, id="sha256 has a fixed root"),
        pytest.param(Hashing(HashAlgorithm.SHA256_CBOR), True, id="sha256_cbor has a fixed root"),
        pytest.param(Hashing(HashAlgorithm.XXHASH), False, id="xxhash has a random one"),
        pytest.param(Hashing(HashAlgorithm.XXHASH_CBOR), False, id="xxhash_cbor has a random one"),
        pytest.param(Hashing(HashAlgorithm.XXHASH, "0"), True, id="unless there is a seed"),
    ],
)
def test_a_root_without_a_seed_is_known_only_where_vllm_fixes_it(hashing, computable):
    if computable:
        assert blocks.none_hash(hashing)
    else:
        with pytest.raises(SpecError, match=r"hashing\.seed"):
            blocks.none_hash(hashing)


ids = st.lists(st.integers(0, 2**32 - 1), max_size=64)


@given(ids, ids, st.integers(1, 9))
def test_equal_hash_means_equal_prefix(a, b, size):
    first, second = blocks.chain(a, size, 0), blocks.chain(b, size, 0)
    for i, (x, y) in enumerate(zip(first, second, strict=False)):
        assert (x == y) == (a[: (i + 1) * size] == b[: (i + 1) * size])


@given(ids, ids, st.integers(1, 9))
def test_a_longer_prompt_extends_the_chain(prompt, more, size):
    short, long = blocks.chain(prompt, size, 7), blocks.chain(prompt + more, size, 7)
    assert long[: len(short)] == short
    assert len(short) == len(prompt) // size
    if short:
        rest = (prompt + more)[len(short) * size :]
        assert long[len(short) :] == blocks.chain(rest, size, short[-1])


def test_our_chain_is_little_endian_xxh3_seeded_with_the_block_before():
    first = xxhash.xxh3_64_intdigest(b"\1\0\0\0\2\0\0\0", 9) & SIXTY
    second = xxhash.xxh3_64_intdigest(b"\3\0\0\0\0\0\1\0", first) & SIXTY
    assert blocks.chain([1, 2, 3, 65536, 5], 2, 9) == [first, second]


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 700)), min_size=1, max_size=12),
    st.integers(1, 3),
    st.sampled_from([1, 4, 1000]),
)
def test_remembered_chains_equal_fresh_ones(prompts, size, max_rows):
    """Prompts that share heads of any length, and roots, in a memory of any size."""
    chains = blocks.Chains(max_rows)
    for kind, length in prompts:
        root = kind // 2
        ids = [kind if n > 300 else n % 7 for n in range(length)]
        for asked in (ids, array("I", ids)):
            assert list(chains.tokens(asked, size, root)) == blocks.chain(ids, size, root)
        text = bytes(n % 256 for n in ids)
        assert list(chains.text(text, size, root)) == blocks.text_chain(text, size, root)


@pytest.mark.parametrize("bad", [[-1], [2**32], [0, -5]])
def test_impossible_token_ids_raise_an_error(bad):
    with pytest.raises(ValueError, match="token id"):
        blocks.chain(bad, 1, 0)


def test_roots_separate_lora_and_salt():
    pairs = [("", ""), ("a", ""), ("", "a"), ("a", "a"), ("aa", ""), ("", "aa"), ("a", "aa"), ("aa", "a")]
    assert len({blocks.prefix_root(lora, salt) for lora, salt in pairs}) == len(pairs)


def test_extra_bytes_separate_their_block_and_all_after_it():
    plain = blocks.chain(TOKENS, 16, 0)
    image = blocks.chain(TOKENS, 16, 0, [None, b"image", None, None])
    assert image[0] == plain[0]
    assert not set(image[1:]) & set(plain)


def test_text_never_meets_tokens():
    text = bytes(range(64)) * 4
    as_tokens = [int.from_bytes(text[i : i + 4], "little") for i in range(0, len(text), 4)]
    of_text = blocks.text_chain(text, 64, 0)
    assert len(of_text) == 4
    assert not set(of_text) & set(blocks.chain(as_tokens, 16, 0))
    assert blocks.text_chain(text + b"tail", 64, 0) == of_text
