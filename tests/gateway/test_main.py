"""What a running gateway takes over from a changed pool document."""

import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from urllib.request import urlopen

import aiohttp
import grpc.aio
import pytest
import replaying_engine
import virtual_time
from forked import Popen
from grpc_health.v1 import health_pb2, health_pb2_grpc
from msgspec import structs
from prometheus_client import generate_latest
from routing_objects import head
from token_requests import COMPLETIONS, request
from waiting import HANG

from perilune_api import extproc_pb2 as pb
from perilune_api.pool import (
    EndpointSpec,
    Engine,
    Limits,
    Metadata,
    Model,
    Pool,
    Routing,
    Selector,
    SessionKeys,
    Spec,
    SpecError,
    dump,
)
from perilune_gateway import main
from perilune_gateway.feeds.pool_file import PoolFile
from perilune_gateway.feeds.shared_state import ANSWER_S, WAIT_MS, Server
from perilune_gateway.model import (
    EngineMetrics,
    Outcome,
    Refusal,
    RequestHead,
    Routed,
    Tier,
    TokenSource,
)
from perilune_gateway.model.shared import Alive, Batch, encode
from perilune_gateway.served_pool import OTHERS_SERVE_S, WARM_S, ServedPool
from perilune_gateway.state.facts import Unreached

READY = r"ext_proc=(\S+) admin=(\S+)"


A, B = "10.0.0.1:8000", "10.0.0.2:8000"


def pool(*addresses: str, routing: Routing | None = None, model: str = "m") -> Pool:
    endpoints = tuple(EndpointSpec(address=a) for a in addresses)
    return Pool(Metadata("p"), Spec(Model(name=model), routing=routing or Routing(), endpoints=endpoints))


