"""Sends the give legs of requests whose prompt another endpoint prefills, and says what to attach to them.

    request ─┬─▶ give leg ─▶ prefill endpoint: its head = accepted ─┬─▶ Attachment ─▶ the request goes on
             │      └─ its end = computed ─▶ remote_prefills.py     │
             └─▶ bootstrap page: the id of the engine that runs now ┘

The give leg is the client's own body on the client's own route, with an answer of one token that ends by its
length, so both engines see the same prompt. Every wait has a bound: `accept_s` of the remote prefill for the
head and the page together, its `give_s` for the end; and so has the answer, LEG_BYTES. A leg that fails,
however, costs that leg only. The leg of a request that has ended is cancelled, by which its engine frees what
it can.
An attached request carries the pool's secret, by which the target obeys the parameters, and the target's
address, by which every other engine drops them: a proxy may send the request elsewhere, and an engine would
wait for a transfer that is already spent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import aiohttp
import msgspec

from perilune_api import names
from perilune_api.foreign_bytes import UNREADABLE
from perilune_api.pages import TooLongError
from perilune_gateway.feeds import bootstrap_pages, pages
from perilune_gateway.model import RequestHead, rank_of, server_of
from perilune_gateway.model.handoff import Attachment, GivenUp, RemotePrefill
from perilune_gateway.request.engine_body import prefill_body
from perilune_gateway.routing.remote_prefills import RemotePrefills
from perilune_gateway.state.connectors import Connectors

log = logging.getLogger(__name__)

PASSED_ON = (names.AUTHORIZATION_HEADER, names.TRACEPARENT_HEADER, names.TRACESTATE_HEADER)
"""Request headers that the give leg has as well, unless the gateway has its own for all its requests."""


class PrefillLegs:
    """The give legs of one pool's requests. Gives nothing unless `run` runs."""

    def __init__(self, remote_prefills: RemotePrefills, connectors: Connectors, secret: str = "") -> None:
        self._remote_prefills = remote_prefills
        self._connectors = connectors
        self._secret = secret
        self._http: aiohttp.ClientSession | None = None
        self._legs: set[asyncio.Task[None]] = set()

    async def run(self, http: aiohttp.ClientSession) -> None:
        """Give until cancelled, and then cancel all legs."""
        self._http = http
        try:
            await asyncio.Event().wait()
        finally:
            self._http = None
            legs = list(self._legs)
            for leg in legs:
                leg.cancel()
            await asyncio.gather(*legs, return_exceptions=True)

    async def give(
        self, ticket: int, remote: RemotePrefill, head: RequestHead, body: bytes
    ) -> Attachment | None:
        """Return what to attach to the request once the source has accepted its prompt; None if it does not
        accept it in time."""
        http = self._http
        if http is None or remote.source not in self._connectors.known:
            self._remote_prefills.failed(ticket, remote, GivenUp.PAGE)
            return None
        accepted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        leg = asyncio.create_task(self._leg(ticket, remote, head, body, accepted, http))
        page = asyncio.create_task(bootstrap_pages.ask(http, remote.bootstrap, rank_of(remote.source)))
        self._legs.add(leg)
        self._remote_prefills.giving(ticket, remote, leg.cancel)
        leg.add_done_callback(self._legs.discard)
        leg.add_done_callback(lambda _: _settle(accepted, False))
        try:
            async with asyncio.timeout(remote.accept_s):
                if not await asyncio.shield(accepted):
                    return None
                source = await page
        except TimeoutError:
            source = None
        finally:
            page.cancel()
        if source is None:
            leg.cancel()
            cause = GivenUp.PAGE if accepted.done() else GivenUp.NOT_ACCEPTED
            self._remote_prefills.failed(ticket, remote, cause)
            return None
        self._connectors.answered(remote.source, source)
        params = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": f"http://{remote.bootstrap}",
            "remote_engine_id": source.engine_ids[0],
            "transfer_id": remote.transfer_id,
        }
        headers: tuple[tuple[str, str], ...] = ((names.TRANSFER_TARGET_HEADER, server_of(remote.target)),)
        if self._secret:
            headers += ((names.ENGINE_SECRET_HEADER, self._secret),)
        return Attachment(msgspec.json.encode(params), headers)

    async def _leg(
        self,
        ticket: int,
        remote: RemotePrefill,
        head: RequestHead,
        body: bytes,
        accepted: asyncio.Future[bool],
        http: aiohttp.ClientSession,
    ) -> None:
        """Send one leg and read it to its end. `accepted` is set by its head."""
        try:
            content = prefill_body(body, remote.transfer_id)
        except UNREADABLE as error:  # the source has no part in it
            return self._failed(ticket, remote, GivenUp.ERROR, error)
        try:
            async with (
                asyncio.timeout(remote.give_s),
                http.post(
                    f"http://{server_of(remote.source)}{head.path}",
                    data=content,
                    allow_redirects=False,
                    headers=_headers(remote, head, http.headers),
                ) as answer,
            ):
                if answer.status != 200:
                    detail = f"{answer.status} {await pages.begin(answer)!r}"
                    return self._failed(ticket, remote, GivenUp.REFUSED, detail)
                _settle(accepted, True)
                await pages.read(answer, pages.LEG_BYTES)
        except TimeoutError:
            self._failed(ticket, remote, GivenUp.NOT_TAKEN)
        except (aiohttp.ClientConnectorError, TooLongError) as error:
            self._failed(ticket, remote, GivenUp.UNREACHABLE, error)
        except (aiohttp.ClientError, OSError) as error:
            self._failed(ticket, remote, GivenUp.BROKE_OFF, error)
        except Exception as error:
            log.exception("prefill leg failed by an error of the gateway")
            self._failed(ticket, remote, GivenUp.ERROR, error)
        else:
            self._remote_prefills.given(ticket, remote)

    def _failed(self, ticket: int, remote: RemotePrefill, cause: GivenUp, detail: object = "") -> None:
        log.warning(
            "prefill for another endpoint failed cause=%s source=%s target=%s error=%s",
            *(cause, remote.source, remote.target, detail),
        )
        self._remote_prefills.failed(ticket, remote, cause)


def _settle(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():
        future.set_result(value)


def _headers(remote: RemotePrefill, head: RequestHead, own: Mapping[str, str]) -> Mapping[str, str]:
    rank = rank_of(remote.source)
    named = {} if rank is None else {names.DATA_PARALLEL_RANK_HEADER: str(rank)}
    passed = {name: head.headers[name] for name in PASSED_ON if name in head.headers and name not in own}
    if head.trace:
        passed[names.TRACEPARENT_HEADER] = head.trace.traceparent
    return {"Content-Type": "application/json", "X-Request-Id": remote.transfer_id, **passed, **named}
