"""Whether a prompt is split between a prefill and a decode endpoint, and between which two."""

from dataclasses import replace
from random import Random

import pytest
from msgspec import structs
from routing_objects import candidate, chosen, head, prefix, request, session

from perilune_api.pool import Disaggregation, Limits, Role, Routing
from perilune_api.topology import Level, Link
from perilune_gateway.model import (
    NEED_BODY,
    Candidate,
    Decision,
    Phase,
    Reason,
    Refusal,
    RequestView,
    Unsplit,
    Verdict,
)
from perilune_gateway.request import openai
from perilune_gateway.request.parsed import ParsedRequest
from perilune_gateway.routing import admission
from perilune_gateway.routing.decide import decide
from perilune_gateway.state.fleet import EndpointView

FAST, SLOW = Link(Level.NODE, 4e11, 1.0), Link(Level.FABRIC, 1e9, 1.0)
TOKENS = 10_000


def prefiller(address: str, **facts) -> Candidate:
    made = candidate(address, **facts)
    return structs.replace(made, endpoint=replace(made.endpoint, role=Role.PREFILL))


def decoder(address: str, links: dict[str, Link], *, in_flight: int = 8, **facts) -> Candidate:
    return structs.replace(candidate(address, in_flight=in_flight, **facts), links=links)


def decision(view: RequestView, *candidates: Candidate, policy: str = "ear", **pool) -> Decision:
    routing = Routing(policy=chosen(policy), disaggregation=Disaggregation(**pool))
    made = decide(view, candidates, policy, routing, Random(0))
    assert isinstance(made, Decision), made
    return made


LONG = request(tokens=TOKENS)


def test_a_long_prompt_is_prefilled_by_one_endpoint_and_decoded_by_another() -> None:
    made = decision(LONG, prefiller("p"), decoder("d", {"p": FAST}))
    assert (made.target, made.prefill, made.reason, made.unsplit) == ("d", "p", Reason.SPLIT, None)
    alone_s = prefiller("p").engine.prefill_s(TOKENS, 0)
    assert made.estimated_ttft_s > alone_s, "and the transfer"


@pytest.mark.parametrize(
    ("why", "cached", "giver", "links", "unsplit"),
    [
        (Unsplit.SHORT, TOKENS - 1_000, {}, {"p": FAST}, None),
        (Unsplit.QUEUES_FULL, 0, {"prefilling": 8}, {"p": FAST}, None),
        (Unsplit.CHEAPER, 0, {"pending_s": 30.0}, {"p": FAST}, None),
        (Unsplit.NO_GIVER, 0, {}, {}, None),
        (Unsplit.ANSWERS, 0, {}, {"p": FAST}, Unsplit.ANSWERS),
    ],
)
def test_a_prompt_is_prefilled_where_it_is_decoded_and_the_decision_says_why(
    why: Unsplit, cached: int, giver: dict[str, float], links: dict[str, Link], unsplit: Unsplit | None
) -> None:
    view = structs.replace(LONG, unsplit=unsplit)
    made = decision(view, prefiller("p", **giver), decoder("d", links, cached=cached))
    assert (made.target, made.prefill, made.unsplit) == ("d", "", why)


def test_a_prompt_is_not_prefilled_where_that_takes_too_long_though_it_is_cheaper() -> None:
    made = decision(LONG, prefiller("p", pending_s=60.0), decoder("d", {"p": FAST}, pending_s=100.0))
    assert (made.prefill, made.unsplit) == ("", Unsplit.SLOW)
    made = decision(
        LONG, prefiller("p", pending_s=60.0), decoder("d", {"p": FAST}, pending_s=100.0), max_seconds=70.0
    )
    assert made.prefill == "p"


@pytest.mark.parametrize(
    ("here", "coming", "prefill"),
    [
        ({"in_flight": 0}, 0, ""),
        ({"in_flight": 0}, 1, "p"),
        ({"in_flight": 1}, 0, "p"),
        ({"in_flight": 0, "pending_s": 1.0}, 0, "p"),
    ],
    ids=["idle", "idle, but a request will come", "decodes", "prefills already"],
)
def test_an_endpoint_prefills_by_itself_if_that_is_cheaper(
    here: dict[str, float], coming: int, prefill: str
) -> None:
    made = decision(LONG, prefiller("p"), decoder("d", {"p": FAST}, **here), coming_requests=coming)
    assert (made.prefill, made.unsplit) == (prefill, None if prefill else Unsplit.CHEAPER)


def test_a_prompt_waits_for_its_prefill_as_long_as_it_would_delay_others() -> None:
    """`alone_s` is what the prompt takes; each request in flight would be delayed by as much."""
    d = decoder("d", {"p": FAST}, in_flight=3)
    alone_s = d.engine.prefill_s(TOKENS, 0)
    assert decision(LONG, prefiller("p", pending_s=2.9 * alone_s), d).prefill == "p"
    assert decision(LONG, prefiller("p", pending_s=3.1 * alone_s), d).unsplit is Unsplit.CHEAPER


