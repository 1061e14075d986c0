"""Whose request it is, and what it continues: tenant, session, and the endpoint that has an earlier response.

headers ─▶ `identity`, and with the body ─▶ `of_prompt`: the session that is named, or that the response
names, or else the one that the prompt continues ─▶ `holder` of the response that it continues
"""

from __future__ import annotations

from collections.abc import Iterable

from perilune_api.pool import SessionKeys
from perilune_gateway.model import Endpoint, Identity, RequestHead
from perilune_gateway.request.aliases import Aliases
from perilune_gateway.request.identity import from_headers, inferred, with_body
from perilune_gateway.request.parsed import ParsedRequest
from perilune_gateway.routing.context import Prompt
from perilune_gateway.state.pool_state import PoolState
from perilune_gateway.state.session import Session


class Conversations:
    """The conversations of one pool's clients."""

    def __init__(self, state: PoolState, aliases: Aliases) -> None:
        self._sessions = state.sessions
        self._aliases = aliases

    def configure(self, keys: SessionKeys, endpoints: Iterable[Endpoint]) -> None:
        """Take over what a (changed) pool document says."""
        self._keys = keys
        self._by_alias = {name: e.address for e in endpoints for name in self._aliases.endpoints(e.address)}

    def identity(self, head: RequestHead, request: ParsedRequest | None = None) -> Identity:
        """Return the tenant and the session that headers and body name, by this pool's session keys."""
        identity = from_headers(head.headers, self._keys)
        if request is None:
            return identity
        return with_body(identity, request.session_id, request.user, self._keys)

    def find(self, identity: Identity, now: float) -> Session | None:
        """Return the session that headers or body name, if it is known; a copy if only other replicas have
        routed it."""
        return self._sessions.find(identity.key, now) if identity.session_id else None

    def arrived(self, identity: Identity, now: float) -> Session | None:
        """Return the session of a request that has come. From now on it is known here, even if only other
        replicas have routed it."""
        return self._sessions.arrived(identity.key, now) if identity.session_id else None

    def of_prompt(
        self, identity: Identity, request: ParsedRequest, prompt: Prompt, now: float
    ) -> tuple[Identity, Session | None]:
        """Return whose request it is, with its session: named by headers, body or response, or inferred from
        an earlier prompt. `identity`: as the headers say."""
        identity, sessions = with_body(identity, request.session_id, request.user, self._keys), self._sessions
        stored = self._aliases.stored(identity.tenant, request.previous_response_id)
        if stored and not identity.session_id:
            identity = inferred(identity, stored.session_id)
        if identity.session_id or prompt.chained or not (self._keys.infer and prompt.blocks):
            return identity, self.arrived(identity, now)
        if session := sessions.infer(identity.tenant, prompt.blocks, prompt.tokens, now):
            return inferred(identity, session.key.session_id), sessions.arrived(session.key, now)
        return inferred(identity, sessions.superseded(identity.tenant, prompt.blocks[-1])), None

    def holder(self, identity: Identity, session: Session | None, response_id: str) -> str:
        """Return the endpoint that has a response; empty if none has it. An id that is not in our form was
        chosen by a client, and is where its session is."""
        if stored := self._aliases.stored(identity.tenant, response_id):
            return self._by_alias.get(stored.endpoint, "")
        known = response_id and session is not None and not self._aliases.is_ours(response_id)
        return session.host if known and session is not None else ""
