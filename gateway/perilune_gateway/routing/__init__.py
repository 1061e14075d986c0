"""Decides where each request goes, and follows it to its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random

from perilune_api.pool import Pool
from perilune_gateway.moves.facts import LiveFacts
from perilune_gateway.moves.planner import Planner
from perilune_gateway.routing.candidates import CandidateBuilder
from perilune_gateway.routing.lifecycle import Lifecycle, Observer
from perilune_gateway.routing.router import Router, TokenizesNow
from perilune_gateway.state.pool_state import PoolState


def new_router(
    pool: Pool,
    state: PoolState,
    tokenizer: TokenizesNow,
    observer: Observer,
    *,
    clock: Callable[[], float] = time.monotonic,
    stopwatch: Callable[[], float] = time.perf_counter,
    wall_clock: Callable[[], float] = time.time,
    rng: Random | None = None,
    conformance: bool = False,
) -> Router:
    """Return a router with all of its parts."""
    candidates = CandidateBuilder(state)
    planner = Planner(LiveFacts(state))
    return Router(
        pool,
        state,
        tokenizer,
        candidates,
        planner,
        Lifecycle(state, candidates, planner, observer, clock, wall_clock),
        clock=clock,
        stopwatch=stopwatch,
        rng=rng or Random(),
        conformance=conformance,
    )