def test_a_prompt_that_is_cached_delays_others_half() -> None:
    """`alone_s` is what the rest takes."""
    held = 8_000
    d = decoder("d", {"p": FAST}, in_flight=4, cached=held)
    alone_s, share = d.engine.prefill_s(TOKENS - held, held), 1.0 - 0.5 * held / TOKENS
    sooner, later = (prefiller("p", cached=held, pending_s=times * share * alone_s) for times in (3.9, 4.1))
    assert decision(LONG, sooner, d).prefill == "p"
    assert decision(LONG, later, d).unsplit is Unsplit.CHEAPER


def within_two_seconds(there: dict[str, float], here: dict[str, float]) -> Verdict:
    """Decide a request that wants its first token within 2 s."""
    return decide(
        structs.replace(LONG, slo_ttft_s=2.0),
        [prefiller("p", **there), decoder("d", {"p": FAST}, **here)],
        "ear",
        Routing(policy=chosen("ear")),
        Random(0),
    )


@pytest.mark.parametrize(
    ("there", "here", "prefill", "unsplit"),
    [
        pytest.param({"pending_s": 5.0}, {"in_flight": 20}, "", Unsplit.SLO, id="only here"),
        pytest.param({}, {"in_flight": 0, "pending_s": 5.0}, "p", None, id="only there"),
        pytest.param({"pending_s": 0.5}, {"in_flight": 0}, "", Unsplit.CHEAPER, id="both"),
    ],
)
def test_the_endpoint_that_meets_the_slo_prefills(
    there: dict[str, float], here: dict[str, float], prefill: str, unsplit: Unsplit | None
) -> None:
    made = within_two_seconds(there, here)
    assert isinstance(made, Decision)
    assert (made.prefill, made.unsplit) == (prefill, unsplit)


def test_a_request_is_refused_if_no_endpoint_meets_the_slo() -> None:
    assert isinstance(within_two_seconds({"pending_s": 5.0}, {"in_flight": 20, "pending_s": 5.0}), Refusal)


def test_the_decision_tells_what_the_prefill_costs_at_each_endpoint_with_room() -> None:
    givers = prefiller("p", pending_s=1.0), prefiller("q"), prefiller("full", prefilling=8)
    made = decision(LONG, *givers, decoder("d", dict.fromkeys(("p", "q", "full"), FAST)))
    assert [cost.address for cost in made.prefill_costs] == ["d", "p", "q"]
    assert [cost.total for cost in made.prefill_costs] == [
        pytest.approx(sum(cost.terms.values())) for cost in made.prefill_costs
    ]
    assert made.prefill == "q"
    assert made.prefill_costs[1].terms["queue_s"] == 1.0
    assert made.prefill_costs[0].terms["interference_s"] > 0


def test_where_nothing_was_compared_the_decision_tells_no_costs() -> None:
    assert decision(LONG, prefiller("p"), decoder("d", {})).prefill_costs == ()


def test_what_the_store_holds_is_read_and_not_prefilled() -> None:
    stored, computed = prefiller("p", stored=TOKENS - 1_000), prefiller("q")
    made = decision(LONG, stored, computed, decoder("d", {"p": FAST, "q": FAST}))
    assert made.prefill == "p"
    assert made.estimated_ttft_s < decision(LONG, computed, decoder("d", {"q": FAST})).estimated_ttft_s


def test_a_token_more_than_the_limit_is_prefilled_elsewhere() -> None:
    held = TOKENS - 1_001
    made = decision(LONG, prefiller("p", cached=held), decoder("d", {"p": FAST}, cached=held))
    assert made.prefill == "p"


def test_the_prefill_endpoint_has_the_lowest_queue_prefill_and_transfer() -> None:
    """Each of the other three is worse in one of the terms."""
    givers = [
        prefiller("queue", pending_s=2.0, cached=5_000),
        prefiller("prefix"),
        prefiller("far", cached=5_000),
        prefiller("best", cached=5_000),
    ]
    links = {"queue": FAST, "prefix": FAST, "far": SLOW, "best": FAST}
    assert decision(LONG, *givers, decoder("d", links)).prefill == "best"


def test_a_full_prefill_endpoint_gives_way_to_another() -> None:
    made = decision(
        LONG,
        prefiller("full", prefilling=8, cached=5_000),
        prefiller("p"),
        decoder("d", {"full": FAST, "p": FAST}),
    )
    assert made.prefill == "p"


def test_a_new_session_decodes_where_the_link_is_fast_and_few_decode() -> None:
    far, busy, good = (
        decoder("far", {"p": SLOW}),
        decoder("busy", {"p": FAST}, in_flight=50, active_kv=500_000),
        decoder("good", {"p": FAST}),
    )
    assert decision(LONG, prefiller("p"), far, busy, good, policy="round_robin").target == "good"


