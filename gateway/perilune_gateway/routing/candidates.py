"""Gathers the facts of a decision: the endpoints that may serve a request, and one `Candidate` for each.

1. `find_eligible` keeps the endpoints that `admission.exclusion` has nothing against.
2. `estimate_from_session` is for a request whose body is not read. The prompt's length follows from the
   body's, and its blocks are taken to be those of the session's context.
3. `look_up` is for a prompt whose blocks are known. The prefix index says what every endpoint holds of it.
4. In a large pool only the endpoints of a shortlist become candidates (shortlist.py).

Reads state and changes nothing. Costs some µs per endpoint, and 2 µs per 256 blocks that the index knows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace

from perilune_api.pool import Pool, Role
from perilune_api.topology import Link
from perilune_gateway.model import (
    COMPUTED_WHOLE,
    Candidate,
    Load,
    Location,
    Overlap,
    Prefix,
    TokenSource,
    Unpulled,
    Unsplit,
)
from perilune_gateway.model.kv_reach import kv_reach
from perilune_gateway.policy import POLICIES
from perilune_gateway.request import paths
from perilune_gateway.routing import admission
from perilune_gateway.routing.context import Prompt, RequestContext
from perilune_gateway.routing.pull import ANSWER_S, gives, unpulled, waits_s
from perilune_gateway.routing.shortlist import ABOVE, BY_COST, shortlist
from perilune_gateway.state.fleet import EndpointView
from perilune_gateway.state.pool_state import PoolState
from perilune_gateway.state.prefix_index import Matches
from perilune_gateway.state.session import Session

MAX_LOCATIONS = 4
"""Maximum number of endpoints in a prefix's locations, unless a policy asks for all holders."""


