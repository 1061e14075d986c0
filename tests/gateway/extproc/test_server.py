"""The servers, asked by a gRPC client on loopback."""

import asyncio
from contextlib import asynccontextmanager

import certificates
import grpc
import grpc.aio
import list_of_one
import pytest
from envoy_doubles import ID, PHASE, REFUSE, ROUTE, ScriptedRouter
from grpc_health.v1 import health_pb2, health_pb2_grpc
from waiting import HANG, until

from perilune_api import extproc_pb2 as pb
from perilune_api.names import EXT_PROC_SERVICE, HEALTH_SERVICES
from perilune_api.pool import Limits
from perilune_gateway.extproc import Server, Transport, new_server
from perilune_gateway.extproc.grpc_server import GrpcServer
from perilune_gateway.extproc.service import Service
from perilune_gateway.extproc.tls import Tls
from perilune_gateway.model import Outcome, Refusal, RefuseReason, Tokens, TokenSource

OPTIONS = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own for every channel
METHOD = f"/{EXT_PROC_SERVICE}/Process"
A = "10.0.0.1:8000"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Tokenizer:
    """Answers what it is given: tokens, a refusal, an exception, or (None) never."""

    def __init__(self, answer) -> None:
        self.answer = answer

    async def encode(self, request):
        if self.answer is None:
            await asyncio.Event().wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Rig:
    def __init__(self, server: Server, service: Service, router: ScriptedRouter, port: int, channel) -> None:
        self.server, self.service, self.router, self.port = server, service, router, port
        self.channel = channel

    def call(self):
        return self.channel.stream_stream(METHOD)()

    async def health(self, service: str) -> int:
        stub = health_pb2_grpc.HealthStub(self.channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


over_one_transport = pytest.mark.parametrize("serving", [Transport.H2], ids=str, indirect=True)
"""For behaviour of the service and the exchange, which the servers share."""


@pytest.fixture(params=list(Transport), ids=str)
def serving(request):
    @asynccontextmanager
    async def serving(tokenizer_answer=None, decision_seconds: float = 30.0, router=None, **options):
        router = router or ScriptedRouter()
        limits = Limits(decision_seconds=decision_seconds)
        service = list_of_one.service(router, Tokenizer(tokenizer_answer), limits=limits, **options)
        server = new_server(request.param, service)
        port = await server.start("127.0.0.1:0")
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) as channel:
                yield Rig(server, service, router, port, channel)
        finally:
            await server.stop(0)

    return serving


def request_headers(phase: str = "headers", mode: str = "BUFFERED", **more: str) -> bytes:
    fields = {":method": "POST", ":path": "/v1/x", ID: "t", ROUTE: A, PHASE: phase} | more
    values = [pb.HeaderValue(key=name, raw_value=value.encode()) for name, value in fields.items()]
    told = pb.ProtocolConfiguration(request_body_mode=pb.ProcessingMode.BodySendMode.Value(mode))
    headers = pb.HttpHeaders(headers=pb.HeaderMap(headers=values))
    return pb.ProcessingRequest(request_headers=headers, protocol_config=told).SerializeToString()


def request_body(body: bytes) -> bytes:
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=True)).SerializeToString()


def response_headers(status: int) -> bytes:
    values = [pb.HeaderValue(key=":status", raw_value=str(status).encode())]
    headers = pb.HttpHeaders(headers=pb.HeaderMap(headers=values))
    return pb.ProcessingRequest(response_headers=headers).SerializeToString()


async def ask(call, raw: bytes) -> pb.ProcessingResponse:
    await call.write(raw)
    return pb.ProcessingResponse.FromString(await call.read())


async def test_conversation_decided_on_headers(serving):
    async with serving() as rig:
        call = rig.call()
        assert (await ask(call, request_headers())).WhichOneof("response") == "request_headers"
        assert rig.service.streams_open == 1
        assert (await ask(call, response_headers(200))).WhichOneof("response") == "response_headers"
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK
        assert await rig.router.outcome("t") is Outcome.COMPLETED
        assert (rig.service.streams_open, rig.service.streams_total) == (0, 1)
        assert rig.service.body_bytes_received == 0


