"""Two gateways, one Envoy in front of them, and a real server of the Redis protocol between them."""

import asyncio
import gc
import shutil
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import certificates
import pytest
import pytest_asyncio
from handing_rig import text
from ports import free_port
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError
from replica_rig import HandingReplica
from router_rig import A, B
from running_envoy import Envoy
from waiting import HANG, until, until_true

from perilune_api import names, quantities
from perilune_api import pool as spec
from perilune_api.inference_pool.checks import convert
from perilune_gateway.feeds.shared_state import Server, SharedState
from perilune_gateway.model import Reason, SessionKey
from perilune_gateway.model.shared import Batch, Bound, Names, encode
from perilune_gateway.state.offers import STANDS_S
from perilune_gateway.state.peers import LEASE_S
from perilune_gateway.state.replicas import Outbox
from perilune_lab.processes import child
from perilune_lab.processes.envoy import config
from perilune_lab.processes.stack import EngineOptions, Stack
from perilune_operator.observe.facts import Observed
from perilune_operator.plan import plan
from perilune_operator.render import shared_state
from perilune_operator.render.objects import Defaults

SERVER = shutil.which("valkey-server") or shutil.which("redis-server")
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(SERVER is None, reason="no Valkey or Redis: `make state-server` installs one (root)"),
]

OPTIONS = EngineOptions(time_scale=50.0, kv_tokens=400_000)
PATIENT = spec.Routing(limits=spec.Limits(decision_seconds=30.0))
POOL = plan(
    "p",
    "ns",
    convert({"model": {"name": "m"}, "gateway": {"replicas": 2}}),
    Observed(uid="uid", generation=1),
    0.0,
    Defaults(),
)
"""A pool to which no server is named, as the operator carries it out."""
(CONTAINER,) = (
    obj["spec"]["template"]["spec"]["containers"][0]
    for obj in POOL.objects or ()
    if (obj["kind"], obj["metadata"]["name"]) == ("Deployment", "p-state")
)
PASSWORD = "of the pool's Secret"
SESSIONS, TURNS = 16, 3


@dataclass(frozen=True, slots=True)
class Turn:
    session: str
    status: int
    endpoint: str
    reason: str


