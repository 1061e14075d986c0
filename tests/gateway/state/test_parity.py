"""The parity check says whether our block hashes are the engine's, and if not, why."""

from itertools import pairwise

import pytest

from perilune_api.pool import ExtraKeys, HashAlgorithm, Hashing
from perilune_gateway.model.kv_events import BlockStored
from perilune_gateway.request import block_hashes as blocks
from perilune_gateway.state.parity import CURES, Parity, ParityCheck, Report

ENGINE = "10.0.0.1:8000"
SIZE = 4
TOKENS = tuple(range(12))
POOL = Hashing(HashAlgorithm.SHA256, "")


def announced(hashing=POOL, *, whole=False, size=SIZE, tokens=TOKENS, **how) -> BlockStored:
    """Return the event of an engine with these settings for a prompt."""
    digests = list(blocks.vllm_chain(tokens, size, hashing, **how))
    lora = [how["lora_name"]] if "lora_name" in how else []
    first = [*lora, how["salt"]] if "salt" in how else lora
    return BlockStored(
        block_hashes=tuple(digests) if whole else tuple(map(blocks.low64, digests)),
        parent_block_hash=None,
        token_ids=tuple(tokens),
        block_size=size,
        medium="GPU",
        lora_name=how.get("lora_name"),
        extra_keys=(first, *([lora] * (len(digests) - 1))) if first else None,
    )


def check(**options) -> ParityCheck:
    return ParityCheck(POOL, SIZE, **options)


@pytest.mark.parametrize("name", ["main", "H", "T"])
def test_a_real_engine_agrees(captures, name):
    capture = captures[name]
    it = ParityCheck(capture.hashing, 32, first=10_000)
    stores = [e for e in capture.events if isinstance(e, BlockStored)]
    results = [it.observe(ENGINE, event) for event in stores]
    on_device = sum(event.medium == "GPU" for event in stores)
    assert results.count(Parity.OK) == on_device
    assert results.count(None) == len(stores) - on_device
    assert it.report(ENGINE) == Report(Parity.OK)


@pytest.mark.parametrize(
    ("event", "parity", "says"),
    [
        pytest.param(announced(), Parity.OK, "", id="equal"),
        pytest.param(announced(whole=True), Parity.OK, "", id="equal, whole digests"),
        pytest.param(announced(salt="s"), Parity.OK, "", id="equal, salted"),
        pytest.param(announced(lora_name="l", lora_path="/l"), Parity.OK, "", id="equal, LoRA"),
        pytest.param(announced(Hashing(seed="0")), Parity.SEED, "PYTHONHASHSEED '0'", id="another seed"),
        pytest.param(
            announced(Hashing(HashAlgorithm.SHA256_CBOR)), Parity.ALGORITHM, "'sha256_cbor'", id="algorithm"
        ),
        pytest.param(
            announced(Hashing(HashAlgorithm.XXHASH, "0")),
            Parity.ALGORITHM,
            "'xxhash'",
            id="algorithm and seed",
        ),
        pytest.param(
            announced(Hashing(extra_keys=ExtraKeys.BARE), salt="s"),
            Parity.EXTRA_KEYS,
            "'bare'",
            id="bare keys",
        ),
        pytest.param(
            announced(lora_name="l", lora_path="/elsewhere"),
            Parity.EXTRA_KEYS,
            "adapter 'l'",
            id="adapter path",
        ),
        pytest.param(announced(size=2), Parity.BLOCK_SIZE, "hold 2 tokens", id="block size"),
        pytest.param(announced(Hashing(seed="77")), Parity.UNEXPLAINED, "random", id="a seed nobody knows"),
        pytest.param(
            announced(Hashing(seed="77"), whole=True),
            Parity.SEED,
            "root",
            id="a seed nobody knows, whole digests",
        ),
    ],
)
def test_hashes_that_are_not_equal_have_a_likely_cause(event, parity, says):
    it = check(lora_paths={"l": "/l"})
    assert it.observe(ENGINE, event) is parity
    report = it.report(ENGINE)
    assert report.parity is parity
    assert says in report.cause
    assert bool(report.cause) == (parity is not Parity.OK)
    assert report.cure == CURES[parity]


def test_every_disagreement_has_a_cure():
    assert CURES.keys() == set(Parity)
    assert {parity for parity, cure in CURES.items() if not cure} == {Parity.UNKNOWN, Parity.OK}


def test_a_chain_is_followed_only_from_a_known_digest():
    it = check()
    names = announced().block_hashes
    tail = BlockStored(
        block_hashes=names[1:], parent_block_hash=names[0], token_ids=TOKENS[4:], block_size=SIZE
    )
    assert it.observe(ENGINE, tail) is None
    assert it.report(ENGINE).parity is Parity.UNKNOWN
    assert it.observe(ENGINE, announced()) is Parity.OK
    assert it.observe(ENGINE, tail) is Parity.OK


