"""What arrives at the endpoint, and where it arrives: bodies, framing, destinations, hints, refusals."""

import gzip
import hashlib
import io
import random

import pytest
from envoy_doubles import PRIORITY

from perilune_api.names import (
    CONFORMANCE_SERVED_HEADER,
    DECISION_HEADER,
    DESTINATION_HEADER,
    REFUSE_REASON_HEADER,
    SUBSET_KEY,
    SUBSET_NAMESPACE,
)
from perilune_gateway.model import Outcome, RefuseReason, Tokens, TokenSource
from perilune_lab.processes.envoy import Mode

pytestmark = pytest.mark.asyncio(loop_scope="session")

SIZES = {
    "empty": 0,
    "1 B": 1,
    "32 KiB - 1": 32 * 1024 - 1,
    "32 KiB": 32 * 1024,
    "32 KiB + 1": 32 * 1024 + 1,
    "130 KB": 130_000,
    "1 MB": 1_000_000,
    "6 MB": 6_000_000,
}
MODES = ["buffered", "duplex"]


PHASES = ["headers", "body"]


def body_of(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def says(received: dict) -> tuple[int, str]:
    return received["bytes"], received["sha1"]


def sent(body: bytes) -> tuple[int, str]:
    return len(body), hashlib.sha1(body).hexdigest()


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
async def test_body_arrives_as_it_was_sent(rig, size, mode, phase):
    envoy, test_id, body = await getattr(rig, mode)(), rig.new_id(), body_of(size)
    headers = rig.headers(test_id, to=rig.addresses[1], phase=phase)
    async with rig.http.post(f"{envoy.url}/v1/x", data=io.BytesIO(body), headers=headers) as reply:
        assert reply.status == 200
        received = await reply.json()
    assert received["name"] == "b"
    assert says(received) == sent(body)
    if mode == "buffered":
        assert received["content_length"] == str(size)
    assert await rig.router.outcome(test_id) is Outcome.COMPLETED
    assert rig.router.responses[test_id] == (200, rig.addresses[1], False)
    if phase == "body" and size:
        assert rig.router.bodies[test_id] == body


@pytest.mark.parametrize("mode", MODES)
async def test_either_transport_carries_a_large_body(each_rig, mode):
    envoy, test_id, body = await getattr(each_rig, mode)(), each_rig.new_id(), body_of(6_000_000)
    headers = each_rig.headers(test_id, to=each_rig.addresses[1], phase="body")
    async with each_rig.http.post(f"{envoy.url}/v1/x", data=io.BytesIO(body), headers=headers) as reply:
        assert reply.status == 200
        assert says(await reply.json()) == sent(body)
    assert await each_rig.router.outcome(test_id) is Outcome.COMPLETED
    assert each_rig.router.bodies[test_id] == body


@pytest.mark.parametrize("phase", ["body", "tokens"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [10, 70_000, 1_000_000])
async def test_a_priority_is_written_into_the_body(rig, size, mode, phase):
    envoy, test_id = await getattr(rig, mode)(), rig.new_id()
    body = b'{"model":"m","prompt":"%b"}' % (b"x" * size)
    headers = rig.headers(test_id, to=rig.addresses[1], phase=phase) | {PRIORITY: "1234567890"}
    async with rig.http.post(f"{envoy.url}/v1/x", data=body, headers=headers) as reply:
        assert reply.status == 200
        received = await reply.json()
    assert received["name"] == "b"
    assert says(received) == sent(body[:-1] + b',"priority":1234567890}')
    assert await rig.router.outcome(test_id) is Outcome.COMPLETED


@pytest.mark.parametrize("priority", [{}, {PRIORITY: "1234567890"}], ids=["as it is", "with a priority"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [10, 1_000_000])
async def test_a_compressed_body_arrives_decoded(rig, size, mode, priority):
    """The endpoint would fail to read a plain body under the header of a compressed one."""
    envoy, test_id = await getattr(rig, mode)(), rig.new_id()
    body = b'{"model":"m","prompt":"%b"}' % (b"x" * size)
    headers = rig.headers(test_id, to=rig.addresses[1], phase="body") | priority
    headers["content-encoding"] = "gzip"
    async with rig.http.post(f"{envoy.url}/v1/x", data=gzip.compress(body), headers=headers) as reply:
        assert reply.status == 200
        received = await reply.json()
    assert rig.router.bodies[test_id] == body
    wanted = body[:-1] + b',"priority":1234567890}' if priority else body
    assert says(received) == sent(wanted)
    assert await rig.router.outcome(test_id) is Outcome.COMPLETED


@pytest.mark.parametrize("mode", MODES)
async def test_tokens_that_come_too_late_are_estimated_from_bytes(rig, mode):
    envoy, test_id, body = await getattr(rig, mode)(), rig.new_id(), body_of(130_000)
    headers = rig.headers(test_id, to=rig.addresses[2], phase="tokens")
    late = rig.service.late_tokens
    async with rig.http.post(f"{envoy.url}/v1/x", data=body, headers=headers) as reply:
        received = await reply.json()
    assert (received["name"], says(received)) == ("c", sent(body))
    assert rig.router.tokens[test_id] == Tokens(count=32_500, source=TokenSource.ESTIMATE)
    assert rig.service.late_tokens == late + 1


async def test_header_only_request_keeps_its_body_from_the_gateway(rig):
    envoy, test_id, body = await rig.buffered(), rig.new_id(), body_of(130_000)
    before = rig.service.body_bytes_received
    async with rig.http.post(f"{envoy.url}/v1/x", data=body, headers=rig.headers(test_id)) as reply:
        assert says(await reply.json()) == sent(body)
    await rig.router.outcome(test_id)
    assert rig.service.body_bytes_received == before
    headers = rig.headers(rig.new_id(), phase="body")
    async with rig.http.post(f"{envoy.url}/v1/x", data=body, headers=headers) as reply:
        assert reply.status == 200
    assert rig.service.body_bytes_received == before + 130_000


async def test_filter_that_ignores_the_override_sends_the_body_after_the_pick(rig):
    envoy, test_id, body = await rig.buffered(allow_mode_override=False), rig.new_id(), body_of(130_000)
    headers = rig.headers(test_id, to=rig.addresses[1])
    async with rig.http.post(f"{envoy.url}/v1/x", data=body, headers=headers) as reply:
        received = await reply.json()
    assert (received["name"], says(received)) == ("b", sent(body))
    assert await rig.router.outcome(test_id) is Outcome.COMPLETED
    assert rig.router.responses[test_id][0] == 200


async def test_header_only_filter_is_told_to_send_the_body(rig):
    envoy, test_id, body = await rig.envoy(rig.gateway, mode=Mode.HEADERS), rig.new_id(), body_of(130_000)
    headers = rig.headers(test_id, to=rig.addresses[1], phase="body")
    async with rig.http.post(f"{envoy.url}/v1/x", data=body, headers=headers) as reply:
        received = await reply.json()
    assert (received["name"], says(received)) == ("b", sent(body))
    assert rig.router.bodies[test_id] == body


async def test_header_only_filter_without_override_never_sends_the_body_and_falls_back(rig, caplog):
    envoy = await rig.envoy(rig.gateway, mode=Mode.HEADERS, allow_mode_override=False)
    headers = rig.headers(rig.new_id(), to=rig.addresses[1], phase="body")
    async with rig.http.post(f"{envoy.url}/v1/x", data=b"{}", headers=headers) as reply:
        assert reply.status == 200
    assert "body_never_came" in caplog.text


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_request_without_body_is_decided_on_its_headers(rig, mode, method):
    envoy, test_id = await getattr(rig, mode)(), rig.new_id()
    headers = rig.headers(test_id, to=rig.addresses[2], phase="body")
    async with rig.http.request(method, f"{envoy.url}/v1/models", headers=headers) as reply:
        assert (await reply.json())["name"] == "c"
    assert await rig.router.outcome(test_id) is Outcome.COMPLETED
    assert rig.router.responses[test_id] == (200, rig.addresses[2], False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("phase", PHASES)
async def test_destination_sent_by_the_client_is_replaced(rig, mode, phase):
    envoy = await getattr(rig, mode)()
    headers = rig.headers(rig.new_id(), to=rig.addresses[1], phase=phase)
    headers[DESTINATION_HEADER] = rig.addresses[2]
    async with rig.http.post(f"{envoy.url}/v1/x", data=b"{}", headers=headers) as reply:
        assert (await reply.json())["name"] == "b"


async def test_destination_sent_by_the_client_is_not_obeyed_while_the_gateway_is_down(
    stub_rig, unused_address
):
    envoy = await stub_rig.envoy(unused_address, grpc_retries=0)
    names = set()
    for _ in range(6):
        headers = {DESTINATION_HEADER: stub_rig.addresses[2]}
        async with stub_rig.http.post(f"{envoy.url}/v1/x", data=b"{}", headers=headers) as reply:
            names.add((await reply.json())["name"])
    assert names == {"a", "b", "c"}


SUBSET = ["10.0.0.1:8000", "10.0.0.2:8000"]
AS_LIST = {
    "name": "envoy.filters.http.set_metadata",
    "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config",
        "metadata": [{"metadata_namespace": SUBSET_NAMESPACE, "value": {SUBSET_KEY: SUBSET}}],
    },
}
AS_STRING = {
    "name": "envoy.filters.http.header_to_metadata",
    "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config",
        "request_rules": [
            {
                "header": "x-subset",
                "on_header_present": {"metadata_namespace": SUBSET_NAMESPACE, "key": SUBSET_KEY},
            }
        ],
    },
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("hint", [AS_LIST, AS_STRING], ids=["list", "string"])
async def test_subset_hint_reaches_the_router(rig, hint, mode):
    envoy, test_id = await getattr(rig, mode)(filters_before=[hint]), rig.new_id()
    headers = rig.headers(test_id) | {"x-subset": ", ".join(SUBSET)}
    async with rig.http.post(f"{envoy.url}/v1/x", data=b"{}", headers=headers) as reply:
        assert reply.status == 200
    assert rig.router.subsets[test_id] == frozenset(SUBSET)


async def test_no_subset_hint_means_all_endpoints(rig):
    envoy, test_id = await rig.buffered(filters_before=[AS_STRING]), rig.new_id()
    async with rig.http.get(f"{envoy.url}/v1/x", headers=rig.headers(test_id)) as reply:
        assert reply.status == 200
    assert rig.router.subsets[test_id] is None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("phase", PHASES)
async def test_dead_endpoint_is_followed_by_the_next_of_the_list_and_named(rig, mode, phase, unused_address):
    envoy = await getattr(rig, mode)(endpoints=[*rig.addresses, unused_address])
    test_id, body = rig.new_id(), body_of(130_000)
    headers = rig.headers(test_id, to=f"{unused_address},{rig.addresses[2]}", phase=phase)
    async with rig.http.post(f"{envoy.url}/v1/x", data=body, headers=headers) as reply:
        assert says(await reply.json()) == sent(body)
    assert rig.router.responses[test_id] == (200, rig.addresses[2], False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (RefuseReason.BAD_JSON, 400),
        (RefuseReason.UNKNOWN_MODEL, 404),
        (RefuseReason.OVERLOADED, 429),
        (RefuseReason.NO_ENDPOINT, 503),
    ],
)
async def test_refusal_is_an_error_in_openai_form(rig, mode, phase, reason, status):
    envoy = await getattr(rig, mode)()
    headers = rig.headers(rig.new_id(), phase=phase, x_test_refuse=reason.value)
    async with rig.http.post(f"{envoy.url}/v1/chat/completions", data=b"{}", headers=headers) as reply:
        assert reply.status == status
        assert reply.headers["content-type"] == "application/json"
        assert reply.headers[REFUSE_REASON_HEADER] == reason
        assert reply.headers.get("retry-after") == ("2" if status == 429 else None)
        error = (await reply.json())["error"]
    assert (error["code"], error["message"]) == (reason, "as the test says")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("said", ["with", "without"])
async def test_body_above_the_limit_is_refused(rig, mode, said):
    envoy = await getattr(rig, mode)()
    body = bytes(rig.service.max_body_bytes + 1)

    async def chunks():
        for start in range(0, len(body), 1 << 20):
            yield body[start : start + (1 << 20)]

    data = io.BytesIO(body) if said == "with" else chunks()
    headers = rig.headers(rig.new_id(), phase="body")
    async with rig.http.post(f"{envoy.url}/v1/x", data=data, headers=headers) as reply:
        assert (reply.status, reply.headers[REFUSE_REASON_HEADER]) == (413, RefuseReason.BODY_TOO_LARGE)


@pytest.mark.parametrize("mode", MODES)
async def test_response_headers_tell_decision_and_served_endpoint(rig, mode):
    envoy = await getattr(rig, mode)()
    headers = rig.headers(rig.new_id(), to=rig.addresses[1])
    async with rig.http.post(f"{envoy.url}/v1/x", data=b"{}", headers=headers) as reply:
        assert reply.headers[DECISION_HEADER] == f"{rig.addresses[1]}; scripted"
        assert reply.headers[CONFORMANCE_SERVED_HEADER] == rig.addresses[1]


FAULT = {
    "name": "envoy.filters.http.fault",
    "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.fault.v3.HTTPFault",
        "abort": {"http_status": 418, "percentage": {"numerator": 100}},
    },
}


@pytest.mark.parametrize("mode", MODES)
async def test_answer_of_an_earlier_filter_passes(rig, mode):
    """The stream then begins with response headers."""
    envoy, streams = await getattr(rig, mode)(filters_before=[FAULT]), rig.service.streams_total
    async with rig.http.post(f"{envoy.url}/v1/x", data=b"{}", headers=rig.headers("")) as reply:
        assert (reply.status, await reply.text()) == (418, "fault filter abort")
    assert rig.service.streams_total == streams + 1
    assert rig.service.protocol_errors == 0
