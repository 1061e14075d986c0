"""What Envoy does when something fails, in both body modes: each test is one line of the failure table.

Lines about Envoy alone use a StubProcessor, an ext_proc server that misbehaves as request header x-test-do
says; the others go through the gateway's own server.
"""

import asyncio
import hashlib
import io
import time
from statistics import median

import envoy_doubles as doubles
import pytest
from envoy_doubles import Call
from waiting import HANG, until, until_true

from perilune_api import extproc_pb2 as pb
from perilune_api import paths
from perilune_api.names import REFUSE_REASON_HEADER
from perilune_gateway.extproc import wire
from perilune_gateway.extproc.messages import BodyMode, Continue, Echo, Kind, Override, Pick
from perilune_gateway.model import RefuseReason
from perilune_lab.processes.envoy import Cluster, Mode

pytestmark = pytest.mark.asyncio(loop_scope="session")

both_modes = pytest.mark.parametrize("mode", [Mode.BUFFERED, Mode.FULL_DUPLEX])
BODY = b'{"model": "m"}' * 100
KIB32 = 32 * 1024


# What the stub does.


async def silent(call: Call) -> None:
    await call.until_end()


async def leave(call: Call) -> None:
    return


async def wrong(call: Call) -> None:
    await call.write(Continue(Kind.RESPONSE_HEADERS))
    await call.until_end()


async def extra(call: Call) -> None:
    await call.write(Continue(Kind.REQUEST_HEADERS), Continue(Kind.REQUEST_HEADERS))
    await call.until_end()


async def fail(call: Call) -> None:
    raise RuntimeError("as the test says")


async def late(call: Call) -> None:
    """Answer right, but three message timeouts late."""
    await asyncio.sleep(3 * TIMEOUT_S)
    if not call.duplex:
        await call.write(
            Pick(to=Kind.REQUEST_HEADERS, destinations=(call.route,), override=Override(BodyMode.NONE))
        )
        return await call.until_end()
    await call.write(Pick(to=Kind.REQUEST_HEADERS, destinations=(call.route,)))
    while message := await call.read():
        kind = Kind(message.WhichOneof("request"))
        if kind in (Kind.REQUEST_BODY, Kind.RESPONSE_BODY):
            part = getattr(message, kind)
            await call.write(Echo(kind, part.body, part.end_of_stream))
        else:
            await call.write(Continue(kind))


async def at_the_end(call: Call) -> None:
    """Take a STREAMED body without waiting: answer nothing before the last part, then everything."""
    parts = 0
    while message := await call.read():
        parts += 1
        if message.request_body.end_of_stream:
            break
    await call.write(Pick(to=Kind.REQUEST_HEADERS, destinations=(call.route,)))
    await call.write(*(Continue(Kind.REQUEST_BODY) for _ in range(parts)))
    await call.until_end()


async def pick(call: Call) -> None:
    """Answer the headers with the pick, all else with nothing."""
    await call.write(Pick(to=Kind.REQUEST_HEADERS, destinations=(call.route,)))
    if (message := await call.read()) and message.HasField("request_body"):
        await call.write(Continue(Kind.REQUEST_BODY))
    await call.until_end()


ACTS = {act.__name__: act for act in (silent, leave, wrong, extra, fail, late, at_the_end, pick)}
TIMEOUT_S = 0.2
"""Envoy's message timeout, for acts that let it pass."""


async def ask(rig, envoy, body: bytes = BODY, path: str = "/v1/x", **headers: str) -> tuple[int, dict | str]:
    """Status, and what the endpoint says that it received (or the text, if no endpoint answered)."""
    url = f"{envoy.url}{path}"
    async with rig.http.post(url, data=io.BytesIO(body), headers=headers) as reply:
        if reply.content_type == "application/json":
            return reply.status, await reply.json()
        return reply.status, await reply.text()


def received(name: str, body: bytes = BODY) -> tuple[str, str]:
    return name, hashlib.sha1(body).hexdigest()


def says(answer: dict) -> tuple[str, str]:
    return answer["name"], answer["sha1"]


async def stub_ask(rig, do: str, mode: Mode, body: bytes = BODY, **options):
    rig.processor.acts = ACTS
    if do in ("silent", "late"):
        options["message_timeout_s"] = TIMEOUT_S
    envoy = await rig.envoy(rig.processor.address, mode=mode, grpc_retries=0, **options)
    headers = {doubles.ID: rig.new_id(), doubles.DO: do, doubles.ROUTE: rig.addresses[1]}
    return await ask(rig, envoy, body, **headers)


