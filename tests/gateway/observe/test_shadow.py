"""Shadow policies: what they are asked, how their opinions are summed, and what becomes of one that fails."""

import asyncio
import io
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction
from random import Random

import msgspec
import pytest
from msgspec.structs import replace
from router_rig import A, Rig, pool
from routing_objects import head
from waiting import HANG

from perilune_api.pool import Routing
from perilune_api.pool import Shadow as Spec
from perilune_gateway.model import Cost, Decision, DecisionRecord, Phase, Reason
from perilune_gateway.observe.decision_log import Writer
from perilune_gateway.observe.shadow import Shadow, ShadowStats, judge
from perilune_gateway.observe.shadow.budget import CpuBudget
from perilune_gateway.observe.shadow.opinion import Agreement, Done, Opinion, Ready, Word
from perilune_gateway.observe.shadow.process import Start
from perilune_gateway.observe.shadow.tally import Skipped, Stopped, page
from perilune_gateway.state.request_facts import Recorded

UNKNOWN = "no_such_policy"
"""A shadow policy that raises whenever it is asked."""


def recorded(sessions: int = 4) -> list[DecisionRecord]:
    """Return decisions: each session's first turn, while A has a long queue and holds the prompt."""
    rig = Rig(pool())
    rig.stored(A, range(20))
    rig.queue(A, 10.0)
    return [rig.record(rig.route(range(20), of(f"s{i}"))) for i in range(sessions)]


def of(session: str):
    return head("/v1/completions", x_session_id=session)


# -- judging -------------------------------------------------------------------------------------------


def opinion(policy: str, record: DecisionRecord | None = None) -> Opinion:
    record = record or recorded(1)[0]
    return judge.opinion(record, judge.decided(record), policy, Routing())


def test_a_policy_that_decides_the_same_has_no_regret() -> None:
    same = opinion("perilune")
    assert (same.agreement, same.reason, same.regret_s) == (Agreement.SAME, "cold", 0.0)
    assert same.cached_tokens == same.decided_cached_tokens


def test_the_regret_of_another_choice_is_the_time_that_it_would_have_added() -> None:
    """The policy that was asked avoids the queue at A; one that does not know of it goes where the cache
    is."""
    other = opinion("dynamo_v1")
    assert other.agreement is Agreement.OTHER
    assert other.regret_s == pytest.approx(10.0, abs=0.1)
    assert (other.cached_tokens, other.decided_cached_tokens, other.prompt_tokens) == (16, 0, 20)


def test_a_policy_that_would_read_the_body_decides_with_what_the_headers_tell() -> None:
    rig, ids, h = Rig(pool()), range(64), head("/v1/completions", x_session_id="s", content_length="400")
    first = rig.route(ids, h)
    host = rig.record(first).target
    rig.stored(host, ids)
    rig.finish(first)
    rig.queue(host, 1.0)
    record = rig.record(rig.route(ids, h))
    assert (record.phase, record.target) == (Phase.HEADERS, host)
    told = opinion("lmetric_plus_one", record)
    assert (told.agreement, told.reason, told.estimated) == (Agreement.OTHER, "lowest_cost", True)
    assert told.regret_s < 0
    assert not opinion("perilune", record).estimated


def run_judge(policies: Sequence[str], records: Sequence[DecisionRecord]) -> list[Word]:
    writer, out = Writer("test"), io.BytesIO()
    lines = writer.pool(pool(), 0.0) + b"".join(writer.decision(i, r) for i, r in enumerate(records))
    judge.run(policies, io.BytesIO(lines), out)
    return [msgspec.json.decode(line, type=Word) for line in out.getvalue().splitlines()]


def test_each_decision_gets_the_opinion_of_each_policy_in_turn() -> None:
    ready, *words = run_judge(["perilune", "least_loaded"], recorded(2))
    assert isinstance(ready, Ready)
    told = [word.policy if isinstance(word, Opinion) else type(word) for word in words]
    assert told == ["perilune", "least_loaded", Done] * 2


def test_a_policy_that_raises_is_soon_asked_no_more_and_the_others_go_on() -> None:
    words = run_judge([UNKNOWN, "sticky"], recorded(5))
    of_broken = [w for w in words if isinstance(w, Opinion) and w.policy == UNKNOWN]
    assert [w.agreement for w in of_broken] == [Agreement.FAILED] * judge.FAILURES
    assert [w.over for w in of_broken] == [False, False, True]
    assert of_broken[-1].problem.startswith(f"Unknown policy '{UNKNOWN}', known are conductor, ")
    assert sum(isinstance(w, Opinion) and w.policy == "sticky" for w in words) == 5


# -- the budget ----------------------------------------------------------------------------------------


def test_a_budget_is_kept_on_average() -> None:
    budget, now, spent = CpuBudget(0.1, 0.0), 0.0, 0.0
    for _ in range(10_000):
        now += 0.01
        if budget.allows(now):
            budget.spend(0.05)
            spent += 0.05
    assert spent / now == pytest.approx(0.1, abs=0.01)


