"""No listener needs what another one does with the same fact: in any order all comes to the same.

Random traffic with the default policy: sessions by headers and by bodies, answers of every kind, prefills of
others, endpoints that fail, leave and come back; and sessions that are handed over while KV is fetched for
requests. Clients, engines and time are the same in each order.
"""

from random import Random
from typing import Any

import pytest
from handing_rig import Handing, text
from property_examples import examples
from router_rig import A, B, C, Rig, completion, pool
from routing_objects import head

from perilune_api.pool import Disaggregation, EndpointSpec, Role, Routing, SessionAdmission
from perilune_gateway.model import NeedBody, Outcome, Refusal, Routed
from perilune_gateway.model.handoff import GivenUp, HandoffOutcome, Leg
from perilune_gateway.model.shared import Names
from perilune_gateway.state.connectors import Connector
from perilune_gateway.state.sharing import Sharing

P = "10.0.0.9:8000"
ROUTING = Routing(
    session_admission=SessionAdmission(enabled=True, max_wait_seconds=60.0),
    disaggregation=Disaggregation(local_tokens=64, coming_requests=1),
)
ORDERS = examples(8)


def known(rig: Rig) -> list[Any]:
    """Return what is known of sessions, endpoints and decisions at the end."""
    state, now = rig.state, rig.now
    sessions = [s for n in range(6) for s in state.sessions.matching(f"s{n}")]
    return [
        [(s.key, s.host, s.turns, s.context_tokens, s.failures, len(s.chain)) for s in sessions],
        [(view.endpoint, view.load, view.ejected) for view in state.fleet.view(now, state.sessions.bound)],
        state.index.stats(now),
        [state.calibration.of(address, now) for address in (A, B, C, P)],
        [(r.target, r.reason, r.ending) for r in rig.decisions.query(n=10_000)],
    ]


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
        self.seen += [
            *known(self.rig),
            self.rig.router.moves.remote_prefills.stats().outcomes,
            self.rig.router.new_sessions.stats(now),
            state.requests.get(0),
        ]
        return self.seen


class Transfers(Handing):
    """Sessions that drains move between two endpoints, whose KV is handed over, and prompts whose KV one of
    them fetches from the other."""

    def __init__(self, seed: int, order: int | None) -> None:
        sharing = Sharing("r", Names(b"key"), lambda: self.now, lambda: self.now)
        self.dice = Random(seed)
        super().__init__(sharing=sharing)
        if order is not None:
            listeners = list(self.state.facts.listeners)
            Random(order).shuffle(listeners)
            self.state.facts.listen(*listeners)
        self.open: list[tuple[Routed, list[int]]] = []
        self.sizes: dict[int, int] = {}
        self.prompts = 100
        self.draining = ""

    def leg_s(self, tokens: int) -> float:
        """Return how long the take leg of so many tokens takes over a fast link."""
        return self.state.calibration.engine.leg_overhead_s(tokens) + 4e-6 * tokens

    def turns(self) -> None:
        number = self.dice.randrange(6)
        size = self.sizes[number] = self.sizes.get(number, 0) + self.dice.randrange(100, 700)
        ids = text(number + 1, size)
        self.open.append((self.send(f"s{number}", ids), ids))

    def fetches(self) -> None:
        """Ask one endpoint for a prompt that the other one has, unless the one drains."""
        self.prompts += 1
        holder, asked = self.dice.sample([A, B], 2)
        if asked == self.draining:
            return
        for routed, ids in self.open:  # an endpoint that waits for others cannot give soon enough
            self.announce(routed.destinations[0], ids)
        ids = text(self.prompts, 6_500)
        self.announce(holder, ids[:6_400])
        h = head("/v1/completions", content_length=str(len(completion(ids))))
        h.subset = frozenset({asked})
        routed = self.route(ids, h)
        self.open.append((routed, ids))
        if pull := routed.pull:
            if self.dice.random() < 0.7:
                tokens = pull.content.tokens
                self.router.moves.pulling.took(routed.ticket, pull, tokens, self.leg_s(tokens))
                self.router.fetched(routed.ticket)
            else:
                self.router.moves.pulling.failed(routed.ticket, pull, Leg.TAKE, GivenUp.REFUSED)
                self.router.prefills_itself(routed.ticket)

    def announces(self) -> None:
        if self.open:
            routed, ids = self.dice.choice(self.open)
            self.announce(routed.destinations[0], ids)

    def ends(self) -> None:
        if self.open:
            routed, ids = self.open.pop(self.dice.randrange(len(self.open)))
            if self.dice.random() < 0.8:
                self.announce(routed.destinations[0], ids)
            self.finish(routed)

    def hands_over(self) -> None:
        """Drain an endpoint, or none, and play the legs that begin."""
        self.draining = self.dice.choice([A, B, ""])
        self.router.configure(self.pool(draining=self.draining))
        self.router.plan_moves()
        for legs in self.handing_over.due():
            self.handing_over.giving(legs)
            self.handing_over.taking(legs)
            self.handing_over.ended(legs, Leg.GIVE)
            self.handing_over.ended(legs, Leg.TAKE)
            if self.dice.random() < 0.8:
                tokens = legs.content.tokens
                self.handing_over.took(legs, tokens, self.leg_s(tokens))
                self.announce(legs.target, list(legs.content.ids))
            else:
                self.handing_over.failed(legs, GivenUp.REFUSED)

    def play(self, steps: int = 150) -> list[Any]:
        """Return all that can be seen of it; the last is how transfers have ended."""
        kinds = [self.turns, self.announces, self.ends, self.ends, self.hands_over, self.fetches]
        for _ in range(steps):
            self.now += self.dice.random()
            self.dice.choice(kinds)()
        while self.open:
            self.ends()
        self.router.tick()
        moves = self.router.moves
        ended = moves.handing_over.stats().outcomes, moves.pulling.stats().outcomes
        return [*known(self), moves.planner.stats(self.now), ended]


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.heavy) for n in (1, 3, 4, 5, 6))])
def test_in_any_order_all_comes_to_the_same(seed: int) -> None:
    usual = Traffic(seed, None).play()
    assert any(isinstance(seen, tuple) and seen[1] is True for seen in usual), "another endpoint prefilled"
    for order in range(ORDERS):
        assert Traffic(seed, order).play() == usual


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.heavy) for n in range(1, 6))])
def test_in_any_order_all_transfers_come_to_the_same(seed: int) -> None:
    usual = Transfers(seed, None).play()
    handed_over, fetched = usual[-1]
    assert {outcome for _, outcome in handed_over} >= {HandoffOutcome.SWITCHED, HandoffOutcome.FAILED}
    assert fetched.keys() >= {HandoffOutcome.COPIED, HandoffOutcome.FAILED}
    for order in range(ORDERS):
        assert Transfers(seed, order).play() == usual