@over_one_transport
async def test_bodies_are_counted(serving):
    async with serving() as rig:
        call = rig.call()
        await ask(call, request_headers("body"))
        assert (await ask(call, request_body(b"abc"))).WhichOneof("response") == "request_body"
        assert rig.service.body_bytes_received == 3
        call.cancel()
        await until(lambda: rig.service.streams_open == 0)


async def test_body_of_32_mib_is_taken(serving):
    async with serving() as rig:
        call = rig.call()
        await ask(call, request_headers("body"))
        await ask(call, request_body(bytes(32 * 1024 * 1024)))
        assert len(rig.router.bodies["t"]) == 32 * 1024 * 1024
        call.cancel()


async def test_cancelled_call_gives_the_ticket_back(serving):
    async with serving() as rig:
        call = rig.call()
        await ask(call, request_headers())
        call.cancel()
        assert await rig.router.outcome("t") is Outcome.CANCELLED
        assert rig.router.outcomes["t"] == [Outcome.CANCELLED]


@over_one_transport
async def test_tokens_are_waited_for(serving):
    tokens = Tokens(count=5, source=TokenSource.ENGINE)
    async with serving(tokens) as rig:
        call = rig.call()
        await ask(call, request_headers("tokens"))
        assert (await ask(call, request_body(b"abc"))).WhichOneof("response") == "request_body"
        assert rig.router.tokens["t"] == tokens
        call.cancel()


@over_one_transport
async def test_tokens_that_come_too_late_are_estimated(serving, caplog):
    async with serving(None, decision_seconds=0.05, bytes_per_token=2.0) as rig:
        call = rig.call()
        await ask(call, request_headers("tokens"))
        await ask(call, request_body(bytes(100)))
        assert rig.router.tokens["t"] == Tokens(count=50, source=TokenSource.ESTIMATE)
        assert rig.service.late_tokens == 1
        call.cancel()
    assert "late_tokens body_bytes=100" in caplog.text


@over_one_transport
async def test_prompt_at_fault_is_refused(serving):
    async with serving(Refusal(RefuseReason.BAD_REQUEST, "no such token")) as rig:
        call = rig.call()
        await ask(call, request_headers("tokens"))
        answer = await ask(call, request_body(b"abc"))
        assert answer.immediate_response.status.code == 400
        assert b"no such token" in answer.immediate_response.body
        call.cancel()


@over_one_transport
@pytest.mark.parametrize("mode", ["BUFFERED", "FULL_DUPLEX_STREAMED"])
async def test_bug_while_tokens_are_awaited(serving, mode, caplog):
    async with serving(RuntimeError("a bug")) as rig:
        call = rig.call()
        await call.write(request_headers("tokens", mode))
        await call.write(request_body(b"abc"))
        if mode == "BUFFERED":
            await call.read()
            assert await call.code() is grpc.StatusCode.INTERNAL
        else:
            answer = pb.ProcessingResponse.FromString(await call.read())
            assert answer.immediate_response.status.code == 500
            call.cancel()
        assert rig.service.failures == 1
    assert "stream_failed state=tokens" in caplog.text


class BuggyRouter(ScriptedRouter):
    def on_response(self, ticket, status, served, streamed) -> None:
        raise RuntimeError("a bug")


async def test_bug_after_the_pick_ends_the_call_and_gives_the_ticket_back(serving, caplog):
    async with serving(router=BuggyRouter()) as rig:
        call = rig.call()
        await ask(call, request_headers())
        await call.write(response_headers(200))
        assert await call.code() is grpc.StatusCode.INTERNAL
        assert await rig.router.outcome("t") is Outcome.COMPLETED
        assert rig.router.outcomes["t"] == [Outcome.COMPLETED]
    assert "stream_failed state=routed" in caplog.text


@over_one_transport
@pytest.mark.parametrize(
    "raw", [b"\xff\xff", b"", request_body(b"first")], ids=["no protobuf", "empty", "a body first"]
)
async def test_nonsense_ends_the_call_with_an_error(serving, raw, caplog):
    async with serving() as rig:
        call = rig.call()
        await call.write(raw)
        assert await call.code() is grpc.StatusCode.INTERNAL
        assert (rig.service.protocol_errors, rig.service.failures) == (1, 0)
    assert "protocol_error state=start" in caplog.text


