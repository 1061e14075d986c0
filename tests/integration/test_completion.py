"""The end of a request reaches the router exactly once, with the right outcome, by every path."""

import asyncio
import time

import aiohttp
import pytest
from envoy_doubles import ILL
from waiting import HANG, until

from perilune_gateway.model import Outcome
from perilune_lab.processes.envoy import Mode

pytestmark = pytest.mark.asyncio(loop_scope="session")

PATHS = {
    "header-only": ("buffered", "headers"),
    "body": ("buffered", "body"),
    "full duplex": ("duplex", "body"),
    "full duplex, decided on headers": ("duplex", "headers"),
}
by_every_path = pytest.mark.parametrize(("mode", "phase"), PATHS.values(), ids=PATHS)
LONG_S = 17


@by_every_path
async def test_sse_holds_its_ticket_until_its_end(rig, mode, phase):
    envoy, test_id = await getattr(rig, mode)(), rig.new_id()
    headers = rig.headers(test_id, phase=phase)
    async with rig.http.post(f"{envoy.url}/sse", data=b"{}" * 65_000, headers=headers) as reply:
        assert await reply.content.readline() == b"data: first\n"
        assert rig.router.responses[test_id] == (200, rig.addresses[0], True)
        other = rig.new_id()
        async with rig.http.get(f"{envoy.url}/x", headers=rig.headers(other)):
            await rig.router.outcome(other)  # time passes
        assert test_id in rig.router.tickets.values()
        rig.endpoints[0].let_go(test_id)
        assert (await reply.read()).endswith(b"data: [DONE]\n\n")
    assert await rig.router.outcome(test_id) is Outcome.COMPLETED
    assert test_id not in rig.router.tickets.values()


@pytest.mark.parametrize("mode", ["buffered", "duplex"])
async def test_request_without_body_holds_its_ticket_too(rig, mode):
    envoy, test_id = await getattr(rig, mode)(), rig.new_id()
    async with rig.http.get(f"{envoy.url}/sse", headers=rig.headers(test_id)) as reply:
        assert await reply.content.readline() == b"data: first\n"
        other = rig.new_id()
        async with rig.http.get(f"{envoy.url}/x", headers=rig.headers(other)):
            await rig.router.outcome(other)  # time passes
        assert test_id in rig.router.tickets.values()
        rig.endpoints[0].let_go(test_id)
        await reply.read()
    assert await rig.router.outcome(test_id) is Outcome.COMPLETED


@by_every_path
async def test_client_that_leaves_before_the_answer_has_cancelled(each_rig, mode, phase):
    envoy, test_id = await getattr(each_rig, mode)(), each_rig.new_id()
    request = asyncio.ensure_future(
        each_rig.http.post(f"{envoy.url}/hang", data=b"{}", headers=each_rig.headers(test_id, phase=phase))
    )
    await each_rig.endpoints[0].arrived(test_id)
    request.cancel()
    assert await each_rig.router.outcome(test_id) is Outcome.CANCELLED
    assert test_id not in each_rig.router.responses
    await asyncio.wait_for(each_rig.endpoints[0].left[test_id].wait(), HANG)


@by_every_path
async def test_client_that_leaves_during_sse_frees_the_ticket_at_once(rig, mode, phase):
    """Envoy does not tell a cut answer from a complete one unless it sends us the answer's body."""
    envoy, test_id = await getattr(rig, mode)(), rig.new_id()
    headers = rig.headers(test_id, phase=phase)
    async with rig.http.post(f"{envoy.url}/sse", data=b"{}", headers=headers) as reply:
        assert await reply.content.readline() == b"data: first\n"
        reply.close()
    expected = Outcome.CANCELLED if mode == "duplex" else Outcome.COMPLETED
    assert await rig.router.outcome(test_id) is expected
    await asyncio.wait_for(rig.endpoints[0].left[test_id].wait(), HANG)


@by_every_path
async def test_endpoints_that_all_die_before_an_answer_have_failed(rig, mode, phase):
    envoy, test_id = await getattr(rig, mode)(), rig.new_id()
    async with rig.http.post(
        f"{envoy.url}/die", data=b"{}", headers=rig.headers(test_id, phase=phase)
    ) as reply:
        assert reply.status == 503
    assert await rig.router.outcome(test_id) is Outcome.FAILED
    status, served, _ = rig.router.responses[test_id]
    assert status == 503
    assert served in rig.addresses
    assert sum(endpoint.hits[test_id] for endpoint in rig.endpoints) == 2, "no third one"