def test_a_session_stays_with_the_endpoint_that_decodes_it() -> None:
    view = request(tokens=TOKENS, of=session("far"))
    made = decision(view, prefiller("p"), decoder("far", {"p": SLOW}), decoder("near", {"p": FAST}))
    assert (made.target, made.prefill, made.moved_from) == ("far", "p", "")


def test_a_prompt_that_is_prefilled_elsewhere_is_fetched_from_nowhere_else() -> None:
    """Although `ear` takes the hot session's KV along."""
    links = {"p": FAST, "h": FAST}
    hot = decoder("h", {"p": FAST}, cached=2_000, pending=100_000)
    view = request(tokens=TOKENS, of=session("h"), prefix=prefix(h=2_000))
    alone = decision(view, hot, decoder("d", links))
    assert (alone.target, alone.replicate_from, alone.moved_from) == ("d", "h", "h")
    made = decision(view, prefiller("p"), hot, decoder("d", links))
    assert (made.target, made.prefill, made.replicate_from, made.cached_tokens) == ("d", "p", "", 0)


def test_headers_suffice_for_a_short_rest_but_not_for_a_long_one() -> None:
    view = request(tokens=TOKENS, of=session("d"), phase=Phase.HEADERS)
    made = decision(view, prefiller("p"), decoder("d", {"p": FAST}, cached=TOKENS - 10))
    assert (made.target, made.unsplit) == ("d", Unsplit.SHORT)
    routing = Routing(policy=chosen("ear"))
    assert decide(view, [prefiller("p"), decoder("d", {"p": FAST})], "ear", routing, Random(0)) is NEED_BODY


def test_a_pool_without_prefill_endpoints_decides_as_ever() -> None:
    made = decision(LONG, decoder("d", {}))
    assert (made.prefill, made.unsplit, made.reason) == ("", None, Reason.COLD)


def test_the_queue_of_a_prefill_endpoint_admits_nobody() -> None:
    """Admission counts the queues of endpoints that get requests."""
    routing = Routing(policy=chosen("ear"), limits=Limits(max_pending_seconds=1.0))
    refused = decide(LONG, [prefiller("p"), decoder("d", {}, pending_s=5.0)], "ear", routing, Random(0))
    assert not isinstance(refused, Decision)


def view_of(made: Candidate) -> EndpointView:
    return EndpointView(endpoint=made.endpoint, load=made.load, seconds_since_move=0.0, links={})


def test_a_prefill_endpoint_serves_no_client_when_it_is_the_last_one() -> None:
    eligible, excluded = admission.split([view_of(prefiller("p"))], admission.Wanted())
    assert (eligible, excluded) == ([], {"p": "prefill"})


def test_a_subset_hint_need_not_name_the_prefill_endpoint() -> None:
    views = [view_of(prefiller("p")), view_of(candidate("d")), view_of(candidate("e"))]
    eligible, excluded = admission.split(views, admission.Wanted(frozenset({"d"})))
    assert ([v.endpoint.address for v in eligible], excluded) == (["p", "d"], {"e": "subset"})


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("/v1/completions", b'{"model":"m","prompt":[1,2]}', None),
        ("/v1/chat/completions", b'{"model":"m","messages":[],"n":1}', None),
        ("/v1/chat/completions", b'{"model":"m","messages":[],"n":2}', Unsplit.ANSWERS),
        ("/v1/completions", b'{"model":"m","prompt":"a","best_of":3}', Unsplit.ANSWERS),
        ("/v1/chat/completions", b'{"model":"m","messages":[],"use_beam_search":true}', Unsplit.ANSWERS),
        ("/v1/completions", b'{"model":"m","prompt":"a","echo":true}', Unsplit.PROMPT_LOGPROBS),
        ("/v1/completions", b'{"model":"m","prompt":"a","echo":false}', None),
        ("/v1/completions", b'{"model":"m","prompt":"a","prompt_logprobs":0}', Unsplit.PROMPT_LOGPROBS),
        ("/v1/chat/completions", b'{"model":"m","messages":[],"prompt_logprobs":1}', Unsplit.PROMPT_LOGPROBS),
        ("/v1/completions", b'{"model":"m","prompt":"a","prompt_embeds":"AA=="}', Unsplit.PROMPTS),
        ("/v1/completions", b'{"model":"m","prompt":[[1],[2]]}', Unsplit.PROMPTS),
        ("/v1/completions", b'{"model":"m","prompt_embeds":"AA=="}', Unsplit.PROMPTS),
        ("/v1/responses", b'{"model":"m","input":"a"}', Unsplit.API),
        ("/v1/messages", b'{"model":"m","messages":[]}', Unsplit.API),
    ],
)
def test_what_cannot_be_split_is_named(path: str, body: bytes, why: Unsplit | None) -> None:
    parsed = openai.parse(head(path).path, body)
    assert isinstance(parsed, ParsedRequest)
    assert parsed.unsplit is why
