"""Which endpoint changes between serving and only prefilling, by what the gateways reported."""

from collections import deque
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from random import Random
from statistics import mean
from types import MappingProxyType

import pytest

from perilune_api import names
from perilune_api.inference_pool.checks import convert
from perilune_api.inference_pool.spec import RoleSwitching
from perilune_api.pool import SpecError
from perilune_operator import roles
from perilune_operator.observe.facts import Demand, Demands, PodFacts
from perilune_operator.observe.timestamps import timestamp
from perilune_operator.roles import Switch

SPEC = RoleSwitching(queue_seconds=2.0, kv_usage=0.8, after_seconds=20)
NOW = 1_760_000_000.0
GATEWAYS = frozenset({"g1", "g2"})


def pods(serving: int = 3, prefilling: int = 1) -> list[PodFacts]:
    """Engines with as many sessions as their number."""
    return [
        *(pod(f"s{i}", "serve", sessions=i) for i in range(serving)),
        *(pod(f"p{i}", "prefill") for i in range(prefilling)),
    ]


def pod(name: str, duty: str, sessions: int = 0) -> PodFacts:
    component = "engine" if duty == "serve" else "prefill"
    return PodFacts(
        name=name,
        component=component,
        role="both",
        node="n",
        ready=True,
        terminating=False,
        uid=f"uid-{name}",
        duty=duty,
        labelled=True,
        sessions=sessions,
    )


def over(seconds: int, queue_s: float = 0.0, kv: float = 0.0) -> Demands:
    """Return a reading every 5 s, up to now, of the prefill endpoints' queues and the KV in use where others
    serve."""
    times = [NOW - ago for ago in range(seconds, -1, -5)]
    return {
        "prefill": [Demand(at=at, queue_s=queue_s, kv_in_use=0.0) for at in times],
        "serve": [Demand(at=at, queue_s=0.0, kv_in_use=kv) for at in times],
    }


def ending(demands: Demands) -> Demands:
    """Return the same readings, and an idle one in the place of the last."""
    return {duty: [*read[:-1], Demand(at=NOW, queue_s=0.0, kv_in_use=0.0)] for duty, read in demands.items()}


def switch(
    engines: Sequence[PodFacts], demands: Demands = MappingProxyType({}), session_s: float = 60.0
) -> Switch:
    return roles.switch(SPEC, engines, demands, GATEWAYS, session_s, NOW)


@pytest.mark.parametrize(
    ("engines", "demands", "who", "to"),
    [
        pytest.param(pods(), {}, "", "", id="nothing is known"),
        pytest.param(pods(), over(20, queue_s=2.5), "s0", "prefill", id="prefill waits, the others idle"),
        pytest.param(pods(), over(15, queue_s=2.5), "", "", id="not for long enough"),
        pytest.param(pods(), ending(over(20, queue_s=2.5)), "", "", id="not any more"),
        pytest.param(pods(), over(20, queue_s=2.5, kv=0.9), "", "", id="two that serve would hold too much"),
        pytest.param(pods(), over(20, queue_s=2.5, kv=0.7), "s0", "prefill", id="two that serve can hold it"),
        pytest.param(pods(3, 2), over(20, queue_s=3.9), "", "", id="the queue counts per endpoint"),
        pytest.param(pods(1, 2), over(20, queue_s=99.0), "", "", id="one always serves"),
        pytest.param(pods(2, 2), over(20, kv=1.7), "p0", "serve", id="full caches, prefill idles"),
        pytest.param(pods(2, 2), over(20, kv=1.7, queue_s=1.1), "", "", id="the other prefills enough"),
        pytest.param(pods(2, 2), over(20, kv=1.5), "", "", id="room in the caches"),
        pytest.param(pods(2, 1), over(20, kv=2.0), "", "", id="one always prefills"),
        pytest.param(
            pods(2, 2), over(20, kv=1.9, queue_s=9.0), "", "", id="both wait: more endpoints, not roles"
        ),
        pytest.param(pods(3, 0), {}, "s0", "prefill", id="none prefills any more"),
        pytest.param(pods(1, 0), {}, "", "", id="the only endpoint serves"),
        pytest.param(pods(0, 2), {}, "p0", "serve", id="none serves any more"),
        pytest.param(
            [*pods(0, 1), replace(pod("e", "prefill"), component="engine")],
            {},
            "e",
            "serve",
            id="one that was made to serve serves first",
        ),
        pytest.param(
            [replace(pods()[0], draining="maintenance"), *pods()[1:]],
            over(20, queue_s=2.5),
            "s1",
            "prefill",
            id="what a user drains keeps its role",
        ),
    ],
)
def test_the_side_that_waits_gets_an_endpoint_of_the_side_that_idles(
    engines: Sequence[PodFacts], demands: Demands, who: str, to: str
) -> None:
    made = switch(engines, demands)
    assert (*made.waiting, made.switched)[0] == who
    assert [mark.pod for mark in made.marks] == ([who] if who else [])
    assert (made.to if made.switched else ("prefill" if made.waiting else "")) == to


