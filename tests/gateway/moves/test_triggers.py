"""What makes sessions leave an engine: who leaves, when, and with what. All settings are the defaults, but
hot engines are left only where the pool asks for it.

Pods as Kubernetes shows them become the pool document as in a gateway. The engines' answers and events are
the test's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from handing_rig import Handing, text
from router_rig import USUAL, A, B, C, pool
from routing_objects import head

from perilune_api import names
from perilune_api.pool import Migration, MoveTrigger, Pool, Routing, Topology
from perilune_gateway.feeds.kubernetes import with_pods
from perilune_gateway.model import MoveReason, Reason
from perilune_gateway.model.handoff import Leg
from perilune_gateway.state.connectors import Connector

Object = dict[str, Any]
PAGES = {A: "10.0.0.1:8998", B: "10.0.0.2:8998", C: "10.0.0.3:8998"}
TOKENS = 8_000


class Cluster(Handing):
    """Three engines on a node each."""

    def __init__(self) -> None:
        self.leaving_nodes: tuple[str, ...] = ()
        self.routing = Routing()
        self.giving: set[str] = set()
        self.pods = [pod(number) for number in range(1, 4)]
        super().__init__(pages=PAGES)

    def pool(self, draining: str = "") -> Pool:
        topology = Topology(leaving=self.leaving_nodes)
        document = pool(endpoints=(), engine=USUAL, topology=topology, routing=self.routing)
        return with_pods(document, self.pods, self.giving)

    def changes(self) -> None:
        """Take over what has changed, and plan."""
        self.router.configure(self.pool())
        self.goes_on()

    def goes_on(self) -> None:
        self.now += 1.0
        self.router.tick()
        self.router.plan_moves()

    def annotate(self, number: int, name: str, value: str = "true") -> None:
        self.pods[number - 1]["metadata"]["annotations"][name] = value

    def copy(self) -> set[str]:
        """Carry out all hand-offs; return the engines that took."""
        takers = set()
        while due := self.handing_over.due():
            for legs in due:
                takers.add(legs.target)
                self.handing_over.giving(legs)
                self.handing_over.taking(legs)
                self.handing_over.ended(legs, Leg.GIVE)
                self.handing_over.ended(legs, Leg.TAKE)
                self.handing_over.took(legs, legs.content.tokens, 0.1)
                self.announce(legs.target, list(legs.content.ids))
            self.goes_on()
        return takers


def pod(number: int, **meta: object) -> Object:
    return {
        "metadata": {
            "name": f"engine-{number}",
            "uid": f"uid-{number}",
            "annotations": {names.EVENTS_PORT: "5557", names.BOOTSTRAP_PORT: "8998"},
        },
        "spec": {"nodeName": f"n{number}"},
        "status": {
            "podIP": f"10.0.0.{number}",
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [{"started": True}],
        },
    }


def scale_down(of: Cluster) -> None:
    of.annotate(1, names.DRAINING, "2026-01-01T00:00:00Z")


def cordon(of: Cluster) -> None:
    """Also a spot node's taint: the operator lists both as nodes that are emptied."""
    of.leaving_nodes = ("n1",)


def deletion(of: Cluster) -> None:
    of.pods[0]["metadata"]["deletionTimestamp"] = "2026-01-01T00:02:30Z"
    of.giving = {"uid-1"}


def rolling_update(of: Cluster) -> None:
    """Replace the first engine; the third is the new one."""
    for number in (1, 2):
        of.annotate(number, names.SUPERSEDED)
    scale_down(of)


def heat(of: Cluster) -> None:
    of.routing = Routing(migration=Migration(triggers=(MoveTrigger.HOT_HOST,)))
    of.queue(A, 6.0, tokens=60_000)


@dataclass(frozen=True)
class Row:
    """Of four sessions on the first engine, two of which have been silent for 100 s."""

    happens: Callable[[Cluster], None]
    leave: int
    """How many of them leave."""
    reason: MoveReason
    to: frozenset[str] = frozenset({B, C})


ROWS = {
    "a scale-down chose it: all leave": Row(scale_down, 4, MoveReason.DRAIN),
    "its node is cordoned or will be taken away: all leave": Row(cordon, 4, MoveReason.DRAIN),
    "its pod is deleted: all leave": Row(deletion, 4, MoveReason.DRAIN),
    "a rolling update replaces it: all leave, for the new engine": Row(
        rolling_update, 4, MoveReason.DRAIN, frozenset({C})
    ),
    "it is hot: those leave that go on": Row(heat, 2, MoveReason.HOT_HOST),
}


def sessions_on_the_first(of: Cluster) -> list[str]:
    """Return four sessions that are bound there, two of which go on."""
    found = [f"s{n}" for n in range(4)]
    for at, name in enumerate(found):
        if at == 2:
            of.now += 100.0
        ids = text(at + 1, TOKENS)
        asked = head("/v1/completions", x_session_id=name)
        asked.subset = frozenset({A})
        routed = of.route(ids, asked)
        of.announce(A, ids)
        of.finish(routed)
    of.now += 10.0
    of.router.tick()
    return found


@pytest.mark.parametrize("row", [pytest.param(row, id=name) for name, row in ROWS.items()])
def test_sessions_leave_with_their_kv(row: Row) -> None:
    rig = Cluster()
    names_of = sessions_on_the_first(rig)
    silent, active = names_of[:2], names_of[2:]
    row.happens(rig)
    rig.changes()
    assert {rig.host(name) for name in names_of} == {A}, "the KV goes first"
    takers = rig.copy()
    assert takers <= row.to
    gone = {name for name in names_of if rig.host(name) != A}
    assert gone == set(names_of if row.leave == 4 else active)
    moved = {m for m, state in rig.router.moves.planner.stats(rig.now).moves if state == "completed"}
    assert moved == {row.reason}
    for name in gone:
        record = rig.turn(name, text(names_of.index(name) + 1, TOKENS + 100))
        assert (record.target, record.reason) == (rig.host(name), Reason.HOST)
        assert record.cached_tokens == TOKENS
    if row.leave < 4:
        assert {rig.host(name) for name in silent} == {A}, "they may never come back"


def test_sessions_wait_until_a_new_engine_has_told_what_it_can() -> None:
    """It is marked as ready before its bootstrap page was asked."""
    rig = Cluster()
    (name, *_) = sessions_on_the_first(rig)
    rig.state.connectors.forget(C)
    del rig.pods[2]
    rig.changes()
    rig.pods.append(pod(3))
    rolling_update(rig)
    rig.changes()
    assert rig.router.moves.planner.offers == ()
    rig.state.connectors.answered(C, Connector(["e"], 1))
    rig.goes_on()
    assert rig.copy() == {C}
    assert rig.host(name) == C


def test_kv_of_another_model_revision_goes_nowhere() -> None:
    """The next turn computes the prompt again: nothing could tell that the blocks were another model's."""
    rig = Cluster()
    (name, *_) = sessions_on_the_first(rig)
    rolling_update(rig)
    for number, revision in ((1, "v1"), (2, "v1"), (3, "v2")):
        rig.annotate(number, names.KV_NAME, revision)
    rig.changes()
    assert rig.handing_over.due() == []
    record = rig.turn(name, text(1, TOKENS + 100))
    assert (record.target, record.cached_tokens) == (C, 0)
    assert rig.host(name) == C