def open_in_any_mode(fail_open: bool) -> dict:
    """Also in full duplex, where envoy.config (as Envoy Gateway) never fails open."""
    return {"ext_proc": {"failure_mode_allow": fail_open}}


# The gateway is down.


@both_modes
@pytest.mark.parametrize(("status_on_error", "status"), [(0, 500), (503, 503)])
async def test_gateway_down_and_closed_is_an_error_at_once(
    stub_rig, mode, status_on_error, status, unused_address
):
    envoy = await stub_rig.envoy(
        unused_address, mode=mode, fail_open=False, status_on_error=status_on_error, grpc_retries=0
    )
    path = f"/v1/{stub_rig.new_id()}"
    assert await ask(stub_rig, envoy, path=path) == (status, "")
    await until(lambda: bool(stub_rig.access_log(envoy, path)))
    assert "ext_proc_error_gRPC_error_14" in stub_rig.access_log(envoy, path)[0]["details"]


async def test_gateway_down_and_open_is_served_by_the_fallback_within_100_ms(stub_rig, unused_address):
    """Also after Envoy's retries. The median counts, because the machine may be busy."""
    envoy = await stub_rig.envoy(unused_address, mode=Mode.BUFFERED)
    took_s = []
    for _ in range(8):
        began = time.monotonic()
        status, answer = await ask(stub_rig, envoy)
        took_s.append(time.monotonic() - began)
        assert status == 200
        assert says(answer) in [received(name) for name in "abc"]
    assert median(took_s) < 0.1


async def test_only_supported_paths_are_served_while_the_gateway_is_down(stub_rig, unused_address):
    envoy = await stub_rig.envoy(
        unused_address, mode=Mode.BUFFERED, grpc_retries=0, allowed=paths.EXACT, fail_open=True
    )
    for path in ("/v1/completions", "/v1/embeddings?x=1", "/v1/responses/resp_1/cancel", "/v1/models/org/m"):
        assert (await ask(stub_rig, envoy, path=path))[0] == 200
    for path in ("/v1/chat/completions/batch", "/v1/audio/speech", "/inference/v1/generate", "/metrics"):
        status, answer = await ask(stub_rig, envoy, path=path)
        assert status == 404
        assert isinstance(answer, dict)
        assert "/v1/chat/completions" in answer["error"]["message"]


async def test_gateway_down_and_open_has_no_fallback_with_original_dst(stub_rig, unused_address):
    envoy = await stub_rig.envoy(unused_address, cluster=Cluster.ORIGINAL_DST, grpc_retries=0)
    assert await ask(stub_rig, envoy) == (503, "no healthy upstream")


async def test_gateway_down_is_an_error_in_full_duplex_even_when_open(stub_rig, unused_address):
    envoy = await stub_rig.envoy(
        unused_address, mode=Mode.FULL_DUPLEX, grpc_retries=0, **open_in_any_mode(True)
    )
    status, _ = await ask(stub_rig, envoy, body=bytes(130_000))
    assert status == 500


# The gateway misbehaves.


async def test_no_answer_is_504_after_the_message_timeout(stub_rig):
    started = time.monotonic()
    status, _ = await stub_ask(stub_rig, "silent", Mode.BUFFERED, fail_open=False)
    assert status == 504
    assert time.monotonic() - started >= TIMEOUT_S


async def test_no_answer_is_served_by_the_fallback_when_open(stub_rig):
    status, answer = await stub_ask(stub_rig, "silent", Mode.BUFFERED)
    assert (status, answer["sha1"]) == (200, received("")[1])


async def test_no_answer_has_no_timer_in_full_duplex(stub_rig):
    status, answer = await stub_ask(stub_rig, "late", Mode.FULL_DUPLEX)
    assert (status, says(answer)) == (200, received("b"))


async def test_late_answer_is_no_answer_when_buffered(stub_rig):
    status, _ = await stub_ask(stub_rig, "late", Mode.BUFFERED, fail_open=False)
    assert status == 504


async def test_stream_ended_without_answer_is_served_by_the_fallback_with_its_body(stub_rig):
    status, answer = await stub_ask(stub_rig, "leave", Mode.BUFFERED, fail_open=False)
    assert (status, answer["sha1"]) == (200, received("")[1])


async def test_stream_ended_without_answer_forwards_an_empty_body_in_full_duplex(stub_rig):
    """Why the exchange never ends a stream early and cleanly."""
    status, answer = await stub_ask(stub_rig, "leave", Mode.FULL_DUPLEX)
    assert (status, answer["bytes"]) == (200, 0)


