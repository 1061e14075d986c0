"""Engines that speak TLS alone, behind a real Envoy and the gateway's own process, with the default policy:
requests, scrapes and the legs of prefills reach them, also while their certificate is renewed."""

import asyncio
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import certificates
from stack_user import StackUser
from waiting import until, until_true

from perilune_api import pool as spec
from perilune_lab.processes.stack import EngineOptions, Stack
from perilune_lab.vocabulary import Vocabulary

HOST = "pool.ns.svc"
LONG = 3_000
ROUTING = spec.Routing(
    limits=spec.Limits(decision_seconds=30.0),
    disaggregation=spec.Disaggregation(queue=1_000, accept_seconds=1.0, coming_requests=1_000),
)


def replace(at: Path, by: Path) -> None:
    new = at.with_suffix(".new")
    new.write_bytes(by.read_bytes())
    new.rename(at)


async def presented(address: str) -> str:
    host, _, port = address.rpartition(":")
    return await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))


async def test_engines_are_asked_over_tls_also_while_their_certificate_is_renewed(tmp_path: Path) -> None:
    cert, key = certificates.make(tmp_path, host=f"DNS:{HOST}")
    next_cert, next_key = certificates.make(tmp_path, "next", host=f"DNS:{HOST}")
    trusted = tmp_path / "ca.crt"
    trusted.write_bytes(cert.read_bytes() + next_cert.read_bytes())
    options = EngineOptions(
        handoff=True,
        prefill=1,
        time_scale=10.0,
        tls=spec.EngineTls(str(trusted), HOST),
        arguments=("--ssl-certfile", str(cert), "--ssl-keyfile", str(key)),
    )
    async with Stack(engines=3, options=options, routing=ROUTING) as stack, aiohttp.ClientSession() as http:
        user = StackUser(stack, http)
        await user.all_hand_over()

        async def ask(session: int) -> tuple[int, Any]:
            prompt = Vocabulary().ids_for(session, LONG)
            body = {"model": options.model, "prompt": prompt, "max_tokens": 2}
            headers = {"x-session-id": f"s{session}", "connection": "close"}
            async with http.post(f"{stack.url}/v1/completions", json=body, headers=headers) as answer:
                return answer.status, await answer.json()

        assert [status for status, _ in await asyncio.gather(*map(ask, range(8)))] == [200] * 8
        again = [reply for _, reply in await asyncio.gather(*map(ask, range(8)))]
        cached = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in again]
        assert min(cached) >= 0.95 * LONG
        assert await user.metric('perilune_prefills_total{where="remote"}') >= 1
        assert await user.metric('perilune_handoffs_total{outcome="copied",reason="prefill"}') >= 1
        assert await user.metric("perilune_scrape_errors_total") == 0

        replace(key, next_key)  # for a moment the two do not belong together
        replace(cert, next_cert)

        async def renewed() -> bool:
            return {await presented(at) for at in stack.endpoints} == {next_cert.read_text()}

        statuses: list[int] = []

        async def load() -> None:
            for session in range(10, 1_000):
                statuses.append((await ask(session))[0])

        running = asyncio.create_task(load())
        await until_true(renewed)
        after = len(statuses)
        await until(lambda: len(statuses) > after + 4)
        running.cancel()
        assert set(statuses) == {200}
        assert await user.metric("perilune_scrape_errors_total") == 0
