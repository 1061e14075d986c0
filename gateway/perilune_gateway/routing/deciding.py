"""Chooses an endpoint for a request whose candidates are known: the policy's decision, or a planned move in
its place, with the KV that is fetched for it.

    context ─▶ the request as a policy sees it ─▶ decide.py ─▶ a planned move, limits of fetching ─▶ Choice

Where a policy of a package fails, another one decides in its place, with the pool's parameters
(policy_watch.py).
`choose` changes nothing. `settle` records what else follows from a choice that counts.
"""

from __future__ import annotations

from functools import partial
from random import Random

from msgspec import Struct
from msgspec.structs import replace

from perilune_api.pool import Pool
from perilune_gateway.model import (
    NEED_BODY,
    Decision,
    Move,
    Phase,
    RequestView,
    SessionView,
    Unpulled,
    Verdict,
)
from perilune_gateway.model.shared import prefix_name
from perilune_gateway.moves.planner import Lapse
from perilune_gateway.policy import PolicyError
from perilune_gateway.policy.cost import target_of
from perilune_gateway.routing.candidates import CandidateBuilder
from perilune_gateway.routing.context import RequestContext
from perilune_gateway.routing.decide import decide, run_policy
from perilune_gateway.routing.kv_moves import KvMoves
from perilune_gateway.routing.objectives import objectives
from perilune_gateway.routing.policy_watch import Asked, PolicyWatch
from perilune_gateway.routing.pull import pull, without
from perilune_gateway.state.pool_state import PoolState
from perilune_gateway.state.session import Session

Faults = tuple[tuple[Asked, PolicyError], ...]
"""Policies that should have given a verdict, and how they failed."""


class Choice(Struct, frozen=True, kw_only=True):
    """What was chosen for a request, and what else was found out meanwhile."""

    view: RequestView
    """The request as the policy saw it."""
    verdict: Verdict
    policy: str
    """The policy that gave the verdict."""
    fell_back: bool = False
    """Whether another policy gave it than the one that was asked for."""
    faults: Faults = ()
    prefix: tuple[int, int] | None = None
    """Last block and tokens of the cached prefix that a new session begins with. None if there is none."""
    lapsed: tuple[Move, Lapse] | None = None
    """An offer of a move that no longer fits, and why."""


