"""An endpoint that gets the address of one that is gone, and inherits nothing of it."""

from router_rig import USUAL, A, B, Rig, pool
from routing_objects import head

from perilune_api.pool import EndpointSpec, Pool
from perilune_gateway.model import EngineMetrics, Outcome, Routed
from perilune_gateway.state.ejection import IN_A_ROW

PROMPT = range(3_200)


def listed(instance: str) -> Pool:
    """Return the pool of A and B, of which A may be another endpoint than before."""
    first = EndpointSpec(address=A, events=(f"tcp://{A}",), instance=instance)
    return pool(endpoints=[first, EndpointSpec(address=B, events=(f"tcp://{B}",))], engine=USUAL)


def of_a(rig: Rig, ids: range = PROMPT, session: str = "s") -> Routed:
    """Route a request to A."""
    asked = head("/v1/completions", x_session_id=session)
    asked.subset = frozenset({A})
    return rig.route(ids, asked)


def replaced(rig: Rig) -> list[str]:
    return list(rig.router.configure(listed("another")))


def test_load_blocks_claims_and_sessions_are_not_inherited() -> None:
    rig = Rig(listed("first"))
    old = of_a(rig)
    rig.stored(A, PROMPT[:1_600])
    assert replaced(rig) == [A]
    assert (rig.load(A).in_flight, rig.pending()[A], rig.state.sessions.bound) == (0, 0, {})
    record = rig.record(of_a(rig))
    assert [c.overlap.device_tokens for c in record.candidates] == [0]
    rig.finish(old)
    assert rig.load(A).in_flight == 1


def test_a_pod_that_stays_keeps_what_is_known_of_it() -> None:
    rig = Rig(listed("first"))
    of_a(rig)
    assert list(rig.router.configure(listed("first"))) == []
    assert (rig.load(A).in_flight, rig.state.sessions.bound) == (1, {A: 1})


def test_requests_to_the_one_before_say_nothing_of_the_new_one() -> None:
    rig = Rig(listed("first"))
    refused, broken, elsewhere = (of_a(rig, range(n, n + 3_200), f"s{n}") for n in (0, 10_000, 20_000))
    replaced(rig)
    rig.state.fleet.metrics(A, EngineMetrics(), rig.now)
    of_a(rig, range(3_200))
    claimed = rig.state.index.stats(rig.now).endpoints[A].speculative
    rig.router.on_response(refused.ticket, 503, A, False)
    rig.router.on_response(elsewhere.ticket, 200, B, True)
    for routed in (refused, broken):
        rig.finish(routed, Outcome.FAILED)
    rig.finish(elsewhere)
    assert rig.state.fleet.usable(rig.now) == {A, B}, "it is not suspected"
    assert rig.state.index.stats(rig.now).endpoints[A].speculative == claimed == 200
    assert rig.state.calibration.of(A, rig.now).prefill.observations == 0


def test_an_ejection_is_not_inherited() -> None:
    rig = Rig(listed("first"))
    for n in range(IN_A_ROW):
        routed = of_a(rig, session=f"s{n}")
        rig.router.on_response(routed.ticket, 500, A, False)
        rig.finish(routed, Outcome.FAILED)
    rig.now += 1.0
    rig.state.pass_time(rig.now)
    assert rig.state.fleet.usable(rig.now) == {B}
    replaced(rig)
    assert rig.state.fleet.usable(rig.now) == {A, B}
