"""What the requests of one pool wait for: their prompt's tokens, their session's turn, KV from elsewhere.

Waiting for tokens ends in one of three ways. The tokens come; or they do not come within
`limits.decision_seconds`, and the estimate from bytes is used; or the prompt is invalid, and the client gets
a 400.

Waiting until a new session may begin ends when the router names its ticket, for which `begin_sessions` asks
ten times per second, or when the stream ends.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from perilune_api.pool import Limits
from perilune_gateway.extproc.exchange import Hold, Router
from perilune_gateway.model import Refusal, RequestHead, Tokens, TokenSource
from perilune_gateway.model.handoff import Attachment, Fetched, KvPull, RemotePrefill
from perilune_gateway.request.parsed import ParsedRequest
from perilune_gateway.routing.new_sessions import Queued
from perilune_gateway.routing.router import Encode

log = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """The part of tokens.Tokenizer that streams need."""

    async def encode(self, request: ParsedRequest) -> Tokens | Refusal: ...


class Giver(Protocol):
    """The part of feeds.prefill_legs.PrefillLegs that streams need."""

    async def give(
        self, ticket: int, remote: RemotePrefill, head: RequestHead, body: bytes
    ) -> Attachment | None: ...


class Fetcher(Protocol):
    """The part of feeds.pull_legs.PullLegs that streams need."""

    async def fetch(self, ticket: int, pull: KvPull) -> bool: ...


class Waiting:
    """What the requests of one pool wait for."""

    def __init__(
        self,
        router: Router,
        tokenizer: Tokenizer,
        *,
        limits: Limits,
        bytes_per_token: float = 4.0,
        giver: Giver | None = None,
        fetcher: Fetcher | None = None,
    ) -> None:
        """`limits` may be replaced at any time; what begins after that obeys the new ones. `bytes_per_token`
        is for the estimate when tokens come too late. `giver` has prompts prefilled on other endpoints,
        `fetcher` has KV fetched for requests; None if targets always do it themselves."""
        self.router = router
        self.limits = limits
        self.late_tokens = 0
        """Number of requests routed by an estimate because their tokens came too late."""
        self._tokenizer = tokenizer
        self._bytes_per_token = bytes_per_token
        self._giver = giver
        self._fetcher = fetcher
        self._beginning: dict[int, asyncio.Future[Refusal | None]] = {}
        """The ends of waiting, by ticket."""

    async def tokens(self, encode: Encode) -> Tokens | Refusal:
        """Return the prompt's tokens, or why it is invalid."""
        try:
            async with asyncio.timeout(self.limits.decision_seconds):
                return await self._tokenizer.encode(encode.request)
        except TimeoutError:
            self.late_tokens += 1
            log.warning("late_tokens body_bytes=%d", encode.body_bytes)
            count = max(1, round(encode.body_bytes / self._bytes_per_token))
            return Tokens(count=count, source=TokenSource.ESTIMATE)

    async def attachment(self, hold: Hold) -> Attachment | Fetched | None:
        """Have the prompt prefilled elsewhere, or its KV fetched. Returns None if the target prefills the
        prompt itself."""
        transfer = hold.transfer
        if isinstance(transfer, KvPull):
            fetched = self._fetcher is not None and await self._fetcher.fetch(hold.ticket, transfer)
            return Fetched() if fetched else None
        return await self._giver.give(hold.ticket, transfer, hold.head, hold.body) if self._giver else None

    async def begun(self, queued: Queued) -> Refusal | None:
        """Wait until the session begins, or is refused. Raises only CancelledError."""
        waiting: asyncio.Future[Refusal | None] = asyncio.get_running_loop().create_future()
        self._beginning[queued.ticket] = waiting
        try:
            return await waiting
        finally:
            del self._beginning[queued.ticket]

    def begin_sessions(self) -> None:
        """Let the waiting sessions begin that the router names now; called several times per second."""
        for ticket, refusal in self.router.due():
            if (waiting := self._beginning.get(ticket)) and not waiting.done():
                waiting.set_result(refusal)

    def begin_all(self) -> None:
        """Let all waiting sessions begin, because the gateway stops."""
        for waiting in self._beginning.values():
            if not waiting.done():
                waiting.set_result(None)
