"""Builders for tests: one object a line, only what the test is about."""

from collections.abc import Mapping
from typing import Any

from perilune_api.policies import PolicyChoice, PolicyName
from perilune_api.topology import Level, Link, Place
from perilune_gateway.model import (
    H20_30B,
    NO_PREFIX,
    Candidate,
    Endpoint,
    EngineModel,
    Load,
    Location,
    Overlap,
    Phase,
    Prefix,
    RequestHead,
    RequestView,
    SessionView,
)

PLAIN = EngineModel(
    flops_per_token=1.0,
    attention_flops=0.0,
    flops_per_s=1000.0,
    prefill_fixed_s=0.0,
    decode_floor_s=0.0,
    expert_bytes=0.0,
    shared_bytes=0.0,
    memory_bytes_per_s=1e9,
    kv_bytes_per_token=1000,
    overhead_fixed_s=0.0,
    overhead_per_token_s=0.0,
    transfer_fixed_s=0.0,
    host_bytes_per_s=10e6,
    store_bytes_per_s=2e6,
)
"""An engine to reckon with in one's head: per token 1 ms of prefill, 1 µs of decode, 1000 bytes of KV, 0.1 ms
from the host's memory, 0.5 ms from the store, 0.2 ms over a link of 5 MB/s."""


def head(path: str = "/v1/chat/completions", /, *, has_body: bool = True, **headers: str) -> RequestHead:
    """`head(x_session_id="a")`: underscores in names become dashes."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return RequestHead(method="POST" if has_body else "GET", path=path, headers=named, has_body=has_body)


def session(host: str = "", *, moved_s_ago: float = float("inf"), id: str = "s") -> SessionView:
    return SessionView(session_id=id, host=host, seconds_since_move=moved_s_ago)


def request(
    *,
    ordinal: int = 0,
    tokens: int = 1_000,
    of: SessionView | None = None,
    phase: Phase = Phase.BODY,
    prefix: Prefix = NO_PREFIX,
    slo_ttft_s: float = 0.0,
    slo_tpot_s: float = 0.0,
    level: int = 0,
) -> RequestView:
    return RequestView(
        request_id=f"r{ordinal}",
        ordinal=ordinal,
        prompt_tokens=tokens,
        phase=phase,
        session=of,
        level=level,
        slo_ttft_s=slo_ttft_s,
        slo_tpot_s=slo_tpot_s,
        prefix=prefix,
    )


def prefix(*, score: float = 0.0, pullable: bool = True, **held: int) -> Prefix:
    """`prefix(a=512, b=128)`: who holds how many tokens, most first."""
    locations = sorted((Location(address, tokens) for address, tokens in held.items()), key=lambda x: -x[1])
    return Prefix(locations=tuple(locations), frequency_score=score, pullable=pullable)


def link(level: Level = Level.RACK, bytes_per_s: float = 9.7e9, slowdown: float = 1.0) -> Link:
    return Link(level, bytes_per_s, slowdown)


def chosen(policy: str = "ear", **blocks: Any) -> PolicyChoice:
    """Return a pool's `routing.policy`, with the blocks of parameters that it sets."""
    return PolicyChoice(name=PolicyName(policy), **blocks)


def endpoint(address: str = "a", *, place: Place = Place()) -> Endpoint:  # noqa: B008
    return Endpoint(address=address, place=place)


def candidate(
    address: str = "a",
    *,
    pending: int = 0,
    pending_s: float = 0.0,
    in_flight: int = 0,
    prefilling: int = 0,
    waiting: int = 0,
    kv_usage: float = 0.0,
    sessions: int = 0,
    cached: int = 0,
    host: int = 0,
    stored: int = 0,
    kv_free: int = 1_000_000,
    active_kv: int = 0,
    decode_s: float = 0.0,
    draining: bool = False,
    superseded: bool = False,
    place: Place = Place(),  # noqa: B008
    links: Mapping[str, Link] | None = None,
    engine: EngineModel = H20_30B,
) -> Candidate:
    """Return a candidate. `cached`, `host`, `stored`: tokens that the device, then also the host, then also
    the store holds."""
    load = Load(
        pending_prefill_tokens=pending,
        pending_prefill_s=pending_s,
        in_flight=in_flight,
        waiting=waiting,
        kv_usage=kv_usage,
        kv_free_tokens=kv_free,
        sessions=sessions,
        prefilling=prefilling,
        active_kv_tokens=active_kv,
    )
    host = max(host, cached)
    return Candidate(
        endpoint=Endpoint(address=address, place=place, draining=draining, superseded=superseded),
        load=load,
        overlap=Overlap(cached, host, max(stored, host)),
        links=links or {},
        engine=engine,
        decode_s=decode_s,
    )


def fleet(**pending: int) -> list[Candidate]:
    """`fleet(a=0, b=5)`: candidates by pending prefill tokens."""
    return [candidate(address, pending=tokens) for address, tokens in pending.items()]
