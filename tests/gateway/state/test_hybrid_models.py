"""The truth for hybrid models: what the index predicts is what vLLM's own KVCacheManager had cached."""

import gzip
import lzma
from pathlib import Path

import msgspec
import pytest

from perilune_api.pool import HashAlgorithm, Hashing
from perilune_gateway.model.kv_events import BlockStored, Event
from perilune_gateway.request import block_hashes as blocks
from perilune_gateway.state.engine_blocks import EngineBlocks
from perilune_gateway.state.parity import Parity, ParityCheck
from perilune_gateway.state.prefix_index import PrefixIndex

FIXTURES = Path(__file__).parents[2] / "fixtures"
ENGINE = "10.0.0.1:8000"


MODELS = msgspec.json.decode(lzma.decompress((FIXTURES / "vllm-kv-models" / "models.json.xz").read_bytes()))
GROUPS = msgspec.json.decode(gzip.decompress((FIXTURES / "vllm-kv-groups" / "groups.json.gz").read_bytes()))


def errors_in_blocks(turns: list[dict], size: int) -> list[int]:
    """Predicted minus real cached blocks, for each turn of which the prompt was looked up."""
    index = PrefixIndex(100_000, 5.0)
    engine = EngineBlocks(index, size, store=False)
    found = []
    for turn in turns:
        if "cached" in turn:
            chain = blocks.chain(turn["prompt"], size, 0)[: (len(turn["prompt"]) - 1) // size]
            held = index.find_matches(chain, 0.0).device.get(ENGINE, 0)
            assert index.leading(ENGINE, chain, 0.0) == held
            found.append(held - turn["cached"] // size)
        for event in turn["events"]:
            engine.apply(ENGINE, msgspec.convert(event, Event), 0.0)
    assert sum(engine.unused.values()) < 5, "vLLM names some blocks of windows that it skipped"
    return found


@pytest.mark.parametrize("name", MODELS["models"])
def test_predictions_for_models_are_within_a_block(name: str) -> None:
    turns = MODELS["models"][name]
    errors = errors_in_blocks(turns, MODELS["block_size"])
    assert sum(abs(error) <= 1 for error in errors) >= 0.99 * len(errors)
    assert sum(turn["cached"] > 0 for turn in turns) > len(turns) / 2
    assert sum(event["type"] == "BlockRemoved" for turn in turns for event in turn["events"]) > 50


@pytest.mark.parametrize("name", MODELS["models"])
def test_hashes_of_every_model_agree_whichever_group_has_full_attention(name: str) -> None:
    """Groups of states and windows name fewer blocks than they have tokens of."""
    check = ParityCheck(Hashing(HashAlgorithm.SHA256_CBOR), MODELS["block_size"])
    for turn in MODELS["models"][name]:
        for event in (msgspec.convert(event, Event) for event in turn["events"]):
            if isinstance(event, BlockStored):
                assert check.observe(ENGINE, event) in (Parity.OK, None)
    assert check.report(ENGINE).parity is Parity.OK


ALONE = "window alone"


def test_windows_without_full_attention_are_not_known_well_but_never_too_much() -> None:
    """Their events do not say which of the blocks, whose tokens they have, vLLM left out."""
    assert max(errors_in_blocks(GROUPS["layouts"][ALONE]["operations"], GROUPS["block_size"])) <= 1


@pytest.mark.parametrize("name", sorted(GROUPS["layouts"].keys() - {ALONE}))
def test_predictions_for_other_layouts_are_within_a_block(name: str) -> None:
    errors = errors_in_blocks(GROUPS["layouts"][name]["operations"], GROUPS["block_size"])
    assert sum(abs(error) <= 1 for error in errors) >= 0.99 * len(errors)


def test_an_engine_that_tells_again_makes_a_late_gateway_know_all() -> None:
    """It began to listen after 60 turns. Each later turn that finds the endpoint learning asks it to announce
    the prompt's cached blocks again, as a request with kv_cache_report_mode "full" does."""
    size, turns = MODELS["block_size"], MODELS["models"]["plain"][60:]
    asked, errors = 0, {False: [], True: []}
    for asks, found in errors.items():
        index = PrefixIndex(100_000, 5.0)
        engine = EngineBlocks(index, size, store=False)
        for turn in turns:
            chain = blocks.chain(turn["prompt"], size, 0)[: (len(turn["prompt"]) - 1) // size]
            found.append(index.find_matches(chain, 0.0).device.get(ENGINE, 0) - turn["cached"] // size)
            if asks and engine.learns(ENGINE) and turn["cached"]:
                asked += 1
                tokens = tuple(turn["prompt"][: turn["cached"]])
                names = tuple(
                    map(blocks.low64, blocks.vllm_chain(tokens, size, Hashing(HashAlgorithm.SHA256_CBOR)))
                )
                engine.apply(
                    ENGINE,
                    BlockStored(
                        block_hashes=names,
                        parent_block_hash=None,
                        token_ids=tokens,
                        block_size=size,
                        medium="GPU",
                    ),
                    0.0,
                )
            for event in turn["events"]:
                engine.apply(ENGINE, msgspec.convert(event, Event), 0.0)
    assert max(errors[True]) <= 0
    assert max(errors[False]) <= 0
    assert errors[True][-60:].count(0) >= 58
    assert errors[False][-60:].count(0) < 50
    assert asked < len(turns)
