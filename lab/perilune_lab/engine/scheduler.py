"""Continuous batching with chunked prefill, in virtual time. Pure state: time is an argument, no I/O.

A step's batch is fixed when it begins and its tokens exist when it ends; how long it takes, the engine model
says. One step:

1. Running sequences first: one token each for those that decode, the next chunk for those still in prefill.
   No block left → the last (or least urgent) sequence is preempted and recomputed later.
2. Then waiting ones, in order of arrival (or priority), while token budget, sequence slots and blocks
   last. Each looks up its prefix: cached blocks are attached (*hit*), what is left is prefilled with the
   chunks of all others in the same forward (*misses*, batched). Blocks register as they are scheduled, so
   of equal prompts in one batch the first is computed and the others share its blocks.
3. A prefix that host memory or the shared store holds beyond the device's is loaded first, at that speed and
   outside the step; the sequence joins when its blocks are there. What a request reads from another
   engine's host memory comes into this one's before.
4. When the step ends, each sequence whose tokens are all computed gets its next token, in the batch's
   order, so results do not depend on how the batch was split.

With `stretches`, steps that only decode are taken together until a sequence fills a block or ends, or
something else happens: the same times and tokens for a fraction of the work, for callers that need no token
by itself.

`serial_misses` models an engine without batched misses: a step's misses are prefilled one after the other,
each a forward of its own, while the step's decode waits.

Cost: about 1 µs per sequence and step, plus 0.5 µs per block when a sequence enters or leaves.
Not modelled: speculative decoding, several ranks, sampling (the caller brings the tokens).
"""

import heapq
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import Protocol

from perilune_gateway.model.engine_model import EngineModel
from perilune_lab.engine.host_tier import HostTier
from perilune_lab.engine.kv_cache import Change, KvCache, Medium, Stored
from perilune_lab.engine.request import Finish, Request, Source
from perilune_lab.engine.store import Store
from perilune_lab.engine.stretches import Stretch


@dataclass(slots=True, kw_only=True)
class EngineStep:
    """One step of the engine: a forward, or several with `serial_misses`, from begin to end."""

    started_s: float
    ends_s: float = inf
    prefilled: list[tuple[Request, int, int]] = field(default_factory=list)
    """(request, new tokens, tokens before them)."""
    decoded: list[Request] = field(default_factory=list)
    """Requests that decode one token."""
    batch: list[Request] = field(default_factory=list)
    """All requests of the step, in sampling order."""
    admitted: list[Request] = field(default_factory=list)
    """Requests that were admitted for the first time."""
    hits: int = 0
    """Admissions with nothing but their tail to compute."""
    misses: int = 0
    begins: int = 0
    """Prefills that begin: misses, and what is left behind blocks that were loaded."""
    prefill_forwards: int = 0
    """Forwards with a miss in them: 1 for all misses of a step, or one each with `serial_misses`."""
    preempted: int = 0
    steps: int = 1
    """Steps that were taken together, see `Limits.stretches`."""
    emitted: list[Request] = field(default_factory=list)
    """Requests that got a token at `ends_s`."""
    finished: list[Request] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens computed."""
        return self.steps * len(self.decoded) + sum(new for _, new, _ in self.prefilled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    max_sequences: int = 256
    tokens_per_step: int = 8192
    tokens_per_prompt: int = sys.maxsize
    """The most of a step that one prompt gets, so that others join it."""
    by_priority: bool = False
    """Waiting requests by (priority, arrival), lower first, instead of by arrival."""
    serial_misses: bool = False
    """One forward per missed prompt instead of one for all."""
    stretches: bool = False
    """Steps that only decode are taken together."""
    stores_answers: bool = True
    """The KV of answers is put into the store as well as that of prompts, as with vLLM's
    `save_decode_cache`."""


class Connector(Protocol):
    """Hands KV over to other engines and fetches it there, see `connector`."""

    def takes(self, request: Request) -> bool:
        """Return whether the request's prompt is fetched; `Scheduler.fetched` ends that."""

    def keeps(self, request: Request) -> bool:
        """Return whether the blocks of an ended request stay until `Scheduler.release`."""


