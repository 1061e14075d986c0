"""KV moves between genuine vLLM engines with sessions, with requests and after remote prefills:
MooncakeConnector over TCP, as the operator renders it, our gateway's legs, Envoy in front."""

import asyncio
import random
import signal
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
import pytest_asyncio
from msgspec import structs

from enginebed.completions import SAME, answering, ask, cached, fetched, furthest, legs, until
from enginebed.marks import SHORT
from enginebed.rig import Engine, Rig
from perilune_api.policies import PolicyName
from perilune_api.pool import Disaggregation, Pool, Role, dump

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200), pytest.mark.asyncio(loop_scope="session")]
BLOCK, SESSIONS, LONG = 32, 6, 12_000
FETCHES, SPLITS = (1, 3) if SHORT else (2, 6)
TOO_LATE = ("slow", "slower", "failed", "no_giver")
"""Why nothing is fetched after a fetch that came too late: links count as slow, the engines have a pause or
did not answer when they were asked whether they can give."""
LEAST = PolicyName.LEAST_LOADED


def tokens(rng, count):
    return [rng.randrange(5, 300) for _ in range(count)]


class Session:
    def __init__(self, number):
        rng = random.Random(number)
        self.name = f"s{number}"
        self.ids = tokens(rng, rng.randrange(300, 900))
        self.new = tokens(rng, 64)
        self.host = ""


@dataclass
class Served:
    """Two engines that hand KV over to each other, gateway and Envoy."""

    rig: Rig
    engines: list[Engine]
    document: Pool

    async def all_alike(self):
        """No engine drains any more, and each does everything."""
        (self.rig.folder / "pool.yaml").write_bytes(dump(self.document))
        hosts = []

        async def both():
            ids, name = tokens(random.Random(), 40), f"new{len(hosts)}"
            hosts.append((await ask(self.rig, self.rig.url, ids, name, LEAST, max_tokens=1))[0])
            return len(set(hosts)) == 2

        await until(both)

    @asynccontextmanager
    async def busy_with(self, ids, session):
        """While an engine gives a long answer to the prompt and has announced its blocks, which those of the
        answer follow. Yields the engine."""
        before = {engine.address: await self.blocks(engine.address) for engine in self.engines}
        async with answering(self.rig, ids, session) as host:

            async def is_known():
                return await self.blocks(host) - before[host] >= len(ids) // BLOCK + 2

            await until(is_known)
            yield next(engine for engine in self.engines if engine.address == host)

    async def blocks(self, address):
        """Return the number of blocks that the gateway knows on the engine."""
        nodes = (await self.rig.page("/api/nodes/stats"))["nodes"]
        return next(node["index"]["device"] for node in nodes if node["address"] == address)

    async def decision(self, session):
        """Return the session's last decision."""
        return (await self.rig.page(f"/api/decisions?session={session}&n=1"))["decisions"][0]

    async def pulls(self):
        """Return the transfers for single requests: how many are open, and those that have ended, newest
        first."""
        return (await self.rig.page("/api/moves"))["pulls"]


def on_one_node(document):
    """Return the same with engines whose link is so fast that long prefixes are worth their transfer, even if
    it was seen to be slow."""
    spec = document.spec
    endpoints = tuple(structs.replace(endpoint, node=spec.endpoints[0].node) for endpoint in spec.endpoints)
    return structs.replace(document, spec=structs.replace(spec, endpoints=endpoints))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served(rig, tiny) -> Served:
    rendered = rig.render(
        {
            "model": {"name": "tiny", "source": str(tiny["qwen"]), "contextTokens": 16384},
            # So many blocks that nothing is evicted, which would hide what `busy_with` waits for.
            # bfloat16 ends in SIGILL on CPUs with AMX, at the first forward after a fetched prefill
            "engine": {"args": ["--num-gpu-blocks-override=4500", "--dtype=float32"]},
            "mooncake": {"transfer": "handoff"},
            "routing": {
                "allowPolicyHeader": True,
                "migration": {"intervalSeconds": 0.2},
                "pull": {"maxSeconds": 1.0},
                "limits": {"decisionSeconds": 0.9},
                "decisionHeader": "address",
            },
        }
    )
    engines = [await rig.engine(rendered, number) for number in range(2)]
    await rig.ready(*engines)
    document = on_one_node(rendered.with_endpoints([engine.pod.address for engine in engines]))
    await rig.start_gateway(document)
    await rig.start_envoy(document)

    async def both_can():
        return len((await rig.page("/api/moves"))["connectors"]) == 2

    await until(both_can)
    return Served(rig, engines, document)


