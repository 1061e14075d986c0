"""The gateway's side of shadow policies: which decisions are judged, the process that judges, and its ends.

A process that says nothing for HANG_S while it has a decision is killed, and the policy at work is asked no
more; so is one whose process dies. The others go on in a new process. A change of the pool document begins
with all of them again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random
from time import thread_time
from typing import Protocol

import msgspec

from perilune_api.pool import Pool
from perilune_gateway.model import DecisionRecord
from perilune_gateway.observe.decision_log import Writer
from perilune_gateway.observe.shadow.budget import CpuBudget
from perilune_gateway.observe.shadow.opinion import Done, Opinion, Ready, Word
from perilune_gateway.observe.shadow.tally import PolicyTally, ShadowStats, Skipped, Stopped
from perilune_gateway.state.request_facts import Recorded

log = logging.getLogger(__name__)

MOST_OPEN = 32
"""Number of decisions that wait to be judged, the one at work included."""
HANG_S = 30.0
"""Long enough for a process of the lowest priority on a busy machine."""
START_S = 60.0
"""As HANG_S, until the process is ready."""
AGAIN_S = 30.0
"""Pause after a process that ended without a policy at work."""
COMMAND = (sys.executable, "-P", "-m", "perilune_gateway.observe.shadow.judge")


class Start(Protocol):
    """Starts the process that judges by these policies."""

    async def __call__(self, policies: Sequence[str]) -> Process: ...


async def start(policies: Sequence[str]) -> Process:
    return await asyncio.create_subprocess_exec(
        *COMMAND, f"{os.getpid()}", *policies, stdin=PIPE, stdout=PIPE
    )


class Shadow:
    """The shadow policies of one pool; a listener (state/facts.py)."""

    def __init__(
        self,
        pool: Pool,
        version: str,
        clock: Callable[[], float],
        rng: Random,
        *,
        starts: Start = start,
        hang_s: float = HANG_S,
    ) -> None:
        self._version, self._clock, self._rng = version, clock, rng
        self._starts, self._hang_s = starts, hang_s
        self._queue: deque[DecisionRecord] = deque()
        self._headed = False
        """Whether the process knows the pool document's routing."""
        self._sent = 0
        """Number of decisions that the process has."""
        self._ready = False
        self._tallies: dict[str, PolicyTally] = {}
        self._skipped: Counter[Skipped] = Counter(dict.fromkeys(Skipped, 0))
        self._stopped: Counter[Stopped] = Counter(dict.fromkeys(Stopped, 0))
        self._cpu_s, self._began_at = 0.0, clock()
        self._heard_at = clock()
        self._spoke = ""
        """The policy that has said its opinion of the decision at work last."""
        self._changed, self._work = asyncio.Event(), asyncio.Event()
        self._pool = pool
        self._begin()

    def configure(self, pool: Pool) -> None:
        """Take over a (changed) pool document. Endpoints change often; judging begins again only for what it
        depends on."""
        before, routing = self._pool.spec.routing, pool.spec.routing
        self._pool, self._headed = pool, self._headed and routing == before
        if (routing.shadow, routing.policy) != (before.shadow, before.policy):
            self._begin()

    def _begin(self) -> None:
        self._shadow = self._pool.spec.routing.shadow
        self._budget = CpuBudget(self._shadow.cpu, self._clock())
        for policy in self._shadow.policies:
            self._tallies.setdefault(policy, PolicyTally(by_reason={})).off = ""
        self._tallies = {policy: self._tallies[policy] for policy in self._shadow.policies}
        self._changed.set()

    @property
    def asked(self) -> list[str]:
        """The policies that are asked at present."""
        return [name for name, tally in self._tallies.items() if not tally.off]

    def stats(self) -> ShadowStats | None:
        """Return what there is to show; None without shadow policies."""
        if not self._shadow.policies:
            return None
        return ShadowStats(
            policies=self._tallies,
            share=self._shadow.share,
            cpu_budget=self._shadow.cpu,
            cpu_s=self._cpu_s,
            uptime_s=self._clock() - self._began_at,
            skipped=self._skipped,
            stopped=self._stopped,
        )

    # -- the gateway's decisions -------------------------------------------------------------------

    def on_recorded(self, fact: Recorded) -> None:
        """Queue the decision, if it is to be judged."""
        record = fact.record
        if not self._shadow.policies or not record.policy or not record.candidates:
            return
        if self._shadow.share < 1 and self._rng.random() >= self._shadow.share:
            return
        if not self._ready or len(self._queue) + self._sent >= MOST_OPEN:
            self._skipped[Skipped.BEHIND] += 1
        elif not self._budget.allows(self._clock()):
            self._skipped[Skipped.BUDGET] += 1
        else:
            self._queue.append(record)
            self._work.set()

    def _spend(self, seconds: float) -> None:
        self._cpu_s += seconds
        self._budget.spend(seconds)

    # -- the process -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Judge until cancelled."""
        while True:
            self._changed.clear()
            pause_s: float | None = None
            if policies := self.asked:
                try:
                    pause_s = AGAIN_S if await self._judge(policies) else 0.0
                except Exception:  # the gateway goes on without them
                    log.exception("shadow policies cannot be judged")
                    pause_s = AGAIN_S
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._changed.wait()

    async def _judge(self, policies: Sequence[str]) -> bool:
        """Let one process judge until it ends, hangs, or the pool document changes. Return whether another
        one should wait a while."""
        try:
            process = await self._starts(policies)
        except OSError as error:
            log.error("shadow policies cannot be judged error=%s", error)
            return True
        self._heard_at, self._spoke = self._clock(), ""
        watch, feed = asyncio.create_task(self._watch()), asyncio.create_task(self._feed(process))
        hear, changed = asyncio.create_task(self._hear(process)), asyncio.create_task(self._changed.wait())
        try:
            done, _ = await asyncio.wait((watch, hear, changed), return_when=asyncio.FIRST_COMPLETED)
            if hear in done and (nonsense := hear.exception()):
                log.error("process of shadow policies says nonsense", exc_info=nonsense)
        finally:
            for task in (watch, feed, hear, changed):
                task.cancel()
            await asyncio.gather(watch, feed, hear, changed, return_exceptions=True)
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            sent, self._ready, self._sent = self._sent, False, 0
            self._queue.clear()
        if self._changed.is_set():
            return False
        why = Stopped.HUNG if watch in done else Stopped.DIED
        return self._ended(policies, why, at_work=sent > 0)

    def _ended(self, policies: Sequence[str], why: Stopped, *, at_work: bool) -> bool:
        """Ask the policy no more with which the process ended. Return whether there was none."""
        self._stopped[why] += 1
        if not at_work:
            log.error("process of shadow policies ended cause=%s", why)
            return True
        if why is Stopped.HUNG:
            self._spend(self._hang_s)
        asked = [policy for policy in policies if not self._tallies[policy].off]
        at = asked.index(self._spoke) + 1 if self._spoke in asked else 0
        culprit = asked[min(at, len(asked) - 1)]
        words = "it did not return" if why is Stopped.HUNG else "its process died"
        self._switch_off(culprit, words)
        return False

    def _switch_off(self, policy: str, why: str) -> None:
        self._tallies[policy].off = why
        log.error("shadow policy asked no more policy=%s cause=%s", policy, why)

    async def _feed(self, process: Process) -> None:
        """Send decisions to the process."""
        assert process.stdin is not None
        writer, self._headed = Writer(self._version), False
        try:
            while True:
                self._work.clear()
                while self._queue:
                    record, began_s = self._queue.popleft(), thread_time()
                    head = b"" if self._headed else writer.pool(self._pool, 0.0)
                    try:
                        line = writer.decision(0, record)
                    except Exception as error:  # no fault of a policy that judges
                        self._headed = False  # lines that define numbers are lost
                        self._skipped[Skipped.UNFIT] += 1
                        if self._skipped[Skipped.UNFIT] == 1:
                            log.error("decision cannot be sent to shadow policies error=%s", error)
                        continue
                    if not self._sent:
                        self._heard_at = self._clock()
                    self._sent += 1
                    self._headed = True
                    process.stdin.write(head + line)
                    self._spend(thread_time() - began_s)
                    await process.stdin.drain()
                    await asyncio.sleep(0)
                await self._work.wait()
        except ConnectionError:
            pass  # it has ended, which `_hear` finds after its last words
        except Exception:
            log.exception("decisions cannot be sent to shadow policies")
            process.kill()

    async def _hear(self, process: Process) -> None:
        """Take in what the process says, until it says nothing any more."""
        assert process.stdout is not None
        decode = msgspec.json.Decoder(Word).decode
        async for line in process.stdout:
            self._heard_at = self._clock()
            self.heard(decode(line))

    def heard(self, word: Word) -> None:
        """Take in one thing that the process says."""
        match word:
            case Ready(cpu_s):
                self._ready, self._cpu_s = True, self._cpu_s + cpu_s
            case Opinion() as opinion:
                self._spoke = opinion.policy
                self._tallies[opinion.policy].add(opinion)
                if opinion.over:
                    self._switch_off(opinion.policy, opinion.problem)
            case Done(cpu_s):
                self._sent, self._spoke = self._sent - 1, ""
                self._spend(cpu_s)

    async def _watch(self) -> None:
        """Return when the process hangs."""
        while not self._is_silent():  # noqa: ASYNC110 - time passes without an event
            await asyncio.sleep(self._hang_s / 10)

    def _is_silent(self) -> bool:
        silent_s = self._clock() - self._heard_at
        return silent_s > (self._hang_s if self._sent else START_S) and (self._sent > 0 or not self._ready)