@over_one_transport
async def test_a_refusal_is_answered_with_its_status(serving):
    async with serving() as rig:
        call = rig.call()
        answer = await ask(call, request_headers(**{REFUSE: "no_endpoint"}))
        assert answer.immediate_response.status.code == 503
        call.cancel()
        await until(lambda: rig.service.streams_open == 0)
        assert rig.router.outcomes == {}


@over_one_transport
async def test_new_limits_are_in_force_with_the_next_stream(serving):
    async with serving() as rig:
        rig.service.of(rig.router).limits = Limits(max_body_bytes=2)
        call = rig.call()
        await ask(call, request_headers("body"))
        assert (await ask(call, request_body(b"abc"))).immediate_response.status.code == 413
        call.cancel()


# Health.


async def test_alive_from_the_start_ready_when_said(serving):
    async with serving() as rig:
        answers = {service: await rig.health(service) for service in HEALTH_SERVICES}
        assert answers == dict.fromkeys(HEALTH_SERVICES, NOT_SERVING) | {"liveness": SERVING}
        await rig.server.set_ready(True)
        assert {await rig.health(service) for service in HEALTH_SERVICES} == {SERVING}
        await rig.server.set_ready(False)
        assert await rig.health(EXT_PROC_SERVICE) == NOT_SERVING
        assert await rig.health("liveness") == SERVING


async def test_unknown_service_is_not_found(serving):
    async with serving() as rig:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await rig.health("something else")
        assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_stop_lets_running_streams_end(serving):
    async with serving() as rig:
        await rig.server.set_ready(True)
        watch = health_pb2_grpc.HealthStub(rig.channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        call = rig.call()
        await ask(call, request_headers())
        stopping = asyncio.create_task(rig.server.stop(30))
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()
        assert (await ask(call, response_headers(200))).WhichOneof("response") == "response_headers"
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK
        await asyncio.wait_for(stopping, HANG)
        assert rig.router.outcomes["t"] == [Outcome.COMPLETED]


async def test_stop_without_grace_cancels_running_streams(serving):
    async with serving() as rig:
        call = rig.call()
        await ask(call, request_headers())
        await rig.server.stop(0)
        assert await call.code() is not grpc.StatusCode.OK
        assert await rig.router.outcome("t") is Outcome.CANCELLED


@pytest.mark.parametrize(
    ("host", "over_tls"),
    [("127.0.0.1", False), ("0.0.0.0", False), ("localhost", False), ("127.0.0.1", True)],
)
async def test_a_grpc_server_that_stops_closes_connections_to_itself(tmp_path, monkeypatch, host, over_tls):
    """Each makes gRPC look again at calls that came while it was shutting down; all are gone in the end."""
    opened = []

    async def open_connection(*address, connect=asyncio.open_connection, **options):
        reader, writer = await connect(*address, **options)
        opened.append(writer.transport)
        return reader, writer

    monkeypatch.setattr(asyncio, "open_connection", open_connection)
    tls = Tls(*certificates.make(tmp_path)) if over_tls else None
    server = new_server(Transport.GRPC, list_of_one.service(ScriptedRouter(), Tokenizer(None)), tls)
    await server.start(f"{host}:0")
    await server.stop(10)
    assert opened
    assert all(transport.is_closing() for transport in opened)


async def test_a_read_that_grpc_awaits_is_not_cancelled_with_its_call():
    """gRPC leaks what a cancelled read holds; it ends the read itself."""
    reading, ended, reads = asyncio.Event(), asyncio.Event(), []

    class Context:
        async def read(self):
            reading.set()
            await ended.wait()
            reads.append("to its end")
            return grpc.aio.EOF

    service = list_of_one.service(ScriptedRouter(), Tokenizer(None))
    call = asyncio.create_task(GrpcServer(service).process(None, Context()))
    await reading.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert service.streams_open == 0
    ended.set()
    await until(lambda: reads == ["to its end"])


async def test_taken_port_is_a_clear_error(serving):
    async with serving() as rig:
        second = type(rig.server)(list_of_one.service(ScriptedRouter(), Tokenizer(None)))
        with pytest.raises(OSError, match=rf"cannot listen on 127\.0\.0\.1:{rig.port}"):
            await second.start(f"127.0.0.1:{rig.port}")