def test_an_endpoint_prefills_only_when_its_sessions_have_left() -> None:
    began = switch(pods(), over(20, queue_s=5.0))
    (mark,) = began.marks
    assert mark.annotations == {names.DRAINING: timestamp(NOW), names.NEXT_DUTY: "prefill"}
    assert mark.labels == {}

    marked = replace(pods()[0], draining=timestamp(NOW - 10), next_duty="prefill")
    engines = [marked, *pods()[1:]]
    waits = switch(engines)
    assert (waits.waiting, waits.marks, round(waits.again_in)) == (("s0",), (), 50)
    half = switch([replace(marked, drained_by=frozenset({"g1"})), *engines[1:]])
    assert half.waiting == ("s0",), "a gateway has not answered yet"

    for ended in (replace(marked, drained_by=GATEWAYS), replace(marked, draining=timestamp(NOW - 60))):
        done = switch([ended, *engines[1:]])
        assert (done.switched, done.to, done.waiting) == ("s0", "prefill", ())
        assert done.marks[0].annotations == {names.DRAINING: None, names.NEXT_DUTY: None}
        assert done.marks[0].labels == {names.DUTY_LABEL: "prefill"}


def test_one_endpoint_at_a_time() -> None:
    marked = replace(pods()[1], draining=timestamp(NOW), next_duty="prefill")
    made = switch([pods()[0], marked, *pods()[2:]], over(20, queue_s=50.0))
    assert (made.waiting, made.switched, made.marks) == (("s1",), "", ())


def test_the_last_endpoint_that_could_serve_goes_on_serving() -> None:
    """Its peers have died since its switch began."""
    marked = replace(pods(1)[0], draining=timestamp(NOW - 90), next_duty="prefill")
    dead = replace(pod("s1", "serve"), ready=False)
    made = switch([marked, dead, *pods(0, 1)])
    assert (made.switched, made.waiting) == ("", ())
    assert made.marks[0].annotations == {names.DRAINING: None, names.NEXT_DUTY: None}
    assert made.marks[0].labels == {}


def test_nothing_begins_while_engines_start_or_leave() -> None:
    assert roles.switch(SPEC, pods(3, 0), over(20), GATEWAYS, 60.0, NOW, steady=False) == Switch()


def test_pods_are_what_their_workload_says_when_roles_are_not_switched_any_more() -> None:
    lent = replace(pod("p0", "prefill"), duty="serve")
    on_its_way = replace(pods()[0], draining=timestamp(NOW), next_duty="prefill")
    first, second = roles.restored([lent, on_its_way, *pods()[1:], pod("g", "serve")])
    assert (first.pod, first.labels, first.annotations) == ("p0", {names.DUTY_LABEL: "prefill"}, {})
    assert (second.pod, second.labels) == ("s0", {})
    assert second.annotations == {names.DRAINING: None, names.NEXT_DUTY: None}


def test_a_switch_goes_on_after_its_mark_was_taken_away() -> None:
    made = switch([replace(pods()[0], next_duty="prefill"), *pods()[1:]])
    assert made.waiting == ("s0",)
    assert made.marks[0].annotations == {names.DRAINING: timestamp(NOW), names.NEXT_DUTY: "prefill"}


def test_a_mark_that_a_user_wrote_stays() -> None:
    *serving, first, second = pods(2, 2)
    made = switch([*serving, replace(first, draining="maintenance"), second], over(20, kv=1.9))
    assert made.switched == "p0"
    assert made.marks[0].annotations == {}


def test_the_load_decides_again_and_again_without_flapping() -> None:
    """A load that is heavy on prefill, then on decode, with noise."""
    engines, changes, at = pods(3, 1), list[str](), NOW
    queued, used = list[Demand](), list[Demand]()
    for prefill_s, kv in [(3.5, 0.3)] * 40 + [(0.1, 1.9)] * 40:
        for noise in (0.95, 1.05):
            at += 5.0
            queued.append(Demand(at=at, queue_s=prefill_s * noise, kv_in_use=0.0))
            used.append(Demand(at=at, queue_s=0.0, kv_in_use=kv * noise))
            made = roles.switch(SPEC, engines, {"prefill": queued, "serve": used}, GATEWAYS, 0.0, at)
            if made.waiting:
                (name,) = made.waiting
                engines = [replace(p, duty="prefill") if p.name == name else p for p in engines]
            elif made.switched:
                engines = [replace(p, duty="serve") if p.name == made.switched else p for p in engines]
            if made.marks:
                changes.append("prefill" if made.waiting else "serve")
                queued, used = [], []
    assert changes == ["prefill", "serve"]


