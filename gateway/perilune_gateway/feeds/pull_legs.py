"""Has an endpoint fetch the KV of a request's prefix while the request is held.

    request ─▶ give leg ─▶ source: accepted ─▶ take leg ─▶ target: answered ─▶ the request goes on, unchanged

Both legs are those of a hand-off (`handoff_legs`), with the token ids that engines announced. `within_s` of
the pull bounds all of it; then the legs are cancelled, and the request goes on as it would without. A target
that could not fetch computes the prefix within the take leg, and has it all the same.
"""

from __future__ import annotations

import asyncio
import logging

import aiohttp

from perilune_gateway.feeds.handoff_legs import LegFailed, both_legs, engine_of
from perilune_gateway.model.handoff import GivenUp, KvPull, Leg
from perilune_gateway.routing.pulling import Pulling
from perilune_gateway.state.connectors import Connectors

log = logging.getLogger(__name__)


class PullLegs:
    """The pulls of one pool's requests. Fetches nothing unless `run` runs."""

    def __init__(self, pulling: Pulling, connectors: Connectors) -> None:
        self._pulling = pulling
        self._connectors = connectors
        self._http: aiohttp.ClientSession | None = None

    async def run(self, http: aiohttp.ClientSession) -> None:
        """Fetch until cancelled."""
        self._http = http
        try:
            await asyncio.Event().wait()
        finally:
            self._http = None

    async def fetch(self, ticket: int, pull: KvPull) -> bool:
        """Return whether the target has the KV now, fetched or computed."""
        if self._http is None or pull.source not in self._connectors.known:
            return self._failed(ticket, pull, Leg.GIVE, GivenUp.PAGE)
        try:
            async with asyncio.timeout(pull.within_s):
                engine_id = await engine_of(self._http, pull, self._connectors)
                cached_tokens, seconds = await both_legs(self._http, pull, engine_id)
        except TimeoutError:
            return self._failed(ticket, pull, Leg.GIVE, GivenUp.NOT_TAKEN)  # KV comes from there
        except LegFailed as error:
            return self._failed(ticket, pull, error.leg, error.cause, error)
        except Exception as error:
            log.exception("legs failed by an error of the gateway")
            return self._failed(ticket, pull, Leg.GIVE, GivenUp.ERROR, error)
        self._pulling.took(ticket, pull, cached_tokens, seconds)
        return True  # fetched, or computed by the take leg

    def _failed(self, ticket: int, pull: KvPull, leg: Leg, cause: GivenUp, detail: object = "") -> bool:
        log.warning(
            "kv not fetched for a request leg=%s cause=%s source=%s target=%s error=%s",
            *(leg, cause, pull.source, pull.target, detail),
        )
        self._pulling.failed(ticket, pull, leg, cause)
        return False
