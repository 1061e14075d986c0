"""Turns while engines leave: one that drains, and a rolling update of all, far below saturation.

Where a share of turns is compared with that of the undisturbed run, it is of those that come after the drain,
with a TTFT of at most 1.3 times their p90 in the undisturbed run. That is some 93 % there.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import mode

import pytest

from perilune_api.pool import Routing
from perilune_gateway.model import MoveReason
from perilune_gateway.model.handoff import HandoffOutcome, HandoffRecord
from perilune_lab.quantiles import quantile
from perilune_lab.simulate.deployment import Arm, Deployment
from perilune_lab.simulate.faults import Faults
from perilune_lab.simulate.h20 import H20
from perilune_lab.simulate.loads import OfferedLoad
from perilune_lab.simulate.loop import BEGIN_S
from perilune_lab.simulate.outcome import PlayedRequest, SimulatedOutcome
from perilune_lab.simulate.simulation import simulate
from perilune_lab.simulate.workload import Workload
from perilune_lab.traces.agentic import Agentic

LOAD = OfferedLoad(window_s=600.0, warmup_s=0.0)
EIGHT = Deployment(arm=Arm.HANDOFF)
AT_S = 240.0
"""When endpoints begin to drain."""
SEEDS = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Played:
    """One seed's traffic, as it was played."""

    workload: Workload
    outcome: SimulatedOutcome

    @property
    def after(self) -> list[PlayedRequest]:
        """The turns after the drain."""
        return [r for r in self.outcome.requests if r.submitted_s >= BEGIN_S + AT_S]

    @property
    def drained(self) -> list[HandoffRecord]:
        """The hand-offs of sessions whose host drained."""
        return [h for h in self.outcome.handed_over if h.move.reason is MoveReason.DRAIN]

    def sessions(self) -> Iterator[tuple[str, list[PlayedRequest]]]:
        """Yield each session's name and turns."""
        turns: dict[int, list[PlayedRequest]] = {}
        for r in sorted(self.outcome.requests, key=lambda r: r.number):
            turns.setdefault(r.task.session, []).append(r)
        return ((self.workload.jobs[session].name, found) for session, found in turns.items())

    def homes(self) -> dict[str, int]:
        """Return the endpoint of each session's last turn before the drain."""
        return {
            name: before[-1].endpoint
            for name, turns in self.sessions()
            if (before := [r for r in turns if r.submitted_s < BEGIN_S + AT_S])
        }

    def busiest(self) -> int:
        """Return the endpoint that has most of the sessions which go on."""
        homes, after = self.homes(), {r.task.session for r in self.after}
        names = [self.workload.jobs[session].name for session in sorted(after)]
        return mode(homes[name] for name in names if name in homes)

    def first_turns(self) -> Iterator[tuple[HandoffRecord, PlayedRequest]]:
        """Yield each hand-off of a session with its next turn, if that follows it."""
        switched: dict[str, list[HandoffRecord]] = {}
        for h in self.drained:
            if h.outcome is HandoffOutcome.SWITCHED:
                switched.setdefault(_name(h), []).append(h)
        for name, turns in self.sessions():
            for before, turn in pairwise(turns):
                found = [h for h in switched.get(name, ()) if before.submitted_s < h.time <= turn.submitted_s]
                if found and found[-1].move.target == self.outcome.addresses[turn.endpoint]:
                    yield found[-1], turn


def _name(handoff: HandoffRecord) -> str:
    return handoff.move.subject.session_id  # type: ignore[attr-defined]


def play(workload: Workload, **faults: float) -> Played:
    return Played(workload, simulate(workload, EIGHT, "perilune", Routing(), Faults(**faults), seed=1))


@pytest.fixture(scope="module")
def undisturbed() -> list[Played]:
    return [play(LOAD.workload(0.5, seed, H20.engine)) for seed in SEEDS]


def share_in_time(runs: list[Played], undisturbed: list[Played]) -> float:
    usual_s = quantile(sorted(r.ttft_s for one in undisturbed for r in one.after), 0.9)
    in_time = [r.ttft_s <= 1.3 * usual_s for one in runs for r in one.after]
    return sum(in_time) / len(in_time)


def finds_all(handoff: HandoffRecord, turn: PlayedRequest) -> bool:
    """Return whether a session's turn finds what its host had, as far as its prompt still begins so."""
    return turn.cached_tokens >= 0.95 * min(handoff.tokens, turn.task.own_tokens // 256 * 256)


def test_the_sessions_of_an_endpoint_that_drains_keep_their_kv(undisturbed: list[Played]) -> None:
    drained, lived, switched = [], [], []
    for one in undisturbed:
        homes, left = one.homes(), one.busiest()
        drained.append(play(one.workload, drain_endpoint=left, drain_at_s=AT_S))
        handed = {_name(h) for h in drained[-1].drained if h.outcome is HandoffOutcome.SWITCHED}
        here = [name for name, home in homes.items() if home == left]
        lived += here
        switched += [name for name in here if name in handed]
        soon = BEGIN_S + AT_S + 60.0
        assert all(r.endpoint != left for r in drained[-1].after if r.submitted_s > soon)
    assert all(r.succeeded for one in drained for r in one.outcome.requests)
    assert len(switched) >= 0.95 * len(lived)
    turns = [finds_all(*first) for one in drained for first in one.first_turns()]
    assert sum(turns) >= 0.95 * len(turns) > 0
    assert all(h.pulled_tokens >= 0.95 * h.tokens for one in drained for h in one.drained)
    assert share_in_time(drained, undisturbed) >= share_in_time(undisturbed, undisturbed) - 0.01


def test_a_rolling_update_takes_no_turn_much_longer(undisturbed: list[Played]) -> None:
    updated = [play(one.workload, rolling_at_s=AT_S) for one in undisturbed]
    assert all(r.succeeded for one in updated for r in one.outcome.requests)
    assert share_in_time(updated, undisturbed) >= share_in_time(undisturbed, undisturbed) - 0.01
    handed = [h for one in updated for h in one.drained]
    assert {h.move.source for h in handed} == set(EIGHT.addresses), "all were updated"
    switched = [h for h in handed if h.outcome is HandoffOutcome.SWITCHED]
    assert len(switched) >= 0.95 * len(handed)
    assert all(h.pulled_tokens >= 0.95 * h.tokens for h in switched)


def test_an_updated_endpoint_does_not_get_all_that_the_others_held() -> None:
    """Sessions of eight turns and more, which come back after the update."""
    load = OfferedLoad(window_s=600.0, warmup_s=0.0, parameters=Agentic(turns_min=8))
    undisturbed = [play(load.workload(0.1, seed, H20.engine)) for seed in SEEDS]
    updated = [play(one.workload, rolling_at_s=AT_S) for one in undisturbed]
    turns = [finds_all(*first) for one in updated for first in one.first_turns()]
    assert len(turns) >= 20
    assert sum(turns) >= 0.95 * len(turns)
    assert share_in_time(updated, undisturbed) >= share_in_time(undisturbed, undisturbed) - 0.01