class SimulatedPool:
    """A closed loop of four engines that do both: prompts queue at those that prefill, then their answers
    wait until there is KV where endpoints serve."""

    def __init__(self, seed: int, *, switches: bool = True) -> None:
        self.rng, self.switches = Random(seed), switches
        self.engines = pods(3, 1)
        self.at = NOW
        self.queues_s = {"p0": 0.0}
        self.answers: deque[tuple[float, float]] = deque()
        """When each came that waits for KV, and its KV."""
        self.running: list[tuple[float, float]] = []
        """When each ends, and its KV."""
        self.demands: dict[names.Duty, list[Demand]] = {"prefill": [], "serve": []}
        self.changes: list[str] = []
        self.prefill_waits_s: list[float] = []
        self.answer_waits_s: list[float] = []

    def serving(self) -> int:
        return sum(pod.duty == "serve" and not pod.next_duty for pod in self.engines)

    def run(self, minutes: int, prefill_s: float, kv: float) -> None:
        """Let 1.1 prompts come per second, each with about so many seconds of prefill and an answer that
        holds so much of a KV cache for a minute."""
        for _ in range(60 * minutes):
            self.at += 1.0
            self.queues_s = {name: max(0.0, queue_s - 1.0) for name, queue_s in self.queues_s.items()}
            for _ in range(1 + (self.rng.random() < 0.1)):
                name = min(self.queues_s, key=lambda name: self.queues_s[name])
                self.prefill_waits_s.append(self.queues_s[name])
                self.queues_s[name] += prefill_s * self.rng.uniform(0.8, 1.2)
                self.answers.append((self.at, kv))
            self.running = [(ends, held) for ends, held in self.running if ends > self.at]
            used = sum(held for _, held in self.running)
            while self.answers and used + self.answers[0][1] <= self.serving():
                came, held = self.answers.popleft()
                used += held
                self.answer_waits_s.append(self.at - came)
                self.running.append((self.at + 60.0, held))
            if self.at % 5 == 0:
                self.look(used)

    def look(self, used: float) -> None:
        queued = Demand(at=self.at, queue_s=sum(self.queues_s.values()), kv_in_use=0.0)
        self.demands["prefill"].append(queued)
        self.demands["serve"].append(Demand(at=self.at, queue_s=0.0, kv_in_use=used))
        if not self.switches:
            return
        made = roles.switch(SPEC, self.engines, self.demands, GATEWAYS, 30.0, self.at)
        for mark in made.marks:
            duty, draining = mark.labels.get(names.DUTY_LABEL), mark.annotations.get(names.DRAINING)
            self.engines = [
                replace(
                    pod,
                    duty=duty or pod.duty,
                    draining=draining or "",
                    next_duty="prefill" if draining else "",
                )
                if pod.name == mark.pod
                else pod
                for pod in self.engines
            ]
        if made.switched:
            self.changes.append(made.to)
            for read in self.demands.values():
                read.clear()
            prefilling = [pod.name for pod in self.engines if pod.duty == "prefill"]
            left_s = sum(queue_s for name, queue_s in self.queues_s.items() if name not in prefilling)
            self.queues_s = {name: self.queues_s.get(name, 0.0) for name in prefilling}
            self.queues_s[prefilling[0]] += left_s


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_roles_follow_the_load_each_way_and_both_sides_gain(seed: int) -> None:
    """First prompts are long and answers short, then the reverse."""
    with_, without = SimulatedPool(seed), SimulatedPool(seed, switches=False)
    for pool in (with_, without):
        pool.run(20, prefill_s=1.2, kv=0.008)
    assert with_.changes == ["prefill"]
    prefill_waits = [mean(pool.prefill_waits_s[-600:]) for pool in (with_, without)]
    assert prefill_waits[0] < 0.1 * prefill_waits[1]
    assert max(with_.answer_waits_s) == 0.0

    back = SimulatedPool(seed)
    back.run(20, prefill_s=1.2, kv=0.008)
    stays = deepcopy(back)
    stays.switches = False
    for pool in (back, stays):
        pool.run(20, prefill_s=0.1, kv=0.034)
    assert back.changes == ["prefill", "serve"]
    answer_waits = [mean(pool.answer_waits_s[-600:]) for pool in (back, stays)]
    assert answer_waits[0] < 0.5 * answer_waits[1]


@pytest.mark.parametrize(
    "change",
    [{"prefillReplicas": 0}, {"replicas": 1, "prefillReplicas": 1}],
    ids=["no role to switch", "too few endpoints"],
)
def test_roles_that_cannot_switch_are_refused(change: dict[str, object]) -> None:
    given = {
        "model": {"name": "m"},
        "replicas": 2,
        "prefillReplicas": 1,
        "mooncake": {"transfer": "handoff"},
        "roleSwitching": {},
    }
    assert convert(given).role_switching == RoleSwitching()
    with pytest.raises(SpecError, match=r"at `\$\.spec\.roleSwitching`"):
        convert(given | change)
