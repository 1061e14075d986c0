"""The whole state of a pool in one value that the gateway's parts share.

Each object has one writer: the router and the feeds call it from one event loop, so there are no locks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from perilune_api.pool import Pool
from perilune_gateway.model import EngineModel
from perilune_gateway.model.handoff import Content
from perilune_gateway.request.stored_turns import StoredTurns
from perilune_gateway.request.tokens.media_spans import MediaSpans
from perilune_gateway.state.block_tokens import BlockTokens
from perilune_gateway.state.calibration import Calibration
from perilune_gateway.state.computed_again import ComputedAgain
from perilune_gateway.state.connectors import Connectors
from perilune_gateway.state.ejection import Ejection
from perilune_gateway.state.facts import Facts
from perilune_gateway.state.fleet import Fleet
from perilune_gateway.state.full_reports import FullReports
from perilune_gateway.state.host_tiers import HostTiers
from perilune_gateway.state.in_flight import Requests
from perilune_gateway.state.loads import Loads
from perilune_gateway.state.offers import Offers
from perilune_gateway.state.parity import ParityCheck
from perilune_gateway.state.prefix_index import Matches, PrefixIndex
from perilune_gateway.state.resets import Resets
from perilune_gateway.state.session import Session
from perilune_gateway.state.sessions import Sessions
from perilune_gateway.state.sharing import Sharing
from perilune_gateway.state.silent_resets import SilentResets
from perilune_gateway.state.starts import Starts

SPECULATIVE_TTL_S = 30.0
"""Seconds for which a routed prompt counts as cached if the engine does not announce its blocks."""
INDEX_BLOCKS_PER_ENDPOINT = 4
"""Maximum size of the index divided by the pool's KV blocks, for blocks on the device, in host memory, and of
prompts that were just routed."""
CONTEXTS = 1_000
"""Number of a host's latest sessions of which `PoolState.contexts` tells."""
MIN_INDEX_BLOCKS = 1_000_000
"""The maximum size of the index is at least this many blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """The state of one pool."""

    facts: Facts
    """Tells the pool's listeners what happens."""
    requests: Requests
    loads: Loads
    fleet: Fleet
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
    silent_resets: SilentResets
    reports: FullReports
    starts: Starts
    media: MediaSpans
    stored: StoredTurns
    sharing: Sharing | None
    """With other replicas of the gateway. None if nothing is shared."""
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
        `costModel` and `prefillScale`. `sharing`: with other replicas of the gateway; None: nothing is
        shared. `keyed`: the gateway sends the key that engines demand."""
        spec = pool.spec
        facts, requests = Facts(), Requests()
        loads = Loads(facts.tell, sharing.sessions.tenant if sharing else str)
        fleet = Fleet(spec.engine.kv_pool_tokens, loads)
        keys = spec.routing.session
        index = PrefixIndex(index_blocks(pool), SPECULATIVE_TTL_S, claims_per_endpoint=_kv_blocks(pool))
        believed = replace(
            engine.told(spec.engine.cost_model).scaled(spec.engine.prefill_scale),
            kv_bytes_per_token=spec.model.kv_bytes_per_token,
        )

        def is_full(address: str) -> bool:
            return loads.at(address).context_tokens >= fleet.kv_tokens(address)

        return cls(
            facts=facts,
            requests=requests,
            loads=loads,
            fleet=fleet,
            sessions=Sessions(
                keys.max_sessions,
                keys.idle_seconds,
                tell=facts.tell,
                max_blocks=index_blocks(pool),
                elsewhere=sharing.sessions if sharing else None,
            ),
            index=index,
            calibration=Calibration(believed, facts.tell, fleet.level),
            computed_again=ComputedAgain(),
            parity=ParityCheck(
                spec.engine.hashing,
                spec.engine.block_size,
                lora_paths={lora.name: lora.path for lora in spec.model.loras},
            ),
            ejection=Ejection(spec.routing.ejection, requests, facts.tell, keyed=keyed, is_full=is_full),
            block_tokens=BlockTokens(spec.engine.block_size, cached=index.__contains__),
            connectors=Connectors(fleet.alike),
            host_tiers=HostTiers(fleet.alike),
            offers=Offers(sharing.replica if sharing else ""),
            resets=Resets(),
            silent_resets=SilentResets(),
            reports=FullReports(),
            starts=Starts(),
            media=MediaSpans(spec.engine.block_size),
            stored=StoredTurns(),
            sharing=sharing,
            block_size=spec.engine.block_size,
        )

    def pass_time(self, now: float) -> None:
        """Let happen what time alone brings about: claims expire, predicted prefills end, and endpoints that
        fail or hang are ejected. Called when a request comes and several times per second. Costs O(requests
        in flight), at most every `ejection.JUDGE_S`."""
        self.loads.pass_time(now)
        self.index.expire(now)
        self.ejection.judge(now, lambda: self.fleet.usable(now), len(self.fleet))

    def now_us(self, now: float) -> int:
        """Return the time by the clock that all replicas share, in microseconds. `now`: by this one's."""
        return self.sharing.stamps.now_us() if self.sharing else int(now * 1e6)

    def held(self, session: Session, now: float, *, prompt: bool = False) -> Matches:
        """Return what is held of the session's context, or of its last `prompt` alone. To save time, other
        endpoints are looked up only if the host's device lacks some of it, or if it is busy and others may
        read what they lack from host memory or the store."""
        endpoint, chain = self.fleet.get(session.host), session.chain
        if prompt:
            chain = chain[: session.fork]
        if endpoint and endpoint.events:
            held = self.index.leading(session.host, chain, now)
            elsewhere = self.index.beyond_devices and self.loads.at(session.host).in_flight
            if held < len(chain) or elsewhere:
                return self.index.find_matches(chain, now)
        else:
            held = max(session.unblocked_tokens // self.block_size, len(chain))
        here = {session.host: held} if held else {}
        return Matches(blocks=len(chain), device=here, host=here, reach=here, longest=held)

    def contexts(self, now: float) -> Iterator[Content]:
        """Yield the contexts of the sessions that are between two turns, as far as their tokens are known; of
        each host its latest CONTEXTS."""
        for address in self.fleet.addresses():
            for session in list(islice(self.sessions.at(address, now), CONTEXTS)):
                if session.chain and session.ticket not in self.requests:
                    context = self.block_tokens.prompt(session.tail)
                    if isinstance(context, Content):
                        yield context

    def announces(self, session: Session) -> bool:
        """Return whether the session's host announces what it caches."""
        endpoint = self.fleet.get(session.host)
        return endpoint is not None and bool(endpoint.events)

    def knows(self, session: Session, body_bytes: int) -> bool:
        """Return whether the headers of a turn with a body of this length suffice to tell what its host
        caches. They do not if the chain is not known although the host announces blocks, or if another
        replica knows more of it, nor if the body is shorter than the last one: then it was rewritten, and may
        differ from it anywhere, nor after a turn that asked for a model that the host does not serve."""
        chained = session.chain or not self.announces(session)
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


def index_blocks(pool: Pool) -> int:
    """Return the maximum number of blocks in the prefix index of this pool."""
    endpoints = sum(max(1, len(endpoint.events)) for endpoint in pool.spec.endpoints)
    return max(MIN_INDEX_BLOCKS, INDEX_BLOCKS_PER_ENDPOINT * _kv_blocks(pool) * endpoints)


def _kv_blocks(pool: Pool) -> int:
    """Return the number of KV blocks on one endpoint's device."""
    return pool.spec.engine.kv_pool_tokens // pool.spec.engine.block_size