@pytest.mark.parametrize("do", ["wrong", "extra", "fail"])
@pytest.mark.parametrize(
    ("mode", "fail_open", "status"),
    [
        pytest.param(Mode.BUFFERED, False, 500, id="buffered and closed: 500"),
        pytest.param(Mode.BUFFERED, True, 200, id="buffered and open: served by the fallback"),
        pytest.param(Mode.FULL_DUPLEX, False, 500, id="full duplex: 500"),
    ],
)
async def test_wrong_or_extra_message_or_exception(stub_rig, do, mode, fail_open, status):
    answer = await stub_ask(stub_rig, do, mode, **open_in_any_mode(fail_open))
    assert answer[0] == status
    if status == 200:
        assert answer[1]["sha1"] == received("")[1]


@both_modes
@pytest.mark.parametrize("phase", ["headers", "body"])
@pytest.mark.parametrize(("reason", "status"), [(RefuseReason.BAD_JSON, 400), (RefuseReason.OVERLOADED, 429)])
async def test_immediate_response_reaches_the_client_and_ends_the_stream(rig, mode, phase, reason, status):
    envoy = await rig.envoy(rig.gateway, mode=mode)
    headers = rig.headers(rig.new_id(), phase=phase, x_test_refuse=reason)
    async with rig.http.post(f"{envoy.url}/v1/x", data=BODY, headers=headers) as reply:
        assert (reply.status, reply.headers[REFUSE_REASON_HEADER]) == (status, reason)
        assert reply.content_type == "application/json"
        assert (await reply.json())["error"]["code"] == reason
    await until(lambda: rig.service.streams_open == 0)


# Bodies above Envoy's buffer limit.


async def test_body_above_the_buffer_limit_is_413_when_buffered(rig):
    envoy = await rig.envoy(rig.gateway, buffer_bytes=KIB32)
    test_id, path = rig.new_id(), f"/v1/{rig.new_id()}"
    status, _ = await ask(rig, envoy, bytes(130_000), path, **rig.headers(test_id, phase="body"))
    assert status == 413
    assert test_id not in rig.router.bodies
    await until(lambda: bool(rig.access_log(envoy, path)))
    assert rig.access_log(envoy, path)[0]["details"] == "request_payload_too_large"


async def test_body_above_the_buffer_limit_passes_in_full_duplex(rig):
    envoy = await rig.envoy(rig.gateway, mode=Mode.FULL_DUPLEX, buffer_bytes=KIB32)
    body = bytes(range(256)) * 26_000
    test_id = rig.new_id()
    status, answer = await ask(rig, envoy, body, **rig.headers(test_id, to=rig.addresses[1], phase="body"))
    assert (status, says(answer)) == (200, received("b", body))
    assert rig.router.bodies[test_id] == body


@pytest.mark.parametrize(
    ("size", "status", "options"),
    [
        pytest.param(20_000, 200, {}, id="below the buffer limit: works without an echo"),
        pytest.param(130_000, 504, {"message_timeout_s": TIMEOUT_S}, id="above it: waits for ever, 504"),
    ],
)
async def test_streamed_body_that_is_answered_at_its_end(stub_rig, size, status, options):
    answer = await stub_ask(
        stub_rig,
        "at_the_end",
        Mode.BUFFERED,
        bytes(size),
        fail_open=False,
        buffer_bytes=KIB32,
        processing_mode={"request_body_mode": "STREAMED", "response_header_mode": "SKIP"},
        ext_proc={"send_body_without_waiting_for_header_response": True},
        **options,
    )
    assert answer[0] == status
    if status == 200:
        assert says(answer[1]) == received("b", bytes(size))


# Endpoints that are not there, or fail.


@both_modes
@pytest.mark.parametrize("destination", ["127.0.0.1:1", "junk"])
async def test_unknown_endpoint_falls_back_silently(rig, mode, destination):
    envoy, test_id = await rig.envoy(rig.gateway, mode=mode), rig.new_id()
    status, answer = await ask(rig, envoy, **rig.headers(test_id, to=destination, phase="body"))
    assert (status, answer["sha1"]) == (200, received("")[1])
    by_name = dict(zip("abc", rig.addresses, strict=True))
    assert rig.router.responses[test_id][1] == by_name[answer["name"]]


