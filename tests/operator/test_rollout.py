from dataclasses import replace
from typing import Any

import pytest

from perilune_operator.observe.facts import PodFacts
from perilune_operator.rollout import RELEASE_S, Drain, Mark, Rolling, drain, hold_seconds

Object = dict[str, Any]
NOW = 1_760_000_000.0
SINCE, EARLIER = "2025-10-09T08:53:20Z", "2025-10-09T08:53:00Z"
"""NOW, and 20 s before."""
DRAINING, COST = "perilune.dev/draining", "controller.kubernetes.io/pod-deletion-cost"
SUPERSEDED = "perilune.dev/superseded"


def pod(name: str, **facts: Any) -> PodFacts:
    shown: Object = {"ready": True, "node": f"n-{name}", "uid": f"uid-{name}", "created": SINCE} | facts
    return replace(
        PodFacts(name=name, component="engine", role="both", node="", ready=True, terminating=False), **shown
    )


def going(name: str, since: str = EARLIER, **facts: Any) -> PodFacts:
    return pod(name, draining=since, chosen=True, **facts)


def workload(number: int, **status: int) -> Object:
    said = {"replicas": number, "updatedReplicas": number} | status
    return {"spec": {"replicas": number}, "status": said}


def of(
    *pods: PodFacts,
    wanted: int,
    live: Object | None = None,
    leaving: str = "",
    gateways: tuple[str, ...] = ("g1",),
    rolling: Rolling | None = None,
    session_s: float = 30.0,
) -> Drain:
    live = workload(len(pods)) if live is None else live
    nodes, answering = frozenset(leaving.split()), frozenset(gateways)
    return drain(pods, wanted, live, nodes, answering, session_s, NOW, rolling)


def marked(made: Drain) -> dict[str, dict[str, str | None]]:
    return {mark.pod: dict(mark.annotations) for mark in made.marks}


GO = {DRAINING: SINCE, COST: "-1"}


def test_no_engine_is_marked_while_their_number_is_as_wanted() -> None:
    assert of(pod("a"), pod("b"), wanted=2) == Drain(replicas=2)


def test_who_is_to_go_is_marked_and_kept() -> None:
    made = of(pod("a"), pod("b"), pod("c"), wanted=1)
    assert (made.replicas, made.leaving) == (3, ("a", "b"))
    assert made.marks == (Mark("a", "uid-a", GO), Mark("b", "uid-b", GO))


@pytest.mark.parametrize(
    ("pods", "first"),
    [
        pytest.param((pod("a"), pod("b", created=EARLIER)), "a", id="the youngest"),
        pytest.param((pod("a"), pod("b", ready=False, created=EARLIER)), "b", id="who is not ready"),
        pytest.param((pod("a"), going("b", created=EARLIER)), "b", id="who was chosen before"),
        pytest.param((pod("a"), pod("b", node="gone", created=EARLIER)), "b", id="on a node that is emptied"),
        pytest.param((pod("a", group=0), pod("b", group=1, created=EARLIER)), "b", id="the highest group"),
        pytest.param(
            (pod("a", recent_hits_tokens=9.0), pod("b", recent_hits_tokens=8.0, sessions=5)),
            "b",
            id="whose cache has saved the least",
        ),
        pytest.param((pod("a", sessions=2), pod("b", sessions=1)), "b", id="of the fewest sessions"),
        pytest.param((pod("b"), pod("a")), "a", id="equals by name"),
    ],
)
def test_the_first_engine_to_leave_is_chosen_by_the_rules(pods: tuple[PodFacts, ...], first: str) -> None:
    assert of(*pods, wanted=1, leaving="gone").leaving == (first,)


@pytest.mark.parametrize(
    ("b", "replicas", "again_in"),
    [
        pytest.param(going("b"), 2, 10.0, id="sessions are left"),
        pytest.param(going("b", drained_by=frozenset({"g1"})), 2, 10.0, id="one gateway of two has answered"),
        pytest.param(going("b", drained_by=frozenset({"g1", "g2", "g0"})), 1, None, id="all have"),
        pytest.param(going("b", since="2025-10-09T08:52:50Z"), 1, None, id="time is up"),
        pytest.param(going("b", ready=False), 1, None, id="it does not serve"),
        pytest.param(pod("b", draining=EARLIER), 2, 31.0, id="not without the deletion cost"),
    ],
)
def test_an_engine_is_removed_when_all_gateways_answered_or_time_is_over(
    b: PodFacts, replicas: int, again_in: float | None
) -> None:
    made = of(pod("a", created=EARLIER), b, wanted=1, gateways=("g1", "g2"))
    assert made.replicas == replicas
    assert made.again_in == (pytest.approx(again_in) if again_in else float("inf"))


