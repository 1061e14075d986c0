"""Finds a request's tenant, session and parent session, and whether it is the session's last turn.

The first source that names a session is used. Headers come first, so that a session that they name is known
without the body:

1. the pool's own session headers, the well-known ones (names.SESSION_HEADERS), then the cookie; a sub-agent
   (`x-claude-code-agent-id`) is a session of its own, whose parent is that session;
2. the body's `session_id`, then its `user`, if the pool enables that;
3. otherwise the session of the response that the body continues (`previous_response_id`, see aliases.py);
4. otherwise the router infers the session, see state/sessions.py.

Clients choose session ids, so the id alone grants nothing: a session is looked up by (tenant, id), where the
tenant is a configured header or a hash of the credential with which the client authenticates: the first of
CREDENTIALS that is there, since one that comes in addition would make another tenant of the same client. Ids
over 256 characters, and those that look like an inferred one, are replaced by a hash.
"""

from collections.abc import Mapping
from functools import lru_cache
from secrets import token_hex

from xxhash import xxh3_128_hexdigest

from perilune_api import names
from perilune_api.pool import SessionKeys
from perilune_gateway.model import Identity

MAX_ID = 256
INFERRED = "inferred-"
"""Beginning of the ids of inferred sessions; clients cannot name one."""
CREDENTIALS = ("authorization", "x-api-key", "api-key")
"""Headers with which clients authenticate, in the order in which they count: OpenAI's, Anthropic's,
Azure's."""
_SPECIAL = frozenset({names.SUB_AGENT_HEADER, *names.PARENT_SESSION_HEADERS, *names.FINAL_TURN_HEADERS})
"""Headers that most requests do not have."""


def from_headers(headers: Mapping[str, str], keys: SessionKeys) -> Identity:
    """Return the identity by the headers, which are given by lower-case name."""
    session_id = _first(headers, _session_headers(keys.headers))
    if keys.cookie and not session_id:
        session_id = _cookie(headers, keys.cookie)
    if _SPECIAL.isdisjoint(headers):
        return Identity(_tenant(headers, keys.tenant_header), bounded(session_id))
    parent_id = _first(headers, names.PARENT_SESSION_HEADERS)
    agent = headers.get(names.SUB_AGENT_HEADER, "")
    if agent and session_id:
        parent_id = f"{session_id}/{parent_id}" if parent_id else session_id
        session_id = f"{session_id}/{agent}"
    final = any(headers.get(name, "").lower() == "true" for name in names.FINAL_TURN_HEADERS)
    return Identity(_tenant(headers, keys.tenant_header), bounded(session_id), bounded(parent_id), final)


def with_body(identity: Identity, session_id: str, user: str, keys: SessionKeys) -> Identity:
    """Add the body's session id, or its user, to an identity without a session."""
    found = session_id or (user if keys.body_user else "")
    if identity.session_id or not found:
        return identity
    return named(identity, bounded(found))


def inferred(identity: Identity, session_id: str) -> Identity:
    """Return the identity with a session that the gateway inferred: this one, or a new one if it is empty."""
    return named(identity, session_id or inferred_id(), inferred=True)


def inferred_id() -> str:
    """Return a new id of an inferred session: random, so that no client can guess it."""
    return INFERRED + token_hex(16)


def named(identity: Identity, session_id: str, inferred: bool = False) -> Identity:
    """Return the identity with this session."""
    return identity._replace(session_id=session_id, inferred=inferred)


@lru_cache(maxsize=16)
def _session_headers(own: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of all session headers, in lower case."""
    return tuple(name.lower() for name in (*own, *names.SESSION_HEADERS))


def _first(headers: Mapping[str, str], wanted: tuple[str, ...]) -> str:
    return next(filter(None, map(headers.get, wanted)), "")


def _cookie(headers: Mapping[str, str], wanted: str) -> str:
    """Return the value of the first cookie of that name, without its quotes."""
    for pair in headers.get("cookie", "").split(";"):
        name, _, value = pair.partition("=")
        if name.strip() == wanted:
            return value.strip().strip('"')
    return ""


def _tenant(headers: Mapping[str, str], tenant_header: str) -> str:
    if tenant_header:
        return bounded(headers.get(tenant_header.lower(), ""))
    credential = _first(headers, CREDENTIALS)
    return _digest(credential) if credential else ""


def bounded(value: str) -> str:
    """Return the value, or a hash of it if it is long or looks like the id of an inferred session."""
    return _digest(value) if len(value) > MAX_ID or value.startswith(INFERRED) else value


def _digest(value: str) -> str:
    return xxh3_128_hexdigest(value.encode(errors="surrogatepass"))