class Clock:
    """Seconds that pass when a test says so."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def gateway(tmp_path, clock):
    first = pool(routing=Routing(limits=Limits(decision_seconds=3600)))
    made = ServedPool(first, PoolFile(tmp_path / "pool.yaml", first), clock=clock)
    yield made
    await made.tokenizer.close()
    await made.events.close()


def is_known(gateway: ServedPool, session: str) -> bool:
    """Return whether a turn of the session is decided by its headers."""
    headers = {"x-session-id": session, "content-length": "100"}
    return isinstance(
        gateway.router.on_headers(RequestHead(method="POST", path=COMPLETIONS, headers=headers)), Routed
    )


def first_turn(gateway: ServedPool, session: str) -> None:
    head = RequestHead(method="POST", path=COMPLETIONS, headers={"x-session-id": session})
    assert isinstance(gateway.router.on_body(head, b'{"model": "m", "prompt": [1, 2]}'), Routed)


async def test_a_changed_document_limits_the_sessions_that_are_kept(gateway, clock) -> None:
    gateway.on_pool(pool(A))
    for session in ("one", "two"):
        first_turn(gateway, session)
    assert is_known(gateway, "one")
    session = SessionKeys(idle_seconds=60, max_sessions=1)
    gateway.on_pool(pool(A, routing=Routing(session=session)))
    first_turn(gateway, "three")
    assert [is_known(gateway, name) for name in ("one", "two", "three")] == [False, False, True]
    clock.now += 61.0
    assert not is_known(gateway, "three")


async def test_another_selector_counts_and_no_selector_needs_a_restart(tmp_path) -> None:
    """Sessions stay known."""

    def selecting(*addresses: str, **labels: str) -> Pool:
        made = pool(*addresses)
        selector = Selector(labels=labels, port=len(addresses))
        return structs.replace(
            made, spec=structs.replace(made.spec, engine=Engine(selector=selector, block_size=16))
        )

    made = ServedPool(selecting(A, app="old"), PoolFile(tmp_path / "pool.yaml"))
    try:
        first_turn(made, "one")
        made.on_pool(selecting(A, B, app="new"))
        assert len(made.router.pool.spec.endpoints) == 2
        assert is_known(made, "one")
        with pytest.raises(SpecError, match=r"restart the gateway - at `\$\.spec\.engine`"):
            made.on_pool(pool(A, B))
    finally:
        await made.tokenizer.close()
        await made.events.close()


async def test_a_changed_document_limits_the_size_of_bodies(gateway) -> None:
    gateway.on_pool(pool(A, routing=Routing(limits=Limits(max_body_bytes=9))))
    stream = main.Gateway([gateway]).service.open()
    names = ((":method", "POST"), (":path", COMPLETIONS), ("content-length", "10"))
    headers = pb.HeaderMap(headers=[pb.HeaderValue(key=name, value=value) for name, value in names])
    asked = pb.ProcessingRequest(request_headers=pb.HttpHeaders(headers=headers))
    (answer,) = stream.receive(asked.SerializeToString()).messages
    assert pb.ProcessingResponse.FromString(answer).immediate_response.status.code == 413
    stream.closed()


async def test_a_changed_document_limits_the_wait_for_tokens(gateway) -> None:
    """Of an engine that never answers."""
    asked = request(COMPLETIONS, prompt="some words")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        gateway.on_pool(pool(address, routing=Routing(limits=Limits(decision_seconds=0.1))))
        assert (await gateway.tokenizer.encode(asked)).source is TokenSource.ESTIMATE


async def test_a_scrape_that_ends_after_its_endpoint_left_makes_no_series(gateway) -> None:
    gateway.on_pool(pool(A))
    gateway.on_metrics(A, None, 0.0)
    assert A.encode() in generate_latest(gateway.metrics.registry)
    gateway.on_pool(pool())
    gateway.on_metrics(A, None, 1.0)
    assert A.encode() not in generate_latest(gateway.metrics.registry)


@pytest.mark.parametrize(
    ("after", "held"),
    [
        pytest.param(EngineMetrics(prefix_queries_tokens=10, started_s=5.0), 0, id="counters began anew"),
        pytest.param(EngineMetrics(prefix_queries_tokens=200, started_s=9.0), 0, id="a later process"),
        pytest.param(EngineMetrics(prefix_queries_tokens=200, started_s=5.0), 2, id="the same process"),
    ],
)
async def test_an_engine_that_came_back_is_not_ready_while_its_old_blocks_are_believed(
    gateway, after: EngineMetrics, held: int
) -> None:
    gateway.on_pool(pool(A))
    address, chain = A, (11, 12)
    gateway.state.index.stored(address, Tier.DEVICE, chain, 0.0)
    gateway.on_metrics(address, EngineMetrics(prefix_queries_tokens=100, started_s=5.0), 1.0)
    gateway.state.facts.tell(Unreached(address, 2.0))
    gateway.on_metrics(address, after, 3.0)
    assert gateway.state.fleet.view(3.0)[0].endpoint.ready
    assert gateway.state.index.leading(address, chain, 3.0) == held


async def test_what_a_restarted_engine_has_announced_by_itself_stays(gateway) -> None:
    gateway.on_pool(pool(A))
    address, chain = A, (11, 12)
    gateway.on_metrics(address, EngineMetrics(prefix_queries_tokens=100), 1.0)
    gateway.blocks.reset(address, 2.0)
    gateway.state.index.stored(address, Tier.DEVICE, chain, 2.5)
    gateway.on_metrics(address, EngineMetrics(prefix_queries_tokens=10), 3.0)
    assert gateway.state.index.leading(address, chain, 3.0) == 2


async def test_an_engine_that_sleeps_gets_nothing_and_comes_back_empty(gateway) -> None:
    def problems() -> list[str]:
        return [one.kind.value for one in gateway.pages.health().problems if one.endpoint == A]

    gateway.on_pool(pool(A, B))
    chain = (11, 12)
    for address in (A, B):
        gateway.on_metrics(address, EngineMetrics(), 1.0)
    gateway.state.index.stored(A, Tier.DEVICE, chain, 1.0)
    gateway.on_metrics(A, EngineMetrics(asleep=True), 2.0)
    routed = [gateway.router.on_headers(head("/v1/models", method="GET")) for _ in range(4)]
    assert {one.destinations for one in routed} == {(B,)}
    assert gateway.pages.decisions.get(routed[0].request_id).excluded == {A: "asleep"}
    assert problems() == ["asleep"]
    assert gateway.state.index.leading(A, chain, 2.0) == 0
    gateway.state.index.stored(A, Tier.DEVICE, chain, 3.0)
    gateway.on_metrics(A, EngineMetrics(), 3.0)
    assert "asleep" not in problems()
    assert gateway.state.index.leading(A, chain, 3.0) == 2
    gateway.on_metrics(B, EngineMetrics(asleep=True), 4.0)
    assert gateway.router.on_headers(head("/v1/models", method="GET")).destinations == (A,)


async def test_another_model_needs_another_gateway(gateway) -> None:
    with pytest.raises(SpecError, match=r"restart the gateway - at `\$.spec.model`"):
        gateway.on_pool(pool(model="n"))


async def test_it_goes_on_serving_while_it_says_that_it_will_not(gateway, capsys) -> None:
    """So that an Envoy with health checks has time to send new requests elsewhere."""
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    stop = asyncio.Event()
    whole = main.Gateway([gateway])
    running = asyncio.create_task(whole.run("127.0.0.1:0", "127.0.0.1:0", 1.0, stop, drain_s=600.0))
    try:
        async with asyncio.timeout(HANG):
            while not (found := re.search(READY, capsys.readouterr().out)):  # noqa: ASYNC110 - printed
                await asyncio.sleep(0.01)
            async with grpc.aio.insecure_channel(found[1]) as channel, aiohttp.ClientSession() as http:
                health = health_pb2_grpc.HealthStub(channel)

                async def says(service: str) -> int:
                    return (await health.Check(health_pb2.HealthCheckRequest(service=service))).status

                assert await says("readiness") == serving
                ready = f"http://{found[2]}/healthz?service=readiness"
                async with http.get(ready) as reply:
                    assert reply.status == 200
                stop.set()
                while await says("readiness") != not_serving:  # noqa: ASYNC110 - by gRPC
                    await asyncio.sleep(0.01)
                assert await says("liveness") == serving
                async with http.get(f"http://{found[2]}/readyz") as reply:
                    assert reply.status == 503
                async with http.get(ready) as reply:
                    assert reply.status == 503
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        await whole.server.stop(0)


@pytest.mark.parametrize(
    ("options", "status", "says"),
    [
        pytest.param(["--pool", "absent"], 2, "absent: No such file or directory", id="no pool file"),
        pytest.param(["--pool", "."], 2, ".: Is a directory", id="a folder for a pool file"),
        pytest.param(["--pool", "empty"], 2, "empty: Expected `object`, got `null`", id="no document"),
        pytest.param(
            ["--pool", "pool", "--decision-log", "absent/log"],
            2,
            "absent/log: No such file or directory",
            id="no folder for the decision log",
        ),
        pytest.param(
            ["--pool", "pool", "--admin", "1.2.3.4:9003"],
            1,
            "admin cannot listen on 1.2.3.4:9003: Cannot assign requested address; choose another with",
            id="no address of this machine",
        ),
    ],
)
def test_a_start_that_fails_says_why_in_one_line(tmp_path, options, status, says) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "pool").write_text("metadata: {name: p}\nspec: {model: {name: m}, endpoints: []}\n")
    ended = Popen("perilune_gateway.main", options, folder=tmp_path)
    _, said = ended.communicate()
    assert ended.returncode == status
    assert said.startswith(f"perilune-gateway: {says}")
    assert said.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda s: s.name)
@pytest.mark.processes
def test_a_signal_drains_the_gateway(tmp_path, number: signal.Signals) -> None:
    file = tmp_path / "pool.yaml"
    file.write_bytes(dump(pool(A)))
    options = ["--pool", str(file), "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
    running = Popen("perilune_gateway.main", options)
    try:
        assert re.search(READY, running.stdout.readline())
        running.send_signal(number)
        _, said = running.communicate(timeout=HANG)
    finally:
        running.kill()
    assert running.returncode == 0
    assert "draining" in said


@pytest.mark.processes
def test_a_gateway_knows_what_its_engines_cache_when_it_begins_to_serve(tmp_path) -> None:
    """One that has replaced another would bind sessions to engines that lack their KV."""
    pipe, file = subprocess.PIPE, tmp_path / "pool.yaml"
    publisher = [sys.executable, replaying_engine.__file__, "400", "4"]
    with subprocess.Popen(publisher, stdin=pipe, stdout=pipe, text=True) as engine:
        assert engine.stdout is not None
        events, replay = engine.stdout.readline().split()
        spec = pool().spec
        followed = structs.replace(
            spec, endpoints=(EndpointSpec(address=A, events=(events,), replay=(replay,)),)
        )
        file.write_bytes(dump(structs.replace(pool(), spec=followed)))
        command = [sys.executable, "-m", "perilune_gateway.main", "--pool", str(file)]
        command += ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
        running = subprocess.Popen(command, stdout=pipe, text=True)
        try:
            assert running.stdout is not None
            found = re.search(READY, running.stdout.readline())
            assert found
            with urlopen(f"http://{found[2]}/api/index/stats") as answer:
                assert json.load(answer)["entries"] == 80
        finally:
            running.kill()
            running.communicate()
            engine.communicate("")


def test_a_gateway_loads_no_slow_package_that_it_does_not_need() -> None:
    """Clients of Kubernetes, gRPC and Redis take 40% of the CPU time of a start, and what reads a model's
    tokenizer and chat template another 15%."""
    code = "import sys, perilune_gateway.main; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG, check=True
    )
    loaded = set(done.stdout.split())
    assert "perilune_gateway" in loaded
    assert not loaded & {"kubernetes", "grpc", "redis", "opentelemetry"}
    assert not loaded & {"tokenizers", "fastokens", "jinja2", "cbor2", "zstandard"}


@dataclass
class Announced:
    """A pool of the Kubernetes API: there, absent, or invalid."""

    name: str
    document: Pool | SpecError | None
    namespace: str = "ns"
    serves: list[str] = field(default_factory=list)
    serves_others: asyncio.Event = field(default_factory=asyncio.Event)
    missing: asyncio.Event = field(default_factory=asyncio.Event)
    answers: bool = True
    """Whether the API server tells of it."""

    async def first(self) -> Pool:
        if self.document is None:
            if self.answers:
                self.missing.set()
            await asyncio.Event().wait()
        if isinstance(self.document, SpecError):
            raise self.document
        assert self.document is not None
        return self.document

    def name_others(self, *others: str) -> None:
        self.serves = list(others)
        self.serves_others.set()


def test_a_pool_that_is_missing_or_invalid_does_not_hold_up_the_others(caplog) -> None:
    own = Announced("p", pool(A), serves=["absent", "broken", "q"])
    broken = Announced("broken", SpecError("Expected `int` - at `$.spec.x`"))
    others = {o.name: o for o in (Announced("absent", None), broken, Announced("q", pool(model="n")))}
    found = virtual_time.run(lambda: main.pools_present(own, others.__getitem__, wait_s=600.0))
    assert [source for _, source in found] == [own, others["q"]]
    assert "pool=ns/absent error=there is no such pool" in caplog.text
    assert "pool=ns/broken error=Expected `int`" in caplog.text


def test_a_pool_of_which_the_api_server_tells_nothing_is_waited_for_for_a_while() -> None:
    async def start() -> tuple[int, float]:
        own = Announced("p", pool(A), serves=["q"])
        found = await main.pools_present(own, lambda name: Announced(name, None, answers=False))
        return len(found), asyncio.get_running_loop().time()

    assert virtual_time.run(start) == (1, main.OTHERS_S)


class Silent(Server):
    """A server of shared state that does not answer."""

    def client(self, node: str = "") -> "Silent":
        return self

    async def time(self) -> None:
        await asyncio.sleep(ANSWER_S)
        raise TimeoutError

    async def aclose(self) -> None: ...


class Stop(asyncio.Event):
    """The gateway is to stop as soon as it is ready."""

    waited_for_at = nan

    async def wait(self) -> bool:
        self.waited_for_at = asyncio.get_running_loop().time()
        return True


def test_all_that_a_start_waits_for_is_waited_for_at_the_same_time(tmp_path) -> None:
    """Two pools, each with an engine that tells nothing and a server of shared state that does not answer."""

    silent = Silent("redis://127.0.0.1:1")
    stop = Stop()

    async def start() -> None:
        pools = []
        for name in ("p", "q"):
            endpoint = EndpointSpec(address="127.0.0.1:1", events=("tcp://127.0.0.1:1",))
            spec = structs.replace(pool().spec, endpoints=(endpoint,), model=Model(name=name))
            named = Pool(Metadata(name), spec)
            pools.append(ServedPool(named, PoolFile(tmp_path / name, named), state_server=silent))
        await main.Gateway(pools).run("127.0.0.1:0", "127.0.0.1:0", 0.0, stop)

    virtual_time.run(start)
    assert stop.waited_for_at == pytest.approx(max(WARM_S, ANSWER_S), abs=0.1)


class Shared(Server):
    """A server of shared state at which another gateway gives signs of life."""

    number = 0

    def client(self, node: str = "") -> "Shared":
        return self

    async def time(self) -> tuple[int, int]:
        return 1, 0

    async def scan_iter(self, **_: object) -> AsyncIterator[bytes]:
        for key in ():
            yield key

    async def get(self, _: str) -> None: ...

    async def xread(self, streams: dict[str, bytes], **_: object) -> list[object]:
        await asyncio.sleep(WAIT_MS / 1_000)
        Shared.number += 1
        message = encode(Batch("other", (Alive(),), Shared.number))
        return [(stream, [(b"1-%d" % Shared.number, {b"b": message})]) for stream in streams]

    def pipeline(self, **_: object) -> "Shared":
        return self

    def xadd(self, *_: object, **__: object) -> None: ...

    async def execute(self) -> list[bytes]:
        return [b"1-0"]

    async def aclose(self) -> None: ...


def test_where_others_serve_what_engines_have_announced_is_waited_for_longer(tmp_path) -> None:
    stop = Stop()

    async def start() -> None:
        endpoint = EndpointSpec(address="127.0.0.1:1", events=("tcp://127.0.0.1:1",))
        given = Pool(Metadata("p"), structs.replace(pool().spec, endpoints=(endpoint,)))
        served = ServedPool(
            given, PoolFile(tmp_path / "p", given), state_server=Shared("redis://127.0.0.1:1")
        )
        await main.Gateway([served]).run("127.0.0.1:0", "127.0.0.1:0", 0.0, stop)

    virtual_time.run(start)
    assert stop.waited_for_at == pytest.approx(OTHERS_SERVE_S, abs=0.1)


async def test_a_gateway_without_its_own_pool_does_not_start() -> None:
    own = Announced("p", SpecError("Expected `int`"), serves=["q"])
    with pytest.raises(SpecError, match=r"^ns/p: Expected"):
        await main.pools_present(own, lambda name: Announced(name, pool(A)))


async def test_pools_of_one_gateway_need_names_of_their_own(gateway) -> None:
    with pytest.raises(SpecError, match="2 pools have the name `p`"):
        main.Gateway([gateway, gateway])


async def test_names_of_several_pools_stand_in_paths(gateway, tmp_path) -> None:
    odd = structs.replace(pool(A), metadata=Metadata("a/{b}"))
    other = ServedPool(odd, PoolFile(tmp_path / "odd.yaml", odd))
    with pytest.raises(SpecError, match=r"not `a/{b}` - at `\$.metadata.name`"):
        main.Gateway([gateway, other])
    await other.close()


@pytest.mark.parametrize("key", ["two words", "ends\n", "Schl\u00fcssel"])
def test_a_key_of_engines_that_no_header_carries_is_refused_with_its_cause(key: str) -> None:
    with pytest.raises(SpecError, match="PERILUNE_ENGINE_API_KEY has a blank, the end of a line"):
        main.authorization(key)


class Front:
    """A running gateway whose own pool is `p`, and the pools of the Kubernetes API."""

    def __init__(self, own: ServedPool, folder: Path) -> None:
        self.own_pool = own
        self.own = Announced("p", own.router.pool)
        self.announced: dict[str, Announced] = {}
        self.made: list[ServedPool] = []

        def watch(name: str) -> Announced:
            return self.announced.setdefault(name, Announced(name, None))

        def serve(pool: Pool, source) -> ServedPool:
            self.made.append(ServedPool(pool, PoolFile(folder / f"{pool.metadata.name}.yaml", pool)))
            return self.made[-1]

        self.gateway = main.Gateway([own], others=main.Others(self.own, watch, serve))
        self.admin = ""

    async def health(self) -> dict:
        async with self.http.get(f"http://{self.admin}/api/health") as reply:
            return await reply.json()

    async def told(self, wanted: Callable[[dict], bool]) -> dict:
        while not wanted(found := await self.health()):  # noqa: ASYNC110 - by HTTP
            await asyncio.sleep(0.01)
        return found

    async def serves(self, *pools: str) -> None:
        """Wait until exactly these pools are served."""

        def served(found: dict) -> list[str]:
            return [one["pool"] for one in found.get("pools", [found] if "pool" in found else [])]

        await self.told(lambda found: served(found) == [f"default/{name}" for name in pools])

    def models(self) -> list[str]:
        answer = self.gateway.service.entrance.on_headers(head("/v1/models", method="GET", has_body=False))
        return [model["id"] for model in json.loads(answer.body)["data"]]

    def asked(self, model: str) -> object:
        """Return what a new request for this model gets."""
        asked = RequestHead(method="POST", path=COMPLETIONS, headers={})
        body = json.dumps({"model": model, "prompt": [1, 2]}).encode()
        return self.gateway.service.entrance.on_body(asked, body)


@pytest.fixture
async def front(gateway, tmp_path, capsys) -> AsyncIterator[Front]:
    gateway.on_pool(pool(A))
    made = Front(gateway, tmp_path)
    stop = asyncio.Event()
    running = asyncio.create_task(made.gateway.run("127.0.0.1:0", "127.0.0.1:0", 1.0, stop))
    try:
        async with asyncio.timeout(HANG), aiohttp.ClientSession() as made.http:
            while not (found := re.search(READY, capsys.readouterr().out)):  # noqa: ASYNC110 - printed
                await asyncio.sleep(0.01)
            made.admin = found[2]
            yield made
            stop.set()
            await running
    finally:
        running.cancel()
        await made.gateway.server.stop(0)


def other(*addresses: str, name: str = "q", model: str = "n") -> Pool:
    return structs.replace(pool(*addresses, model=model), metadata=Metadata(name))


async def test_a_pool_that_comes_late_is_taken_in(front) -> None:
    """Health names it until then, and why it is not served; the gateway's own pool does not wait."""
    late = front.announced["q"] = Announced("q", SpecError("Expected `int`"))
    front.own.name_others("q")
    waiting = await front.told(lambda found: found.get("waiting") == {"q": "Expected `int`"})
    assert len(waiting["pools"]) == 1
    late.document = other(B)
    await front.serves("p", "q")
    assert (await front.health())["waiting"] == {}
    async with front.http.get(f"http://{front.admin}/pools/q/api/health") as reply:
        assert (await reply.json())["pool"] == "default/q"
    assert front.models() == ["m", "n"]