class Rig:
    """Four engines, the server, and as many gateways as a test starts."""

    def __init__(self, stack: Stack, http: aiohttp.ClientSession) -> None:
        self.stack = stack
        self.http = http
        self.url = ""
        self.gateways: dict[str, child.Child] = {}
        self.admin: dict[str, str] = {}
        self.ext_proc: dict[str, str] = {}
        self.port, self.tls_port = free_port(), free_port()
        self.server: child.Child | None = None
        self._servers = 0

    async def start_server(self, *more: str) -> child.Child:
        """As in the operator's pod, but at a port and an address of this machine, and without TLS."""
        assert SERVER is not None
        self._servers += 1
        certificates.make(self.stack.folder)
        here = {"$(PERILUNE_STATE_PASSWORD)": PASSWORD, shared_state.FOLDER: str(self.stack.folder)}
        args = list(CONTAINER["args"])
        for there, value in here.items():
            args = [arg.replace(there, value) for arg in args]
        plain = ("--port", f"{self.port}", "--tls-port", "0", "--bind", "127.0.0.1")
        command = [SERVER, *args, *plain, *more]
        name = f"server-{self._servers}"
        started = await child.start(name, command, {}, self.stack.folder)
        self.stack.children[name] = started
        return started

    async def start_gateway(self, name: str, *state: str) -> None:
        """Start a gateway. `state`: the arguments about the server; none stand for the server without TLS."""
        command = [
            *self.stack.programs.gateway,
            *("--pool", str(self.stack.pool_file), "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"),
            *(state or ("--state-server", f"redis://127.0.0.1:{self.port}")),
        ]
        env = {"PERILUNE_STATE_PASSWORD": PASSWORD}
        started = await child.start(name, command, env, self.stack.folder)
        self.stack.children[name] = self.gateways[name] = started
        facts = await started.until_ready(HANG)
        self.ext_proc[name], self.admin[name] = facts["ext_proc"], f"http://{facts['admin']}"

    async def kill(self, process: child.Child) -> None:
        process.stopping = True
        process.process.kill()
        await asyncio.wait({process.ended})

    async def page(self, gateway: str, path: str) -> Any:
        async with self.http.get(self.admin[gateway] + path) as answer:
            return await answer.json()

    async def metric(self, gateway: str, name: str) -> float:
        async with self.http.get(self.admin[gateway] + "/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    async def problems(self, gateway: str) -> set[str]:
        return {problem["kind"] for problem in (await self.page(gateway, "/api/health"))["problems"]}

    async def knows(self, gateway: str) -> float:
        bound = await self.metric(gateway, "perilune_sessions_bound")
        return bound + await self.metric(gateway, "perilune_shared_state_sessions")

    async def turn(self, session: str, turn: int) -> Turn:
        """Play a session's turn; its prompt grows with its turns."""
        messages = [
            {"role": "user", "content": f"{session} turn {n} says something " * 40} for n in range(turn + 1)
        ]
        body = {"model": OPTIONS.model, "messages": messages, "max_tokens": 4}
        headers = {"x-perilune-decision": "1", "x-session-id": session}
        async with self.http.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as answer:
            await answer.read()
            endpoint, reason, *_ = f"{answer.headers.get('x-perilune-decision', '')};;".split(";")
            return Turn(session, answer.status, endpoint, reason.strip())

    async def load(self, first_turn: int, turns: int = TURNS) -> list[Turn]:
        """All turns of all sessions, a session's one after the other. Few run at a time, so that no engine
        gets so busy that the policy moves sessions away from it."""
        places = asyncio.Semaphore(4)

        async def session(name: str) -> list[Turn]:
            async with places:
                return [await self.turn(name, first_turn + n) for n in range(turns)]

        each = await asyncio.gather(*(session(f"session-{n}") for n in range(SESSIONS)))
        return [turn for turns in each for turn in turns]


@pytest.fixture(autouse=True)
def _nothing_left_open() -> Iterator[None]:
    """Blame a connection that is left open on the test that left it, not on a later one."""
    yield
    gc.collect()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory):
    async with AsyncExitStack() as exits:
        stack = await exits.enter_async_context(
            Stack(
                engines=4,
                options=OPTIONS,
                routing=PATIENT,
                with_gateway=False,
                with_envoy=False,
                vital=frozenset(),
            )
        )
        http = await exits.enter_async_context(aiohttp.ClientSession())
        rig = Rig(stack, http)
        rig.server = await rig.start_server()
        await rig.start_gateway("gateway-1")
        await rig.start_gateway("gateway-2")
        processors = list(rig.ext_proc.values())
        bootstrap = config(stack.endpoints, processors, message_timeout_s=30.0, fail_open=False)
        envoy = await exits.enter_async_context(Envoy(bootstrap))
        rig.url = envoy.url

        async def both_connected() -> bool:
            return all([await rig.metric(g, "perilune_shared_state_peers") == 1 for g in rig.gateways])

        await until_true(both_connected)
        yield rig


def lost(turns: list[Turn]) -> list[Turn]:
    """Return the turns on another endpoint than their session's turn before, without a decision to move the
    session. The policy may decide so on a machine that is busy with other things, and then says so."""
    found: list[Turn] = []
    bound: dict[str, str] = {}
    for turn in turns:
        if bound.setdefault(turn.session, turn.endpoint) != turn.endpoint and turn.reason != Reason.MOVED:
            found.append(turn)
        bound[turn.session] = turn.endpoint
    return found


def failed(turns: list[Turn]) -> list[Turn]:
    return [turn for turn in turns if turn.status != 200]


async def test_replicas_act_as_one_and_outlive_each_other_and_the_server(rig: Rig) -> None:
    """One story, because each part begins where the one before ends."""
    # Sessions whose turns alternate between two gateways stay on one engine.
    turns = await rig.load(0, 1)

    async def known() -> bool:
        return min([await rig.knows(gateway) for gateway in rig.gateways]) >= SESSIONS

    await until_true(known)
    turns += await rig.load(1)
    assert failed(turns) == []
    alone = [await rig.metric(g, "perilune_decisions_total") for g in rig.gateways]
    assert min(alone) > SESSIONS, "Envoy did not ask both gateways"
    assert lost(turns) == []

    # A late replica has read all sessions before it is ready.
    await rig.start_gateway("late")
    assert await rig.knows("late") >= SESSIONS
    await rig.kill(rig.gateways.pop("late"))

    # Killing a gateway fails no request and loses no binding.
    await rig.kill(rig.gateways.pop("gateway-1"))
    turns += await rig.load(TURNS + 1, 1)
    assert failed(turns) == []
    assert lost(turns) == []

    async def no_peers() -> bool:
        return await rig.metric("gateway-2", "perilune_shared_state_peers") == 0

    await until_true(no_peers)

    # Without the server, requests are served, and health says what is missing.
    assert rig.server is not None
    await rig.kill(rig.server)

    async def says_so() -> bool:
        return "shared_state" in await rig.problems("gateway-2")

    await until_true(says_so)
    turns += await rig.load(TURNS + 2, 1)
    assert failed(turns) == []
    assert lost(turns) == []

    # A server that comes back empty is filled again, for replicas that come later.
    rig.server = await rig.start_server()

    async def connected() -> bool:
        return "shared_state" not in await rig.problems("gateway-2")

    await until_true(connected)

    async def again() -> bool:
        if "again" in rig.gateways:
            await rig.kill(rig.gateways.pop("again"))
        await rig.start_gateway("again")
        return await rig.knows("again") >= SESSIONS

    await until_true(again)


