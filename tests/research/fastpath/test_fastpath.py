"""Decisions from headers alone against those that know the body, over real state and real engines' events."""

from collections import Counter
from dataclasses import replace
from itertools import islice
from random import Random

import pytest
from msgspec import structs
from routing_objects import candidate, chosen, head, prefix

from perilune_api.policies import PeriluneParams
from perilune_api.pool import Routing
from perilune_gateway.model import (
    NEED_BODY,
    Candidate,
    Identity,
    Phase,
    Prefix,
    Reason,
    RequestView,
    SessionView,
)
from perilune_gateway.routing.context import RequestContext, StepTimer
from perilune_gateway.routing.decide import decide
from perilune_lab.traces.model import Role, Segment
from perilune_research.fastpath import cli
from perilune_research.fastpath.cli import Options, measure, parse, render, traffic
from perilune_research.fastpath.compare import Cause, Tally, cause_of
from perilune_research.fastpath.rig import Pair
from perilune_research.fastpath.traffic import MARKUP_TOKENS, bytes_of, ids_of

# Traffic


def test_equal_seeds_give_equal_traffic():
    first, again = (list(islice(traffic(Options(seed=3)), 40)) for _ in range(2))
    assert first == again
    assert first != list(islice(traffic(Options(seed=4)), 40))


def test_traffic_has_all_that_makes_a_body_hard_to_guess():
    talks = list(islice(traffic(Options()), 400))
    requests = [request for talk in talks for request in talk.requests]
    seen = Counter(
        sub_agents=sum(len(request.spawns) for request in requests),
        side=sum(request.side is not None for request in requests),
        reused=len(talks) - len({talk.session_id for talk in talks}),
        compacted=sum("summary" in segment.key for request in requests for segment in request.prompt),
        shortened=sum(s.key.endswith("/said") for request in requests for s in request.prompt),
        forks=sum(len(child.requests[0].prompt) > 2 for request in requests for child in request.spawns),
    )
    assert min(seen.values()) > 10, seen


def test_a_segment_is_always_the_same_text():
    segment = Segment("key", 100, Role.TOOL)
    assert ids_of(segment) == ids_of(Segment("key", 100, Role.TOOL))
    assert ids_of(segment) != ids_of(Segment("other", 100, Role.TOOL))
    assert len(ids_of(segment)) == 100 + MARKUP_TOKENS
    assert 260 < bytes_of(segment) < 560


# Causes


HOST, OTHER = "a", "b"
ROUTING = Routing(policy=chosen("perilune", perilune=PeriluneParams(least_gain_seconds=0.0)))


def side(
    tokens: int, rows: list[Candidate], held: Prefix, phase: Phase
) -> tuple[RequestContext, RequestView, object]:
    session = SessionView(session_id="s", host=HOST, seconds_since_move=1e6, context_tokens=tokens, turns=5)
    view = RequestView(
        request_id="r", ordinal=0, prompt_tokens=tokens, phase=phase, session=session, prefix=held
    )
    asked = RequestContext(
        head=head(),
        now=0.0,
        timer=StepTimer(lambda: 0.0),
        identity=Identity(),
        session=None,
        candidates=rows,
        prefix=held,
    )
    return asked, view, decide(view, rows, "perilune", ROUTING, Random(0))


def row(address: str, tokens: int, held: int, pending_s: float = 0.0) -> Candidate:
    made = candidate(address, cached=held, pending_s=pending_s)
    return structs.replace(made, prefill_s=made.engine.prefill_s(tokens - held, held))


def pair(guess: tuple[int, int], truth: tuple[int, int, int], pending_s: float) -> Pair:
    """Guessed: tokens, the host holds. True: tokens, host, the other. Seconds queued at the host."""
    tokens, held = guess
    by_headers = side(
        tokens,
        [row(HOST, tokens, held, pending_s), row(OTHER, tokens, 0)],
        prefix(a=held),
        Phase.HEADERS,
    )
    tokens, held, other = truth
    by_body = side(
        tokens,
        [row(HOST, tokens, held, pending_s), row(OTHER, tokens, other)],
        prefix(**{k: v for k, v in (("a", held), ("b", other)) if v}),
        Phase.BODY,
    )
    return Pair("perilune", by_headers, by_body, ROUTING)


@pytest.mark.parametrize(
    ("guess", "truth", "pending_s", "cause"),
    [
        pytest.param((40_000, 32_000), (40_000, 0, 0), 3.0, Cause.HOST_HOLDS, id="the host has lost it"),
        pytest.param((40_000, 32_000), (40_000, 32_000, 32_000), 3.0, Cause.OTHERS_HOLD, id="two hold it"),
        pytest.param((40_000, 32_000), (4_000, 32, 0), 3.0, Cause.TOKENS, id="it is short"),
    ],
)
def test_the_cause_of_a_difference_is_named(guess, truth, pending_s, cause):
    found = pair(guess, truth, pending_s)
    assert found.by_headers[2].target == HOST
    assert found.by_body[2].target == OTHER
    assert cause_of(found) is cause
    tally = Tally(policy="perilune")
    tally.add(found)
    assert (tally.turns, tally.equal, tally.read) == (1, 0, 0)
    assert [cause for cause, _ in tally.different] == [cause]
    assert len(tally.examples) == 1


def test_what_is_read_is_the_same():
    found = pair((40_000, 32_000), (40_000, 32_000, 0), 0.0)
    tally = Tally(policy="perilune")
    tally.add(found)
    tally.add(replace(found, by_headers=(*found.by_headers[:2], NEED_BODY)))
    assert (tally.turns, tally.equal, tally.read, tally.same_share) == (2, 1, 1, 1.0)
    assert found.by_body[2].reason is Reason.HOST


# Runs


@pytest.mark.parametrize(
    "policy", [pytest.param(p, marks=[pytest.mark.heavy] * (p != "perilune")) for p in cli.USUAL]
)
def test_headers_decide_as_bodies_do_in_a_short_run(policy):
    tally, rig = measure(Options(turns=150, restart_every_s=10.0), policy)
    assert tally.turns == 150
    assert tally.same_share >= cli.BAR, render([(tally, rig)])
    assert tally.by_headers > 75
    assert rig.restarts > 0
    assert rig.requests > 150


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("policy", cli.USUAL)
def test_headers_decide_as_bodies_do_over_many_turns(policy):
    tally, rig = measure(Options(turns=5000), policy)
    print(render([(tally, rig)]))
    assert tally.same_share >= cli.BAR
    assert tally.by_headers >= 0.8 * tally.turns


# The command


def test_the_command_prints_a_table(capsys):
    assert cli.main(["--policies", "sticky", "--turns", "30"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("simulated, seed 0, 8 endpoints, 1.0 sessions/s\n")
    assert "sticky        30" in said


def test_a_share_below_the_bar_fails(capsys):
    assert cli.main(["--policies", "sticky", "--turns", "5", "--bar", "1.1"]) == 1
    assert capsys.readouterr().out.endswith("below 110.0%: sticky\n")


def test_an_unknown_policy_is_named(capsys):
    assert cli.main(["--policies", "nobody"]) == 2
    assert "Unknown policy 'nobody'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        pytest.param(["--turns", "0"], id="no turns"),
        pytest.param(["--sessions-per-s", "-1"], id="negative rate"),
        pytest.param(["--sessions-per-s", "nan"], id="no rate"),
        pytest.param(["--bar", "nan"], id="no bar"),
    ],
)
def test_wrong_calls_are_refused(argv):
    with pytest.raises(SystemExit) as left:
        parse(argv)
    assert left.value.code == 2
