"""One gateway in virtual time: what a `ServedPool` has, without its sockets, and the engines that it asks.

Several gateways of one pool share their state as live ones do, by the batches of `state/replicas.py`, which
reach the others after `SHARED_S`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from random import Random

from perilune_api.pool import Pool
from perilune_gateway.feeds.drained import is_idle
from perilune_gateway.model import Tokens
from perilune_gateway.model.handoff import HandoffRecord, Leg
from perilune_gateway.model.kv_events import BlockStored, Event
from perilune_gateway.model.shared import Batch, Names
from perilune_gateway.request.parsed import ParsedRequest
from perilune_gateway.routing.handing_over import Legs
from perilune_gateway.routing.new_router import new_router
from perilune_gateway.state.connectors import Connector
from perilune_gateway.state.engine_blocks import EngineBlocks
from perilune_gateway.state.facts import HandedOver, LegsDue
from perilune_gateway.state.pool_state import PoolState, index_blocks
from perilune_gateway.state.replicas import Replicas
from perilune_gateway.state.request_facts import Decided
from perilune_gateway.state.sharing import Sharing
from perilune_lab.simulate.engine import SimulatedEngine
from perilune_lab.simulate.legs import BothLegs, Ends
from perilune_lab.simulate.loop import Loop
from perilune_lab.simulate.sent import Round
from perilune_lab.simulate.texts import names

ALIVE_S = 0.5
"""Seconds between two signs of life for the other gateways, see `feeds/shared_state.py`."""
SHARED_S = 0.003
"""Seconds until the others have heard what a gateway tells them."""


class SimulatedGateway:
    """One gateway of a pool."""

    def __init__(
        self,
        number: int,
        pool: Pool,
        engines: Mapping[str, SimulatedEngine],
        loop: Loop,
        rng: Random,
        *,
        shares: bool,
    ) -> None:
        """`shares`: whether the pool has other gateways."""
        self.loop = loop
        self.engines = engines
        self.decided: Decided | None = None
        """The last decision."""
        self.handed_over: list[HandoffRecord] = []
        """The transfers of KV that have ended."""
        self.rounds: dict[BothLegs, Legs] = {}
        """The hand-offs whose legs run."""
        clock, sharing = loop.clock, None
        if shares:
            sharing = Sharing(f"gateway{number}", Names(b"simulated"), clock, clock, self._tell_soon)
        self.state = PoolState.of(pool, sharing=sharing)
        self.blocks = EngineBlocks(
            self.state.index,
            pool.spec.engine.block_size,
            store=pool.spec.engine.store,
            max_names=2 * index_blocks(pool),
        )
        self.router = new_router(
            pool,
            self.state,
            _NoTokenizer(),
            (self.blocks, self),
            clock=clock,
            stopwatch=clock,
            wall_clock=clock,
            rng=rng,
        )
        self._ask()
        self._others: Sequence[SimulatedGateway] = ()
        self._legs_due = self._telling = False
        self._told = 0
        self._replicas: Replicas | None = None
        if shares:
            moves = self.router.moves
            self._replicas = Replicas(self.state, self.router.new_sessions, moves.handing_over)

    # -- what comes in -----------------------------------------------------------------------------

    def heard(self, address: str, events: Iterable[Event]) -> None:
        """Apply an engine's KV events."""
        now = self.loop.now
        for event in events:
            applied = self.blocks.apply(address, event, now)
            if isinstance(event, BlockStored):
                self.state.block_tokens.stored(event, applied)
            self.router.on_applied(applied)

    def lost(self, digests: Sequence[bytes]) -> None:
        """Hear that the store has these blocks no longer."""
        now = self.loop.now
        self.blocks.surveyed((), names(digests), now, now)

    def configure(self, pool: Pool) -> None:
        """Take over a changed pool document."""
        self.router.configure(pool)
        self._ask()

    def _ask(self) -> None:
        """Ask the engines whether they hand KV over."""
        for endpoint in self.router.pool.spec.endpoints:
            if endpoint.bootstrap:
                self.state.connectors.answered(endpoint.address, Connector((endpoint.address,), 1))

    def has_left(self, address: str) -> bool:
        """Return whether the endpoint, which drains, is no longer used."""
        state, transfers = self.state, self.router.moves.handing_over.transfers
        return is_idle(state.fleet, state.sessions, address, self.loop.now, transfers=transfers)

    def scrape(self) -> None:
        """Read the engines' metrics."""
        for engine in self.engines.values():
            self.state.fleet.metrics(engine.address, engine.metrics(), self.loop.now)

    def plan_moves(self) -> None:
        self.router.plan_moves(self._replicas is None or self._replicas.plans)

    # -- what happens in it ------------------------------------------------------------------------

    def on_decided(self, fact: Decided) -> None:
        self.decided = fact

    def on_handed_over(self, fact: HandedOver) -> None:
        self.handed_over.append(fact.record)

    def on_legs_due(self, fact: LegsDue) -> None:
        if not self._legs_due:
            self._legs_due = True
            self.loop.at(self.loop.now, self._hand_over)

    def _hand_over(self) -> None:
        """Send the legs that are due, and cancel those of hand-offs that were given up."""
        self._legs_due = False
        handing_over = self.router.moves.handing_over
        for legs in handing_over.due():
            Round(self, legs).begin()
        for both, legs in list(self.rounds.items()):
            if legs.handoff.is_over:
                del self.rounds[both]
                both.cancel()
                for leg in Leg:
                    handing_over.ended(legs, leg)

    def ends(self, source: str, target: str) -> Ends:
        return Ends(self.engines[source], self.engines[target])

    # -- the other gateways ------------------------------------------------------------------------

    def share(self, others: Sequence[SimulatedGateway]) -> None:
        """Begin to share state with the pool's other gateways."""
        self._others = others
        self.loop.every(ALIVE_S, partial(self._tell, alive=True))
        self._tell(alive=True)

    def _tell_soon(self) -> None:
        if not self._telling:
            self._telling = True
            self.loop.at(self.loop.now, self._tell)

    def _tell(self, *, alive: bool = False) -> None:
        self._telling = False
        assert self._replicas, "with others"
        changes = self._replicas.take(alive=alive).changes
        if changes:
            self._told += 1
            batch = Batch(self._replicas.replica, changes, self._told)
            for other in self._others:
                self.loop.at(self.loop.now + SHARED_S, partial(other.hear, batch))

    def hear(self, batch: Batch) -> None:
        """Hear what another gateway tells."""
        assert self._replicas, "with others"
        self._replicas.apply(batch)
        self._replicas.lapse()


class _NoTokenizer:
    """A tokenizer that must not be called, since the token ids are known."""

    rewrites_answers = False

    def now(self, request: ParsedRequest) -> Tokens | None:
        raise AssertionError("the token ids are known")
