"""What is known of a request when it is decided: its session, its prompt, and a row for each endpoint.

    head, body, state ─▶ Asked: identity, session, prompt, prefix, candidates, excluded

1. *eligible*: the endpoints that pass admission.BEFORE.
2. *held*: what each endpoint holds of the prompt. Exactly, by its blocks (`exact`); or, where the body is not
   read, what the session's tail says of its host (`by_tail`).
3. *candidates*: load, overlap, predicted prefill, links to who holds the prefix, speeds as observed.

Reads state, but has claims dropped whose time is over, and remembers who holds what of a prompt until the
index changes: equal prompts that come together are looked up once. Does not: decide, or change what others
read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from msgspec import Struct, field

from perilune_api.pool import Pool
from perilune_gateway.model import (
    NO_PREFIX,
    Candidate,
    EngineModel,
    Identity,
    Location,
    Overlap,
    Prefix,
    RequestHead,
    Step,
    Tokens,
    TokenSource,
)
from perilune_gateway.request import block_hashes as blocks
from perilune_gateway.request.openai import ParsedRequest
from perilune_gateway.routing import admission
from perilune_gateway.routing.candidates import Candidates
from perilune_gateway.state.calibration import Calibration
from perilune_gateway.state.fleet import EndpointView, Fleet
from perilune_gateway.state.prefix_index import Matches, PrefixIndex
from perilune_gateway.state.sessions import Session, Sessions

_new = tuple.__new__
"""A third of a named tuple's own constructor."""
NOTHING = Overlap()
MAX_HELD = 1024
"""Prompts whose holders are remembered while the index stays as it is."""
MAX_LOCATIONS = 4
"""Holders of the longest prefix that a policy is told."""


class Laps:
    """Microseconds by step."""

    __slots__ = ("_clock", "_last", "_started", "us")

    def __init__(self, clock: Callable[[], float], started: float | None = None) -> None:
        """`started`: by that clock; None: now."""
        self._clock = clock
        self._started = self._last = clock() if started is None else started
        self.us: dict[str, float] = {}

    def lap(self, step: Step) -> None:
        now = self._clock()
        self.us[step] = (now - self._last) * 1e6
        self._last = now

    def total(self) -> dict[str, float]:
        self.us[Step.TOTAL] = (self._clock() - self._started) * 1e6
        return self.us


class Prompt(Struct, frozen=True, gc=False):
    """A prompt as far as it is known."""

    tokens: int
    source: TokenSource
    blocks: Sequence[int] = ()
    model: str = ""
    """As the body says; empty: the body was not read."""
    output_tokens: int = 0
    priority: int = 0
    body_bytes: int = 0
    hint: str = ""
    """Its prompt_cache_key."""


NO_PROMPT = Prompt(0, TokenSource.ESTIMATE)


class Asked(Struct, gc=False):
    """A request while it is decided."""

    head: RequestHead
    now: float
    laps: Laps
    identity: Identity
    session: Session | None
    eligible: Sequence[EndpointView] = ()
    excluded: Mapping[str, str] = field(default_factory=dict)
    """Endpoints that may not be chosen: address → name of the check that failed."""
    prompt: Prompt = NO_PROMPT
    candidates: Sequence[Candidate] = ()
    prefix: Prefix = NO_PREFIX
    dice: int = 0
    """What the policy's dice start from."""

    @property
    def wanted(self) -> admission.Wanted:
        return admission.Wanted(self.head.subset, self.session.host if self.session else "")


class Held(Struct, frozen=True, gc=False):
    """What is held of one prompt."""

    matches: Matches
    overlaps: Mapping[str, Overlap]
    """In tokens, of the endpoints that hold something themselves."""
    elsewhere: Overlap
    """Of all others."""
    locations: tuple[Location, ...]
    holders: tuple[str, ...]
    """Of the locations."""