class Deciding:
    """The choices of one pool."""

    def __init__(
        self,
        state: PoolState,
        candidates: CandidateBuilder,
        moves: KvMoves,
        watch: PolicyWatch,
    ) -> None:
        self._state = state
        self.watch = watch
        self.candidates = candidates
        self.moves = moves
        self._dice = Random()
        """Seeded for each decision, since a new generator costs twice as much."""

    def configure(self, pool: Pool) -> None:
        """Take over a (changed) pool document."""
        self.candidates.configure(pool)
        self.moves.configure(pool)
        self._routing = self._canary = routing = pool.spec.routing
        if routing.canary:
            self._canary = replace(routing, policy=routing.canary.policy)
        self.watch.configure(routing.policy, routing.canary.policy if routing.canary else None)
        self._model = pool.spec.model.name

    def policy(self, context: RequestContext) -> str:
        """Return the name of the policy that decides: the pool's, or the canary's."""
        return str((self._canary if context.by_canary else self._routing).policy.name)

    def choose(
        self, context: RequestContext, policy: str, request_id: str, ordinal: int, *, watched: bool
    ) -> Choice:
        """Choose by the policy, or by another one where it is off or fails. `ordinal`: the number of verdicts
        so far. `watched`: whether the policies are timed."""
        view, asked = self._view(context, request_id, ordinal), Asked(policy, context.by_canary)
        verdict, decided, faults = self._decide(view, context, asked, watched)
        policy, fell_back = decided.policy, decided != asked
        prefix, lapsed = None, None
        if isinstance(verdict, Decision):
            prefix = self._prefix(context)
            if offer := self._offer(context, prefix):
                if view.phase is Phase.HEADERS:  # only the body tells what its target holds of the prompt
                    return Choice(view=view, verdict=NEED_BODY, policy=policy, faults=faults)
                moved = self.moves.planner.redirected(offer, verdict, view, context.candidates, context.now)
                if isinstance(moved, Lapse):
                    lapsed, moved = (offer, moved), verdict
                verdict = pull(view, moved, context.candidates, self._routing.pull)
        if isinstance(verdict, Decision) and verdict.replicate_from:
            verdict = self._with_room(verdict, view, context)
        return Choice(
            view=view,
            verdict=verdict,
            policy=policy,
            fell_back=fell_back,
            faults=faults,
            prefix=prefix,
            lapsed=lapsed,
        )

    def _decide(
        self, view: RequestView, context: RequestContext, asked: Asked, watched: bool
    ) -> tuple[Verdict, Asked, Faults]:
        """Return the verdict of the policy, or of the one in its place; which one that is; and how others
        failed before it."""
        decides = self.watch.standing(asked)
        faults: Faults = ()
        while True:
            routing = self._canary if decides.by_canary else self._routing
            run = partial(self.watch.run, decides.by_canary) if watched else run_policy
            try:
                self._dice.seed(context.seed)
                verdict = decide(view, context.candidates, decides.policy, routing, self._dice, run)
                return verdict, decides, faults
            except PolicyError as error:  # never of the default, which is no policy of a package
                faults = (*faults, (decides, error))
                decides = self.watch.in_place(decides)

    def settle(self, choice: Choice, now: float) -> None:
        """Record what was found out while a verdict was chosen that counts."""
        for asked, error in choice.faults:
            self.watch.failed(asked, error)
        if choice.prefix:
            self.moves.planner.saw(*choice.prefix)
        if choice.lapsed:
            self.moves.planner.lapsed(*choice.lapsed, now)

    def _with_room(self, decision: Decision, view: RequestView, context: RequestContext) -> Decision:
        """Return the decision with what it fetches from another endpoint, unless too much is on its way
        already."""
        if view.prefix.from_host:
            cause = self.moves.peer_reads.refuses(decision, context.candidates, context.now)
        else:
            cause = self.moves.pulling.refuses(decision, context.candidates, context.now)
        if cause is None and not view.prefix.from_host:
            context.content = self.moves.pulling.content(context.prompt.blocks, decision.cached_tokens)
            cause = None if context.content else Unpulled.TOKENS
        if cause is None:
            return decision
        return without(decision, target_of(decision, context.candidates), view, cause)

    def _prefix(self, context: RequestContext) -> tuple[int, int] | None:
        """Return last block and tokens of the cached prefix that a new session begins with, if any."""
        known = context.prefix.tokens // self._state.block_size
        if not known or (context.session and context.session.host):
            return None
        return context.prompt.blocks[known - 1], context.prefix.tokens

    def _offer(self, context: RequestContext, prefix: tuple[int, int] | None) -> Move | None:
        """Return the planner's offer for this session, or for the prefix that a new session begins with."""
        planner, handing_over = self.moves.planner, self.moves.handing_over
        if context.session and context.session.host:
            key, name = context.session.key, context.session.name
            planned = planner.offer(key, None) or planner.offer(name, None)  # before it came here
            return planned or handing_over.offered(key, name)
        if prefix is None:
            return None
        block, _ = prefix
        return planner.offer(None, block) or handing_over.offered(block, prefix_name(block))

    def _view(self, context: RequestContext, request_id: str, ordinal: int) -> RequestView:
        """Return the request as a policy sees it."""
        prompt, session = context.prompt, context.session
        level, slo_ttft_s, slo_tpot_s = objectives(context.head.headers, self._routing.limits)
        return RequestView(
            request_id=request_id,
            ordinal=ordinal,
            prompt_tokens=prompt.tokens,
            phase=Phase.BODY if prompt.model else Phase.HEADERS,
            session=self._session(session, context.now) if session else self._new_session(context),
            model=prompt.model or self._model,
            output_tokens=prompt.output_tokens,
            token_source=prompt.source,
            priority=prompt.priority,
            level=level,
            slo_ttft_s=slo_ttft_s,
            slo_tpot_s=slo_tpot_s,
            prefix=context.prefix,
            block_size=self._state.block_size,
            unsplit=self.candidates.unsplit(context),
            unpulled=context.unpulled,
        )

    def _session(self, session: Session, now: float) -> SessionView:
        view = self._state.sessions.view(session, now)
        return replace(view, awaits_kv=True) if self.moves.handing_over.keeps(session) else view

    def _new_session(self, context: RequestContext) -> SessionView | None:
        identity = context.identity
        if not identity.session_id:
            return None
        near = self._state.sessions.near_host(identity, context.prompt.cache_key, context.now)
        return SessionView(session_id=identity.session_id, parent_host=near)