@by_every_path
async def test_endpoint_that_dies_before_its_answer_is_replaced(rig, mode, phase):
    envoy, test_id = await getattr(rig, mode)(), rig.new_id()
    headers = rig.headers(test_id, to=",".join(rig.addresses[:2]), phase=phase) | {ILL: "a=die"}
    async with rig.http.post(f"{envoy.url}/x", data=b"{}" * 65_000, headers=headers) as reply:
        assert reply.status == 200
        assert (await reply.json())["name"] == "b"
    assert await rig.router.outcome(test_id) is Outcome.COMPLETED
    assert rig.router.responses[test_id] == (200, rig.addresses[1], False)


@by_every_path
async def test_endpoint_that_dies_during_sse_frees_the_ticket_at_once(rig, mode, phase):
    """As with a client that leaves: only full duplex shows that the end is missing, and never whose fault."""
    envoy, test_id = await getattr(rig, mode)(), rig.new_id()
    headers = rig.headers(test_id, phase=phase)
    async with rig.http.post(f"{envoy.url}/sse/break", data=b"{}", headers=headers) as reply:
        assert await reply.content.readline() == b"data: first\n"
        rig.endpoints[0].let_go(test_id)
        expected = Outcome.CANCELLED if mode == "duplex" else Outcome.COMPLETED
        assert await rig.router.outcome(test_id) is expected
        with pytest.raises(aiohttp.ClientPayloadError):
            await reply.read()


@pytest.mark.parametrize("phase", ["headers", "body"])
async def test_override_asks_for_the_answers_headers_where_the_filter_skips_them(rig, phase):
    envoy = await rig.buffered(processing_mode={"response_header_mode": "SKIP"})
    test_id = rig.new_id()
    headers = rig.headers(test_id, phase=phase)
    async with rig.http.post(f"{envoy.url}/v1/x", data=b"{}", headers=headers) as reply:
        await reply.read()
    assert await rig.router.outcome(test_id) is Outcome.COMPLETED
    assert rig.router.responses[test_id] == (200, rig.addresses[0], False)


@by_every_path
@pytest.mark.parametrize(("status", "expected"), [(501, Outcome.FAILED), (404, Outcome.COMPLETED)])
async def test_status_of_the_answer_decides(rig, mode, phase, status, expected):
    envoy, test_id = await getattr(rig, mode)(), rig.new_id()
    headers = rig.headers(test_id, phase=phase)
    async with rig.http.post(f"{envoy.url}/status/{status}", data=b"{}", headers=headers) as reply:
        assert reply.status == status
        await reply.read()
    assert await rig.router.outcome(test_id) is expected
    assert rig.router.responses[test_id] == (status, rig.addresses[0], False)


@pytest.mark.parametrize("mode", [Mode.BUFFERED, Mode.FULL_DUPLEX])
async def test_client_that_leaves_while_tokens_are_awaited_ends_the_stream_at_once(each_rig, mode):
    service, server = each_rig.new_server(each_rig.router, decision_seconds=60)
    port = await server.start("127.0.0.1:0")
    try:
        envoy = await each_rig.envoy(f"127.0.0.1:{port}", mode=mode, message_timeout_s=60)
        test_id = each_rig.new_id()
        headers = each_rig.headers(test_id, phase="tokens")
        request = asyncio.ensure_future(each_rig.http.post(f"{envoy.url}/x", data=b"{}", headers=headers))
        await until(lambda: test_id in each_rig.router.bodies)
        assert service.streams_open == 1
        request.cancel()
        await until(lambda: service.streams_open == 0)
    finally:
        await server.stop(0)
    assert test_id not in each_rig.router.outcomes
    assert service.failures == 0


async def test_sse_longer_than_the_route_timeout_keeps_its_ticket_to_the_end(rigs):
    """Envoy's default route timeout is 15 s; all paths of both transports at once."""

    async def stream(rig, mode: str, phase: str) -> None:
        envoy, test_id = await getattr(rig, mode)(), rig.new_id()
        started = time.monotonic()
        headers = rig.headers(test_id, phase=phase)
        url = f"{envoy.url}/sse?seconds={LONG_S}"
        async with rig.http.post(url, data=b"{}" * 65_000, headers=headers) as reply:
            for _ in range(LONG_S):
                await reply.content.readuntil(b"data: more\n\n")
            assert time.monotonic() - started >= LONG_S
            assert test_id in rig.router.tickets.values()
            rig.endpoints[0].let_go(test_id)
            assert (await reply.read()).endswith(b"data: [DONE]\n\n")
        assert await rig.router.outcome(test_id) is Outcome.COMPLETED

    await asyncio.gather(*(stream(rig, *path) for rig in rigs.values() for path in PATHS.values()))