async def test_new_sessions_wait_at_every_gateway_for_contexts_that_any_of_them_counts(rig: Rig) -> None:
    small, rules = (
        EngineOptions(kv_tokens=4_000, time_scale=4.0),
        spec.SessionAdmission(enabled=True, max_wait_seconds=60.0),
    )
    async with AsyncExitStack() as exits:
        stack = await exits.enter_async_context(
            Stack(
                engines=1,
                options=small,
                routing=spec.Routing(session_admission=rules),
                with_gateway=False,
                with_envoy=False,
            )
        )
        here = Rig(stack, rig.http)
        await here.start_server()
        for name in ("gateway-1", "gateway-2"):
            await here.start_gateway(name)
        bootstrap = config(stack.endpoints, list(here.ext_proc.values()), message_timeout_s=62.0)
        here.url = (await exits.enter_async_context(Envoy(bootstrap))).url

        async def sums(name: str) -> list[float]:
            return [await here.metric(gateway, name) for gateway in here.gateways]

        async def only_turn(session: str, words: int, answer_tokens: int) -> int:
            prompt = " ".join(f"{session}{i}" for i in range(words))
            body = {"model": small.model, "prompt": prompt, "max_tokens": answer_tokens}
            headers = {"x-session-id": session, names.FINAL_TURN_HEADERS[0]: "true"}
            async with rig.http.post(f"{here.url}/v1/completions", json=body, headers=headers) as answer:
                await answer.read()
                return answer.status

        async def both_count_the_first() -> bool:
            return min(await sums("perilune_active_context_tokens")) > 1_000

        async def all_wait() -> bool:
            return sum(await sums("perilune_new_sessions_waiting")) == 8

        async def engine_waits(waits: bool) -> None:
            url = f"http://{stack.endpoints[0]}/fault"
            async with rig.http.post(url, json={"hang": waits}) as answer:
                assert answer.status == 200

        await engine_waits(True)
        first = asyncio.create_task(only_turn("first", 280, 400))
        await until_true(both_count_the_first)
        later = [asyncio.create_task(only_turn(f"later-{n}", 180, 1)) for n in range(8)]
        await until_true(all_wait)
        assert min(await sums("perilune_new_sessions_waiting")) > 0, "Envoy did not ask both gateways"
        assert not first.done()
        await engine_waits(False)
        assert await first == 200
        assert await asyncio.gather(*later) == [200] * 8


async def test_a_client_of_the_server_reads_no_name_of_a_session(rig: Rig) -> None:
    assert (await rig.turn("a-name-of-a-session", 0)).status == 200
    async with Redis(port=rig.port, password=PASSWORD) as client:

        async def kept() -> bool:
            return await client.dbsize() > 1

        await until_true(kept)
        keys = [key async for key in client.scan_iter()]
        strings = [key for key in keys if await client.type(key) == b"string"]
        values = [await client.get(key) for key in strings]
        entries = await client.xrange("perilune:1:{default/local}:changes")
    everything = b"".join([*keys, *filter(None, values), *(entry[1][b"b"] for entry in entries)])
    assert len(entries) > 1
    assert b"a-name" not in everything
    assert b"session-1" not in everything


