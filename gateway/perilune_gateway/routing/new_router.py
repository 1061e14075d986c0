"""Makes a router with all its parts, and lists who hears what happens in its pool."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from random import Random

from perilune_api.pool import Pool
from perilune_gateway.moves.gatherer import PoolGatherer
from perilune_gateway.moves.handoff import Handoffs
from perilune_gateway.moves.planner import Planner
from perilune_gateway.policy import POLICIES
from perilune_gateway.request.aliases import Aliases
from perilune_gateway.routing.announcement_check import AnnouncementCheck
from perilune_gateway.routing.candidates import CandidateBuilder
from perilune_gateway.routing.carried_moves import CarriedMoves
from perilune_gateway.routing.claiming import Claiming
from perilune_gateway.routing.context import TimeAndDice
from perilune_gateway.routing.conversations import Conversations
from perilune_gateway.routing.deciding import Deciding
from perilune_gateway.routing.handing_over import HandingOver
from perilune_gateway.routing.kv_moves import KvMoves
from perilune_gateway.routing.lifecycle import Lifecycle
from perilune_gateway.routing.new_sessions import NewSessions
from perilune_gateway.routing.peer_reads import PeerReads
from perilune_gateway.routing.policy_watch import PolicyWatch
from perilune_gateway.routing.prompts import Prompts, PromptSeen, TokenizesNow
from perilune_gateway.routing.pull_limits import OpenPulls, PullLimits
from perilune_gateway.routing.pulling import Pulling
from perilune_gateway.routing.remote_prefills import RemotePrefills
from perilune_gateway.routing.router import Router
from perilune_gateway.routing.session_turns import SessionTurns
from perilune_gateway.routing.speed_learning import SpeedLearning
from perilune_gateway.routing.trial import Trial
from perilune_gateway.routing.verdicts import Verdicts
from perilune_gateway.state.pool_state import PoolState


def new_router(
    pool: Pool,
    state: PoolState,
    tokenizer: TokenizesNow,
    listeners: Sequence[object] = (),
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
    trial: Trial | None = None,
) -> Router:
    """Return a router with all its parts. `listeners` hear the pool's facts (state/facts.py) after the parts.
    `secret`: what clients may not know of endpoints and tenants' salts is derived from it. `previous_secret`:
    the one before, if ids of its responses are still to be read. `engine_secret`: by which engines obey
    transfer parameters. Empty if they need none. `trial`: of the pool's canary."""
    aliases, open_pulls = Aliases(secret, previous_secret), OpenPulls()
    handoffs = Handoffs(lambda address: open_pulls.copies(address) + state.offers.copies(address, clock()))
    gatherer = PoolGatherer(state, handoffs)
    planner = Planner(gatherer, elsewhere=state.offers, tell=state.facts.tell)
    handing_over = HandingOver(state, planner, handoffs, gatherer, open_pulls, clock, wall_clock)
    limits = PullLimits(planner, handoffs, open_pulls)
    remote_prefills = RemotePrefills(state, clock, wall_clock)
    pulling = Pulling(state, limits, clock, wall_clock)
    peer_reads = PeerReads(state, limits, engine_secret, clock, wall_clock)
    moves = KvMoves(planner, handing_over, remote_prefills, pulling, peer_reads)
    new_sessions = NewSessions(state)
    turns = SessionTurns(state, new_sessions)
    lifecycle, trial = Lifecycle(state, clock), trial or Trial()
    state.facts.listen(
        state.loads,
        state.fleet,
        state.ejection,
        state.index,
        state.sessions,
        state.resets,
        state.silent_resets,
        state.calibration,
        state.computed_again,
        state.parity,
        state.connectors,
        state.host_tiers,
        Claiming(state.index, state.facts.tell),
        SpeedLearning(state.calibration, state.loads),
        AnnouncementCheck(state),
        CarriedMoves(planner),
        turns,
        remote_prefills,
        pulling,
        peer_reads,
        limits,
        state.reports,
        handing_over,
        trial,
        *([state.sharing.changes] if state.sharing else []),
        *listeners,
    )

    def planned_targets(now: float) -> Iterable[str]:
        elsewhere = [offered.target for offered in state.offers.all_elsewhere(now)]
        return [*(move.target for move in planner.offers), *elsewhere]

    return Router(
        pool,
        state,
        conversations=Conversations(state, aliases),
        prompts=Prompts(state, tokenizer, aliases, prompt_seen),
        deciding=Deciding(
            state,
            CandidateBuilder(state, planned_targets),
            moves,
            PolicyWatch(POLICIES, stopwatch, state.facts.tell),
        ),
        verdicts=Verdicts(state, lifecycle, turns, aliases, wall_clock),
        new_sessions=new_sessions,
        trial=trial,
        time=TimeAndDice(clock, stopwatch, rng or Random()),
        conformance=conformance,
    )
