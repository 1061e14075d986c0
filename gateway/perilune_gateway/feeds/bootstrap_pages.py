"""Asks the bootstrap page of each endpoint's KV connector what the engine can.

    GET http://ADDRESS/query ─▶ {rank: {engine_id, worker_addr: {tp rank: …}}} ─▶ state/connectors.py

Every ASK_S, and for each pair of legs, because an engine has another id after every start, and whoever takes
from the old id waits until a timeout. An endpoint whose page does not answer hands nothing over until it
does, nor does one whose workers have not all registered yet. The page is vLLM's (`mooncake_utils.py`,
`MooncakeBootstrapServer`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import aiohttp
import msgspec

from perilune_api import engine_calls
from perilune_api.foreign_bytes import UNREADABLE
from perilune_gateway.feeds import pages
from perilune_gateway.model import Endpoint, rank_of
from perilune_gateway.state.connectors import Connector, Connectors

log = logging.getLogger(__name__)

ASK_S = 2.0
"""Seconds between two looks at all pages."""
PAGE_S = 1.0
"""Seconds that a page may take."""
SILENT = 2
"""Number of looks in a row without an answer after which an endpoint hands nothing over; one may fail in a
busy moment."""
MAX_BYTES = 1024 * 1024


class _Rank(msgspec.Struct):
    engine_id: str
    worker_addr: Mapping[str, Mapping[str, str]]


_page = msgspec.json.Decoder(dict[str, _Rank])


def parse(page: bytes, rank: int | None = None) -> Connector:
    """Read what a page says of a data-parallel rank, or with `rank` None of all. Raises one of
    UNREADABLE for a page of another shape, ValueError if a rank or a worker of one is missing."""
    ranks = {int(number): said for number, said in _page.decode(page).items()}
    workers = max((len(said.worker_addr) for said in ranks.values()), default=0)
    asked = range(max(ranks, default=0) + 1) if rank is None else (rank,)
    if not workers or any(n not in ranks or len(ranks[n].worker_addr) < workers for n in asked):
        raise ValueError("not all workers have registered yet")
    return Connector([ranks[n].engine_id for n in asked], workers)


async def ask(
    http: aiohttp.ClientSession, bootstrap: str, rank: int | None = None, page_s: float | None = None
) -> Connector | None:
    """Return what the page at `bootstrap` (`ip:port`) says of a data-parallel rank; None if it does not
    answer in `page_s` (PAGE_S), or with nothing of use. Without `rank` the endpoint is the whole server."""
    try:
        async with (
            asyncio.timeout(page_s or PAGE_S),
            http.get(
                f"http://{bootstrap}/query", allow_redirects=False, middlewares=engine_calls.PLAIN
            ) as answer,
        ):
            if answer.status != 200:
                return None
            return parse(await pages.read(answer, MAX_BYTES), rank)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, *UNREADABLE):
        return None


async def run(
    endpoints: Callable[[], Iterable[Endpoint]], connectors: Connectors, http: aiohttp.ClientSession
) -> None:
    """Ask all pages until cancelled, and log each page that begins or ceases to answer."""
    silent: Counter[str] = Counter()
    """Address → number of times in a row that the page did not answer."""
    while True:
        asked = {endpoint.address: endpoint.bootstrap for endpoint in endpoints() if endpoint.bootstrap}
        answers = await asyncio.gather(*(ask(http, page, rank_of(a)) for a, page in asked.items()))
        for address, answer in zip(asked, answers, strict=True):
            before = connectors.known.get(address)
            silent[address] = 0 if answer else silent[address] + 1
            if answer is not None:
                connectors.answered(address, answer)
                if answer != before:
                    log.info("endpoint hands KV over endpoint=%s engine=%s", address, answer.engine_ids)
            elif silent[address] == SILENT:
                connectors.forget(address)
                if before is not None:
                    log.warning("bootstrap page does not answer endpoint=%s", address)
        for address in connectors.known.keys() - asked:
            connectors.forget(address)
        await asyncio.sleep(ASK_S)
