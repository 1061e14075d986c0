"""The process that judges: lines of the decision log on stdin → opinions as JSON lines on stdout.

    python -m perilune_gateway.observe.shadow.judge PARENT_PID POLICY…

1. It says Ready.
2. Every policy decides each decision again, with the recorded facts and the recorded random seed, and says an
   Opinion at once. So the gateway knows which policy was at work if this process hangs or ends.
3. After a decision it says Done, with the CPU time that the decision took.

The two choices are compared by one yardstick, the predicted seconds to the first token (explain's
`expected`, which is admission's prediction by policy/cost.py) on the facts of that moment. Where a decision
was taken by the headers and a policy asks for the body, it decides with what the headers let the gateway
estimate. A policy that raises or answers nonsense has no opinion of that decision; after FAILURES in a row it
is asked no more. Nothing that a policy prints reaches stdout.

It ends with its input, dies with its parent, runs at the lowest priority, and gets MemoryError beyond
MEMORY_BYTES.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random
from time import process_time
from typing import BinaryIO

import msgspec
from msgspec.structs import replace

from perilune_api.pool import Routing
from perilune_gateway.model import Decision, DecisionRecord, NeedBody, Phase
from perilune_gateway.observe.decision_log import Logged, read
from perilune_gateway.observe.explain import Expected, expected
from perilune_gateway.observe.shadow.opinion import Agreement, Done, Opinion, Ready
from perilune_gateway.policy import POLICIES
from perilune_gateway.policy.cost import target_of
from perilune_gateway.routing.decide import decide

FAILURES = 3
"""A policy that fails so often in a row is asked no more."""
MEMORY_BYTES = 2**30
LOWEST_PRIORITY = 19
MOST_WORDS = 400
"""Number of characters that say why a policy failed."""
PR_SET_PDEATHSIG = 1


def decided(record: DecisionRecord) -> Expected | None:
    """Return what was to be expected of the decision itself; None if it sent the request nowhere."""
    verdict, chosen = record.verdict, record.chosen
    if not isinstance(verdict, Decision) or chosen is None:
        return None
    return expected(chosen, record.view, verdict)


def opinion(record: DecisionRecord, here: Expected | None, policy: str, routing: Routing) -> Opinion:
    """Return what the policy makes of a recorded decision, of which `here` was to be expected. Raises what
    the policy raises, and AssertionError or KeyError for an answer that is none."""
    view = record.view
    verdict = decide(view, record.candidates, policy, routing, Random(record.seed))
    if estimated := isinstance(verdict, NeedBody):
        view = replace(view, phase=Phase.BODY)
        verdict = decide(view, record.candidates, policy, routing, Random(record.seed))
        assert not isinstance(verdict, NeedBody), "it has the body"
    recorded, reason = record.verdict, str(verdict.reason.value)
    if not isinstance(verdict, Decision):
        same = not isinstance(recorded, Decision)
        agreement = Agreement.SAME if same else Agreement.REFUSED
        return Opinion(policy=policy, agreement=agreement, reason=reason, estimated=estimated)
    if not isinstance(recorded, Decision) or here is None:
        return Opinion(policy=policy, agreement=Agreement.OTHER, reason=reason, estimated=estimated)
    there = expected(target_of(verdict, record.candidates), view, verdict)
    return Opinion(
        policy=policy,
        agreement=Agreement.SAME if verdict.target == recorded.target else Agreement.OTHER,
        reason=reason,
        regret_s=there.ttft_s - here.ttft_s,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=there.cached_tokens,
        decided_cached_tokens=here.cached_tokens,
        estimated=estimated,
    )


class Judge:
    """The shadow policies, and how often each has failed in a row."""

    def __init__(self, policies: Sequence[str]) -> None:
        self._policies = policies
        self._failures: Counter[str] = Counter()

    def opinions(self, logged: Logged) -> Iterator[Opinion]:
        """Yield the opinion of every policy that is still asked."""
        here = decided(logged.record)
        for policy in self._policies:
            if self._failures[policy] >= FAILURES:
                continue
            try:
                made = opinion(logged.record, here, policy, logged.routing)
            except Exception as error:
                self._failures[policy] += 1
                over = self._failures[policy] >= FAILURES
                known = policy in POLICIES
                words = f"{type(error).__name__}: {error}" if known else POLICIES.why_not(policy)
                yield Opinion(
                    policy=policy, agreement=Agreement.FAILED, problem=words[:MOST_WORDS], over=over
                )
            else:
                self._failures[policy] = 0
                yield made


def run(policies: Sequence[str], lines: BinaryIO, out: BinaryIO) -> None:
    """Judge decisions until the input ends."""
    encode = msgspec.json.Encoder().encode

    def say(word: Ready | Opinion | Done) -> None:
        out.write(encode(word) + b"\n")
        out.flush()

    judge, spent_s = Judge(policies), process_time()
    say(Ready(spent_s))
    for entry in read(lines, "stdin"):
        if isinstance(entry, Logged):
            for made in judge.opinions(entry):
                say(made)
            before_s, spent_s = spent_s, process_time()
            say(Done(spent_s - before_s))


def _confine(parent: int) -> None:
    """Make this process one that cannot harm the gateway."""
    os.nice(LOWEST_PRIORITY)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            sys.exit("the gateway is gone")


def main(argv: Sequence[str]) -> None:
    parent, *policies = argv
    _confine(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway, which gets it too, ends this process
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    run(policies, sys.stdin.buffer, out)


if __name__ == "__main__":
    main(sys.argv[1:])
