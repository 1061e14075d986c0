"""Hostile clients and engines against the whole stack: a real Envoy, bodies buffered and in full duplex, the
real gateway. Hostile peers of the transports themselves are in tests/gateway/extproc.

Whatever is sent, the answer is an error that says what is wrong, nothing crashes, and nothing stays behind:
no open stream, no load. `-m bench` sends ten times as much.
"""

import asyncio
import io
import json
import random
import re
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import forked
import msgspec
import pytest
import pytest_asyncio
import zmq
import zmq.asyncio
from running_envoy import Envoy
from waiting import HANG, until_true

from perilune_api import pool as spec
from perilune_gateway.extproc import Transport
from perilune_lab.processes.envoy import Mode, config
from perilune_lab.processes.stack import EngineOptions, Stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

OPTIONS = EngineOptions(time_scale=100.0)
ROUTING = spec.Routing(
    allow_policy_header=True, limits=spec.Limits(max_body_bytes=1_000_000, decision_seconds=30.0)
)
CHAT = "/v1/chat/completions"
FINE = {"model": OPTIONS.model, "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 4}
DEEP = 200_000


@dataclass
class Victim:
    """A stack, and what can be seen of it."""

    stack: Stack
    http: aiohttp.ClientSession
    url: str
    """Envoy's."""

    async def send(self, body: object = FINE, path: str = CHAT, **headers: str) -> tuple[int, str]:
        """(status, code of the error or empty)."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {"content-type": "application/json"} | {n.replace("_", "-"): v for n, v in headers.items()}
        async with self.http.post(self.url + path, data=io.BytesIO(data), headers=named) as answer:
            said = await answer.read()
            if answer.status == 200:
                return 200, ""
            try:
                return answer.status, str(json.loads(said)["error"].get("code", ""))
            except (ValueError, KeyError, TypeError, AttributeError):
                return answer.status, said.decode(errors="replace")

    async def raw(self, head: list[bytes], body: bytes = b"") -> tuple[int, bytes]:
        """Bytes as no HTTP library would send them → (status, everything that came back)."""
        reader, writer = await self.open()
        try:
            lines = [*head, b"host: x", b"connection: close", b"content-length: %d" % len(body)]
            writer.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
            said = await asyncio.wait_for(reader.read(), HANG)
        finally:
            writer.close()
        return int(said.split(b" ", 2)[1]) if said else 0, said

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return await asyncio.open_connection(host, int(port))

    async def page(self, path: str) -> Any:
        async with self.http.get(self.stack.admin_url + path) as answer:
            return json.loads(await answer.read())

    async def metrics(self) -> dict[str, float]:
        async with self.http.get(self.stack.admin_url + "/metrics") as answer:
            lines = (await answer.text()).splitlines()
        rows = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in rows}

    async def at_rest(self) -> bool:
        """Nothing is open, running or queued."""
        nodes = (await self.page("/api/nodes/stats"))["nodes"]
        busy = [n for n in nodes if n["load"]["in_flight"] or n["load"]["pending_prefill_tokens"]]
        return not busy and (await self.metrics())["perilune_streams_open"] == 0

    async def unharmed(self) -> None:
        """Assert that everything has been given back, and that the next request is served."""
        await until_true(self.at_rest)
        assert await self.send() == (200, "")
        self.stack.check()
        log = (self.stack.folder / "gateway.log").read_text()
        assert "Traceback" not in log, log[log.index("Traceback") :][:3000]


BUFFERED, FULL_DUPLEX, GRPC = (
    pytest.param((transport, mode), id=f"{transport}, {mode}", marks=marks)
    for transport, mode, marks in (
        (Transport.H2, Mode.BUFFERED, ()),
        (Transport.H2, Mode.FULL_DUPLEX, pytest.mark.heavy),
        (Transport.GRPC, Mode.BUFFERED, pytest.mark.heavy),
    )
)
in_one_mode = pytest.mark.parametrize("victim", [BUFFERED], indirect=True)
"""For what does not depend on how Envoy sends bodies."""
over_either_transport = pytest.mark.parametrize("victim", [BUFFERED, FULL_DUPLEX, GRPC], indirect=True)


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=[BUFFERED, FULL_DUPLEX])
async def victim(request: pytest.FixtureRequest) -> AsyncIterator[Victim]:
    transport, mode = request.param
    stack = Stack(
        engines=2,
        options=OPTIONS,
        routing=ROUTING,
        with_envoy=False,
        gateway_arguments=("--transport", transport),
    )
    async with AsyncExitStack() as parts:
        await parts.enter_async_context(stack)
        envoy = await parts.enter_async_context(Envoy(config(stack.endpoints, [stack.ext_proc], mode=mode)))
        http = await parts.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        yield Victim(stack, http, envoy.url)


# -- bodies ----------------------------------------------------------------------------------------


def chat(**fields: object) -> bytes:
    return json.dumps(FINE | fields).encode()


BY_ENGINE = (400, "400")
"""What the gateway can route it does; the engine says what it wants."""
BODIES = [
    pytest.param(b"", {BY_ENGINE}, id="empty"),
    pytest.param(b"{", {(400, "bad_json")}, id="cut"),
    pytest.param(chat()[:-1], {(400, "bad_json")}, id="without its end"),
    pytest.param(chat() + b"}", {(400, "bad_json")}, id="with more after its end"),
    pytest.param(b"\x00" * 4096, {(400, "bad_json")}, id="zeros"),
    pytest.param(b"\xff\xfe\xfd", {(400, "bad_json")}, id="no text"),
    pytest.param(b"null", {(400, "bad_request")}, id="null"),
    pytest.param(b"[]", {(400, "bad_request")}, id="a list"),
    pytest.param(b"17", {(400, "bad_request")}, id="a number"),
    pytest.param(b'"x"', {(400, "bad_request")}, id="a string"),
    pytest.param(b"{}", {(400, "bad_request")}, id="an empty object"),
    pytest.param(chat(model=7), {(400, "bad_request")}, id="model is a number"),
    pytest.param(chat(model=None), {(200, "")}, id="model is null, as engines take it"),
    pytest.param(chat(model={"a": []}), {(400, "bad_request")}, id="model is an object"),
    pytest.param(chat(model="nobody"), {(404, "unknown_model")}, id="unknown model"),
    pytest.param(chat(model="\x00\r\n\x1b[2J"), {(404, "unknown_model")}, id="a model that steers terminals"),
    pytest.param(chat(model="m" * 500_000), {(404, "unknown_model")}, id="a model's name of 500 kB"),
    pytest.param(chat(messages="hello"), {(400, "bad_request")}, id="messages are a string"),
    pytest.param(chat(messages={}), {(400, "bad_request")}, id="messages are an object"),
    pytest.param(chat(messages=[]), {BY_ENGINE}, id="no messages"),
    pytest.param(chat(max_tokens="many"), {(400, "bad_request")}, id="max_tokens is a string"),
    pytest.param(chat(max_tokens=-5), {BY_ENGINE}, id="max_tokens below 0"),
    pytest.param(
        b"[" * DEEP, {(400, "bad_json"), (400, "bad_request")}, id="nested 200,000 deep, nothing else"
    ),
    pytest.param(
        chat(messages=1).replace(b": 1,", b": " + b"[" * DEEP + b"]" * DEEP + b","),
        {(400, "bad_json"), (400, "bad_request")},
        id="nested 200,000 deep, as messages",
    ),
    pytest.param(
        chat(x=1).replace(b'"x": 1', b'"x": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
        {(400, "bad_json"), (400, "bad_request")},
        id="nested 50,000 deep, in a field that nobody reads",
    ),
    pytest.param(b" " * 2_000_000, {(413, "body_too_large"), (413, "Payload Too Large")}, id="2 MB"),
    pytest.param(b" " * 50_000_000, {(413, "body_too_large"), (413, "Payload Too Large")}, id="50 MB"),
]


@pytest.mark.parametrize(("body", "expected"), BODIES)
@pytest.mark.parametrize("path", [CHAT])
async def test_a_body_that_is_none_is_refused_in_openais_form(
    victim: Victim, path: str, body: bytes, expected: set[tuple[int, str]]
) -> None:
    assert await victim.send(body, path) in expected


async def test_a_body_that_tells_no_length_is_refused_when_it_is_too_long(victim: Victim) -> None:
    """Also of a session that is known, whose turns are mostly decided without it."""

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield b" " * 100_000

    assert await victim.send(x_session_id="chunked") == (200, "")
    headers = {"content-type": "application/json", "x-session-id": "chunked"}
    async with victim.http.post(victim.url + CHAT, data=pieces(), headers=headers) as answer:
        assert answer.status == 413


ODD_BUT_HARMLESS = [
    pytest.param(chat(max_tokens=10**400), id="max_tokens of 400 digits"),
    pytest.param(chat(priority=10**300), id="priority of 300 digits"),
    pytest.param(chat(messages=[{"role": "user", "content": "\x00\u202e\U0010ffff\ufffe"}]), id="odd text"),
    pytest.param(chat().replace(b"hello", b"\\ud800"), id="half a surrogate pair"),
    pytest.param(chat(messages=[{"role": {"x": 1}, "content": [[["x"]]]}]), id="messages of other shapes"),
    pytest.param(chat(messages=[None, 1, "x", [], {}]), id="messages of all kinds"),
    pytest.param(chat(messages=[{"role": "user", "content": None}]), id="content is null"),
    pytest.param(chat(tools=[{"function": {"parameters": [[[]]]}}], tool_choice={"a": 1}), id="odd tools"),
    pytest.param(chat(prompt_cache_key="k" * 100_000, user="u" * 100_000), id="long names"),
    pytest.param(chat(chat_template="{{ 1/0 }}", chat_template_kwargs={"x": "{% for %}"}), id="a template"),
    pytest.param(
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}]),
        id="a broken image",
    ),
]


@pytest.mark.parametrize("body", ODD_BUT_HARMLESS)
async def test_an_odd_body_is_answered_by_somebody(victim: Victim, body: bytes) -> None:
    """By the gateway, or by the engine, which knows better; with 5xx by nobody."""
    status, said = await victim.send(body)
    assert status < 500, said


@in_one_mode
@pytest.mark.parametrize(
    "prompt",
    [[-1, 5], [2**31, 2**63, 2**70], [1.5], [[[1]]], [True, None], "", [], ["a", 1], [[]], {"a": 1}, 10**20],
    ids=str,
)
async def test_token_ids_that_are_none(victim: Victim, prompt: object) -> None:
    body = {"model": OPTIONS.model, "prompt": prompt, "max_tokens": 2}
    status, said = await victim.send(body, "/v1/completions")
    assert status in (200, 400), said


# -- headers ---------------------------------------------------------------------------------------

SESSION_IDS = [
    pytest.param("s" * 7_000, id="7 kB"),
    pytest.param("../../../../etc/passwd", id="a path"),
    pytest.param("a/b?c=d&e#f %00%0d%0a", id="URL characters"),
    pytest.param("<script>alert(1)</script>", id="markup"),
    pytest.param("'; drop table sessions; --", id="SQL"),
    pytest.param("{{7*7}}${jndi:ldap://x}%s%n", id="templates"),
    pytest.param("\U0001f480 \u202e \u00ad", id="unicode"),
    pytest.param("null", id="null"),
    pytest.param("inferred-0", id="a name that the gateway gives"),
]


@in_one_mode
@pytest.mark.parametrize("session_id", SESSION_IDS)
async def test_a_session_may_be_called_anything(victim: Victim, session_id: str) -> None:
    for _ in range(2):
        head = [f"POST {CHAT} HTTP/1.1".encode(), b"x-session-id: " + session_id.encode()]
        status, _said = await victim.raw([*head, b"content-type: application/json"], chat())
        assert status == 200
    listed = await victim.page("/api/decisions?n=2")
    assert [row["reason"] for row in listed["decisions"]] == ["host", "cold"]
    found = await victim.page("/api/sessions/" + quote(session_id, safe=""))
    hashed = len(session_id) > 1000 or session_id.startswith("inferred-")
    assert hashed or found["session_id"] == session_id


@in_one_mode
@pytest.mark.parametrize(
    "line",
    [
        b"x-session-id: \xff\xfe\x80",
        b"x-session-id: a\x01b",
        b"x-session-id: a\x00b",
        b"x-session-id",
        b": x",
        b"x-\xff: y",
        b"x-session-id: a\r\n folded",
    ],
    ids=repr,
)
async def test_a_header_that_is_none_ends_its_own_connection_at_most(victim: Victim, line: bytes) -> None:
    """Envoy refuses most of them before anybody is asked, some by closing the connection."""
    status, _ = await victim.raw([f"POST {CHAT} HTTP/1.1".encode(), line], chat())
    assert status in (0, 200, 400)
    assert await victim.send() == (200, "")


@in_one_mode
async def test_injected_headers_steer_nothing(victim: Victim) -> None:
    """A destination, a subset, an endpoint for conformance tests: a client may name them, nobody obeys."""
    lines = [
        f"POST {CHAT} HTTP/1.1".encode(),
        b"x-gateway-destination-endpoint: 127.0.0.1:1",
        b"x-gateway-destination-endpoint-subset: 127.0.0.1:1",
        b"test-epp-endpoint-selection: 127.0.0.1:1",
        b"x-request-id: a; evil; request=b",
        b"x-perilune-decision: 1",
    ]
    status, said = await victim.raw(lines, chat())
    assert status == 200
    (told,) = re.findall(rb"^x-perilune-decision: (.*?)\r$", said, re.MULTILINE)
    assert told.split(b";")[0].decode() in victim.stack.endpoints


@in_one_mode
@pytest.mark.parametrize("value", ["inf", "-1", "1e999", "", "9" * 5_000])
async def test_objectives_without_a_limit_ask_for_nothing(victim: Victim, value: str) -> None:
    assert await victim.send(x_slo_ttft_ms=value, x_slo_tpot_ms=value) == (200, "")


@in_one_mode
@pytest.mark.parametrize("value", ["nan", "soon", "0x10"])
async def test_objectives_that_are_no_numbers_are_bad_requests(victim: Victim, value: str) -> None:
    assert await victim.send(x_slo_ttft_ms=value) == (400, "bad_request")
    assert await victim.send(x_slo_tpot_ms=value) == (400, "bad_request")


@in_one_mode
async def test_a_policy_that_does_not_exist_is_a_bad_request(victim: Victim) -> None:
    assert await victim.send(x_perilune_policy="../evil\t") == (400, "bad_request")


@in_one_mode
async def test_headers_beyond_reason_are_envoys_to_refuse(victim: Victim) -> None:
    status, _ = await victim.raw([f"POST {CHAT} HTTP/1.1".encode(), b"x: " + b"y" * 65_000], chat())
    assert status in (0, 431), "an answer, or the connection's end"
    assert await victim.send() == (200, "")


# -- clients that are slow, or leave ---------------------------------------------------------------


async def test_a_slow_client_is_served_when_its_body_is_there(victim: Victim) -> None:
    reader, writer = await victim.open()
    body = chat()
    writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode())
    for at in range(0, len(body), 9):
        writer.write(body[at : at + 9])
        await writer.drain()
        await asyncio.sleep(0.01)  # as slow as it says
    assert b" 200 OK" in await reader.readline()
    writer.close()


@pytest.mark.parametrize("sent", ["nothing", "part of the headers", "headers", "part of the body"])
async def test_clients_that_vanish_while_they_send_leave_nothing(victim: Victim, sent: str) -> None:
    body = chat()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    data = {
        "nothing": b"",
        "part of the headers": head[:30],
        "headers": head,
        "part of the body": head + body[:20],
    }[sent]
    for _ in range(50):
        _, writer = await victim.open()
        writer.write(data)
        await writer.drain()
        writer.transport.abort()
    await victim.unharmed()


KINDS = ("fine", "stream", "leave", "leave stream", "bad", "model", "models", "large", "get")


async def storm(victim: Victim, requests: int, workers: int = 48) -> Counter[str]:
    """Good and bad requests and clients that leave, all mixed: what came of them."""
    came: Counter[str] = Counter()
    rng = random.Random(requests)
    left = iter(range(requests))

    async def one(number: int) -> str:
        kind = rng.choice(KINDS)
        session = f"storm-{number % 200}"
        text = f"{session} says " + "a few words more " * rng.randrange(1, 200)
        body = FINE | {"messages": [{"role": "user", "content": text}], "stream": "stream" in kind}
        match kind:
            case "bad":
                status, _ = await victim.send(rng.randbytes(rng.randrange(2_000)))
                return f"bad {status}"
            case "model":
                return f"model {(await victim.send(body | {'model': session}))[0]}"
            case "large":
                return f"large {(await victim.send(b' ' * 1_500_000))[0]}"
            case "models" | "get":
                path = "/v1/models" if kind == "models" else "/nowhere"
                async with victim.http.get(victim.url + path) as answer:
                    await answer.read()
                    return f"{kind} {answer.status}"
        asked = victim.http.post(victim.url + CHAT, json=body, headers={"x-session-id": session})
        if kind == "leave":
            try:
                async with asyncio.timeout(rng.random() * 0.02), asked as answer:
                    await answer.read()
            except TimeoutError:
                return "left"
            return f"fine {answer.status}"
        async with asked as answer:
            if kind == "leave stream":
                await answer.content.readany()
                answer.close()
                return f"left {answer.status}"
            await answer.read()
            return f"{kind} {answer.status}"

    async def worker() -> None:
        for number in left:
            came[await one(number)] += 1

    await asyncio.gather(*(worker() for _ in range(workers)))
    return came


EXPECTED = {
    *("fine 200", "stream 200", "left", "left 200", "bad 400", "model 404", "models 200"),
    *("large 413", "get 404"),
}


async def test_a_storm_of_all_that_leaves_nothing_behind(victim: Victim) -> None:
    came = await storm(victim, 500)
    assert set(came) <= EXPECTED, came
    await victim.unharmed()


@pytest.mark.bench
@pytest.mark.timeout(600)
@over_either_transport
async def test_a_storm_of_10_000(victim: Victim) -> None:
    came = await storm(victim, 10_000)
    print(f"\n{dict(came)}")
    assert set(came) <= EXPECTED, came
    await victim.unharmed()


# -- engines -----------------------------------------------------------------------------------------


@asynccontextmanager
async def hostile_publisher(victim: Victim) -> AsyncIterator[tuple[zmq.asyncio.Socket, zmq.asyncio.Socket]]:
    """Yield the sockets that serve events and replay of an endpoint whose address nobody else serves."""
    context = zmq.asyncio.Context()
    events, replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    try:
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (events, replay)]
        urls = [f"tcp://127.0.0.1:{port}" for port in ports]
        document, file = victim.stack.pool, victim.stack.pool_file
        evil = spec.EndpointSpec(address="127.0.0.1:1", events=(urls[0],), replay=(urls[1],))
        changed = msgspec.structs.replace(
            document,
            spec=msgspec.structs.replace(document.spec, endpoints=(*document.spec.endpoints, evil)),
        )
        file.write_bytes(spec.dump(changed))
        yield events, replay
        file.write_bytes(spec.dump(document))
        await until_true(lambda: _has_endpoints(victim, len(document.spec.endpoints)))
    finally:
        events.close(0)
        replay.close(0)
        context.term()


async def _has_endpoints(victim: Victim, count: int) -> bool:
    return len((await victim.page("/api/nodes/stats"))["nodes"]) == count


def hostile_payloads() -> list[bytes]:
    stored = ["BlockStored", [b"\x01" * 32, b"\x02" * 32], None, list(range(32)), 16, None, "GPU", None]
    good = msgspec.msgpack.encode([1.5, [stored], 0])
    rng = random.Random(1)
    values: list[object] = [
        None,
        [],
        [1.0, [["BlockStored"]]],
        [1.0, [["BlockStored", [1], 1, ["x"], "16", None]]],
        [1.0, [["BlockStored", [2**64 - 1] * 1000, None, list(range(16_000)), 16, None, "GPU", None]]],
        [1.0, [["BlockStored", [1], None, [-1] * 16, 16, None, "GPU", None]]],
        [1.0, [["BlockStored", [1], None, [2**63] * 16, 16, None, "GPU", None]]],
        [1.0, [["BlockStored", [1], 99, list(range(16)), 16, None, "GPU", None]]],
        [1.0, [["BlockRemoved", [b"never seen"] * 100, "GPU"]]],
        [1.0, [["BlockRemoved", "x", 1]]],
        [1.0, [["AllBlocksCleared", 1, 2, 3]]],
        [1.0, [["Invented", 1]]],
        [float("nan"), [["AllBlocksCleared"]]],
        [float("inf"), []],
        {"ts": 1, "events": "x"},
    ]
    return [
        *(msgspec.msgpack.encode(value) for value in values),
        *(good[:at] for at in range(0, len(good), 7)),
        *(rng.randbytes(rng.randrange(64)) for _ in range(50)),
        *(b"\x91" * depth for depth in (100, 100_000)),
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"",
    ]


@in_one_mode
async def test_events_of_a_mad_engine_end_nothing(victim: Victim) -> None:
    async with hostile_publisher(victim) as (events, replay):

        async def answer_replays() -> None:
            """Answer replays with garbage: a sequence number that is none, a payload that is none, then the
            end."""
            while True:
                asker, *_ = await replay.recv_multipart()
                for frames in (
                    [b""],
                    [b"", b"x"],
                    [b"", b"topic", b"not eight bytes", b"\xff"],
                    [b"", b"topic", struct.pack(">q", -5), b"\xc1"],
                    [b"", b"topic", struct.pack(">q", 2**62), b"\x93\x01"],
                    [b"", b"topic", struct.pack(">q", -1), b""],
                ):
                    await replay.send_multipart([asker, *frames])

        replaying = asyncio.create_task(answer_replays())
        sequence = 0
        before = (await victim.metrics()).get(f'{MALFORMED}{{endpoint="127.0.0.1:1"}}', 0.0)

        async def heard() -> bool:
            nonlocal sequence
            for payload in hostile_payloads():
                sequence += 7  # a gap each time, so that replays are asked for
                await events.send_multipart([b"kv@x@y", struct.pack(">q", sequence), payload])
            for frames in ([b"x"], [b"a", b"b"], [b"a", b"short", b"\x90"], [b"a"] * 9):
                await events.send_multipart(frames)
            return (await victim.metrics()).get(f'{MALFORMED}{{endpoint="127.0.0.1:1"}}', 0.0) > before + 100

        await until_true(heard)
        replaying.cancel()
        assert (await victim.page("/api/health"))["status"] == "degraded"
        assert await victim.send() == (200, "")
    await victim.unharmed()


MALFORMED = "perilune_events_malformed_total"


@in_one_mode
async def test_the_pool_file_may_be_garbage_for_a_while(victim: Victim) -> None:
    good = victim.stack.pool_file.read_bytes()

    async def complains() -> bool:
        problems = (await victim.page("/api/health"))["problems"]
        return any(problem["kind"] == "pool_file" for problem in problems)

    async def is_content() -> bool:
        return not await complains()

    negative = b"metadata: {name: p}\nspec: {model: {name: m}, engine: {blockSize: -16}}"
    for garbage in (b"\x00\xff", b"{" * 10_000, negative):
        victim.stack.pool_file.write_bytes(garbage)
        await until_true(complains)
        assert await victim.send() == (200, "")
        victim.stack.pool_file.write_bytes(good)
        await until_true(is_content)
    await victim.unharmed()


# -- starting ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        pytest.param(
            lambda folder: folder / "none", "tokenizer", marks=pytest.mark.heavy, id="no such folder"
        ),
        pytest.param(lambda folder: folder, "tokenizer", marks=pytest.mark.heavy, id="an empty folder"),
        pytest.param(lambda folder: _with(folder, "{"), "tokenizer", id="a broken tokenizer.json"),
        pytest.param(
            lambda folder: _with(folder, "{}"),
            "tokenizer",
            marks=pytest.mark.heavy,
            id="a tokenizer.json that is none",
        ),
    ],
)
async def test_a_tokenizer_that_is_not_there_ends_the_start_and_says_so(
    tmp_path: Path, make: Callable[[Path], Path], said: str
) -> None:
    pool = spec.Pool(spec.Metadata("p"), spec.Spec(spec.Model(name="m", tokenizer=str(make(tmp_path)))))
    file = tmp_path / "pool.yaml"
    file.write_bytes(spec.dump(pool))
    gateway = forked.Popen("perilune_gateway.main", ["--pool", str(file), "--listen", "127.0.0.1:0"])
    _, errors = await asyncio.to_thread(gateway.communicate, HANG)
    assert gateway.returncode == 2
    assert said in errors
    assert "Traceback" not in errors


def _with(folder: Path, text: str) -> Path:
    (folder / "tokenizer.json").write_text(text)
    return folder
