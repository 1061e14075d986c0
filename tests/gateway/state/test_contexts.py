"""The contexts of which the store's master is asked."""

from handing_rig import BLOCK, Handing, text
from msgspec.structs import replace
from router_rig import USUAL, A, B

from perilune_gateway.model import Tier
from perilune_gateway.state.engine_blocks import EngineBlocks

TOKENS = 4_000
WHOLE = TOKENS // BLOCK * BLOCK


def stored() -> Handing:
    """Two engines that share a store and hand nothing over."""
    return Handing(pages={A: "", B: ""}, engine=replace(USUAL, store=True))


def engine_blocks(rig: Handing) -> EngineBlocks:
    return EngineBlocks(rig.state.index, BLOCK, store=True)


def ids(rig: Handing) -> list[list[int]]:
    return [list(context.ids) for context in rig.state.contexts(rig.now)]


def test_they_are_those_of_sessions_between_two_turns() -> None:
    rig = stored()
    rig.turn("s", text(1, TOKENS))
    rig.turn("t", text(2, TOKENS))
    assert sorted(ids(rig)) == [text(1, WHOLE), text(2, WHOLE)]
    routed = rig.send("s", text(1, TOKENS + 160))
    assert ids(rig) == [text(2, WHOLE)]
    rig.announce(routed.destinations[0], text(1, TOKENS + 160))
    rig.finish(routed)
    assert sorted(map(len, ids(rig))) == [WHOLE, (TOKENS + 160) // BLOCK * BLOCK]


def test_one_whose_tokens_nobody_told_is_left_out() -> None:
    rig = stored()
    rig.finish(rig.send("s", text(1, TOKENS)))
    assert ids(rig) == []


def test_an_answer_counts_for_the_next_turn() -> None:
    rig = stored()
    host = rig.turn("s", text(1, TOKENS)).target
    other = B if host == A else A
    rig.stored(host, text(1, TOKENS), tier=Tier.STORE)
    (context,) = rig.state.contexts(rig.now)
    index = rig.state.index
    assert index.in_store(context.blocks) == [True] * len(context.blocks)

    def store_has() -> int:
        return index.find_matches(context.blocks, rig.now).of(other)[2]

    rig.now += 1.0
    engine_blocks(rig).surveyed(context.blocks[:100], context.blocks[100:120], rig.now, rig.now)
    assert store_has() == 100
    engine_blocks(rig).surveyed(context.blocks, (), rig.now, rig.now)
    assert store_has() == len(context.blocks)


def test_what_was_stored_after_the_question_stays() -> None:
    rig = stored()
    host = rig.turn("s", text(1, TOKENS)).target
    asked_at = rig.now
    rig.now += 1.0
    rig.stored(host, text(1, TOKENS), tier=Tier.STORE)
    (context,) = rig.state.contexts(rig.now)
    engine_blocks(rig).surveyed((), context.blocks, asked_at, rig.now)
    assert all(rig.state.index.in_store(context.blocks))