class Peers(Protocol):
    """Reads the host memory of other engines, see `peers`."""

    def asks(self, request: Request, source: Source, digests: Sequence[bytes]) -> None:
        """Ask for these blocks; `Scheduler.read` ends that."""


class Scheduler:
    def __init__(
        self,
        cache: KvCache,
        model: EngineModel,
        limits: Limits | None = None,
        store: Store | None = None,
        connector: Connector | None = None,
        noise: Callable[[], float] | None = None,
        host: HostTier | None = None,
        peers: Peers | None = None,
    ) -> None:
        """`host`: host memory, which `peers` need. `noise`: called for each step; how many times longer it
        takes than the model says."""
        self.cache = cache
        self.model = model
        self.limits = limits or Limits()
        self.store = store
        self.connector = connector
        self.noise = noise
        self.host = host
        self.peers = peers
        self.running: list[Request] = []
        """Requests in the batch, in the order in which they were admitted."""
        self.loading: list[Request] = []
        """Admitted requests whose blocks are being loaded from the store or another engine."""
        self.step: EngineStep | None = None
        """The step in progress."""
        self._arriving: list[tuple[float, int, Request]] = []
        self._waiting: list[tuple[int, int, Request]] = []
        self._sequence = count()
        self._ordinal = count()
        self._now = 0.0
        self._store_free_s = self._host_free_s = 0.0
        self._brought: list[Change] = []
        """What other engines' blocks changed in host memory since the last step ended."""
        self._blocked = False
        """No waiting request can be admitted until something changes."""

    # reading

    @property
    def waiting_count(self) -> int:
        return len(self._waiting) + len(self.loading) + len(self._arriving)

    @property
    def waiting(self) -> list[Request]:
        """Requests that do not run yet, in no particular order."""
        return [entry[2] for entry in (*self._waiting, *self._arriving)] + self.loading

    @property
    def idle(self) -> bool:
        return not (self.running or self.waiting_count)

    def next_s(self) -> float:
        """Return when something happens next; inf if there is nothing to do."""
        if self.step is not None:
            return self.step.ends_s
        if self.running or (self._waiting and not self._blocked):
            return self._now
        arrival = self._arriving[0][0] if self._arriving else inf
        return min([arrival, *(request.ready_s for request in self.loading)])

    # writing

    def add(self, request: Request, now: float) -> None:
        """Take a request that arrives at `now`; it can run once its overhead has passed."""
        request.arrived_s = now
        request.ready_s = now + self.model.request_overhead_s(request.prompt_tokens)
        heapq.heappush(self._arriving, (request.ready_s, next(self._sequence), request))
        self.interrupt(request.ready_s)

    def interrupt(self, at_s: float) -> None:
        """End a stretch of steps with the one in which `at_s` lies, because something changes then."""
        step = self.step
        if step is None or step.steps == 1 or at_s >= step.ends_s:
            return
        stretch = self._stretch(step)
        step.steps = min(step.steps, stretch.steps_until(at_s - step.started_s))
        step.ends_s = step.started_s + stretch.seconds(step.steps)

    def abort(self, request: Request, now: float) -> None:
        """Free the blocks of a request whose client left; a step in progress runs on without its token."""
        if request.finish is not None:
            return
        self.interrupt(now)
        if self.step is not None and self.step.steps > 1 and request in self.step.decoded:
            self._catch_up(request, self.step.steps - 1)
        if request in self.running:
            self.running.remove(request)
        elif request in self.loading:
            self.loading.remove(request)
        else:
            self._waiting = [entry for entry in self._waiting if entry[2] is not request]
            self._arriving = [entry for entry in self._arriving if entry[2] is not request]
            heapq.heapify(self._waiting)
            heapq.heapify(self._arriving)
        self._end(request, Finish.ABORT, now)

    def advance(self, now: float) -> list[EngineStep]:
        """Advance to `now`; return the steps that have ended, oldest first."""
        ended: list[EngineStep] = []
        while (due := self.next_s()) <= now:
            if self.step is None:
                self._now = max(self._now, due)
                self.step = self._begin(self._now)
            else:
                self._now = due
                self._complete(self.step)
                ended.append(self.step)
                self.step = None
        return ended

    # a step begins

    def _begin(self, now: float) -> EngineStep | None:
        while self._arriving and self._arriving[0][0] <= now:
            self._queue(heapq.heappop(self._arriving)[2])
        step = EngineStep(started_s=now)
        self._join_loaded(step, now)
        budget = self._continue(step, self.limits.tokens_per_step)
        if not step.preempted:
            self._admit(step, now, budget)
        if not step.batch:
            self._blocked = True
            return None
        if self.limits.stretches and not step.prefilled:
            stretch = self._stretch(step)
            step.steps = self._uninterrupted(step, stretch)
            step.ends_s = now + stretch.seconds(step.steps)
        else:
            step.ends_s = now + self._duration(step) * (self.noise() if self.noise else 1.0)
        return step

    def _stretch(self, step: EngineStep) -> Stretch:
        """Return the times of the batch that decodes in this step."""
        context = sum([request.prompt_tokens + request.produced for request in step.decoded])
        return Stretch.of(self.model, len(step.decoded), context)

    def _uninterrupted(self, step: EngineStep, stretch: Stretch) -> int:
        """Return how many steps of this batch follow each other until a sequence fills its last block or
        ends, or another request may join. No step needs another block."""
        size = self.cache.block_size
        steps = min(
            [min(len(r.output) - r.produced, r.table.length * size - r.computed + 1) for r in step.decoded]
        )
        arrival = self._arriving[0][0] if self._arriving else inf
        next_s = min([arrival, *(request.ready_s for request in self.loading)])
        return steps if next_s == inf else min(steps, stretch.steps_until(next_s - step.started_s))

    def _duration(self, step: EngineStep) -> float:
        """Return the seconds that the step takes. Also counts its forwards."""
        chunks = [(new, before) for _, new, before in step.prefilled]
        misses = [chunk for chunk in chunks if self._is_miss(chunk[0])]
        context = sum([request.computed for request in step.decoded])
        if not self.limits.serial_misses:
            step.prefill_forwards = 1 if misses else 0
            return self.model.mixed_step_s(chunks, len(step.decoded), context, step.begins)
        step.prefill_forwards = len(misses)
        tails = [chunk for chunk in chunks if not self._is_miss(chunk[0])]
        alone_s = sum(self.model.prefill_s(new, before) for new, before in misses)
        return alone_s + self.model.mixed_step_s(tails, len(step.decoded), context)

    def _is_miss(self, new_tokens: int) -> bool:
        """Return whether there is more to compute than the tail that a hit leaves."""
        return new_tokens > self.cache.block_size

    def _continue(self, step: EngineStep, budget: int) -> int:
        """Schedule running requests; return the tokens left."""
        i = 0
        running = self.running
        while i < len(running) and budget > 0:
            request = running[i]
            new = self._schedule(step, request, budget)
            budget -= new
            # A sequence that preempted itself is gone from the list; those before it stay.
            if i < len(running) and running[i] is request:
                i += 1
        return budget

    def _schedule(self, step: EngineStep, request: Request, budget: int) -> int:
        """Schedule the next chunk or token of a running sequence, and preempt others if there are no free
        blocks. Return its tokens, 0 if it was preempted itself."""
        table, before = request.table, request.computed
        new = min(len(table.tokens) - before, budget, self.limits.tokens_per_prompt)
        end = before + new
        while not self.cache.grow(table, end):
            victim = self._victim()
            self._preempt(step, victim)
            if victim is request:
                return 0
        step.batch.append(request)
        if new == 1 and request.produced:
            step.decoded.append(request)
        else:
            step.prefilled.append((request, new, before))
        return new

    def _victim(self) -> Request:
        if self.limits.by_priority:
            return max(self.running, key=lambda request: (request.priority, request.ordinal))
        return self.running[-1]

    def _preempt(self, step: EngineStep, victim: Request) -> None:
        """Free the victim's blocks and queue it again. What is still cached when it is admitted again is a
        hit."""
        self.running.remove(victim)
        step.batch = [request for request in step.batch if request is not victim]
        step.decoded = [request for request in step.decoded if request is not victim]
        step.prefilled = [entry for entry in step.prefilled if entry[0] is not victim]
        step.preempted += 1
        victim.preemptions += 1
        self.cache.release(victim.table)
        # Before everyone who has never run.
        heapq.heappush(self._waiting, (self._urgency(victim), victim.ordinal - (1 << 62), victim))

    def _urgency(self, request: Request) -> int:
        return request.priority if self.limits.by_priority else 0

    def _queue(self, request: Request) -> None:
        heapq.heappush(self._waiting, (self._urgency(request), next(self._sequence), request))
        self._blocked = False

    def _admit(self, step: EngineStep, now: float, budget: int) -> int:
        """Admit waiting requests while budget, slots and blocks last; return the tokens left."""
        cache = self.cache
        while self._waiting and budget > 0:
            if len(self.running) + len(self.loading) >= self.limits.max_sequences:
                break
            request = self._waiting[0][2]
            table = request.table
            hits = cache.match(table)
            total = len(table.tokens)
            if not cache.fits(table, hits, total):
                break
            heapq.heappop(self._waiting)
            cache.attach(table, hits)
            if request.ordinal < 0:
                request.ordinal = next(self._ordinal)
                request.scheduled_s = now
                request.cached_tokens = request.computed
                if request.report_full:
                    cache.announce_again(table, len(hits[0]))
                if self._fetch(request) or self._read(request, now) or self._load(request, now):
                    continue
                step.admitted.append(request)
            if self._is_miss(total - request.computed):
                step.misses += 1
                step.begins += 1
            else:
                step.hits += 1
            self.running.append(request)
            budget -= self._schedule(step, request, budget)
        return budget

    # other engines

    def _fetch(self, request: Request) -> bool:
        """Start to fetch the prompt's KV from another engine if the request says so. The last token is
        computed here."""
        if self.connector is None or not self.connector.takes(request):
            return False
        self.cache.grow(request.table, request.prompt_tokens, register=False)
        request.loaded_tokens, request.ready_s = request.computed, inf
        self.loading.append(request)
        return True

    def fetched(self, request: Request, now: float, *, arrived: bool) -> None:
        """Hear that the prompt's KV has come from another engine, or will not come and is computed."""
        if arrived:
            request.pulled_tokens = request.prompt_tokens - request.cached_tokens
            request.cached_tokens = request.prompt_tokens
            request.loaded_tokens = request.prompt_tokens - 1
        request.ready_s = now
        self.interrupt(now)

    # host memory

    def _read(self, request: Request, now: float) -> bool:
        """Start to load what host memory has beyond the device's hits. If the request says so, first ask
        another engine for what is missing here. Return False if there is nothing to load."""
        if self.host is None:
            return False
        table, size = request.table, self.cache.block_size
        first, end = table.length, (request.prompt_tokens - 1) // size
        found = self.host.leading(table.chain[first:end])
        missing = table.chain[first + found : end]
        if self.peers is not None and isinstance(request.leg, Source) and missing:
            self.cache.grow(table, request.prompt_tokens, register=False)
            request.host_tokens, request.ready_s = found * size, inf
            self.loading.append(request)
            self.peers.asks(request, request.leg, missing)
            return True
        if not found:
            return False
        self.cache.grow(table, (first + found) * size, register=False)
        self._from_host(request, found * size, now)
        self.loading.append(request)
        return True

    def read(self, request: Request, blocks: int, now: float) -> None:
        """Hear that so many of the blocks that the request asked another engine for have come to host
        memory."""
        if request.finish is not None:
            return
        assert self.host is not None
        table, size = request.table, self.cache.block_size
        first = (request.computed + request.host_tokens) // size
        request.pulled_tokens = blocks * size
        if blocks:
            self._brought += self.host.put(
                Stored(
                    digests=table.chain[first : first + blocks],
                    parent=table.chain[first - 1] if first else None,
                    tokens=table.tokens[first * size : (first + blocks) * size],
                    positions=range(first, first + blocks),
                    namespace=table.namespace,
                    session_id=table.session_id,
                )
            )
        self._from_host(request, request.host_tokens + blocks * size, now)

    def _from_host(self, request: Request, tokens: int, now: float) -> None:
        """Load so many tokens from host memory, one request after the other."""
        request.host_tokens = tokens
        request.cached_tokens += tokens
        request.loaded_tokens = request.computed + tokens
        begin = max(now, self._host_free_s)
        request.ready_s = self._host_free_s = begin + self.model.host_s(tokens)
        self.interrupt(request.ready_s)

    # the legs' blocks

    def release(self, request: Request, now: float) -> None:
        """Free the blocks that an ended request kept."""
        self.interrupt(now)
        self.cache.release(request.table)
        self._freed(now)

    def _freed(self, now: float) -> None:
        """Hear that waiting requests may have room now."""
        self._blocked = False
        if self.step is None:
            self._now = max(self._now, now)

    # the shared store

    def _load(self, request: Request, now: float) -> bool:
        """Start to load what the store holds beyond the device's hits. Return False if it holds nothing
        more."""
        if self.store is None:
            return False
        table, size = request.table, self.cache.block_size
        first = table.length
        found = self.store.leading(table.chain[first : (request.prompt_tokens - 1) // size])
        if not found:
            return False
        request.store_tokens = found * size
        request.cached_tokens += request.store_tokens
        request.loaded_tokens = (first + found) * size
        self.cache.grow(table, request.loaded_tokens, register=False)
        begin = max(now, self._store_free_s)
        request.ready_s = self._store_free_s = begin + self.model.store_s(request.store_tokens)
        self.loading.append(request)
        return True

    def _join_loaded(self, step: EngineStep, now: float) -> None:
        for request in [request for request in self.loading if request.ready_s <= now]:
            self.loading.remove(request)
            self.cache.grow(request.table, request.loaded_tokens)
            self.running.append(request)
            step.admitted.append(request)
            step.begins += self._is_miss(len(request.table.tokens) - request.computed)
            self._blocked = False

    def _offer(self, store: Store, request: Request) -> list[Change]:
        """Put the request's new full blocks into the store. Return an announcement for each that it did not
        have."""
        table, size = request.table, self.cache.block_size
        wanted = request.computed if self.limits.stores_answers else request.prompt_tokens
        first, end = request.shared_blocks, min(request.computed, wanted) // size
        if end <= first:
            return []
        request.shared_blocks = end
        added = store.put(table.chain[first:end])
        return [
            Stored(
                digests=[table.chain[i]],
                parent=table.chain[i - 1] if i else None,
                tokens=table.tokens[i * size : (i + 1) * size],
                positions=(i,),
                namespace=table.namespace,
                session_id=table.session_id,
                medium=Medium.SHARED,
            )
            for i, new in zip(range(first, end), added, strict=True)
            if new
        ]

    # a step ends

    def _complete(self, step: EngineStep) -> None:
        now = step.ends_s
        if step.steps > 1:
            for request in step.decoded:
                self._catch_up(request, step.steps - 1)
        step.changes = self.cache.take_changes()
        if self.host is not None:
            stored = [change for change in step.changes if isinstance(change, Stored)]
            step.changes += self._brought + [change for one in stored for change in self.host.put(one)]
            self._brought = []
        if self.store is not None:
            for request in step.batch:
                if request.finish is None:
                    step.changes += self._offer(self.store, request)
        for request in step.batch:
            tokens = request.table.tokens
            if request.finish is not None or request.computed < len(tokens):
                continue  # aborted meanwhile, or its prompt is not through yet
            tokens.append(request.output[request.produced])
            request.produced += 1
            if request.produced == 1:
                request.first_token_s = now
            request.last_token_s = now
            step.emitted.append(request)
            if request.produced == len(request.output):
                self.running.remove(request)
                self._end(request, Finish.STOP if request.natural_end else Finish.LENGTH, now)
                step.finished.append(request)

    def _catch_up(self, request: Request, steps: int) -> None:
        """Take the tokens of all but the last step of a stretch."""
        if request.finish is not None:
            return
        table, before = request.table, request.produced
        request.produced += steps
        table.tokens.extend(request.output[before : request.produced])
        self.cache.grow(table, len(table.tokens))

    def _end(self, request: Request, finish: Finish, now: float) -> None:
        request.finish = finish
        request.finished_s = now
        if self.connector is None or not self.connector.keeps(request):
            self.cache.release(request.table)
        self._freed(now)