def test_without_a_ready_gateway_it_takes_its_time() -> None:
    assert of(pod("a"), going("b"), wanted=1, gateways=()).replicas == 2


def test_chosen_engines_are_removed_together() -> None:
    """They have one deletion cost: the ReplicaSet might take the one that is not done."""
    done = going("b", drained_by=frozenset({"g1"}))
    assert of(pod("a"), done, going("c"), wanted=1).replicas == 3
    assert of(pod("a"), done, replace(done, name="c"), wanted=1).replicas == 1


def test_a_leader_worker_set_keeps_its_lowest_indices() -> None:
    """Group 0 is being made again: with 3 replicas, group 3 would go at once, and 2 is to go as well."""
    groups = [pod(f"p-{i}", group=i, terminating=i == 0) for i in range(4)]
    made = of(*groups, wanted=2)
    assert (made.replicas, made.leaving) == (4, ("p-2", "p-3"))
    gone = of(groups[1], going("p-2", group=2), wanted=2, live=workload(4))
    assert (gone.replicas, gone.leaving) == (3, ("p-2",))


def test_a_change_of_mind_takes_the_marks_away() -> None:
    made = of(pod("a"), going("b"), wanted=2)
    assert made.replicas == 2
    assert marked(made) == {"b": {DRAINING: None, COST: None}}


def test_a_shrunk_workload_does_not_grow_again_while_the_chosen_are_still_there() -> None:
    made = of(pod("a", ready=False), going("b"), wanted=1, live=workload(1))
    assert made.replicas == 1


def test_a_rollout_follows_the_spec_at_once() -> None:
    rolling = workload(3, updatedReplicas=1, replicas=4)
    assert of(pod("a"), pod("b"), pod("c"), pod("d"), wanted=2, live=rolling) == Drain(replicas=2)


def test_a_surge_is_no_scale_down() -> None:
    """Pods and workload are seen by two watches: one may be ahead."""
    assert of(pod("a"), pod("b"), pod("c"), wanted=2, live=workload(2)) == Drain(replicas=2)


def test_what_was_never_made_need_not_be_waited_for() -> None:
    assert of(pod("a"), wanted=1, live=workload(4)) == Drain(replicas=1)
    assert drain([], 2, None, frozenset(), frozenset(), 30.0, NOW) == Drain(replicas=2)


def test_engines_on_a_node_that_is_emptied_take_no_new_sessions() -> None:
    made = of(pod("a"), pod("b", node="gone"), wanted=2, leaving="gone")
    assert (made.replicas, made.emptied) == (2, ("b",))
    assert marked(made) == {"b": {DRAINING: SINCE}}
    back = of(pod("a"), pod("b", node="gone", draining=SINCE), wanted=2)
    assert marked(back) == {"b": {DRAINING: None}}


@pytest.mark.parametrize(
    "a",
    [
        pytest.param(pod("a", node="gone"), id="all of them"),
        pytest.param(pod("a", ready=False), id="others are not ready"),
    ],
)
def test_somebody_has_to_take_new_sessions(a: PodFacts) -> None:
    assert of(a, pod("b", node="gone"), wanted=2, leaving="gone") == Drain(replicas=2)


def test_a_users_own_mark_stays_unless_the_engine_goes() -> None:
    mine = pod("b", draining="maintenance")
    assert of(pod("a"), mine, wanted=2).marks == ()
    assert of(pod("a", node="gone"), mine, pod("c"), wanted=3, leaving="gone n-b").marks[-1].pod == "a"
    assert marked(of(pod("a", created=EARLIER), mine, wanted=1)) == {"b": GO}


def test_following_the_plan_changes_nothing_more() -> None:
    pods = [pod("a"), pod("b", node="gone"), pod("c"), pod("d")]
    first = of(*pods, wanted=2, leaving="gone")
    carried = marked(first)
    after = [
        replace(
            p, draining=carried.get(p.name, {}).get(DRAINING) or "", chosen=COST in carried.get(p.name, {})
        )
        for p in pods
    ]
    second = of(*after, wanted=2, leaving="gone")
    assert (second.marks, second.replicas, second.leaving) == ((), first.replicas, first.leaving)


# -- a changed template ------------------------------------------------------------------------------------


TWO = Rolling("v2", 2)
HOLD_S = hold_seconds(30.0)


