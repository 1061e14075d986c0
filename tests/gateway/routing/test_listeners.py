"""No listener needs what another one does with the same fact: in any order all comes to the same.

Random traffic with the default policy: sessions by headers and by bodies, answers of every kind, prefills of
others, endpoints that fail, leave and come back. Clients, engines and time are the same in each order.
"""

from random import Random
from typing import Any

import pytest
from router_rig import A, B, C, Rig, completion, pool
from routing_objects import head

from perilune_api.pool import Disaggregation, EndpointSpec, Role, Routing, SessionAdmission
from perilune_gateway.model import NeedBody, Outcome, Refusal, Routed
from perilune_gateway.model.handoff import GivenUp
from perilune_gateway.model.shared import Names
from perilune_gateway.state.connectors import Connector
from perilune_gateway.state.sharing import Sharing

P = "10.0.0.9:8000"
ROUTING = Routing(
    session_admission=SessionAdmission(enabled=True), disaggregation=Disaggregation(local_tokens=64)
)
ORDERS = 8


class Traffic:
    """One play of the traffic of `seed`, heard in the order of `order`; None is the usual one."""

    def __init__(self, seed: int, order: int | None) -> None:
        sharing = Sharing("r", Names(b"key"), lambda: self.rig.now, lambda: self.rig.now)
        self.dice = Random(seed)
        self.rig = Rig(self.pool({A, B, C, P}), sharing=sharing, seed=seed)
        facts = self.rig.state.facts
        listeners = list(facts.listeners)
        if order is not None:
            Random(order).shuffle(listeners)
            facts.listen(*listeners)
        self.connect()
        self.open: list[tuple[Routed, list[int]]] = []
        self.seen: list[Any] = []
        self.sizes: dict[str, int] = {}

    def pool(self, there: set[str]) -> Any:
        listed = [
            EndpointSpec(
                address=address,
                events=(f"tcp://{address}",) if address != C else (),
                bootstrap=f"{address}1",
                role=Role.PREFILL if address == P else Role.BOTH,
            )
            for address in (A, B, C, P)
            if address in there
        ]
        return pool(endpoints=listed, routing=ROUTING)

    def connect(self) -> None:
        """Let every endpoint say that it can hand KV over."""
        for address in (A, B, C, P):
            self.rig.state.connectors.answered(address, Connector([address], 1))

    def asks(self) -> None:
        name = f"s{self.dice.randrange(6)}"
        size = self.sizes[name] = self.sizes.get(name, 0) + self.dice.randrange(8, 120)
        ids = [ord(name[1]) * 1_000 + i for i in range(size)]
        body = completion(ids)
        h = head("/v1/completions", x_session_id=name, content_length=str(len(body)))
        verdict: Any = self.rig.router.on_headers(h)
        if isinstance(verdict, NeedBody):
            verdict = self.rig.router.on_body(h, body)
        self.seen.append(verdict if isinstance(verdict, Refusal) else type(verdict).__name__)
        if isinstance(verdict, Routed):
            if verdict.remote and self.dice.random() < 0.5:
                self.rig.router.moves.remote_prefills.failed(verdict.ticket, verdict.remote, GivenUp.REFUSED)
                self.rig.router.prefills_itself(verdict.ticket)
            self.seen.append((verdict.destinations, bool(verdict.remote)))
            self.open.append((verdict, ids))

    def announces(self) -> None:
        if self.open:
            routed, ids = self.dice.choice(self.open)
            self.rig.stored(self.dice.choice([*routed.destinations, P]), ids)

    def answers(self) -> None:
        if self.open:
            routed, _ = self.dice.choice(self.open)
            status = self.dice.choice([200, 200, 200, 404, 500, 503])
            served = self.dice.choice([routed.destinations[0], routed.destinations[-1], ""])
            self.rig.router.on_response(routed.ticket, status, served, self.dice.random() < 0.5)

    def breaks_off(self) -> None:
        if self.open:
            self.rig.router.on_reset(self.dice.choice(self.open)[0].ticket, "")

    def ends(self) -> None:
        if self.open:
            routed, _ = self.open.pop(self.dice.randrange(len(self.open)))
            if self.dice.random() < 0.5:
                self.rig.router.on_usage(routed.ticket, self.dice.randrange(100))
            self.rig.finish(routed, self.dice.choice(list(Outcome)))

    def endpoints_change(self) -> None:
        if self.dice.random() < 0.2:
            there = {A, B, C, P} - {self.dice.choice([A, B, C, P, ""])}
            self.rig.router.configure(self.pool(there))
            self.connect()

    def sessions_begin(self) -> None:
        for ticket, refusal in self.rig.router.due():
            self.seen.append((ticket, refusal))
        self.rig.router.plan_moves()

    def play(self, steps: int = 300) -> list[Any]:
        """Return all that can be seen of it."""
        kinds = [self.asks, self.announces, self.answers, self.ends] * 4
        kinds += [self.breaks_off, self.endpoints_change, self.sessions_begin]
        for _ in range(steps):
            self.rig.now += self.dice.random()
            self.dice.choice(kinds)()
        while self.open:
            self.ends()
        state, now = self.rig.state, self.rig.now
        self.rig.router.tick()
        sessions = [state.sessions.matching(f"s{n}") for n in range(6)]
        self.seen += [
            [
                (s.key, s.host, s.turns, s.context_tokens, s.failures, len(s.chain))
                for each in sessions
                for s in each
            ],
            [
                (view.endpoint, view.load, view.ejected)
                for view in state.fleet.view(now, state.sessions.bound)
            ],
            state.index.stats(now),
            [state.calibration.of(address, now) for address in (A, B, C, P)],
            [(r.target, r.reason, r.ending) for r in self.rig.decisions.query(n=10_000)],
            self.rig.router.moves.remote_prefills.stats().outcomes,
            self.rig.router.new_sessions.stats(now),
            state.requests.get(0),
        ]
        return self.seen


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.heavy) for n in range(1, 6))])
def test_in_any_order_all_comes_to_the_same(seed: int) -> None:
    usual = Traffic(seed, None).play()
    assert any(isinstance(seen, tuple) and seen[1] is True for seen in usual), "another endpoint prefilled"
    for order in range(ORDERS):
        assert Traffic(seed, order).play() == usual
