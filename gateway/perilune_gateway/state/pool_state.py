"""The whole state of a pool in one value that the gateway's parts share.

Each object has one writer: the router and the feeds call it from one event loop, so there are no locks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from perilune_api.pool import Pool
from perilune_gateway.model import EngineModel
from perilune_gateway.state.block_tokens import BlockTokens
from perilune_gateway.state.calibration import Calibration
from perilune_gateway.state.changes import NOT_SHARED, Changes
from perilune_gateway.state.computed_again import ComputedAgain
from perilune_gateway.state.connectors import Connectors
from perilune_gateway.state.ejection import Ejection
from perilune_gateway.state.fleet import Fleet
from perilune_gateway.state.host_tiers import HostTiers
from perilune_gateway.state.in_flight import InFlight
from perilune_gateway.state.offers import Offers
from perilune_gateway.state.parity import ParityCheck
from perilune_gateway.state.prefix_index import Matches, PrefixIndex
from perilune_gateway.state.resets import Resets
from perilune_gateway.state.sessions import Session, Sessions
from perilune_gateway.state.sharing import Sharing

SPECULATIVE_TTL_S = 30.0
"""Seconds for which a routed prompt counts as cached if the engine does not announce its blocks."""
INDEX_BLOCKS_PER_ENDPOINT = 4
"""Maximum size of the index divided by the pool's KV blocks, for blocks on the device, in host memory, and of
prompts that were just routed."""
MIN_INDEX_BLOCKS = 1_000_000
"""The maximum size of the index is at least this many blocks."""


@dataclass(frozen=True, slots=True)
class PoolState:
    """The state of one pool."""

    fleet: Fleet
    in_flight: InFlight
    sessions: Sessions
    index: PrefixIndex
    calibration: Calibration
    computed_again: ComputedAgain
    parity: ParityCheck
    ejection: Ejection
    block_tokens: BlockTokens
    connectors: Connectors
    host_tiers: HostTiers
    offers: Offers
    resets: Resets
    changes: Changes
    """Is told what other replicas of the gateway have to know."""
    block_size: int

    @classmethod
    def of(
        cls,
        pool: Pool,
        engine: EngineModel = EngineModel(),  # noqa: B008
        sharing: Sharing | None = None,
        *,
        keyed: bool = False,
    ) -> PoolState:
        """Return an empty state for a pool. `engine` is the assumed speed of an engine, before the pool's
        `prefillScale`. `sharing`: with other replicas of the gateway; None: nothing is shared. `keyed`:
        the gateway sends the key that engines demand."""
        spec = pool.spec
        changes = sharing.changes if sharing else NOT_SHARED
        in_flight = InFlight(changes.loaded)
        fleet = Fleet(spec.engine.kv_pool_tokens, in_flight)
        keys = spec.routing.session
        index = PrefixIndex(index_blocks(pool), SPECULATIVE_TTL_S, claims_per_endpoint=_kv_blocks(pool))
        believed = replace(
            engine.scaled(spec.engine.prefill_scale), kv_bytes_per_token=spec.model.kv_bytes_per_token
        )
        return cls(
            fleet,
            in_flight,
            Sessions(
                keys.max_sessions,
                keys.idle_seconds,
                on_rebound=fleet.sessions_changed,
                max_blocks=index_blocks(pool),
                elsewhere=sharing.sessions if sharing else None,
            ),
            index,
            Calibration(believed, changes.measured),
            ComputedAgain(),
            ParityCheck(
                spec.engine.hashing,
                spec.engine.block_size,
                lora_paths={lora.name: lora.path for lora in spec.model.loras},
            ),
            Ejection(
                spec.routing.ejection, on_change=fleet.set_ejected, on_judged=changes.judged, keyed=keyed
            ),
            BlockTokens(spec.engine.block_size, cached=index.__contains__),
            Connectors(),
            HostTiers(),
            Offers(sharing.replica if sharing else ""),
            Resets(),
            changes,
            spec.engine.block_size,
        )

    def judge(self, now: float) -> None:
        """Eject the endpoints that fail or hang. Costs O(requests that wait for their first token)."""
        self.ejection.judge(now, lambda: self.fleet.usable(now), len(self.fleet))

    def claim(self, address: str, blocks: Sequence[int], now: float, ttl_s: float | None) -> None:
        """Count the blocks of a prompt that was sent to the endpoint as cached there before it announces
        them, for `ttl_s` seconds at most; None: as the pool says."""
        if blocks and (claimed := self.index.speculate(address, blocks, now, ttl_s=ttl_s)):
            before = len(blocks) - len(claimed)
            self.changes.claimed(address, claimed, ttl_s, blocks[before - 1] if before else 0)

    def held(self, session: Session, now: float) -> Matches:
        """Return what is held of the session's context. While its host's device has all of it, the others are
        not looked up."""
        endpoint, chain = self.fleet.get(session.host), session.chain
        if endpoint and endpoint.events:
            held = self.index.leading(session.host, chain, now)
            if held < len(chain):
                return self.index.find_matches(chain, now)
        else:
            held = max(session.unblocked_tokens // self.block_size, len(chain))
        here = {session.host: held} if held else {}
        return Matches(len(chain), here, here, here, longest=held)

    def knows(self, session: Session, body_bytes: int) -> bool:
        """Whether the headers of a turn with a body of this length suffice to tell what its host caches. They
        do not if the chain is not known although the host announces blocks, or if another replica knows more
        of it, nor if the body is shorter than the last one: then it was rewritten, and may differ from it
        anywhere, nor after a turn that asked for a model that the host does not serve."""
        endpoint = self.fleet.get(session.host)
        chained = session.chain or not (endpoint and endpoint.events)
        follows = bool(chained) and session.follows and not session.unserved
        return follows and body_bytes >= session.body_bytes

    def held_end(self, session: Session, now: float) -> tuple[int, int]:
        """Return the last block of the session's context that its host still caches, as far as known, and the
        tokens up to its end. (0, 0) if none is."""
        if not session.follows and self.index.announced(session.host, session.shared_tail):
            return session.shared_tail, session.shared_blocks * self.block_size
        held = self.index.leading(session.host, session.chain, now)
        return (session.chain[held - 1], held * self.block_size) if held else (0, 0)

    def offloaded_tokens(self, session: Session) -> int:
        """Return how many leading tokens of the session's context its host has in host memory, as far as
        known."""
        offloaded = self.index.leading_offloaded
        if not session.follows and offloaded(session.host, (session.shared_tail,)):
            return session.shared_blocks * self.block_size
        return offloaded(session.host, session.chain) * self.block_size

    def forget(self, address: str) -> None:
        """Forget an endpoint that left the pool. The fleet has dropped it already, or knows another one at
        its address."""
        self.changes.left(address)
        self.index.forget(address)
        self.sessions.forget_host(address)
        self.calibration.forget(address)
        self.computed_again.forget(address)
        self.ejection.forget(address)
        self.parity.forget(address)
        self.connectors.forget(address)
        self.host_tiers.forget(address)


def index_blocks(pool: Pool) -> int:
    """Return the maximum number of blocks in the prefix index of this pool."""
    endpoints = sum(max(1, len(endpoint.events)) for endpoint in pool.spec.endpoints)
    return max(MIN_INDEX_BLOCKS, INDEX_BLOCKS_PER_ENDPOINT * _kv_blocks(pool) * endpoints)


def _kv_blocks(pool: Pool) -> int:
    """Return the number of KV blocks on one endpoint's device."""
    return pool.spec.engine.kv_pool_tokens // pool.spec.engine.block_size