@both_modes
@pytest.mark.parametrize("cluster", [Cluster.ORIGINAL_DST, Cluster.ORIGINAL_DST_METADATA])
@pytest.mark.parametrize(
    ("destination", "status"),
    [
        pytest.param("{b}", 200, id="one address: obeyed"),
        pytest.param("127.0.0.1:1", 503, id="nobody there: 503"),
        pytest.param("junk", 503, id="junk: 503"),
        pytest.param("{b},{c}", 503, id="a list: 503"),
    ],
)
async def test_a_header_with_one_address_is_obeyed_by_original_dst(rig, mode, cluster, destination, status):
    envoy = await rig.envoy(rig.gateway, mode=mode, cluster=cluster)
    to = destination.format(b=rig.addresses[1], c=rig.addresses[2])
    answer = await ask(rig, envoy, **rig.headers(rig.new_id(), to=to, phase="body"))
    assert answer[0] == status
    if status == 200:
        assert says(answer[1]) == received("b")


RETRY_ON = "connect-failure,refused-stream,reset,gateway-error"


@both_modes
@pytest.mark.parametrize("size", [1_000, 130_000])
@pytest.mark.parametrize(
    ("to", "ill", "served"),
    [
        pytest.param("ab", "", "a", id="a list: its first"),
        pytest.param("?b", "", "b", id="a list: its first that is known"),
        pytest.param("ab", "a=503", "b", id="the first answers 503: the second"),
        pytest.param("ab", "a=die", "b", id="the first breaks off: the second"),
        pytest.param("a", "a=503", "bc", id="the only one fails: another"),
        pytest.param("a", "a=die", "bc", id="the only one breaks off: another"),
    ],
)
async def test_the_next_address_of_the_list_serves_a_retry(rig, mode, size, to, ill, served):
    envoy = await rig.envoy(rig.gateway, mode=mode, retry_on=RETRY_ON)
    addresses = dict(zip("abc", rig.addresses, strict=True)) | {"?": "127.0.0.1:1"}
    test_id, route = rig.new_id(), ",".join(addresses[name] for name in to)
    headers = rig.headers(test_id, to=route, phase="body") | {doubles.ILL: ill}
    status, answer = await ask(rig, envoy, bytes(size), **headers)
    assert (status, answer["sha1"]) == (200, received("", bytes(size))[1])
    assert answer["name"] in served
    assert rig.router.responses[test_id] == (200, addresses[answer["name"]], False)


@both_modes
async def test_a_request_at_which_two_endpoints_break_off_reaches_no_third(rig, mode):
    envoy = await rig.envoy(rig.gateway, mode=mode)
    test_id = rig.new_id()
    headers = rig.headers(test_id, to=",".join(rig.addresses), phase="body")
    status, _ = await ask(rig, envoy, **headers, **{doubles.ILL: "a=die,b=die"})
    assert status == 503
    assert rig.router.resets[test_id] == rig.addresses[1]


@pytest.mark.parametrize(("size", "status"), [(20_000, 200), (130_000, 503)])
async def test_retry_in_full_duplex_needs_a_body_within_the_buffer_limit(rig, size, status):
    envoy = await rig.envoy(rig.gateway, mode=Mode.FULL_DUPLEX, retry_on=RETRY_ON, buffer_bytes=KIB32)
    headers = rig.headers(rig.new_id(), to=",".join(rig.addresses[:2]), phase="body") | {doubles.ILL: "a=503"}
    answer = await ask(rig, envoy, bytes(size), **headers)
    assert answer[0] == status


# How long Envoy keeps a stream.


@pytest.mark.parametrize(
    ("mode", "response", "kept"),
    [
        pytest.param(Mode.HEADERS, "SKIP", False, id="headers only: ends with the decision"),
        pytest.param(Mode.BUFFERED, "SKIP", True, id="buffered: lasts as long as the response"),
        pytest.param(Mode.HEADERS, "TRAILERS", True, id="trailers asked for: as long as the response"),
    ],
)
async def test_a_stream_lasts_while_the_answer_runs(stub_rig, mode, response, kept):
    stub_rig.processor.acts = ACTS
    modes = {"response_header_mode": "SKIP"}
    if response == "TRAILERS":
        modes["response_trailer_mode"] = "SEND"
    envoy = await stub_rig.envoy(stub_rig.processor.address, mode=mode, processing_mode=modes)
    test_id = stub_rig.new_id()
    headers = {doubles.ID: test_id, doubles.DO: "pick", doubles.ROUTE: stub_rig.addresses[0]}
    async with stub_rig.http.post(f"{envoy.url}/sse", data=b"{}", headers=headers) as reply:
        assert await reply.content.readline() == b"data: first\n"
        ended = stub_rig.processor.ended[test_id]
        if not kept:
            await asyncio.wait_for(ended.wait(), HANG)
        else:
            await ask(
                stub_rig, envoy, **{doubles.DO: "pick", doubles.ROUTE: stub_rig.addresses[0]}
            )  # time passes
            assert not ended.is_set()
        stub_rig.endpoints[0].let_go(test_id)
        assert (await reply.read()).endswith(b"data: [DONE]\n\n")
    await asyncio.wait_for(ended.wait(), HANG)


