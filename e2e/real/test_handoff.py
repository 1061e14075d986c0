"""Sessions move between genuine vLLM engines with their KV: MooncakeConnector over TCP, as the operator
renders it, our gateway's legs, Envoy in front."""

import random
from dataclasses import dataclass

import pytest
import pytest_asyncio
from msgspec import structs

from enginebed.completions import SAME, ask, cached, fetched, furthest, legs, until
from enginebed.rig import Engine, Rig
from perilune_api.pool import Disaggregation, Pool, Role, dump

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200), pytest.mark.asyncio(loop_scope="session")]
BLOCK, SESSIONS = 32, 6


class Session:
    def __init__(self, number):
        rng = random.Random(number)
        self.name = f"s{number}"
        self.ids = [rng.randrange(5, 300) for _ in range(rng.randrange(300, 900))]
        self.new = [rng.randrange(5, 300) for _ in range(64)]
        self.host = ""


@dataclass
class Served:
    """Two engines that hand KV over to each other, gateway and Envoy."""

    rig: Rig
    engines: list[Engine]
    document: Pool


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served(rig, tiny) -> Served:
    rendered = rig.render(
        {
            "model": {"name": "tiny", "source": str(tiny["qwen"]), "contextTokens": 4096},
            # bfloat16 ends in SIGILL on CPUs with AMX, at the first forward after a fetched prefill
            "engine": {"args": ["--num-gpu-blocks-override=600", "--dtype=float32"]},
            "mooncake": {"transfer": "handoff"},
            "routing": {
                "policy": {"name": "sticky"},
                "migration": {"intervalSeconds": 0.2},
                "decisionHeader": "address",
            },
        }
    )
    engines = [await rig.engine(rendered, number) for number in range(2)]
    await rig.ready(*engines)
    document = rendered.with_endpoints([engine.pod.address for engine in engines])
    await rig.start_gateway(document)
    await rig.start_envoy(document)

    async def both_can():
        return len((await rig.page("/api/moves"))["connectors"]) == 2

    await until(both_can)
    return Served(rig, engines, document)


async def test_a_drained_engines_sessions_are_found_whole_on_the_other(served):
    rig, document = served.rig, served.document
    sessions = [Session(number) for number in range(SESSIONS)]
    for session in sessions:
        session.host, answer = await ask(rig, rig.url, session.ids, session.name, max_tokens=16)
        session.ids += answer["choices"][0]["token_ids"]
    leaving = sessions[0].host
    theirs = [session for session in sessions if session.host == leaving]
    endpoints = tuple(structs.replace(e, draining=e.address == leaving) for e in document.spec.endpoints)
    drained = structs.replace(document, spec=structs.replace(document.spec, endpoints=endpoints))
    (rig.folder / "pool.yaml").write_bytes(dump(drained))

    async def all_switched():
        ended = (await rig.page("/api/moves"))["ended"]
        done = {e["session_id"] for e in ended if e["handoff"] and e["handoff"]["outcome"] == "switched"}
        return done == {session.name for session in theirs}

    await until(all_switched)
    for session in theirs:
        following = session.ids + session.new
        there, moved = await ask(rig, rig.url, following, session.name, max_tokens=8)
        _, stayed = await ask(rig, f"http://{leaving}", following, max_tokens=8)
        assert there != leaving
        assert cached(stayed) == (len(session.ids) - 1) // BLOCK * BLOCK
        assert cached(moved) >= 0.95 * cached(stayed)
        assert moved["choices"][0]["token_ids"] == stayed["choices"][0]["token_ids"]
        assert furthest(moved, stayed) < SAME
    assert await fetched(rig, there) > 0, "computed there, not handed over"


async def test_kv_of_another_prompt_would_show(served):
    """Engines copy by position: had the two legs' prompts differed, log probabilities would tell."""
    rig, (giver, taker) = served.rig, served.engines
    rng = random.Random(99)
    given = [rng.randrange(5, 300) for _ in range(10 * BLOCK)]
    taken = [*given[: 9 * BLOCK], *(5 + (one + 7) % 295 for one in given[9 * BLOCK :])]
    await legs(rig, giver, taker, given, taken)
    _, right = await ask(rig, giver.url, [*taken, 7], max_tokens=8)
    _, wrong = await ask(rig, taker.url, [*taken, 7], max_tokens=8)
    assert cached(wrong) == 10 * BLOCK, "under the hashes of the taker's own prompt"
    assert furthest(right, wrong) > SAME


async def test_a_long_prompt_is_prefilled_on_one_engine_and_decoded_on_the_other(served):
    rig, (prefill, decode) = served.rig, served.engines
    spec = served.document.spec
    endpoints = tuple(
        structs.replace(e, role=Role.PREFILL if e.address == prefill.address else Role.DECODE, draining=False)
        for e in spec.endpoints
    )
    routing = structs.replace(
        spec.routing, disaggregation=Disaggregation(local_tokens=100, accept_seconds=1.0)
    )
    (rig.folder / "pool.yaml").write_bytes(
        dump(
            structs.replace(served.document, spec=structs.replace(spec, endpoints=endpoints, routing=routing))
        )
    )
    before = await fetched(rig, decode.address)

    async def is_split():
        rng = random.Random()
        ids = [rng.randrange(5, 300) for _ in range(600)]
        await ask(rig, rig.url, ids, max_tokens=1)
        return bool((await rig.page("/api/moves"))["prefills"]["ended"])

    await until(is_split)
    for number in range(6):
        ids = Session(1_000 + number).ids
        host, answer = await ask(rig, rig.url, ids, f"split{number}", max_tokens=8)
        assert host == decode.address
        _, alone = await ask(rig, prefill.url, ids, max_tokens=8)
        assert furthest(answer, alone) < SAME
    assert await fetched(rig, decode.address) - before >= 6 * 300
    ended = (await rig.page("/api/moves"))["prefills"]["ended"]
    assert {one["outcome"] for one in ended} == {"copied"}, ended