def test_a_whole_digest_as_parent_is_enough():
    names = announced(whole=True).block_hashes
    assert (
        check().observe(
            ENGINE,
            BlockStored(
                block_hashes=names[1:], parent_block_hash=names[0], token_ids=TOKENS[4:], block_size=SIZE
            ),
        )
        is Parity.OK
    )


def test_the_first_ones_then_one_in_k():
    it = check(first=3, one_in=10)
    compared = [n for n in range(1, 31) if it.observe(ENGINE, announced()) is not None]
    assert compared == [1, 2, 3, 10, 20, 30]
    assert all(b > a for a, b in pairwise(compared))


def test_drift_shows_and_passes():
    it = check(first=1000)
    it.observe(ENGINE, announced())
    it.observe(ENGINE, announced(Hashing(seed="0")))
    assert it.report(ENGINE).parity is Parity.SEED
    for _ in range(32):
        it.observe(ENGINE, announced())
    assert it.report(ENGINE).parity is Parity.OK


def test_endpoints_are_judged_apart_and_forgotten():
    it = check()
    it.observe("a", announced())
    it.observe("b", announced(Hashing(seed="0")))
    assert [it.report(e).parity for e in "abc"] == [Parity.OK, Parity.SEED, Parity.UNKNOWN]
    it.forget("b")
    assert it.report("b") == Report()


@pytest.mark.parametrize(
    ("seen", "parity"),
    [
        pytest.param([False] * 7, Parity.OK, id="too few to say"),
        pytest.param([False] * 8, Parity.TEMPLATE, id="none of ours showed up"),
        pytest.param([True] * 2 + [False] * 7, Parity.TEMPLATE, id="hardly any"),
        pytest.param([True] * 4 + [False] * 4, Parity.OK, id="half of them"),
        pytest.param([False] * 8 + [True] * 32, Parity.OK, id="long ago"),
    ],
)
def test_prompts_that_never_show_up_mean_another_template(seen, parity):
    it = check()
    it.heard(ENGINE, 0.1)
    it.observe(ENGINE, announced())
    for one in seen:
        it.request_blocks_seen(ENGINE, one, 0.0)
    assert it.report(ENGINE).parity is parity


def test_a_hash_disagreement_outranks_the_template():
    it = check()
    it.heard(ENGINE, 0.1)
    it.observe(ENGINE, announced(Hashing(seed="0")))
    for _ in range(20):
        it.request_blocks_seen(ENGINE, False, 0.0)
    assert it.report(ENGINE).parity is Parity.SEED


@pytest.mark.parametrize("lags_s", [[], [float("nan")], [0.1, 1.5], [0.1, float("nan")]], ids=str)
def test_where_events_come_late_missing_ones_say_nothing(lags_s):
    """No batch yet, out of a replay, long after it was published."""
    it = check()
    it.observe(ENGINE, announced())
    for lag_s in lags_s:
        it.heard(ENGINE, lag_s)
    for _ in range(20):
        it.request_blocks_seen(ENGINE, False, 0.0)
    assert it.report(ENGINE).parity is Parity.OK
    it.request_blocks_seen(ENGINE, True, 0.0)
    it.heard(ENGINE, 0.1)
    for _ in range(20):
        it.request_blocks_seen(ENGINE, False, 0.0)
    report = it.report(ENGINE)
    assert report.parity is Parity.TEMPLATE
    assert report.cause.startswith("20 of its last 21 prompts never showed up")


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(
            BlockStored(
                block_hashes=(1,), parent_block_hash=None, token_ids=TOKENS[:4], block_size=SIZE, medium="cpu"
            ),
            id="store copy",
        ),
        pytest.param(
            BlockStored(
                block_hashes=(1,), parent_block_hash=None, token_ids=TOKENS[:4], block_size=SIZE, medium="CPU"
            ),
            id="host copy",
        ),
        pytest.param(
            BlockStored(
                block_hashes=(1,), parent_block_hash=None, token_ids=TOKENS[:4], block_size=SIZE, group_idx=1
            ),
            id="another group",
        ),
        pytest.param(
            BlockStored(block_hashes=(1,), parent_block_hash=None, token_ids=(), block_size=0), id="no tokens"
        ),
        pytest.param(
            BlockStored(block_hashes=(), parent_block_hash=None, token_ids=(), block_size=4), id="no blocks"
        ),
    ],
)
def test_what_is_not_compared(event):
    assert check().observe(ENGINE, event) is None


def test_news_are_told_once():
    it = check()
    assert it.news(ENGINE) is None, "nothing has been heard"
    it.observe(ENGINE, announced())
    assert it.news(ENGINE).parity is Parity.OK
    it.observe(ENGINE, announced())
    assert it.news(ENGINE) is None
    it.observe(ENGINE, announced(Hashing(seed="0")))
    assert it.news(ENGINE).parity is Parity.SEED
    it.forget(ENGINE)
    it.observe(ENGINE, announced(Hashing(seed="0")))
    assert it.news(ENGINE).parity is Parity.SEED, "of another engine, for all that is known"