async def test_a_pool_that_is_named_no_more_leaves_and_its_requests_end(front) -> None:
    """The gateway's own pool keeps its sessions, and its pages are those of the only pool again."""
    first_turn(front.own_pool, "stays")
    front.announced["q"] = Announced("q", other(B))
    front.own.name_others("q")
    await front.serves("p", "q")
    runs = front.asked("n")
    front.own.name_others()
    await front.serves("p")
    assert is_known(front.own_pool, "stays")
    assert isinstance(front.asked("n").verdict, Refusal)
    assert front.gateway.service.of(runs.router)
    runs.router.finished(runs.verdict.ticket, Outcome.COMPLETED)
    front.own.name_others("q")
    await front.serves("p", "q")
    assert isinstance(front.asked("n").verdict, Routed)


async def test_a_pool_that_is_awaited_and_then_named_no_more_is_forgotten(front) -> None:
    front.own.name_others("q")
    await front.told(lambda found: found.get("waiting") == {"q": main.ABSENT})
    front.own.name_others()
    await front.serves("p")
    assert front.made == []


async def test_another_model_of_a_served_pool_is_taken_in_in_place_of_the_old_one(front) -> None:
    front.announced["q"] = Announced("q", other(B))
    front.own.name_others("q")
    await front.serves("p", "q")
    front.announced["q"].document = other(B, model="another")
    with pytest.raises(SpecError, match="Cannot change while running"):
        front.made[0].on_pool(front.announced["q"].document)
    while front.models() != ["m", "another"]:  # noqa: ASYNC110 - by the gateway's own tasks
        await asyncio.sleep(0.01)
    assert len(front.made) == 2
