"""Makes a router with all its parts."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random

from perilune_api.pool import Pool
from perilune_gateway.moves.facts import LiveFacts
from perilune_gateway.moves.handoff import Handoffs
from perilune_gateway.moves.planner import Planner
from perilune_gateway.request.aliases import Aliases
from perilune_gateway.routing.candidates import CandidateBuilder
from perilune_gateway.routing.deciding import Deciding
from perilune_gateway.routing.full_reports import FullReports
from perilune_gateway.routing.handing_over import HandingOver
from perilune_gateway.routing.lifecycle import Lifecycle
from perilune_gateway.routing.new_sessions import NewSessions
from perilune_gateway.routing.observer import Observer
from perilune_gateway.routing.peer_reads import PeerReads
from perilune_gateway.routing.pull_limits import OpenPulls, PullLimits
from perilune_gateway.routing.pulling import Pulling
from perilune_gateway.routing.remote_prefills import RemotePrefills
from perilune_gateway.routing.router import PromptSeen, Router, TokenizesNow
from perilune_gateway.routing.session_turns import SessionTurns
from perilune_gateway.routing.verdicts import Verdicts
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
    secret: bytes = b"",
    previous_secret: bytes = b"",
    engine_secret: str = "",
    prompt_seen: PromptSeen | None = None,
    on_legs_due: Callable[[], object] = lambda: None,
) -> Router:
    """A router with all its parts. `secret`: what clients may not know of endpoints and tenants' salts is
    derived from it. `previous_secret`: the one before, if ids of its responses are still to be read.
    `engine_secret`: by which engines obey transfer parameters; empty: they need none.
    `on_legs_due` is called when `handing_over.due` has something."""
    candidates, aliases, open_pulls = CandidateBuilder(state), Aliases(secret, previous_secret), OpenPulls()
    handoffs = Handoffs(lambda address: open_pulls.copies(address) + state.offers.copies(address, clock()))
    facts = LiveFacts(state, handoffs)
    planner = Planner(facts, elsewhere=state.offers, on_change=state.changes.offers_changed)
    handing_over = HandingOver(
        *(state, planner, handoffs, facts, open_pulls, observer, clock, wall_clock, on_legs_due)
    )
    remote_prefills = RemotePrefills(state, observer, clock, wall_clock)
    limits = PullLimits(planner, handoffs, open_pulls)
    pulling = Pulling(state, limits, observer, clock, wall_clock)
    peer_reads = PeerReads(state.fleet, limits, observer, engine_secret, clock, wall_clock)
    new_sessions, reports = NewSessions(state), FullReports()
    turns = SessionTurns(state, new_sessions)
    transfers = remote_prefills, pulling, peer_reads
    lifecycle = Lifecycle(state, planner, handing_over, *transfers, turns, observer, clock)
    verdicts = Verdicts(*(state, lifecycle, turns, reports, *transfers, observer, aliases, clock, wall_clock))
    return Router(
        pool,
        state,
        tokenizer,
        candidates,
        planner,
        Deciding(state, candidates, planner, handing_over, pulling, peer_reads),
        verdicts,
        lifecycle,
        handing_over,
        aliases,
        *transfers,
        new_sessions,
        reports,
        clock=clock,
        stopwatch=stopwatch,
        rng=rng or Random(),
        conformance=conformance,
        prompt_seen=prompt_seen,
    )
