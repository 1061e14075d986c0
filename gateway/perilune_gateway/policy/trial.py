"""Tries a policy on many situations, for the tests of its package.

    def test_every_answer_counts():
        try_out(policy)

The situations are drawn: one endpoint or several, idle and crowded ones, with and without a session, its host
there, gone or draining, before and after the body has come. Equal seeds draw equal situations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from random import Random
from typing import NamedTuple

from perilune_gateway.model import (
    Candidate,
    Endpoint,
    Load,
    Location,
    Overlap,
    Phase,
    Prefix,
    RequestView,
    SessionView,
    Verdict,
)
from perilune_gateway.policy.contract import OutsidePolicy, Parameters
from perilune_gateway.policy.packages import call

BLOCK, KV_POOL = 16, 300_000


class Situation(NamedTuple):
    """A request, and the endpoints that may serve it."""

    request: RequestView
    candidates: Sequence[Candidate]


def try_out(
    policy: OutsidePolicy, parameters: Parameters | None = None, number: int = 1000, seed: int = 0
) -> list[Verdict]:
    """Return the policy's verdicts on so many situations. Raises PolicyError for the first one that raises
    or would not count in a gateway."""
    given = policy.parameters() if parameters is None else parameters
    return [
        call(policy, request, candidates, given, Random(at))
        for at, (request, candidates) in enumerate(situations(number, seed))
    ]


def situations(number: int, seed: int = 0) -> Iterator[Situation]:
    """Yield so many situations."""
    rng = Random(seed)
    for ordinal in range(number):
        yield _situation(ordinal, rng)


def _situation(ordinal: int, rng: Random) -> Situation:
    prompt = rng.choice((0, 1, 700, 30_000, 130_000))
    addresses = [f"10.0.0.{n}:8000" for n in range(1, rng.choice((1, 2, 3, 9)) + 1)]
    candidates = [_candidate(address, prompt, rng) for address in addresses]
    held = [Location(c.address, c.overlap.device_tokens) for c in candidates if c.overlap.device_tokens]
    session = None
    if rng.random() < 0.8:
        host = rng.choice((*addresses, "", "10.9.9.9:8000"))
        moved_s = rng.choice((inf, 0.0, 100.0))
        session = SessionView(
            session_id=f"s{ordinal}",
            host=host,
            seconds_since_move=moved_s,
            context_tokens=prompt,
            turns=rng.randrange(50),
            parent_host=rng.choice(addresses),
        )
    request = RequestView(
        request_id=f"r{ordinal}",
        ordinal=ordinal,
        prompt_tokens=prompt,
        phase=rng.choice(tuple(Phase)),
        session=session,
        model="model",
        output_tokens=rng.choice((0, 1, 4096)),
        prefix=Prefix(locations=tuple(sorted(held, key=lambda location: -location.tokens)[:4])),
        block_size=BLOCK,
    )
    return Situation(request, candidates)


def _candidate(address: str, prompt: int, rng: Random) -> Candidate:
    pending, in_flight = rng.choice((0, 0, 500, 200_000)), rng.choice((0, 1, 40))
    device = rng.choice((0, prompt // 2, prompt)) // BLOCK * BLOCK
    host = max(device, rng.choice((0, prompt)) // BLOCK * BLOCK)
    used = rng.choice((0.0, 0.5, 1.0))
    load = Load(
        pending_prefill_tokens=pending,
        pending_prefill_s=pending / 12_000,
        in_flight=in_flight,
        running=in_flight,
        waiting=rng.choice((0, 3)),
        kv_usage=used,
        kv_free_tokens=int((1 - used) * KV_POOL),
        sessions=rng.choice((0, 1, 20)),
        active_kv_tokens=in_flight * 2_000,
        kv_pool_tokens=KV_POOL,
    )
    endpoint = Endpoint(address=address, draining=rng.random() < 0.1)
    return Candidate(
        endpoint=endpoint, load=load, overlap=Overlap(device, host, host), decode_s=rng.choice((0.0, 3.0))
    )