class CandidateBuilder:
    """Builds the candidates of one pool's requests."""

    def __init__(self, state: PoolState, targets: Callable[[float], Iterable[str]] = lambda now: ()) -> None:
        """`targets` returns where planned moves would lead; these endpoints are always candidates."""
        self._state = state
        self._targets = targets

    def configure(self, pool: Pool) -> None:
        """Take over a (changed) pool document."""
        self._bytes_per_token = pool.spec.model.bytes_per_token
        self._block_size = pool.spec.engine.block_size
        self._session_failures = pool.spec.routing.ejection.session_failures
        rules, routing = pool.spec.routing.pull, pool.spec.routing
        canary = (routing.canary.policy.name,) if routing.canary else ()
        asked = (routing.policy.name, *canary, *routing.shadow.policies)
        self._most = None if any(map(POLICIES.asks_for_holders, asked)) else MAX_LOCATIONS
        reach = kv_reach(pool.spec)
        self._reads_peers = rules.enabled and reach.reads_peers
        self._pulls = rules.enabled and (reach.hands_over or reach.reads_peers)
        self._held_s = 0.0 if self._reads_peers else rules.max_seconds
        self._first = pool.spec.routing.engine_priority.used
        self._loras = {lora.name for lora in pool.spec.model.loras}
        self._splits = any(endpoint.role is Role.PREFILL for endpoint in pool.spec.endpoints)
        self._by_cost = BY_COST.issuperset(asked) and not self._splits
        self._params = routing.policy.perilune

    def find_eligible(self, context: RequestContext) -> None:
        """Fill in which endpoints may be chosen. Endpoints that are ejected, or whose metrics fail, are tried
        only if no other is left, and those that take no connections only if all of several take none."""
        state, now = self._state, context.now
        views = state.fleet.recent(now, state.sessions.bound)
        wanted = self._wanted(context)
        context.eligible, context.excluded = admission.split(views, wanted)
        if context.excluded and (trial := self._trial(context, wanted, views)):
            wanted = replace(wanted, trial=trial)
            context.eligible, context.excluded = admission.split(views, wanted)
        if not context.eligible:
            views = state.fleet.as_last_resort(views, now)
            wanted = replace(wanted, failing="")
            context.eligible, context.excluded = admission.split(views, wanted)
        if not context.eligible:
            context.eligible, context.excluded = admission.split(state.fleet.as_cut_off(views), wanted)

    def _wanted(self, context: RequestContext) -> admission.Wanted:
        """Return what admission must know of the request."""
        wanted, session = wanted_by(context), context.session
        failing = session is not None and session.failures >= self._session_failures
        return replace(wanted, failing=wanted.host) if failing else wanted

    def _trial(self, context: RequestContext, wanted: admission.Wanted, views: Sequence[EndpointView]) -> str:
        """Return the ejected endpoint for which this request is the trial; empty if it is none."""
        if not paths.is_model_path(context.head.path) or context.head.method != "POST":
            return ""
        return self._state.ejection.trial(
            context.now, new_session=not wanted.host, may=lambda address: _tried(address, wanted, views)
        )

    def estimate_from_session(self, context: RequestContext, session: Session, body_bytes: int) -> None:
        """Fill in prompt, prefix and candidates from the session and the body's length alone."""
        tokens = max(1, session.estimate_tokens(body_bytes, self._bytes_per_token))
        context.prompt = Prompt(tokens=tokens, source=TokenSource.ESTIMATE, body_bytes=body_bytes)
        self._weigh(context, self._state.held(session, context.now), session.chain)

    def look_up(self, context: RequestContext) -> Matches:
        """Fill in prefix and candidates from the prompt's blocks. Returns the index's answer. A turn that is
        only estimated, of a session whose earlier ones were not, matches no engine's blocks; then the session
        tells what is cached, as it does for a turn that is not read, and for one that names an earlier
        response and has the same instructions and tools."""
        index, prompt, now = self._state.index, context.prompt, context.now
        matches, session = index.find_matches(prompt.blocks, now), context.session
        unlike = prompt.source is TokenSource.ESTIMATE and not matches.longest
        if prompt.partial:
            known = session is not None and session.begins_with(prompt.lead)
        else:
            known = session is not None and self._state.knows(session, prompt.body_bytes)
        if unlike and session and known:
            held = self._state.held(session, now, prompt=prompt.partial and prompt.rewritten)
            self._weigh(context, held, session.chain)
            return matches
        hits, _, score = (
            index.statistics(prompt.blocks[matches.longest - 1], now) if matches.longest else (0, 0, 0.0)
        )
        self._weigh(context, matches, prompt.blocks, hits, score)
        return matches

    def unsplit(self, context: RequestContext) -> Unsplit | None:
        """Return why no other endpoint can prefill the request's prompt; None if one can, or in a pool
        without prefill endpoints."""
        if not self._splits:
            return None
        return context.prompt.unsplit if self._givers(context.eligible) else Unsplit.NO_GIVER

    # -- inside ------------------------------------------------------------------------------------

    def _weigh(
        self,
        context: RequestContext,
        matches: Matches,
        blocks: Sequence[int],
        hits: int = 0,
        score: float = 0.0,
    ) -> None:
        """Fill in prefix and candidates from what is held of the prompt's `blocks`."""
        tokens = context.prompt.tokens
        limit = cacheable(tokens, self._block_size)
        waits = self._waits_s(matches, limit, context.now)
        locations = self._locations(matches, limit, waits)
        context.unpulled = self._unpulled(context, locations, waits, blocks)
        pullable = self._pulls and bool(locations) and not context.unpulled
        context.prefix = Prefix(
            locations=locations,
            hits=hits,
            frequency_score=score,
            pullable=pullable,
            fetch_within_s=self._held_s,
            legs_first=self._first,
            from_host=self._reads_peers,
        )
        in_store = Overlap(0, 0, min(matches.store * self._block_size, limit))
        overlaps = self._overlaps(matches, limit)
        context.candidates = self._candidates(context, tokens, overlaps, in_store, waits)

    def _candidates(
        self,
        context: RequestContext,
        prompt_tokens: int,
        overlaps: Mapping[str, Overlap],
        elsewhere: Overlap,
        holders: Collection[str],
    ) -> list[Candidate]:
        """Return one candidate per eligible endpoint. `elsewhere`: the overlap of endpoints not in
        `overlaps`. `holders`: those that can hand KV over."""
        calibration, now = self._state.calibration, context.now
        givers = self._givers(context.eligible)
        chosen_links = calibration.transfers or self._splits or self._pulls
        loads = self._state.loads
        overtakes = loads.contended
        rank = loads.rank(context.identity.tenant, now) if overtakes else 0.0
        candidates = []
        for view in self._looked_at(context, overlaps):
            address = view.endpoint.address
            engine, decode_s, ttft_ratio = calibration.speed(address, now)
            overlap = overlaps.get(address, elsewhere)
            device = overlap.device_tokens
            candidates.append(
                Candidate(
                    endpoint=view.endpoint,
                    load=_ahead(view.load, loads.goes_before(address, rank)) if overtakes else view.load,
                    overlap=overlap,
                    prefill_s=engine.prefill_s(prompt_tokens - device, device),
                    seconds_since_move=view.seconds_since_move,
                    links=self._links(view, context.prefix, givers, holders, now)
                    if chosen_links
                    else view.links,
                    engine=engine,
                    decode_s=decode_s,
                    ttft_ratio=ttft_ratio,
                )
            )
        return candidates

    def _looked_at(self, context: RequestContext, overlaps: Mapping[str, Overlap]) -> Sequence[EndpointView]:
        """Return the eligible endpoints, or the shortlist of many."""
        if not self._by_cost or len(context.eligible) <= ABOVE:
            return context.eligible
        calibration, now, session = self._state.calibration, context.now, context.session
        return shortlist(
            context.eligible,
            tokens=context.prompt.tokens,
            output_tokens=context.prompt.output_tokens,
            overlaps=overlaps,
            named={session.host if session else "", context.holder, *self._targets(now)},
            engine_of=lambda address: calibration.speed(address, now).engine,
            params=self._params,
        )

    def _givers(self, eligible: Sequence[EndpointView]) -> Sequence[str]:
        """Return the endpoints that prefill for others."""
        if not self._splits:
            return ()
        return [v.endpoint.address for v in eligible if v.endpoint.role is Role.PREFILL]

    def _links(
        self,
        view: EndpointView,
        prefix: Prefix,
        givers: Sequence[str],
        holders: Collection[str],
        now: float,
    ) -> Mapping[str, Link]:
        """Return links to the holders of the prefix, and to the prefill endpoints that can hand KV over to
        this one, as slow as they were observed to be."""
        state, here = self._state, view.endpoint.address
        can = state.host_tiers.can if self._reads_peers else state.connectors.can
        near = [there for there, *_ in prefix.locations if there not in givers]
        near += [giver for giver in givers if can(giver, here)]
        return {
            there: view.links[there]._replace(
                slowdown=state.calibration.slowdown(there, here, now),
                carries_kv=(there in holders or there in givers) and can(there, here),
            )
            for there in near
            if there in view.links
        }

    def _overlaps(self, matches: Matches, limit: int) -> dict[str, Overlap]:
        """Return what each endpoint itself holds, in tokens, at most `limit`."""
        size, again, overlaps = self._block_size, self._state.computed_again, {}
        alike: dict[tuple[int, int, int, int], Overlap] = {}  # many endpoints hold equally much
        for address in matches.reach:
            key = *matches.of(address), again.tokens(address)
            overlap = alike.get(key)
            if overlap is None:
                device, host, store = (min(blocks * size, limit) for blocks in key[:3])
                used = max(0, device - key[3])
                overlap = Overlap(used, host if host > device else used, store if store > device else used)
                alike[key] = overlap
            overlaps[address] = overlap
        return overlaps

    def _locations(self, matches: Matches, limit: int, waits: Mapping[str, float]) -> tuple[Location, ...]:
        """Return the endpoints that hold the most of the prompt, or all holders if a policy asks for them.
        Where host memory is read, one of those that have the most there is among them."""
        held, size = matches.host, self._block_size
        if not (limit and held):
            return ()
        longest = sorted(held, key=held.__getitem__, reverse=True)[: self._most]
        offloaded = {address: n for address, n in matches.offloaded.items() if address in waits}
        if offloaded and (most := max(offloaded, key=offloaded.__getitem__)) not in longest:
            longest[-1] = most
        return tuple(
            Location(
                address,
                min(held[address] * size, limit),
                waits.get(address, 0.0),
                min(offloaded.get(address, 0) * size, limit) if self._reads_peers else 0,
            )
            for address in longest
        )

    def _waits_s(self, matches: Matches, tokens: int, now: float) -> Mapping[str, float]:
        """Return the holders that can hand KV over now, and the predicted seconds until they begin."""
        holders = matches.offloaded if self._reads_peers else matches.host
        if not self._pulls or not holders:
            return {}
        state = self._state
        givers = [
            (address, view.load)
            for view in state.fleet.recent(now, state.sessions.bound)
            if (address := view.endpoint.address) in holders
            and gives(view.endpoint, ejected=bool(view.ejected))
        ]
        if self._reads_peers:
            return {address: ANSWER_S for address, _ in givers if address in state.host_tiers.known}
        able = [giver for giver in givers if not state.connectors.why_not(giver[0])]
        return waits_s(able, state.calibration.engine, tokens, first=self._first)

    def _unpulled(
        self,
        context: RequestContext,
        locations: Sequence[Location],
        givers: Collection[str],
        blocks: Sequence[int],
    ) -> Unpulled | None:
        """Return why the longest prefix cannot be fetched from its holders; None if it can, or if nothing is
        held, or in a pool that does not fetch KV with requests."""
        if not self._pulls:
            return None
        if self._reads_peers:
            named = None if context.prompt.unsplit is None else Unpulled.REQUEST
            return unpulled(locations, givers, lambda tokens: named)
        if context.prompt.unsplit in COMPUTED_WHOLE:
            return unpulled(locations, givers, lambda tokens: Unpulled.REQUEST)
        return unpulled(locations, givers, lambda tokens: self._why_not(tokens, blocks))

    def _why_not(self, tokens: int, blocks: Sequence[int]) -> Unpulled | None:
        """Return why the prompt's leading `tokens` cannot be handed over; None if they can."""
        last = tokens // self._block_size
        if not 0 < last <= len(blocks):
            return Unpulled.TOKENS
        cause = self._state.block_tokens.why_not(blocks[last - 1], self._loras)
        return Unpulled(cause) if cause else None


def cacheable(prompt_tokens: int, block_size: int) -> int:
    """Return the most tokens of a prompt that a cache can serve: whole blocks, and never the last token."""
    return max(0, prompt_tokens - 1) // block_size * block_size


def _tried(address: str, wanted: admission.Wanted, views: Sequence[EndpointView]) -> bool:
    """Return whether the request may be the trial of an ejected endpoint, which does not drain."""
    if wanted.subset is not None and address not in wanted.subset:
        return False
    return any(v.ejected and v.endpoint.address == address and not v.endpoint.draining for v in views)


def wanted_by(context: RequestContext) -> admission.Wanted:
    """Return what admission must know of the request."""
    host = context.session.host if context.session else ""
    return admission.Wanted(context.head.subset, host, context.holder)


def _ahead(load: Load, share: float) -> Load:
    """Return the load with only this share of its pending prefill."""
    if share == 1.0:
        return load
    return load._replace(
        pending_prefill_tokens=round(load.pending_prefill_tokens * share),
        pending_prefill_s=load.pending_prefill_s * share,
    )
