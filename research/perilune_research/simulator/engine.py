"""One simulated engine: continuous batching with chunked prefill, which jumps from event to event.

A stretch is the time between two events: one step with prefill in it, or a number of decode steps. The
lengths of decode steps are known, since each sequence's context grows by one token a step, so one formula
gives the length of any number of them. A stretch ends when its step with prefill ends, when a sequence has
produced its last token, or, after a whole decode step, when a waiting request has become ready.

A step works as in vLLM:

1. Every decoding sequence gets one token.
2. Up to `tokens_per_step` prompt tokens are prefilled: first those of sequences that already run, then those
   of waiting requests in the order of (priority, arrival), while sequence slots and KV room last.
3. The engine looks up the prefix of a waiting request when it admits it. Blocks count as cached as soon as
   they are scheduled, so the first of several equal prompts in one batch is computed and the others hit. All
   misses of a step are one prefill.
4. The engine loads what host memory or the store hold beyond the device before it prefills. A prefix from
   another engine arrives before admission (serial), or while the rest is prefilled (overlapped: the first
   token waits for both).
5. When the KV pool is full, idle runs are evicted. If that is not enough, the youngest decoding sequence is
   preempted and recomputed later.

Cost: some 5 events of 10 µs per request. Not modelled: rounding to blocks, speculative decoding.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable
from math import ceil, inf, sqrt

from perilune_lab.simulate.h20 import Hardware
from perilune_research.simulator.cache import RunCache
from perilune_research.simulator.request import SimulatedRequest
from perilune_research.simulator.store import SimulatedStore

OnRequest = Callable[[SimulatedRequest, float], None]


class SimulatedEngine:
    """Engine number `number` of the fleet. It calls `schedule(at_s, version)` to have the simulation call
    `event(at_s, version)` at that time."""

    def __init__(
        self,
        number: int,
        hardware: Hardware,
        cache: RunCache,
        *,
        schedule: Callable[[float, int], None],
        on_first_token: OnRequest,
        on_finish: OnRequest,
        store: SimulatedStore | None = None,
        host: SimulatedStore | None = None,
        measured_from_s: float = 0.0,
        noise: Callable[[], float] | None = None,
    ) -> None:
        """`noise` draws a factor on the seconds of each step that prefills. Gaps between tokens are kept from
        `measured_from_s` on."""
        self.number = number
        self.hardware = hardware
        self._noise = noise
        self.model = hardware.engine
        self.cache = cache
        self.store = store
        self.host = host
        """The engine's host memory, to which it also writes everything that it computes."""
        self.alive = True
        self._schedule = schedule
        self._on_first_token = on_first_token
        self._on_finish = on_finish
        self._arriving: list[tuple[float, int, SimulatedRequest]] = []
        self._waiting: list[tuple[int, int, SimulatedRequest]] = []
        self._prefilling: list[SimulatedRequest] = []
        self._held: list[tuple[float, int, SimulatedRequest]] = []
        """Requests whose prefill has ended but whose transfer has not."""
        self._decoding: list[tuple[int, int, SimulatedRequest]] = []
        self._context_tokens = 0
        """Context tokens of the decoding sequences."""
        self._generated_tokens = 0
        """Tokens of unfinished answers. The cache takes them over when the answer ends."""
        self._reserved_tokens = 0
        """Tokens of admitted prompts that remain to be computed."""
        self._step = 0
        self._busy = False
        self._began_s = 0.0
        self._ends_s = inf
        self._steps = 0
        """Decode steps in the stretch that ends at `_ends_s`."""
        self._mixed = False
        """Whether the present stretch prefills."""
        self._version = 0
        self._store_free_s = 0.0
        """When the current load from host memory or the store ends; loads run one after the other."""
        self._measured_from_s = measured_from_s
        self.gap_s = array("d")
        """Seconds between two tokens of a request, one entry per stretch."""
        self.gaps = array("q")
        """Number of such gaps over all sequences, one entry per stretch."""
        self._step_cost: dict[int, float] = {}

    # -- reading -----------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Number of admitted requests."""
        return len(self._decoding) + len(self._prefilling) + len(self._held)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for admission."""
        return len(self._waiting) + len(self._arriving)

    @property
    def kv_usage(self) -> float:
        """Share of the KV pool that running sequences use, 0–1. It may exceed 1 for a moment."""
        used = self.cache.used_tokens - self.cache.idle_tokens + self._generated_tokens
        return used / self.cache.capacity_tokens

    def requests(self) -> list[SimulatedRequest]:
        """Return all requests that have not ended."""
        heaps = (self._arriving, self._waiting, self._held, self._decoding)
        return [entry[2] for heap in heaps for entry in heap] + self._prefilling

    # -- writing -----------------------------------------------------------------------------------

    def add(self, request: SimulatedRequest, now: float) -> None:
        """Add a request. It is ready once its overhead has passed, and a serial transfer has ended."""
        request.ready_s = max(now + self.model.request_overhead_s(request.prompt_tokens), request.ready_s)
        heapq.heappush(self._arriving, (request.ready_s, request.number, request))
        if not self._busy:
            if request.ready_s < self._ends_s:
                self._plan(request.ready_s)
        elif not self._mixed and request.ready_s < self._ends_s:
            steps = self._steps_until(request.ready_s)
            if steps < self._steps:
                self._steps = steps
                self._plan(self._began_s + self._decode_s(steps))

    def cancel(self, request: SimulatedRequest) -> None:
        """Remove a request that has not been admitted; one that runs goes on."""
        self._arriving = [entry for entry in self._arriving if entry[2] is not request]
        self._waiting = [entry for entry in self._waiting if entry[2] is not request]
        heapq.heapify(self._arriving)
        heapq.heapify(self._waiting)

    def die(self) -> list[SimulatedRequest]:
        """Fails the engine, which loses its caches; returns the requests that waited or ran there."""
        lost = self.requests()
        self.alive = False
        self.host = None
        self._arriving, self._waiting, self._prefilling, self._held, self._decoding = [], [], [], [], []
        self._context_tokens = self._generated_tokens = self._reserved_tokens = 0
        self._busy, self._steps, self._ends_s = False, 0, inf
        self._version += 1
        self.cache.clear()
        return lost

    def event(self, now: float, version: int) -> None:
        """Handle a scheduled event; ignores it if the engine has scheduled another one since."""
        if version != self._version:
            return
        if self._busy:
            self._complete(now)
        self._begin(now)

    # -- a stretch ends ----------------------------------------------------------------------------

    def _complete(self, now: float) -> None:
        n, decoding = self._steps, self._decoding
        if n:
            self._step += n
            grown = n * len(decoding)
            if self._began_s >= self._measured_from_s:
                self.gap_s.append((now - self._began_s) / n)
                self.gaps.append(grown)
            self._context_tokens += grown
            self._generated_tokens += grown
            while decoding and decoding[0][0] <= self._step:
                self._finish(heapq.heappop(decoding)[2], now)
        if self._mixed:
            done = [s for s in self._prefilling if s.computed == s.depth]
            if done:
                self._prefilling = [s for s in self._prefilling if s.computed < s.depth]
                for request in done:
                    if request.transfer_ends_s > now:
                        heapq.heappush(self._held, (request.transfer_ends_s, request.number, request))
                    else:
                        self._prefilled(request, now)
        self._busy = False
        surplus = self.cache.used_tokens + self._generated_tokens - self.cache.capacity_tokens
        if surplus > 0:
            self.cache.trim(self.cache.used_tokens - surplus)

    def _prefilled(self, request: SimulatedRequest, now: float) -> None:
        """Start to decode a request: its prefill is over and its next token exists now."""
        if not request.produced:
            request.first_token_s = now
            self._on_first_token(request, now)
            self._write(request.run, request.prompt_tokens)
        request.produced += 1
        request.joined_step = self._step
        left = request.output_tokens - request.produced
        request.finish_step = self._step + left
        self._context_tokens += request.depth
        if left:
            heapq.heappush(self._decoding, (request.finish_step, request.number, request))
        else:
            self._finish(request, now)

    def _finish(self, request: SimulatedRequest, now: float) -> None:
        self._leave(request)
        depth = request.prompt_tokens + request.output_tokens - 1
        self.cache.grow(request.answer_run, depth)
        self.cache.unpin(request.answer_run)
        self._write(request.answer_run, depth)
        request.produced = request.output_tokens
        request.finished_s = now
        self._on_finish(request, now)

    def _leave(self, request: SimulatedRequest) -> int:
        """Remove a decoding request from the sums; returns the tokens that it produced since it joined."""
        made = self._step - request.joined_step
        self._generated_tokens -= made
        self._context_tokens -= request.depth + made
        return made

    # -- a stretch begins --------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        while self._arriving and self._arriving[0][0] <= now:
            _, _, request = heapq.heappop(self._arriving)
            heapq.heappush(self._waiting, (request.priority, request.number, request))
        while self._held and self._held[0][0] <= now:
            self._prefilled(heapq.heappop(self._held)[2], now)
        if self._prefilling or self._waiting:
            chunks = self._chunks(now)
            if chunks[0]:
                self._begin_mixed(now, *chunks)
                return
        if self._decoding:
            self._begin_decode(now)
            return
        self._plan(self._next_ready_s())

    def _next_ready_s(self) -> float:
        at_s = self._arriving[0][0] if self._arriving else inf
        return min(at_s, self._held[0][0]) if self._held else at_s

    def _plan(self, at_s: float) -> None:
        """Schedules the next event, not before `at_s`."""
        self._ends_s = at_s
        self._version += 1
        if at_s < inf:
            self._schedule(at_s, self._version)

    def _chunks(self, now: float) -> tuple[int, float, bool]:
        """Chooses the prompt tokens of the next step. Return their number, the pairs of tokens that they
        attend to, and whether a prompt's first chunk is among them."""
        budget = self.model.tokens_per_step
        tokens, attended, begins = 0, 0.0, False
        for request in self._prefilling:
            new = min(request.depth - request.computed, budget)
            if new <= 0:
                break
            tokens, attended, budget = tokens + new, attended + self._chunk(request, new), budget - new
        limit = self.hardware.max_sequences
        while self._waiting and budget > 0 and self.running < limit:
            request = self._waiting[0][2]
            if not self._admit(request, now):
                break
            heapq.heappop(self._waiting)
            if request.ready_s > now:  # it loads from host memory or the store first
                heapq.heappush(self._arriving, (request.ready_s, request.number, request))
                continue
            self._prefilling.append(request)
            begins = begins or request.depth - request.computed > self.hardware.block_tokens
            new = min(request.depth - request.computed, budget)
            tokens, attended, budget = tokens + new, attended + self._chunk(request, new), budget - new
        return tokens, attended, begins

    def _chunk(self, request: SimulatedRequest, new: int) -> float:
        attended = new * (request.computed + new / 2)
        request.computed += new
        self._reserved_tokens -= new
        self.cache.grow(
            request.run if request.computed <= request.prompt_tokens else request.answer_run,
            request.computed,
        )
        return attended

    def _admit(self, request: SimulatedRequest, now: float) -> bool:
        """Admits a request with its cached prefix, or starts to load more of it from a lower tier. Return
        False if the rest of the prompt does not fit into the KV pool."""
        cache, block = self.cache, self.hardware.block_tokens
        run = request.run if not request.produced else request.answer_run
        most = (request.depth - 1) // block * block
        here = min(cache.match(run, request.depth) // block * block, most)
        cached = max(here, min(request.fetched_tokens, most))
        looked = request.produced or request.host_tokens or request.store_tokens
        if (self.store or self.host) and not looked and self._load(request, run, cached, most, now):
            return True
        needed = request.depth - here
        room = cache.capacity_tokens - cache.used_tokens - self._generated_tokens - self._reserved_tokens
        room += cache.idle_tokens - cache.idle_on(request.answer_run)
        if needed > room and self.running:
            return False
        cache.pin(request.answer_run)
        if cached > here:
            cache.grow(run, cached)
        request.computed = cached
        self._reserved_tokens += request.depth - cached
        if not request.preemptions:
            request.cached_tokens = cached
        return True

    def _load(self, request: SimulatedRequest, run: int, cached: int, most: int, now: float) -> bool:
        """Start to load what host memory holds beyond `cached` tokens, then what the store holds beyond
        that. Return False if there is nothing to load."""
        block, seconds, reach = self.hardware.block_tokens, 0.0, cached
        if self.host is not None:
            held = min(self.host.match(run, request.depth) // block * block, most)
            if held > reach:
                request.host_tokens, seconds, reach = held - reach, self.hardware.host_s(held - reach), held
                self.host.put(run, held)
        if self.store is not None:
            held = min(self.store.match(run, request.depth) // block * block, most)
            if held > reach:
                request.store_tokens = held - reach
                seconds, reach = seconds + self.model.store_s(held - reach), held
                self.store.put(run, held)
        if reach == cached:
            return False
        request.transfer_s, request.fetched_tokens = seconds, reach
        request.ready_s = self._store_free_s = max(now, self._store_free_s) + seconds
        return True

    def _write(self, run: int, depth: int) -> None:
        """Write the prompt (run, depth) from the device to host memory and the store."""
        if self.host is not None:
            self.host.put(run, depth)
        if self.store is not None:
            self.store.put(run, depth)

    def _begin_mixed(self, now: float, tokens: int, attended: float, begins: bool) -> None:
        sequences = len(self._decoding)
        self._busy = self._mixed = True
        self._began_s = now
        self._steps = 1 if sequences else 0
        step_s = self.model.step_s(tokens, attended, sequences, self._context_tokens, begins)
        self._plan(now + (step_s * self._noise() if self._noise else step_s))

    def _begin_decode(self, now: float) -> None:
        cache = self.cache
        room = cache.capacity_tokens - cache.used_tokens - self._generated_tokens - self._reserved_tokens
        room += cache.idle_tokens
        while room < len(self._decoding) > 1:
            room += self._preempt()
        sequences = len(self._decoding)
        steps = min(self._decoding[0][0] - self._step, max(1, room // sequences))
        self._busy, self._mixed = True, False
        self._began_s = now
        ready_s = self._next_ready_s()
        if ready_s < inf:
            steps = min(steps, self._steps_until(ready_s))
        self._steps = steps
        self._plan(now + self._decode_s(steps))

    def _preempt(self) -> int:
        """Preempts the youngest decoding request, which will be recomputed. Return the number of tokens that
        this frees."""
        youngest = max(self._decoding, key=lambda entry: entry[1])
        self._decoding.remove(youngest)
        heapq.heapify(self._decoding)
        request = youngest[2]
        before = self._generated_tokens - self.cache.idle_tokens
        made = self._leave(request)
        request.produced += made
        request.depth = request.prompt_tokens + request.produced
        request.computed = 0
        request.fetched_tokens = 0
        request.preemptions += 1
        self.cache.unpin(request.answer_run)
        heapq.heappush(self._waiting, (request.priority, request.number - (1 << 40), request))
        return before - (self._generated_tokens - self.cache.idle_tokens)

    # -- several decode steps ----------------------------------------------------------------------

    def _slope(self) -> tuple[float, float, float]:
        """Return (floor, base, slope): step i of this batch takes scale × max(floor, base + i × slope)."""
        m, sequences = self.model, len(self._decoding)
        base = self._step_cost.get(sequences)
        if base is None:
            touched = 1.0 - (1.0 - m.expert_share) ** sequences
            base = (m.expert_bytes * touched + m.shared_bytes) / m.memory_bytes_per_s
            self._step_cost[sequences] = base
        token_s = m.kv_bytes_per_token / m.memory_bytes_per_s
        return m.decode_floor_s, base + self._context_tokens * token_s, sequences * token_s

    def _decode_s(self, steps: int) -> float:
        """Return the seconds of the next `steps` decode steps."""
        floor, base, slope = self._slope()
        flat = min(steps, max(0, ceil((floor - base) / slope)))
        rest = steps - flat
        first = base + flat * slope
        return self.model.scale * (flat * floor + rest * first + slope * rest * (rest - 1) / 2)

    def _steps_until(self, at_s: float) -> int:
        """Return the number of decode steps up to the one in which `at_s` lies, at least 1."""
        floor, base, slope = self._slope()
        left = (at_s - self._began_s) / self.model.scale
        flat = max(0, ceil((floor - base) / slope))
        if left <= flat * floor:
            return max(1, ceil(left / floor))
        b = base + flat * slope - slope / 2
        left -= flat * floor
        return max(1, flat + ceil((sqrt(b * b + 2 * slope * left) - b) / slope))