async def test_a_request_takes_along_what_a_busy_engine_holds(served):
    """The engine that holds the prompt's prefix gives a long answer, so the request goes to the other one,
    with the prefix's KV. The answer is that of the engine that computed the prefix. On a busy machine a fetch
    may take longer than it is allowed to, or Envoy may not wait for the decision; then the prompt is
    computed, and other prompts are tried until FETCHES have been fetched."""
    rig, rng, copied, late = served.rig, random.Random(5), 0, 0
    while copied < FETCHES:
        name = f"along{copied + late}"
        ids = tokens(rng, LONG)
        following = [*ids, *tokens(rng, 64)]
        async with served.busy_with(ids, f"with {name}") as giver:
            host, moved = await ask(rig, rig.url, following, name, LEAST, max_tokens=8)
        made = await served.decision(name)
        print(f"{name}: fetched from {made['pulled_from'] or 'nowhere'} {made['unpulled'] or ''}")
        assert host != giver.address
        if not made["pulled_from"]:
            assert late, made["unpulled"]
            assert made["unpulled"] in TOO_LATE
            late += 1
            continue
        assert made["pulled_from"] == giver.address
        ended = (await served.pulls())["ended"][0]
        if ended["outcome"] != "copied":
            assert ended["outcome"] == "expired" or ended["cause"] == "left", ended
            late += 1
            continue
        assert cached(moved) == made["cached_tokens"] == LONG // BLOCK * BLOCK
        _, stayed = await ask(rig, giver.url, following, max_tokens=8)
        assert furthest(moved, stayed) < SAME
        copied += 1
    async with rig.http.get(f"{rig.admin_url}/metrics") as page:
        assert f'perilune_handoffs_total{{outcome="copied",reason="pull"}} {copied}.0' in await page.text()


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
        return done >= {session.name for session in theirs}

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
    given = tokens(rng, 10 * BLOCK)
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
        spec.routing,
        disaggregation=Disaggregation(local_tokens=100, accept_seconds=1.0, coming_requests=1_000),
    )
    (rig.folder / "pool.yaml").write_bytes(
        dump(
            structs.replace(served.document, spec=structs.replace(spec, endpoints=endpoints, routing=routing))
        )
    )
    before = await fetched(rig, decode.address)

    async def is_split():
        rng = random.Random()
        ids = tokens(rng, 600)
        await ask(rig, rig.url, ids, max_tokens=1)
        return bool((await rig.page("/api/moves"))["prefills"]["ended"])

    await until(is_split)
    for number in range(SPLITS):
        ids = Session(1_000 + number).ids
        host, answer = await ask(rig, rig.url, ids, f"split{number}", max_tokens=8)
        assert host == decode.address
        _, alone = await ask(rig, prefill.url, ids, max_tokens=8)
        assert furthest(answer, alone) < SAME
    assert await fetched(rig, decode.address) - before >= SPLITS * 300
    ended = (await rig.page("/api/moves"))["prefills"]["ended"]
    assert {one["outcome"] for one in ended} == {"copied"}, ended


async def test_a_giver_that_dies_costs_a_request_its_computation(served):
    """The giver stops before it accepts its leg, and is killed while the request is held for it."""
    rig, rng = served.rig, random.Random(6)
    await served.all_alike()
    ids = tokens(rng, LONG)
    following = [*ids, *tokens(rng, 64)]
    async with served.busy_with(ids, "busy") as giver:
        giver.kill(signal.SIGSTOP)
        held = asyncio.create_task(ask(rig, rig.url, following, "held", LEAST, max_tokens=8))

        async def is_held():
            return held.done() or (await served.pulls())["open"] == 1

        await until(is_held, 10)  # for a second, which may be over before it is seen
        giver.kill()
        host, answer = await held
    assert host != giver.address
    assert (await served.decision("held"))["pulled_from"] == giver.address
    assert cached(answer) == 0
    last = (await served.pulls())["ended"][0]
    assert (last["outcome"], last["cause"]) in (("failed", "unreachable"), ("expired", "not_taken")), last
