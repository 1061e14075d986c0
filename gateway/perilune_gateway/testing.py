"""Builders for tests: one object a line, only what the test is about."""

from perilune_api.pool import Role
from perilune_api.topology import Place
from perilune_gateway.model import (
    Candidate,
    Endpoint,
    Load,
    Overlap,
    Phase,
    RequestHead,
    RequestView,
    SessionView,
)


def head(path: str = "/v1/chat/completions", /, *, has_body: bool = True, **headers: str) -> RequestHead:
    """`head(x_session_id="a")`: underscores in names become dashes."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return RequestHead("POST" if has_body else "GET", path, named, has_body=has_body)


def session(host: str = "", *, moved_s_ago: float = float("inf"), id: str = "s") -> SessionView:
    return SessionView(id, host, moved_s_ago)


def request(
    *, ordinal: int = 0, tokens: int = 1_000, of: SessionView | None = None, phase: Phase = Phase.BODY
) -> RequestView:
    return RequestView(f"r{ordinal}", ordinal, tokens, phase, of)


def endpoint(address: str = "a", *, role: Role = Role.BOTH, place: Place = Place()) -> Endpoint:  # noqa: B008
    return Endpoint(address, role, place)


def candidate(
    address: str = "a",
    *,
    pending: int = 0,
    in_flight: int = 0,
    sessions: int = 0,
    cached: int = 0,
    kv_free: int = 1_000_000,
) -> Candidate:
    load = Load(
        pending_prefill_tokens=pending, in_flight=in_flight, sessions=sessions, kv_free_tokens=kv_free
    )
    return Candidate(endpoint(address), load, Overlap(cached, cached, cached))


def fleet(**pending: int) -> list[Candidate]:
    """`fleet(a=0, b=5)`: candidates by pending prefill tokens."""
    return [candidate(address, pending=tokens) for address, tokens in pending.items()]
