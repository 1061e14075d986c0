"""Runs a scheduler in wall time: engine seconds = wall seconds × time scale.

One task drives the engine: sleep until something is due → run every step that is due, in virtual time →
publish its events, count it, hand tokens to their streams (one write per stream, however many tokens) →
sleep again. Nothing wakes per token when steps are shorter than `FLUSH_S` of wall time; first and last
tokens are never held back. Late wake-ups do not shift engine time: steps begin when they were due.

Cost: 3–6 µs per output token with rendering, about 10 µs per write.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import IO, Protocol

import msgspec

from perilune_lab.engine.answers import Form, Usage
from perilune_lab.engine.events import Publisher
from perilune_lab.engine.metrics import Metrics
from perilune_lab.engine.request import Request
from perilune_lab.engine.scheduler import Scheduler
from perilune_lab.engine.words import Text

log = logging.getLogger(__name__)

FLUSH_S = 0.02
"""Wall seconds that a token amid an answer may wait for others, where the time scale is above 1."""
MOST_UNSENT_BYTES = 1 << 20
"""A stream whose client has not taken this much gets nothing more until its end."""


class CoreDeadError(Exception):
    """The engine core has died; only the HTTP server is left."""

    def __init__(self) -> None:
        super().__init__(
            "EngineCore encountered an issue. See stack trace (above) for the root cause."
        )  # vLLM's words


class Sink(Protocol):
    """Receives the bytes of a stream."""

    async def write(self, data: bytes) -> None:
        """Write without waiting for the client."""

    def unsent_bytes(self) -> int:
        """Return the bytes that the client has not read yet."""


class Answer:
    """Hands the tokens of one request to its client."""

    __slots__ = ("_sent", "done", "form", "request", "sink")

    def __init__(self, request: Request, form: Form, sink: Sink | None, done: asyncio.Future[bytes]) -> None:
        """`sink`: where a stream is written; None for an answer in one piece."""
        self.request = request
        self.form = form
        self.sink = sink
        self.done = done
        """Resolved when the last token exists, with what is left to write of a stream."""
        self._sent = 0

    def usage(self) -> Usage:
        request = self.request
        return Usage(request.prompt_tokens, request.cached_tokens, request.produced)

    def take(self, text: Text) -> bytes:
        """Render what has not been sent yet."""
        request = self.request
        ids = request.output[self._sent : request.produced]
        self._sent = request.produced
        finish = request.finish
        data = self.form.tokens(text.pieces(ids), ids, finish)
        if finish is not None:
            data += self.form.end(text.decode(request.output), self.usage(), finish)
        return data


class Service:
    def __init__(
        self,
        scheduler: Scheduler,
        text: Text,
        metrics: Metrics,
        publisher: Publisher | None,
        time_scale: float,
        request_log: IO[bytes] | None = None,
        clock: Callable[[], float] = time.monotonic,
        rank: int = 0,
    ) -> None:
        self.rank = rank
        """Data-parallel rank."""
        self.dead = False
        """The engine core has died."""
        self.scheduler = scheduler
        self.text = text
        self.metrics = metrics
        self.publisher = publisher
        self.time_scale = time_scale
        self._log = request_log
        self._clock = clock
        self._start = clock()
        self._answers: dict[Request, Answer] = {}
        self._unflushed: dict[Request, None] = {}
        self._wake = asyncio.Event()
        self._flushed_at = -inf

    def now(self) -> float:
        """Return the engine seconds since the start."""
        return (self._clock() - self._start) * self.time_scale

    @property
    def open_requests(self) -> int:
        return len(self._answers)

    def submit(self, answer: Answer, arrived_s: float) -> None:
        """Take a request. `arrived_s`: engine time when the request came; reading it took part of its
        overhead already. Raises CoreDeadError."""
        if self.dead:
            raise CoreDeadError
        self._run_steps(self.now())
        self._answers[answer.request] = answer
        self.scheduler.add(answer.request, arrived_s)
        self._wake.set()

    def abort(self, request: Request) -> None:
        """End the request of a client that has left."""
        if self._answers.pop(request, None) is None:
            return
        self._unflushed.pop(request, None)
        if self.dead:
            return
        now = self.now()
        self._run_steps(now)
        if request.finish is None:
            self.scheduler.abort(request, now)
            self._ended(request)
        self._wake.set()

    def fetched(self, request: Request, *, arrived: bool) -> None:
        """Hear that a prompt's KV has come from another engine, or will not come."""
        now = self.now()
        self._run_steps(now)
        self.scheduler.fetched(request, now, arrived=arrived)
        self._wake.set()

    def read(self, request: Request, blocks: int) -> None:
        """Hear that so many blocks have come from another engine's host memory."""
        now = self.now()
        self._run_steps(now)
        self.scheduler.read(request, blocks, now)
        self._wake.set()

    def holds(self, digests: Sequence[bytes]) -> list[bool]:
        """Return whether each block is in host memory."""
        self._run_steps(self.now())
        host = self.scheduler.host
        return host.holds(digests) if host else [False] * len(digests)

    def release(self, request: Request) -> None:
        """Free the blocks of an ended leg of a hand-off, which are no longer needed."""
        now = self.now()
        self._run_steps(now)
        self.scheduler.release(request, now)
        self._wake.set()

    def die(self) -> None:
        """End the engine core as its kill -9 does: nothing is computed or published any more, and every
        request that runs fails with CoreDeadError."""
        self.dead = True
        self._unflushed.clear()
        if self.publisher is not None:
            self.publisher.close()
        for answer in self._answers.values():
            if not answer.done.done():
                answer.done.set_exception(CoreDeadError())
        self._answers.clear()
        self._wake.set()

    def reset_prefix_cache(self) -> bool:
        """Reset the prefix cache. Raises CoreDeadError."""
        if self.dead:
            raise CoreDeadError
        self._run_steps(self.now())
        return self.scheduler.cache.reset()

    def sleep(self) -> None:
        """Forget all KV, and serve nothing until it is woken. Raises CoreDeadError."""
        self.reset_prefix_cache()
        self.metrics.asleep = True

    async def run(self) -> None:
        """Drive the engine until it dies or is cancelled."""
        while not self.dead:
            self._run_steps(self.now())
            if self._unflushed:
                await self._flush()
            await self._sleep(self._due_wall_s())

    async def _sleep(self, until: float) -> None:
        self._wake.clear()
        delay = until - self._clock()
        if delay <= 0:
            await asyncio.sleep(0)
            return
        timer = asyncio.get_running_loop().call_later(delay, self._wake.set) if delay != inf else None
        try:
            await self._wake.wait()
        finally:
            if timer is not None:
                timer.cancel()

    def _due_wall_s(self) -> float:
        """Return when the driver has to look next, on the wall clock."""
        if self._unflushed:
            return self._clock()
        due = self.scheduler.next_s()
        if due == inf:
            return inf
        wall = self._start + due / self.time_scale
        step = self.scheduler.step
        if step is None or step.prefilled or self.time_scale <= 1:
            return wall
        # Only decoding: look again when a request ends, or after FLUSH_S; an arrival wakes us anyway.
        steps_left = min([len(request.output) - request.produced for request in step.decoded])
        last = wall + (steps_left - 1) * (step.ends_s - step.started_s) / self.time_scale
        return max(wall, min(last, self._flushed_at + FLUSH_S))

    def _run_steps(self, now: float) -> None:
        for step in self.scheduler.advance(now):
            if step.changes and self.publisher is not None:
                self.publisher.publish(step.changes)
            self.metrics.step_ended(step)
            for request in step.emitted:
                self._unflushed[request] = None
            for request in step.finished:
                self._ended(request)

    async def _flush(self) -> None:
        self._flushed_at = self._clock()
        unflushed, self._unflushed = self._unflushed, {}
        for request in unflushed:
            answer = self._answers.get(request)
            if answer is None:
                continue
            if request.finish is not None:
                del self._answers[request]
                if not answer.done.done():
                    answer.done.set_result(answer.take(self.text) if answer.sink else b"")
            elif answer.sink is not None and answer.sink.unsent_bytes() < MOST_UNSENT_BYTES:
                try:
                    await answer.sink.write(answer.take(self.text))
                except ConnectionError:
                    answer.done.cancel()  # the handler aborts the request

    def _ended(self, request: Request) -> None:
        self.metrics.request_ended(request)
        if self._log is not None:
            self._log.write(msgspec.json.encode(log_entry(request, self.rank)) + b"\n")
            self._log.flush()


def log_entry(request: Request, rank: int = 0) -> Mapping[str, object]:
    """Return one line of the request log. Times are engine seconds since the engine's start, null for what
    did not happen; `admitted` counts admissions from 0, null if it was never admitted."""
    table = request.table
    return {
        "request_id": request.request_id,
        "admitted": request.ordinal if request.ordinal >= 0 else None,
        "rank": rank,
        "session_id": table.session_id,
        "cache_salt": table.namespace.salt,
        "lora": table.namespace.lora_name,
        "prompt_tokens": request.prompt_tokens,
        "cached_tokens": request.cached_tokens,
        "store_tokens": request.store_tokens,
        "host_tokens": request.host_tokens,
        "pulled_tokens": request.pulled_tokens,
        "output_tokens": request.produced,
        "finish": request.finish,
        "preemptions": request.preemptions,
        "submitted_s": _time(request.arrived_s),
        "admitted_s": _time(request.scheduled_s),
        "first_token_s": _time(request.first_token_s),
        "last_token_s": _time(request.last_token_s),
        "ended_s": _time(request.finished_s),
        "last_block_hash": table.chain[-1].hex() if table.chain else None,
    }


def _time(seconds: float) -> float | None:
    return None if seconds == inf else round(seconds, 6)
