"""`spec.routing.session` and `.sessionAdmission`: how sessions are found, and whether new ones wait."""

from typing import Annotated

from msgspec import Meta

from perilune_api.fields import Name, Positive, Seconds, Struct


class SessionKeys(Struct, frozen=True, kw_only=True):
    """How the gateway finds the session of a request. Headers take precedence over the body, so that the
    session is the same before and after the body arrives."""

    headers: tuple[Name, ...] = ()
    """Request headers that hold the session id. They take precedence over the well-known headers
    names.SESSION_HEADERS, which always count."""
    cookie: str = ""
    """Name of a cookie that holds the session id. If empty, cookies are not read."""
    body_user: bool = False
    """Whether the body's `user` is taken as the session id."""
    infer: bool = True
    """Whether a prompt that extends an earlier prompt continues that prompt's session when nothing else names
    one."""
    tenant_header: str = ""
    """Request header that names the tenant, which your platform sets on every request. A session is found by
    tenant and session id. If empty, a hash of the request's credential names the tenant: the first of the
    headers Authorization, x-api-key and api-key that it has. A client is then as many tenants as it can send
    first credentials that are accepted."""
    idle_seconds: Seconds = 1800.0
    """Seconds without a request after which the gateway forgets a session."""
    max_sessions: Positive = 100_000
    """Maximum number of sessions that a gateway remembers. Above it, the gateway forgets the session that has
    been idle longest."""
    several_models: bool = False
    """Whether a session asks for the models of several pools behind one gateway, as coding agents do that
    have a small and a large model. The gateway then reads every body to find its model. Otherwise a
    session's requests may go by their headers to the pool that it is bound to. No effect on a gateway with
    one pool."""


class SessionAdmission(Struct, frozen=True):
    """Whether new sessions wait while the contexts of active sessions fill the pool's KV. Requests of
    sessions that have begun never wait."""

    enabled: bool = False
    """Whether new sessions wait. Envoy then waits for the gateway's answers as much longer as
    `maxWaitSeconds`, also where a gateway does not answer at all."""
    max_wait_seconds: Annotated[float, Meta(ge=0, le=600)] = 0.0
    """Seconds for which a new session is held at most. After that it is refused with 429 and told when to try
    again. On Kubernetes, Envoy's timeout for an answer of the gateway follows from it. 0: nothing is held, so
    that timeout stays; a session without room is refused at once, keeps its place in the queue, and begins
    when it comes back in time. For clients that do not come back as often as it takes: 60."""
    max_waiting: Positive = 1000
    """Number of requests of new sessions that may wait at one gateway; more are refused at once. The gateway
    keeps the body of each, at most 256 MiB in all."""