async def test_a_turn_at_another_gateway_follows_a_copy_and_a_dead_planners_offer_expires(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two gateways' states, whose changes travel through the server; engines' events reach both."""
    server, name = Server(f"redis://127.0.0.1:{rig.port}", PASSWORD), "offers"
    first, second = HandingReplica("a"), HandingReplica("b")
    links = {
        replica: SharedState(server, name, replica.shared, replica.changed, time.monotonic, Random(1))
        for replica in (first, second)
    }
    tasks = {replica: asyncio.create_task(link.run()) for replica, link in links.items()}

    try:
        await until(lambda: first.shared.peers == second.shared.peers == 1)
        for replica in (first, second):
            replica.router.configure(replica.pool(draining=B))
        for session in ("s", "t"):
            ids = text(ord(session), 320)
            assert first.turn(session, ids).target == A
            second.announce(A, ids)
            await until(lambda session=session: second.shared.sessions == 1)
            assert second.turn(session, ids).target == A
            first.announce(A, ids)
        for replica in (first, second):
            replica.router.configure(replica.pool(draining=A))
        first.router.plan_moves(first.shared.plans)
        second.router.plan_moves(second.shared.plans)
        copies = {legs.handoff.move.subject.session_id: legs for legs in first.handing_over.due()}
        assert set(copies) == {"s", "t"}
        assert second.handing_over.due() == []
        await until(lambda: second.state.offers.copies(B, second.now) == 2)
        second.announce(B, list(copies["s"].content.ids))
        record = second.turn("s", [*copies["s"].content.ids, *text(9, 160)])
        assert (record.target, record.cached_tokens) == (B, 320)
        await until(lambda: first.host("s") == B)

        # The planner dies without a word. What it copies is not offered again until that expires.
        monkeypatch.setattr(first.shared, "take", lambda **_: Outbox((), ()))

        # Its last sign of life may still be on its way, and holds from when it comes.
        def later() -> bool:
            second.now += LEASE_S / 30
            return second.shared.plans

        await until(later)
        second.router.plan_moves()
        assert second.handing_over.due() == []
        second.now += STANDS_S["copying"]
        second.router.plan_moves()
        assert [legs.handoff.move.subject.session_id for legs in second.handing_over.due()] == ["t"]
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)


async def test_the_operators_server_asks_for_the_password_and_is_bounded(rig: Rig) -> None:
    """And drops sessions before the stream of changes when its memory is used up."""
    async with Redis(port=rig.port, retry=None) as stranger:
        with pytest.raises(AuthenticationError):
            await stranger.dbsize()
    async with Redis(port=rig.port, password=PASSWORD) as client:
        told = {**await client.config_get("maxmemory*"), **await client.config_get("save")}
    limit = int(quantities.quantity(CONTAINER["resources"]["limits"]["memory"]))
    assert 0 < int(told["maxmemory"]) <= 0.8 * limit
    assert (told["maxmemory-policy"], told["save"]) == ("volatile-ttl", "")


async def test_gateways_verify_the_certificate_of_a_server_with_tls(rig: Rig, tmp_path: Path) -> None:
    certificate, key = certificates.make(tmp_path)
    other, _ = certificates.make(tmp_path, "other")
    server = await rig.start_server(
        *("--port", "0", "--tls-port", f"{rig.tls_port}"),
        *("--tls-cert-file", f"{certificate}", "--tls-key-file", f"{key}"),
    )
    address = ("--state-server", f"rediss://127.0.0.1:{rig.tls_port}", "--state-ca")
    await rig.start_gateway("trusting", *address, f"{certificate}")
    await rig.start_gateway("doubting", *address, f"{other}")

    async def connected() -> bool:
        return await rig.metric("trusting", "perilune_shared_state_connected") == 1

    async def refused() -> bool:
        problems = (await rig.page("doubting", "/api/health"))["problems"]
        said = [problem for problem in problems if problem["kind"] == "shared_state"]
        return any("certificate verify failed" in str(problem) for problem in said)

    await until_true(connected)
    await until_true(refused)
    for process in (rig.gateways.pop("trusting"), rig.gateways.pop("doubting"), server):
        await rig.kill(process)


@pytest.mark.parametrize(
    "others", [pytest.param(1, marks=pytest.mark.heavy), pytest.param(4, marks=pytest.mark.bench)]
)
async def test_a_gateway_that_starts_knows_20000_sessions_when_it_is_ready_within_ten_seconds_of_cpu(
    rig: Rig, others: int
) -> None:
    many, now_us = 20_000, time.time_ns() // 1_000
    kept = Names(PASSWORD.encode())
    async with AsyncExitStack() as exits:
        stack = await exits.enter_async_context(
            Stack(
                engines=1,
                options=OPTIONS,
                routing=PATIENT,
                with_gateway=False,
                with_envoy=False,
                vital=frozenset(),
            )
        )
        here = Rig(stack, rig.http)
        await here.start_server()
        await asyncio.gather(*(here.start_gateway(f"gateway-{n}") for n in range(others)))
        (endpoint,) = stack.endpoints
        async with Redis(port=here.port, password=PASSWORD) as client:
            pipe = client.pipeline(transaction=False)
            for n in range(many):
                name = kept.session(SessionKey("", f"s-{n}"))
                bound = Bound(
                    at_us=now_us,
                    session=name,
                    host=endpoint,
                    turns=3,
                    context_tokens=8_000,
                    body_bytes=32_000,
                    bytes_per_token=4.0,
                    blocks=500,
                    tail=n,
                    prompt_blocks=500,
                    prompt_tail=n,
                    prompt_tokens=8_000,
                )
                pipe.set(b"perilune:1:{default/local}:session:" + name, encode(Batch("script", (bound,))))
            await pipe.execute()

            async def connections() -> int:
                return int((await client.info("clients"))["connected_clients"])

            before = await connections()

            async def connects() -> bool:
                return await connections() > before

            starting = asyncio.create_task(here.start_gateway("late"))
            await until_true(connects)
            connected_at = time.monotonic()
            await starting
            ready_s = time.monotonic() - connected_at
        cpu_s = await here.metric("late", "process_cpu_seconds_total")
        assert await here.knows("late") == many
        assert await here.metric("late", "perilune_shared_state_peers") == others
        assert cpu_s < 10
        print(
            f"\n{many} sessions, beside {others} gateways: ready after {cpu_s:.1f} s of CPU, {ready_s:.1f} s"
            " after it connected"
        )


@pytest.mark.parametrize(
    "seconds", [pytest.param(2.0, marks=pytest.mark.heavy), pytest.param(60.0, marks=pytest.mark.bench)]
)
async def test_an_absence_of_the_server_fails_no_request_and_leaves_no_difference(
    rig: Rig, seconds: float
) -> None:
    """Sessions go on and new ones begin while the server is away. It comes back empty."""
    async with AsyncExitStack() as exits:
        stack = await exits.enter_async_context(
            Stack(
                engines=4,
                options=OPTIONS,
                routing=PATIENT,
                with_gateway=False,
                with_envoy=False,
                vital=frozenset(),
            )
        )
        here = Rig(stack, rig.http)
        server = await here.start_server()
        for gateway in ("gateway-1", "gateway-2"):
            await here.start_gateway(gateway)
        processors = list(here.ext_proc.values())
        bootstrap = config(stack.endpoints, processors, message_timeout_s=30.0, fail_open=False)
        here.url = (await exits.enter_async_context(Envoy(bootstrap))).url
        played: list[Turn] = []
        loading = True

        async def client(number: int) -> None:
            conversation = 0
            while loading:
                session, conversation = f"client-{number}-{conversation}", conversation + 1
                for turn in range(TURNS):
                    played.append(await here.turn(session, turn))

        async def alone() -> bool:
            return min([("shared_state" in await here.problems(g)) for g in here.gateways])

        async def together() -> bool:
            return not any([("shared_state" in await here.problems(g)) for g in here.gateways])

        async def agree() -> bool:
            """Return whether all sessions that both gateways routed have one host, and there are some."""
            both = 0
            for session in {turn.session for turn in played}:
                pages = [await here.page(g, f"/api/sessions/{session}") for g in ("gateway-1", "gateway-2")]
                known = [page["tenants"] for page in pages if "error" not in page]
                if len({row["host"] for rows in known for row in rows}) > 1:
                    return False
                both += len(known) == 2
            return both > 0

        await until_true(together)
        clients = [asyncio.create_task(client(n)) for n in range(4)]
        await here.kill(server)
        await until_true(alone)
        await asyncio.sleep(seconds)
        during = len(played)
        await here.start_server()
        await until_true(together)
        loading = False
        await asyncio.gather(*clients)
        sessions = {turn.session for turn in played}
        assert failed(played) == []
        assert during > 4 * TURNS
        await until_true(agree)
        await here.start_gateway("late")

        async def all_known() -> bool:
            return await here.knows("late") >= len(sessions)

        await until_true(all_known)
        print(
            f"\nserver away for {seconds:g} s: {len(played)} requests of {len(sessions)} sessions, 0 failed"
        )
