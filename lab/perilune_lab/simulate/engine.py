"""One modelled engine in virtual time: the scheduler and KV cache of the lab's engine, and who asked it
what."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from math import inf
from typing import Protocol, cast

from perilune_gateway.model import EngineMetrics
from perilune_gateway.model.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from perilune_lab.engine.hashing import low64
from perilune_lab.engine.kv_cache import Change, Medium, Removed, Stored
from perilune_lab.engine.request import Request
from perilune_lab.engine.scheduler import Scheduler
from perilune_lab.simulate.loop import Loop


class Asker(Protocol):
    """Who has sent a request to an engine."""

    def first_token(self, request: Request) -> None:
        """Hear that the prompt is computed."""

    def finished(self, request: Request) -> None:
        """Hear that the answer is complete."""

    def lost(self, request: Request) -> None:
        """Hear that the engine has died before."""


class SimulatedEngine:
    """One endpoint."""

    def __init__(
        self, number: int, address: str, loop: Loop, announce: Callable[[str, Sequence[Event]], None]
    ) -> None:
        """`announce` takes the KV events of each step. Set `scheduler` before the first request."""
        self.number = number
        self.address = address
        self.alive = True
        self.scheduler: Scheduler
        self.gap_s = array("d")
        """Seconds between two tokens of a request, one entry for each stretch of steps."""
        self.gaps = array("q")
        """Number of such gaps over all requests, one entry for each stretch of steps."""
        self.measured_from_s = -inf
        """Gaps are kept from then on."""
        self._loop = loop
        self._announce = announce
        self._open: dict[Request, Asker] = {}
        self._version = 0
        self._planned_s = inf

    @property
    def load(self) -> int:
        """Number of requests that run or wait."""
        return len(self.scheduler.running) + self.scheduler.waiting_count

    def metrics(self) -> EngineMetrics | None:
        """Return what the engine's page of metrics says; None if it does not answer."""
        if not self.alive:
            return None
        s = self.scheduler
        cache = s.cache
        return EngineMetrics(
            running=len(s.running),
            waiting=s.waiting_count,
            kv_usage=cache.usage,
            block_size=cache.block_size,
            gpu_blocks=cache.blocks - 1,
        )

    def add(self, request: Request, asker: Asker) -> None:
        """Take a request now."""
        self._open[request] = asker
        self.scheduler.add(request, self._loop.now)
        self.wake()

    def abort(self, request: Request) -> None:
        """End a request whose client has left; ignore one that has ended."""
        if self._open.pop(request, None) is not None:
            self.scheduler.abort(request, self._loop.now)
            self.wake()

    def fetched(self, request: Request, *, arrived: bool) -> None:
        """Hear that a request's KV has come from another engine, or will not come."""
        if request.finish is None:
            self.scheduler.fetched(request, self._loop.now, arrived=arrived)
        else:
            self.scheduler.release(request, self._loop.now)
        self.wake()

    def release(self, request: Request) -> None:
        """Free the blocks that an ended request kept for another engine."""
        self.scheduler.release(request, self._loop.now)
        self.wake()

    def die(self) -> None:
        """Fail, and lose all requests."""
        self.alive = False
        self._version += 1
        lost, self._open = self._open, {}
        for request, asker in lost.items():
            asker.lost(request)

    def empty(self) -> bool:
        """Begin anew with an empty cache, of which it tells nobody. Return False, and do nothing, while a
        request uses blocks."""
        cache = self.scheduler.cache
        if not cache.reset():
            return False
        cache.take_changes()
        return True

    def wake(self) -> None:
        """Plan the next step after something has changed."""
        due_s = self.scheduler.next_s()
        if not self.alive or due_s == self._planned_s:
            return
        self._version += 1
        self._planned_s = due_s
        if due_s < inf:
            self._loop.at(due_s, partial(self._advance, self._version))

    def _advance(self, version: int) -> None:
        if version != self._version:
            return
        self._planned_s = inf
        for step in self.scheduler.advance(self._loop.now):
            if step.decoded and step.started_s >= self.measured_from_s:
                self.gap_s.append((step.ends_s - step.started_s) / step.steps)
                self.gaps.append(step.steps * len(step.decoded))
            if step.changes:
                self._announce(self.address, events(step.changes, self.scheduler.cache.block_size))
            if step.prefilled:
                for request in step.emitted:
                    if request.produced == 1:
                        self._open[request].first_token(request)
            for request in step.finished:
                self._open.pop(request).finished(request)
        self.wake()


def events(changes: Sequence[Change], block_size: int) -> list[Event]:
    """Return the KV events of these changes, as the gateway decodes them. Blocks that were removed one after
    the other share an event, and so do those of one prompt that were put into the store, which says the same
    in less time than one for each."""
    found: list[Event] = []
    for alike, same in groupby(changes, _alike):
        if alike is None:
            found += [_event(change, block_size) for change in same]
        elif alike is Medium.SHARED:
            found += _shared(cast("Iterator[Stored]", same), block_size)
        else:
            names = [low64(digest) for digest, *_ in cast("Iterator[Removed]", same)]
            found.append(BlockRemoved(tuple(names), medium=alike))
    return found


def _alike(change: Change) -> Medium | None:
    """Return the medium of a block that was removed, or SHARED if it was put into the store, from which
    nothing is removed; None otherwise."""
    if type(change) is Removed:
        return change.medium
    return Medium.SHARED if type(change) is Stored and change.medium is Medium.SHARED else None


def _shared(changes: Iterator[Stored], block_size: int) -> Iterator[BlockStored]:
    """Yield one event for the blocks of each prompt that were put into the store."""
    names: list[int] = []
    last: bytes | None = None
    for change in changes:
        if names and change.parent != last:
            yield BlockStored(block_hashes=tuple(names), block_size=block_size, medium=Medium.SHARED)
            names = []
        names += map(low64, change.digests)
        last = change.digests[-1]
    yield BlockStored(block_hashes=tuple(names), block_size=block_size, medium=Medium.SHARED)


def _event(change: Change, block_size: int) -> Event:
    match change:
        case Stored():
            return BlockStored(
                block_hashes=tuple([low64(digest) for digest in change.digests]),
                parent_block_hash=None if change.parent is None else low64(change.parent),
                token_ids=cast("tuple[int, ...]", change.tokens),  # an array, which costs nothing to pass on
                block_size=block_size,
                medium=change.medium,
            )
        case _:
            return AllBlocksCleared()
