"""Ways into the router, and what it says about a decision."""

import re
from random import Random
from typing import Literal

import pytest
from router_rig import A, B, C, Rig, completion, pool
from routing_objects import chosen, head

from perilune_api.pool import Routing
from perilune_gateway.model import (
    Decision,
    NeedBody,
    Phase,
    Reason,
    Refusal,
    RequestHead,
    Routed,
    Tokens,
    TokenSource,
)
from perilune_gateway.request import block_hashes as blocks
from perilune_gateway.request.parsed import ParsedRequest
from perilune_gateway.routing.context import Prompt
from perilune_gateway.routing.decide import decide
from perilune_gateway.routing.router import Encode


@pytest.mark.parametrize(
    "h",
    [head("/v1/models", has_body=False), head("/v1/messages/count_tokens"), head("/health", has_body=False)],
    ids=["GET", "another POST", "health"],
)
def test_what_is_not_for_the_model_goes_to_any_ready_endpoint(rig: Rig, h: RequestHead) -> None:
    routed = rig.route(h=h)
    assert rig.record(routed).reason == Reason.PASS_THROUGH
    assert len(routed.destinations) == 2
    rig.finish(routed)
    assert len(rig.state.requests) == 0


def test_the_conformance_header_counts_only_in_conformance_mode(rig: Rig) -> None:
    h = head("/v1/completions", test_epp_endpoint_selection=f"{B},{A}")
    assert isinstance(rig.router.on_headers(h), NeedBody)
    forced = Rig(pool(), conformance=True)
    assert forced.route(h=h).destinations == (B, A)
    ip = B.partition(":")[0]
    assert forced.route(h=head("/v1/completions", test_epp_endpoint_selection=ip)).destinations[0] == B
    refusal = forced.ask(h=head("/v1/completions", test_epp_endpoint_selection="1.1.1.1:1"))
    assert isinstance(refusal, Refusal)
    assert refusal.status == 503


def test_a_request_may_choose_its_policy_where_the_pool_allows_it(rig: Rig) -> None:
    h = head("/v1/completions", x_perilune_policy="round_robin")
    assert rig.record(rig.route(h=h)).policy == "perilune"
    allowing = Rig(pool(routing=Routing(allow_policy_header=True)))
    assert allowing.record(allowing.route(h=h)).policy == "round_robin"
    refusal = allowing.ask(h=head("/v1/completions", x_perilune_policy="nearest"))
    assert isinstance(refusal, Refusal)
    assert refusal.status == 400


def test_the_decision_header_where_asked(rig: Rig) -> None:
    h = head("/v1/completions", x_perilune_decision="1", x_request_id="abc")
    routed = rig.route(h=h)
    assert re.fullmatch(r"endpoint-[0-9a-f]{12}; cold; request=abc", routed.decision_header)
    assert rig.route().decision_header == ""
    assert rig.route(h=head("/v1/completions", x_perilune_decision="0")).decision_header == ""


def test_tokens_that_must_be_waited_for() -> None:
    class Slow:
        rewrites_answers = False

        def now(self, request: ParsedRequest) -> None:
            return None

    rig = Rig(pool(), tokenizer=Slow())
    encode = rig.router.on_body(head("/v1/completions"), completion(range(20)))
    assert isinstance(encode, Encode)
    routed = rig.router.on_tokens(
        encode, Tokens(count=20, source=TokenSource.ENGINE, ids=list(range(20))), waited_s=0.5
    )
    assert isinstance(routed, Routed)
    assert rig.record(routed).timings_us["tokenize"] == 500_000


@pytest.mark.parametrize("by", ["headers", "prompt"])
def test_weighing_keeps_nothing(rig: Rig, by: str) -> None:
    routed = rig.route(range(40), head("/v1/completions", x_session_id="s"))
    rig.stored(routed.destinations[0], range(40))
    rig.finish(routed)
    h = head("/v1/completions", x_session_id="s", content_length="400")
    prompt = Prompt(
        tokens=48, source=TokenSource.LOCAL, blocks=blocks.chain(range(48), rig.block_size, 0), model="m"
    )
    session = rig.router.state.sessions.matching("s")[0]
    before = (repr(session), rig.pending(), len(rig.decisions))
    _, view, verdict = rig.router.weigh(h, None if by == "headers" else prompt, 1)
    assert isinstance(verdict, Decision)
    assert verdict.target == routed.destinations[0]
    assert view.phase is (Phase.HEADERS if by == "headers" else Phase.BODY)
    assert (repr(session), rig.pending(), len(rig.decisions)) == before
    with pytest.raises(KeyError):
        rig.router.weigh(head("/v1/completions", x_session_id="new"), None, 1)


def test_a_decision_can_be_taken_again_from_its_record() -> None:
    """Ties are drawn: the record's seed draws them alike."""
    rig = Rig(pool(routing=Routing(policy=chosen("power_of_two")), endpoints=[A, B, C]))
    targets = set()
    for i in range(30):
        record = rig.record(rig.route(range(i, i + 8), h=head("/v1/completions", x_request_id=f"r{i}")))
        again = decide(
            record.view, record.candidates, record.policy, rig.document.spec.routing, Random(record.seed)
        )
        assert again == record.verdict
        targets.add(record.target)
    assert len(targets) == 3


def test_one_line_per_decision_at_debug(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.route(range(100, 120))
    assert not caplog.messages
    with caplog.at_level("DEBUG", "perilune_gateway.observe"):
        rig.route(h=head("/v1/completions", x_request_id="abc"))
    assert [message.split()[:2] for message in caplog.messages] == [["decision", "request_id=abc"]]


@pytest.mark.parametrize(
    ("told", "header"),
    [("address", f"{A}; cold; request=r"), ("off", "")],
)
def test_the_pool_says_what_a_client_learns_of_its_decision(
    told: Literal["address", "off"], header: str
) -> None:
    routing = Routing(policy=chosen("ear"), decision_header=told)
    rig = Rig(pool(endpoints=[A], routing=routing))
    asked = head("/v1/completions", x_perilune_decision="1", x_request_id="r", x_session_id="s")
    routed = rig.route(h=asked)
    assert routed.decision_header == rig.router.decision_header(routed, A) == header


@pytest.mark.parametrize(("told", "name"), [("address", "{}"), ("name", "endpoint-[0-9a-f]{{12}}")])
def test_the_decision_header_names_who_served_in_place_of_the_chosen_endpoint(
    told: Literal["address", "name"], name: str
) -> None:
    rig = Rig(pool(endpoints=[A, B], routing=Routing(decision_header=told)))
    routed = rig.route(h=head("/v1/completions", x_perilune_decision="1", x_request_id="r"))
    first, other = routed.destinations
    header = rig.router.decision_header(routed, other)
    found = re.fullmatch(f"({name.format(first)}); cold; request=r; served=({name.format(other)})", header)
    assert found
    assert found[1] != found[2]
    for served in (first, ""):
        assert rig.router.decision_header(routed, served) == routed.decision_header
    assert rig.router.decision_header(rig.route(), other) == "", "its client did not ask"