def old(name: str, **facts: Any) -> PodFacts:
    return pod(name, template="v1", superseded=True, **facts)


def new(name: str, **facts: Any) -> PodFacts:
    return pod(name, template="v2", **facts)


@pytest.mark.parametrize(
    ("pods", "leaving"),
    [
        pytest.param((old("a"), old("b")), (), id="nothing new yet"),
        pytest.param((old("a"), old("b"), new("c", ready=False)), (), id="the new one loads"),
        pytest.param((old("a"), old("b"), new("c")), ("a",), id="one serves more than has to"),
        pytest.param((old("a"), old("b"), new("c"), new("d")), ("a", "b"), id="two do"),
        pytest.param((old("a"), old("b", sessions=-1), new("c")), ("b",), id="the one of fewest sessions"),
        pytest.param((old("a"), going("b", template="v1"), new("c")), ("b",), id="the one chosen before"),
        pytest.param((old("a", ready=False), old("b"), new("c")), (), id="an old one has failed"),
        pytest.param((old("a", terminating=True), old("b"), new("c")), (), id="one leaves already"),
        pytest.param((old("a"), new("b"), new("c")), ("a",), id="the last one"),
        pytest.param((new("a"), new("b"), new("c")), (), id="all are new"),
    ],
)
def test_as_many_old_engines_leave_as_more_serve_than_have_to(
    pods: tuple[PodFacts, ...], leaving: tuple[str, ...]
) -> None:
    assert of(*pods, wanted=2, live=workload(2), rolling=TWO).leaving == leaving


@pytest.mark.parametrize(
    ("a", "min_ready_s"),
    [
        pytest.param(old("a"), HOLD_S, id="not yet marked"),
        pytest.param(going("a", template="v1"), HOLD_S, id="sessions are left"),
        pytest.param(going("a", template="v1", drained_by=frozenset({"g1"})), RELEASE_S, id="all have left"),
        pytest.param(going("a", "2025-10-09T08:52:50Z", template="v1"), RELEASE_S, id="time is up"),
    ],
)
def test_a_new_engine_waits_until_sessions_have_left_the_old_one(a: PodFacts, min_ready_s: int) -> None:
    made = of(a, old("b", recent_hits_tokens=1.0), new("c"), wanted=2, live=workload(2), rolling=TWO)
    assert (made.replicas, made.leaving, made.min_ready_s) == (2, ("a",), min_ready_s)


def test_old_engines_are_marked_so_that_sessions_go_to_new_ones() -> None:
    made = of(pod("a", template="v1"), pod("b", template=""), new("c"), wanted=2, rolling=TWO)
    assert marked(made) == {"a": {**GO, SUPERSEDED: "true"}, "b": {SUPERSEDED: "true"}}
    back = of(old("a"), going("b", template="v2"), wanted=2, rolling=Rolling("v1", 2), live=workload(2))
    assert marked(back) == {"a": {SUPERSEDED: None}, "b": {DRAINING: None, COST: None, SUPERSEDED: "true"}}


def test_nothing_waits_for_sessions_where_there_are_none() -> None:
    assert of(old("a"), new("b"), wanted=1, rolling=Rolling("v2", 1), session_s=0.0).min_ready_s == 0
    assert of(new("a"), wanted=1, rolling=Rolling("v2", 1)).min_ready_s == 0


def test_whatever_a_rollout_comes_to_enough_engines_stay() -> None:
    """Follow the plan as Deployment and gateway would, and count who serves."""
    pods, made, steps = [old("a"), old("b"), old("c")], 0, 0
    rolling = Rolling("v2", 3)
    while any(p.template == "v1" for p in pods):
        steps += 1
        assert steps < 20
        if len(pods) < 4:
            made += 1
            pods.append(new(f"n{made}", ready=False))
        pods = [replace(p, ready=True) for p in pods]
        plan = of(*pods, wanted=3, live=workload(3), rolling=rolling)
        carried = marked(plan)
        pods = [
            replace(
                p, draining=carried.get(p.name, {}).get(DRAINING) or p.draining, chosen=p.name in plan.leaving
            )
            for p in pods
        ]
        answered = [replace(p, drained_by=frozenset({"g1"})) if p.draining else p for p in pods]
        if of(*answered, wanted=3, live=workload(3), rolling=rolling).min_ready_s == RELEASE_S:
            pods = [p for p in pods if not p.chosen]
        assert sum(p.ready for p in pods) >= 3
    assert [p.name for p in pods] == ["n1", "n2", "n3"]
