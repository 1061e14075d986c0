"""The gateway asks the store's master which blocks of sessions' contexts it has."""

import asyncio
from array import array
from pathlib import Path

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from waiting import HANG, until

from perilune_api.pool import Hashing
from perilune_gateway.feeds import store_questions
from perilune_gateway.feeds.store_keys import Prefixes
from perilune_gateway.feeds.store_questions import survey
from perilune_gateway.model.handoff import Content
from perilune_gateway.request import block_hashes
from perilune_gateway.state.context_digests import EVERY, ContextDigests

RECORDED = Path(__file__).parents[2] / "fixtures/mooncake-master"
SIZE = 4
RANKS = [f"qwen@tp_rank:{rank}@pcp0@dcp0@pp_rank:0@group:0" for rank in (0, 1)]


def played(held, believed):
    """Return what a survey finds in a store that has the blocks at these positions, and the questions."""
    question, questions = survey(believed), []
    asked = next(question)
    while True:
        questions.append(list(asked))
        try:
            asked = question.send([at in held for at in asked])
        except StopIteration as end:
            return end.value, questions


def test_the_genuine_masters_answer_is_read():
    assert store_questions.parse((RECORDED / "batch_query_keys.json").read_bytes()) == {"k0", "k1"}


@pytest.mark.parametrize(
    ("blocks", "held", "believed", "found", "keys"),
    [
        (100, range(100), True, 100, 4),
        (100, range(100), False, 100, 100),
        (100, range(70), True, 70, 4 + 31),
        (100, range(1, 100), True, 100, 4),
        (100, range(40, 100), True, 0, 4 + 31),
        (100, (), True, 0, 4 + 31),
        (1, (), True, 0, 1),
        (1, (0,), False, 1, 1),
    ],
    ids=[
        "all",
        "all, and not known",
        "its end is gone",
        "a single block is not noticed",
        "its beginning is gone",
        "nothing",
        "one that is gone",
        "one that is not known",
    ],
)
def test_few_questions_tell_what_is_missing(blocks, held, believed, found, keys):
    answer, questions = played(set(held), [believed] * blocks)
    assert answer.held == found
    assert sum(map(len, questions)) == keys
    assert not set(answer.lacking) & set(held)


def some_of(blocks):
    return st.sets(st.integers(0, blocks - 1))


@given(st.integers(1, 3 * EVERY).flatmap(lambda n: st.tuples(st.just(n), some_of(n), some_of(n))))
def test_nothing_counts_that_was_neither_asked_for_nor_believed(case):
    blocks, held, believed = case
    answer, questions = played(held, [at in believed for at in range(blocks)])
    asked = [at for some in questions for at in some]
    assert len(asked) == len(set(asked))
    assert all(at in (held if at in asked else believed) for at in range(answer.held))
    assert set(answer.lacking) == set(asked) - held


def context(blocks):
    ids = array("I", range(1, blocks * SIZE + 1))
    return Content(ids, block_hashes.chain(ids, SIZE, block_hashes.prefix_root("", "")))


class Master:
    """Answers as `mooncake_master` 0.3.13 does, of a store that has the first blocks of a context."""

    def __init__(self, of):
        digests = block_hashes.vllm_chain(of.ids, SIZE, Hashing())
        self.keys = [[f"{rank}@{digest.hex()}" for rank in RANKS] for digest in digests]
        self.held = len(self.keys)
        self.lost_of_rank_1 = set()
        self.status = 200
        self.most_at_once = self.answers = 0

    async def serve(self):
        async def answer(request):
            asked = request.query["keys"].split(",")
            self.answers += 1
            self.most_at_once = max(self.most_at_once, len(asked))
            there = {key for keys in self.keys[: self.held] for key in keys}
            there -= {self.keys[at][1] for at in self.lost_of_rank_1}
            found = {"ok": True, "values": [{"size_": 1024, "transport_endpoint_": "127.0.0.1:1"}]}
            lost = {"ok": False, "error": "OBJECT_NOT_FOUND"}
            data = {key: found if key in there else lost for key in asked}
            return web.json_response({"success": True, "data": data}, status=self.status)

        app = web.Application()
        app.router.add_get("/batch_query_keys", answer)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        return f"127.0.0.1:{self.runner.addresses[0][1]}"


@pytest.fixture
async def asked():
    of, prefixes, seen = context(100), Prefixes(), asyncio.Queue()
    master, believed = Master(of), set(of.blocks)
    clock = iter(range(1_000_000)).__next__

    def sink(held, lacking, since, now):
        assert since < now
        seen.put_nowait((len(held), lacking))

    feed = asyncio.create_task(
        store_questions.run(
            store_questions.Master(
                await master.serve(), prefixes, ContextDigests(Hashing(), SIZE, {}), key_s=0.0
            ),
            lambda: [of],
            lambda blocks: [block in believed for block in blocks],
            sink,
            clock,
            round_s=0.001,
        )
    )
    yield master, of, prefixes, believed, seen
    feed.cancel()
    await asyncio.gather(feed, return_exceptions=True)
    await master.runner.cleanup()


async def told(seen, wanted):
    async with asyncio.timeout(HANG):
        while await seen.get() != wanted:
            pass


async def test_what_the_store_has_and_what_it_lost_is_told(asked):
    master, of, prefixes, believed, seen = asked
    prefixes.known = [rank.encode() for rank in RANKS]
    await told(seen, (100, []))
    master.held = 70
    await told(seen, (70, [of.blocks[at] for at in range(70, 96)] + [of.blocks[99]]))
    believed.clear()
    master.held = 100
    await told(seen, (100, []))
    assert master.most_at_once <= store_questions.AT_ONCE


async def test_a_block_is_there_if_every_rank_has_it(asked):
    master, of, prefixes, _, seen = asked
    master.lost_of_rank_1 = {EVERY - 1}
    prefixes.known = [rank.encode() for rank in RANKS]
    await told(seen, (EVERY - 1, [of.blocks[EVERY - 1]]))


async def test_while_the_master_answers_with_errors_nothing_is_told(asked):
    master, of, prefixes, _, seen = asked
    prefixes.known = [rank.encode() for rank in RANKS]
    await told(seen, (100, []))
    master.status, master.held, master.answers = 500, 0, 0
    await until(lambda: master.answers >= 3)
    while not seen.empty():
        assert seen.get_nowait() == (100, []), "it was answered before"
    master.status = 200
    await told(seen, (0, [of.blocks[at] for at in (*range(EVERY), 63, 95, 99)]))