class Gatherer:
    """Reads the state of one pool."""

    def __init__(
        self,
        fleet: Fleet,
        sessions: Sessions,
        index: PrefixIndex,
        calibration: Calibration,
        engine: EngineModel,
    ) -> None:
        self._fleet = fleet
        self._sessions = sessions
        self._index = index
        self._engine = engine
        self._chains = blocks.Chains()
        self._rows = Candidates(calibration)
        self._held: dict[tuple[int, int], Held] = {}
        """By last block and tokens: prompts that were looked up since the index changed."""
        self._changes = -1
        """The index's then."""

    def configure(self, pool: Pool) -> None:
        """Take over a (changed) pool document."""
        spec = pool.spec
        self._model = spec.model
        self._block_size = spec.engine.block_size
        self.engine = replace(
            self._engine.scaled(spec.engine.prefill_scale), kv_bytes_per_token=spec.model.kv_bytes_per_token
        )
        """The pool's engines as believed, nothing observed."""
        self._rows.configure(self.engine)
        self._held.clear()

    def eligible(self, asked: Asked) -> None:
        """Who may be chosen, and who not; rather than nobody, those that are merely silent."""
        views = self._fleet.recent(asked.now, self._sessions.bound)
        if asked.head.subset is None and self._fleet.all_serve:
            asked.eligible = views
        else:
            asked.eligible, asked.excluded = admission.split(views, asked.wanted)
            if not asked.eligible:
                views = self._fleet.with_silent(views, asked.now)
                asked.eligible, asked.excluded = admission.split(views, asked.wanted)

    def by_tail(self, asked: Asked, session: Session, size_bytes: int) -> None:
        """The prompt is not read: its tokens are estimated from the body's length, and the session's host is
        taken to hold what the session's tail says."""
        tokens = max(1, session.estimate_tokens(size_bytes, self._model.bytes_per_token))
        asked.prompt = Prompt(tokens, TokenSource.ESTIMATE, body_bytes=size_bytes)
        rewritten = 0 < size_bytes < session.body_bytes  # where it differs from the last one is not known
        held = 0 if rewritten else min(self.held(session, asked.now), self.whole_blocks(tokens))
        asked.prefix = Prefix((Location(session.host, held),)) if held else NO_PREFIX
        overlaps, holders = {session.host: Overlap(held, held, held)}, (session.host,) if held else ()
        asked.candidates = self._rows.rows(asked.eligible, tokens, overlaps, NOTHING, holders, asked.now)

    def exact(self, asked: Asked) -> Matches:
        """The prompt's blocks are known: what everybody holds of them."""
        prompt, now = asked.prompt, asked.now
        held = self._held_of(prompt, now)
        hits, _, score = self._index.statistics(prompt.blocks, held.matches, now)
        asked.prefix = Prefix(held.locations, hits, score)
        asked.candidates = self._rows.rows(
            asked.eligible, prompt.tokens, held.overlaps, held.elsewhere, held.holders, now
        )
        return held.matches

    def blocks(self, request: ParsedRequest, tokens: Tokens, lora: str) -> Sequence[int]:
        """Our hashes of the prompt's full blocks; of its text where no token ids are known."""
        root = blocks.prefix_root(lora, request.cache_salt)
        if tokens.ids is not None:
            return self._chains.tokens(tokens.ids, self._block_size, root)
        model = self._model
        text = request.prefix_text()[: int(model.context_tokens * model.bytes_per_token)]
        return self._chains.text(text, int(self._block_size * model.bytes_per_token), root)

    def whole_blocks(self, prompt_tokens: int) -> int:
        """The most tokens of a prompt that a cache can serve: whole blocks, never the last token."""
        return max(0, prompt_tokens - 1) // self._block_size * self._block_size

    # -- inside ------------------------------------------------------------------------------------

    def _held_of(self, prompt: Prompt, now: float) -> Held:
        """Equal prompts that come together are looked up once."""
        index = self._index
        index.expire(now)
        if self._changes != index.changes or len(self._held) >= MAX_HELD:
            self._held.clear()
            self._changes = index.changes
        key = prompt.blocks[-1] if prompt.blocks else 0, prompt.tokens
        held = self._held.get(key)
        if held is None:
            matches = index.find_matches(prompt.blocks, now)
            limit = self.whole_blocks(prompt.tokens)
            stored = min(matches.store * self._block_size, limit)
            locations = self._locations(matches, limit)
            held = self._held[key] = Held(
                matches,
                self._overlaps(matches, limit),
                _new(Overlap, (0, 0, stored)),
                locations,
                tuple([location[0] for location in locations]),
            )
        return held

    def held(self, session: Session, now: float) -> int:
        """Tokens of the session's context that its host still holds, as far as one look tells: all up to the
        tail, or nothing once the tail was evicted."""
        endpoint = self._fleet.get(session.host)
        if not (endpoint and endpoint.events):
            return session.tail_tokens
        return session.tail_tokens if self._index.holds(session.host, session.tail, now) else 0

    def engine_of(self, address: str, now: float) -> EngineModel:
        """As fast as it was observed to be."""
        return self._rows.engine_of(address, now)

    def _overlaps(self, matches: Matches, limit: int) -> dict[str, Overlap]:
        """Of the endpoints that hold something themselves, at most `limit` tokens."""
        size = self._block_size
        device, reach = matches.device, matches.reach
        if device is reach:  # nothing but devices holds anything
            tokens = {held: min(held * size, limit) for held in set(device.values())}
            made = {held: _new(Overlap, (n, n, n)) for held, n in tokens.items()}
            return {address: made[held] for address, held in device.items()}
        return {
            address: Overlap(*(min(held * size, limit) for held in matches.of(address))) for address in reach
        }

    def _locations(self, matches: Matches, limit: int) -> tuple[Location, ...]:
        """Who holds most of it. (Nobody asks an engine to pull from another yet: it is not pullable.)"""
        held, size = matches.host, self._block_size
        longest = sorted(held, key=held.__getitem__, reverse=True)[:MAX_LOCATIONS] if limit else ()
        return tuple([_new(Location, (address, min(held[address] * size, limit))) for address in longest])
