"""Sends the two legs of each hand-off to the engines. Only moves bytes.

    host's bootstrap page ─▶ engine id
    give leg ─▶ host:   head = accepted ─▶ take leg ─▶ target:   answer = the target has the KV

Both legs carry the same token ids on /v1/completions, with the session's adapter and salt. The give leg ends
by length (`max_tokens` 1, `ignore_eos`), because the host drops a transfer that ends otherwise; it is
streamed, so that its head says that it was accepted before anybody depends on it. The take leg goes to the
engine as an ordinary request of one token. Engines identify the transfer by its id alone, and copy by
position: the two prompts must be equal.

Where engines only share a store, there is no give leg: the target loads the prompt from the store, as for any
request.

Every wait has a bound: ACCEPT_S for the page and for the head, as an engine that computes may keep silent for
some seconds; TAKE_S for the take leg. A leg that is given up is cancelled, by which its engine frees what it
can. Source of the fields: vLLM's `mooncake_connector_proxy.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
import msgspec

from perilune_api.foreign_bytes import UNREADABLE
from perilune_gateway.feeds import bootstrap_pages, pages
from perilune_gateway.model import rank_of, server_of
from perilune_gateway.model.handoff import GivenUp, KvPull, Leg
from perilune_gateway.moves.handoff import Handoff
from perilune_gateway.routing.handing_over import HandingOver, Legs
from perilune_gateway.state.connectors import Connectors
from perilune_gateway.state.facts import LegsDue

log = logging.getLogger(__name__)

ACCEPT_S = 4.0
TAKE_S = 30.0
FIRST = 0
"""Priority of legs that a request waits for; those that the gateway writes for requests are Unix times."""
_encode = msgspec.json.Encoder(enc_hook=list).encode


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


_answer = msgspec.json.Decoder(_Answer)


class Due:
    """Wakes who sends legs."""

    def __init__(self) -> None:
        self.event = asyncio.Event()

    def on_legs_due(self, fact: LegsDue) -> None:
        self.event.set()


class LegFailed(Exception):  # noqa: N818
    """A leg has failed: the host's (`Leg.GIVE`) or the target's."""

    def __init__(self, leg: Leg, cause: GivenUp, detail: object = "") -> None:
        super().__init__(detail)
        self.leg = leg
        self.cause = cause


async def run(
    handing_over: HandingOver, due: Due, connectors: Connectors, http: aiohttp.ClientSession
) -> None:
    """Send what is due until cancelled. Cancel the legs of hand-offs that were given up, and all at the
    end."""
    rounds: dict[asyncio.Task[None], Handoff] = {}
    async with asyncio.TaskGroup() as tasks:
        while True:
            for legs in handing_over.due():
                task = tasks.create_task(_round(legs, handing_over, connectors, http))
                rounds[task] = legs.handoff
            for task, handoff in list(rounds.items()):
                if task.done():
                    del rounds[task]
                elif handoff.is_over:
                    task.cancel()
            await due.event.wait()
            due.event.clear()


async def _round(
    legs: Legs, handing_over: HandingOver, connectors: Connectors, http: aiohttp.ClientSession
) -> None:
    try:
        if legs.from_store:
            cached_tokens, seconds = await _prewarm(http, legs, handing_over)
        else:
            cached_tokens, seconds = await both_legs(
                http,
                legs,
                await engine_of(http, legs, connectors),
                giving=lambda: handing_over.giving(legs),
                taking=lambda: handing_over.taking(legs),
                ended=lambda leg: handing_over.ended(legs, leg),
            )
    except LegFailed as error:
        log.warning(
            "hand-off leg failed leg=%s cause=%s source=%s target=%s error=%s",
            *(error.leg, error.cause, legs.source, legs.target, error),
        )
        handing_over.failed(legs, error.cause)
    except Exception:
        log.exception("hand-off failed by an error of the gateway source=%s", legs.source)
        handing_over.failed(legs, GivenUp.ERROR)
    else:
        handing_over.took(legs, cached_tokens, seconds)


async def _prewarm(http: aiohttp.ClientSession, legs: Legs, handing_over: HandingOver) -> tuple[int, float]:
    """Let the target load the prompt from the store. Return how many tokens it had without computing, and the
    seconds. Raises LegFailed."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    handing_over.taking(legs)
    try:
        return await _take(http, legs, None), loop.time() - began
    finally:
        handing_over.ended(legs, Leg.TAKE)


async def engine_of(http: aiohttp.ClientSession, legs: Legs | KvPull, connectors: Connectors) -> str:
    """Return the id of the source's engine that runs now. Raises LegFailed."""
    _check_open(http, Leg.GIVE)
    page = await bootstrap_pages.ask(http, legs.bootstrap, rank_of(legs.source), ACCEPT_S)
    if page is None:
        raise LegFailed(Leg.GIVE, GivenUp.PAGE)
    connectors.answered(legs.source, page)
    return page.engine_ids[0]