@pytest.mark.parametrize(
    ("body", "trailers", "kept"),
    [
        pytest.param(BodyMode.NONE, "SEND", True, id="with response trailers: as long as the response"),
        pytest.param(BodyMode.NONE, "SKIP", False, id="without: ends with the response headers"),
        pytest.param(BodyMode.BUFFERED, "SKIP", True, id="without, but buffered: as long as the response"),
    ],
)
async def test_stream_with_mode_override_lasts(stub_rig, body, trailers, kept):
    async def override(call: Call) -> None:
        answer = pb.ProcessingResponse.FromString(
            wire.encode(Continue(Kind.REQUEST_HEADERS, override=Override(body)))
        )
        answer.mode_override.response_trailer_mode = pb.ProcessingMode.HeaderSendMode.Value(trailers)
        await call.context.write(answer.SerializeToString())
        while message := await call.read():
            await call.write(Continue(Kind(message.WhichOneof("request"))))

    stub_rig.processor.acts = {"override": override, "": override}
    envoy = await stub_rig.envoy(stub_rig.processor.address)
    test_id = stub_rig.new_id()
    headers = {doubles.ID: test_id, doubles.DO: "override"}
    endpoint_of = dict(zip(stub_rig.addresses, stub_rig.endpoints, strict=True))
    async with stub_rig.http.post(f"{envoy.url}/sse", data=b"{}", headers=headers) as reply:
        assert await reply.content.readline() == b"data: first\n"
        ended = stub_rig.processor.ended[test_id]
        if not kept:
            await asyncio.wait_for(ended.wait(), HANG)
        else:
            assert (await ask(stub_rig, envoy))[0] == 200  # time passes
            assert not ended.is_set()
        for endpoint in endpoint_of.values():
            endpoint.let_go(test_id)
        assert (await reply.read()).endswith(b"data: [DONE]\n\n")
    await asyncio.wait_for(ended.wait(), HANG)


async def test_mode_override_is_ignored_in_full_duplex(stub_rig):
    seen = []

    async def override(call: Call) -> None:
        await call.write(Continue(Kind.REQUEST_HEADERS, override=Override(BodyMode.NONE)))
        while message := await call.read():
            kind = Kind(message.WhichOneof("request"))
            seen.append(kind)
            if kind in (Kind.REQUEST_BODY, Kind.RESPONSE_BODY):
                part = getattr(message, kind)
                await call.write(Echo(kind, part.body, part.end_of_stream))
            else:
                await call.write(Continue(kind))

    stub_rig.processor.acts = {"": override}
    envoy = await stub_rig.envoy(stub_rig.processor.address, mode=Mode.FULL_DUPLEX)
    status, answer = await ask(stub_rig, envoy)
    assert (status, answer["sha1"]) == (200, received("")[1])
    assert Kind.REQUEST_BODY in seen


PINGS, BYTES_OF_A_PING = 25, 17


@pytest.mark.parametrize("server", ["ours", "with the default policy of gRPC"])
async def test_pings_without_data_keep_the_connection(rig, server):
    """The default policy drops a peer after a few of them."""
    rig.processor.acts = {"": leave}
    address = rig.gateway if server == "ours" else rig.processor.address
    envoy = await rig.envoy(address, keepalive_s=0.02, keepalive_timeout_s=HANG)

    async def counted(name: str) -> int:
        url = f"{envoy.admin_url}/stats?filter=cluster.processors.{name}$"
        async with rig.http.get(url) as reply:
            return int((await reply.text()).split(":")[1])

    async def asked() -> None:
        assert (await ask(rig, envoy, **rig.headers(rig.new_id())))[0] == 200

    async def is_dropped() -> bool:
        return await counted("upstream_cx_destroy") > 0

    async def pings_answered() -> bool:
        return await counted("upstream_cx_rx_bytes_total") >= answered

    await asked()
    answered = await counted("upstream_cx_rx_bytes_total") + PINGS * BYTES_OF_A_PING
    await until_true(pings_answered if server == "ours" else is_dropped)
    await asked()
    connections = await counted("upstream_cx_total")
    assert connections == 1 if server == "ours" else connections > 1
