"""Endpoints that sleep instead of being removed, and wake before new ones are started."""

from dataclasses import replace
from typing import Any

import pytest

from perilune_api import names
from perilune_api.inference_pool.checks import convert
from perilune_api.pool import SpecError
from perilune_operator import sleeping
from perilune_operator.observe.facts import PodFacts
from perilune_operator.rollout import Drain, drain

NOW = 1_760_000_000.0
GATEWAYS = frozenset({"g1"})


def pod(name: str, **facts: Any) -> PodFacts:
    made = PodFacts(name=name, component="engine", role="both", node="n", ready=True, terminating=False)
    return replace(made, uid=f"uid-{name}", created="2025-10-09T08:00:00Z", **facts)


class Cluster:
    """A Deployment and its pods, which do what a plan says; the gateways answer draining marks at once."""

    def __init__(self, *pods: PodFacts, most: int) -> None:
        self.pods, self.most = list(pods), most
        self.replicas = len(pods)
        self.started = 0

    def round(self, wanted: int) -> Drain:
        before = sleeping.night(self.pods, wanted, self.most)
        workload = {"spec": {"replicas": self.replicas}}
        made = drain(
            before.awake, wanted, before.without_sleepers(workload), frozenset(), GATEWAYS, 60.0, NOW
        )
        made = sleeping.falling_asleep(before, made, self.most)
        for mark in made.marks:
            self.pods = [
                self._marked(p, dict(mark.annotations)) if p.name == mark.pod else p for p in self.pods
            ]
        self.replicas = made.replicas
        while len(self.pods) < self.replicas:
            self.started += 1
            self.pods.append(pod(f"new{self.started}"))
        self.pods.sort(key=lambda p: not p.chosen)
        del self.pods[: len(self.pods) - self.replicas]
        return made

    def until_quiet(self, wanted: int) -> Drain:
        made = self.round(wanted)
        for _ in range(5):
            made = self.round(wanted)
        assert made.marks == (), "planning again changes nothing"
        return made

    @staticmethod
    def _marked(of: PodFacts, annotations: dict[str, str | None]) -> PodFacts:
        if names.ASLEEP in annotations:
            of = replace(of, asleep=annotations[names.ASLEEP] == "true")
        if names.DRAINING in annotations:
            mark = annotations[names.DRAINING] or ""
            of = replace(of, draining=mark, drained_by=GATEWAYS if mark else frozenset())
        if names.DELETION_COST in annotations:
            of = replace(of, chosen=annotations[names.DELETION_COST] is not None)
        return of

    def asleep(self) -> list[str]:
        return sorted(p.name for p in self.pods if p.asleep)

    def serving(self) -> list[str]:
        return sorted(p.name for p in self.pods if p.serves and not p.draining)


def three(most: int) -> Cluster:
    return Cluster(*(pod(name, sessions=n) for n, name in enumerate("abc")), most=most)


def test_an_endpoint_that_is_not_wanted_sleeps_and_wakes_before_another_one_starts() -> None:
    cluster = three(most=2)
    made = cluster.until_quiet(1)
    assert (made.replicas, made.asleep, made.leaving) == (3, ("a", "b"), ())
    assert (cluster.serving(), cluster.asleep(), cluster.started) == (["c"], ["a", "b"], 0)
    cluster.until_quiet(2)
    assert (cluster.serving(), cluster.asleep(), cluster.started) == (["a", "c"], ["b"], 0)
    cluster.until_quiet(4)
    assert (cluster.serving(), cluster.asleep()) == (["a", "b", "c", "new1"], [])


def test_its_sessions_leave_first() -> None:
    cluster = three(most=2)
    made = cluster.round(2)
    assert (made.leaving, made.asleep, made.waits) == (("a",), (), True)
    assert cluster.pods[0].draining
    made = cluster.round(2)
    assert made.asleep == ("a",)
    assert cluster.asleep() == ["a"]
    assert all(p.draining for p in cluster.pods if p.asleep), "no gateway sends it anything while it sleeps"


def test_no_more_sleep_than_may_and_of_several_the_one_whose_cache_saved_most() -> None:
    pods = (
        pod("a", recent_hits_tokens=1.0),
        pod("b", recent_hits_tokens=2.0),
        pod("c", recent_hits_tokens=9.0),
    )
    cluster = Cluster(*pods, most=1)
    made = cluster.until_quiet(1)
    assert (cluster.serving(), cluster.asleep(), made.replicas) == (["c"], ["b"], 2)


def test_one_that_may_sleep_no_longer_wakes_and_leaves_as_any_other() -> None:
    cluster = three(most=2)
    cluster.until_quiet(1)
    cluster.most = 0
    made = cluster.until_quiet(1)
    assert (made.replicas, made.asleep, cluster.asleep()) == (1, (), [])
    assert len(cluster.pods) == 1


def test_without_sleep_nothing_changes() -> None:
    cluster = three(most=0)
    cluster.until_quiet(1)
    assert (len(cluster.pods), cluster.asleep()) == (1, [])


def test_one_that_starts_or_is_replaced_does_not_sleep() -> None:
    cluster = Cluster(pod("a", ready=False), pod("b"), most=1)
    cluster.until_quiet(1)
    assert (cluster.serving(), cluster.asleep()) == (["b"], [])


def test_the_first_request_of_a_pool_at_zero_wakes_one() -> None:
    cluster = three(most=3)
    cluster.until_quiet(0)
    assert (cluster.serving(), len(cluster.asleep())) == ([], 3)
    cluster.until_quiet(1)
    assert (len(cluster.serving()), len(cluster.asleep()), cluster.started) == (1, 2, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"scaling": {"minReplicas": 1, "maxReplicas": 2, "sleeping": 1}},
        {
            "scaling": {"minReplicas": 1, "maxReplicas": 2, "sleeping": 1, "signal": "queueSeconds"},
            "mooncake": {"transfer": "handoff"},
        },
    ],
    ids=["an autoscaler sets the number", "KV is registered with the network"],
)
def test_sleep_is_refused_where_it_cannot_be(change: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"cannot sleep .* at `\$\.spec\.scaling\.sleeping`"):
        convert({"model": {"name": "m"}, **change})