def test_what_was_overdrawn_is_waited_for() -> None:
    budget = CpuBudget(0.1, 0.0)
    budget.spend(1.5)
    assert [budget.allows(now) for now in (5.0, 9.9, 10.1)] == [False, False, True]


# -- the process ---------------------------------------------------------------------------------------


def script(text: str) -> Start:
    """Return what starts a process that runs this text in place of the judge's."""

    async def start(policies: Sequence[str]) -> Process:
        return await asyncio.create_subprocess_exec(sys.executable, "-c", text, stdin=PIPE, stdout=PIPE)

    return start


SAYS_READY = 'import sys, time; print(\'{"type":"ready","cpu_s":0.1}\', flush=True); sys.stdin.readline(); '
HANGS, DIES = SAYS_READY + "time.sleep(1e6)", SAYS_READY + "sys.exit(1)"


class Judged:
    """Shadow policies of a running gateway, whose decisions come as fast as they are taken."""

    def __init__(self, spec: Spec, **options: object) -> None:
        self.pool = pool(routing=Routing(shadow=spec))
        loop = asyncio.get_running_loop()
        self.shadow = Shadow(self.pool, "test", loop.time, Random(1), **options)  # type: ignore[arg-type]
        self.records = recorded()

    @property
    def stats(self) -> ShadowStats:
        stats = self.shadow.stats()
        assert stats is not None
        return stats

    async def until(self, condition) -> None:
        """Let decisions come until the condition holds."""
        task = asyncio.create_task(self.shadow.run())
        try:
            while not condition(self.stats):
                for record in self.records:
                    self.shadow.on_recorded(Recorded(record))
                await asyncio.sleep(0.01)
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def test_decisions_are_judged_in_another_process() -> None:
    judged = Judged(Spec(policies=("perilune", "least_loaded", UNKNOWN), cpu=1.0))
    await judged.until(
        lambda stats: stats.policies[UNKNOWN].off and stats.policies["perilune"].count(Agreement.SAME) > 20
    )
    shown = {row["policy"]: row for row in page(judged.stats)["policies"]}
    assert shown["perilune"]["agreement"] == 1.0
    assert shown["perilune"]["regret_s"] == 0.0
    assert UNKNOWN in shown[UNKNOWN]["off"]
    assert shown["perilune"]["off"] == shown["least_loaded"]["off"] == ""
    assert judged.stats.cpu_s > 0
    assert sum(judged.stats.stopped.values()) == 0


@pytest.mark.parametrize(
    ("text", "hang_s", "why"),
    [pytest.param(HANGS, 0.2, Stopped.HUNG, id="hangs"), pytest.param(DIES, HANG, Stopped.DIED, id="dies")],
)
async def test_a_policy_with_which_the_process_ends_is_asked_no_more(
    text: str, hang_s: float, why: Stopped
) -> None:
    judged = Judged(Spec(policies=("ear", "sticky"), cpu=1.0), starts=script(text), hang_s=hang_s)
    await judged.until(lambda stats: all(tally.off for tally in stats.policies.values()))
    assert judged.stats.stopped[why] == 2
    assert judged.shadow.asked == []


async def test_a_decision_that_cannot_be_encoded_is_no_fault_of_theirs() -> None:
    judged = Judged(Spec(policies=("perilune",), cpu=1.0))
    good = judged.records[0]
    bad = replace(good, verdict=Decision(good.target, Reason.COLD, [Cost(good.target, Fraction(1))]))
    judged.records = [bad, *judged.records]
    await judged.until(
        lambda stats: (
            stats.skipped[Skipped.UNFIT] > 2 and stats.policies["perilune"].count(Agreement.SAME) > 2
        )
    )
    assert judged.shadow.asked == ["perilune"]
    assert sum(judged.stats.stopped.values()) == 0


async def test_a_change_of_the_policies_asks_all_of_them_again_and_one_of_endpoints_does_not() -> None:
    judged = Judged(Spec(policies=("ear",), cpu=1.0), starts=script(DIES))
    await judged.until(lambda stats: stats.policies["ear"].off)
    judged.shadow.configure(pool(endpoints=[A], routing=judged.pool.spec.routing))
    assert judged.shadow.asked == []
    judged.shadow.configure(pool(routing=Routing(shadow=Spec(policies=("ear", "sticky")))))
    assert judged.shadow.asked == ["ear", "sticky"]


def test_a_decision_waits_for_nothing_while_there_is_no_process() -> None:
    shadow = Shadow(pool(routing=Routing(shadow=Spec(policies=("ear",)))), "test", lambda: 0.0, Random(1))
    for record in recorded():
        shadow.on_recorded(Recorded(record))
    assert shadow.stats().skipped[Skipped.BEHIND] == 4


def test_without_shadow_policies_there_is_nothing_to_show() -> None:
    shadow = Shadow(pool(), "test", lambda: 0.0, Random(1))
    shadow.on_recorded(Recorded(recorded(1)[0]))
    assert shadow.stats() is None