async def both_legs(
    http: aiohttp.ClientSession,
    legs: Legs | KvPull,
    engine_id: str,
    *,
    giving: Callable[[], object] = lambda: None,
    taking: Callable[[], object] = lambda: None,
    ended: Callable[[Leg], object] = lambda leg: None,
) -> tuple[int, float]:
    """Send the give leg and, once it is accepted, the take leg. Return how many tokens the target had without
    computing, and the seconds of the take leg. Raises LegFailed; cancelled or failed, it leaves no leg
    behind. Call the functions when it sends a leg and when a leg has ended."""
    loop = asyncio.get_running_loop()
    giving()
    give = loop.create_task(_give(http, legs, accepted := asyncio.Event()))
    give.add_done_callback(lambda _: ended(Leg.GIVE))
    try:
        await _accepted(give, accepted)
        taking()
        began = loop.time()
        take = loop.create_task(_take(http, legs, engine_id))
        take.add_done_callback(lambda _: ended(Leg.TAKE))
        try:
            await _both(give, take)
        finally:
            take.cancel()
        return take.result(), loop.time() - began
    finally:
        give.cancel()


async def _accepted(give: asyncio.Task[None], accepted: asyncio.Event) -> None:
    """Wait until the host has accepted the give leg. Raises LegFailed."""
    head = asyncio.get_running_loop().create_task(accepted.wait())
    try:
        done, _ = await asyncio.wait({give, head}, timeout=ACCEPT_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        head.cancel()
    if give in done:
        give.result()  # raises what is wrong, unless it has ended already
    elif not done:
        raise LegFailed(Leg.GIVE, GivenUp.NOT_ACCEPTED)


async def _both(give: asyncio.Task[None], take: asyncio.Task[int]) -> None:
    """Wait until both legs have ended, or one has failed. Raises LegFailed."""
    waiting: set[asyncio.Task[Any]] = {give, take}
    while waiting:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for leg in done:
            leg.result()


async def _give(http: aiohttp.ClientSession, legs: Legs | KvPull, accepted: asyncio.Event) -> None:
    """Send the give leg and read it to its end. `accepted` is set by its head. Raises LegFailed."""
    body = _body(legs, {"do_remote_decode": True, "do_remote_prefill": False})
    _check_open(http, Leg.GIVE)
    try:
        async with _post(http, legs, legs.source, body) as answer, asyncio.timeout(TAKE_S):
            if answer.status != 200:
                detail = f"{answer.status} {await pages.begin(answer)!r}"
                raise LegFailed(Leg.GIVE, GivenUp.REFUSED, detail)
            accepted.set()
            await pages.read(answer, pages.LEG_BYTES)
    except TimeoutError:
        raise LegFailed(Leg.GIVE, GivenUp.NOT_TAKEN) from None
    except (aiohttp.ClientError, OSError) as error:
        raise LegFailed(Leg.GIVE, GivenUp.UNREACHABLE, error) from None


async def _take(http: aiohttp.ClientSession, legs: Legs | KvPull, engine_id: str | None) -> int:
    """Send the take leg. Return how many tokens the target had without computing. `engine_id`: the source's;
    None: the KV is in the store. Raises LegFailed."""
    params = None
    if engine_id is not None:
        params = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": f"http://{legs.bootstrap}",
            "remote_engine_id": engine_id,
        }
    body = _body(legs, params) | {"stream": False}
    _check_open(http, Leg.TAKE)
    try:
        async with asyncio.timeout(TAKE_S), _post(http, legs, legs.target, body) as answer:
            if answer.status != 200:
                detail = f"{answer.status} {await pages.begin(answer)!r}"
                raise LegFailed(Leg.TAKE, GivenUp.REFUSED, detail)
            usage = _answer.decode(await pages.read(answer, pages.LEG_BYTES)).usage
    except TimeoutError:
        raise LegFailed(Leg.TAKE, GivenUp.NOT_TAKEN) from None
    except (aiohttp.ClientError, OSError, *UNREADABLE) as error:
        raise LegFailed(Leg.TAKE, GivenUp.UNREACHABLE, error) from None
    return usage.prompt_tokens_details.cached_tokens if usage and usage.prompt_tokens_details else 0


def _check_open(http: aiohttp.ClientSession, leg: Leg) -> None:
    """Check that the gateway goes on. Raises LegFailed if it stops."""
    if http.closed:
        raise LegFailed(leg, GivenUp.LEFT, "the gateway stops")


def _post(
    http: aiohttp.ClientSession, legs: Legs | KvPull, address: str, body: dict[str, Any]
) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
    """Send a leg, without following redirections, since an engine must not choose which server gets the
    prompt."""
    url = f"http://{server_of(address)}/v1/completions"
    return http.post(url, data=_encode(body), headers=_headers(legs, address), allow_redirects=False)


def _headers(legs: Legs | KvPull, address: str) -> dict[str, str]:
    rank = rank_of(address)
    named = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    return {"Content-Type": "application/json", "X-Request-Id": legs.transfer_id, **named}


def _body(legs: Legs | KvPull, params: dict[str, Any] | None) -> dict[str, Any]:
    content = legs.content
    transfer = {"kv_transfer_params": params | {"transfer_id": legs.transfer_id}} if params else {}
    return {
        "model": legs.model,
        "prompt": content.ids,
        "max_tokens": 1,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        **({"priority": FIRST} if isinstance(legs, KvPull) and legs.first else {}),
        **({"cache_salt": content.salt} if content.salt else {}),
        **transfer,
    }
