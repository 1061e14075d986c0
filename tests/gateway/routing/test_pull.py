"""Whether the endpoint that was chosen fetches what another one caches, and from which."""

from dataclasses import replace
from random import Random

import pytest
from msgspec import structs
from routing_objects import candidate, chosen, link, prefix, request, session

from perilune_api.pool import Pull, Role, Routing
from perilune_gateway.model import (
    NEED_BODY,
    Candidate,
    Decision,
    Location,
    Phase,
    Prefix,
    Reason,
    RequestView,
    Unpulled,
)
from perilune_gateway.routing.decide import decide
from perilune_gateway.routing.pull import pull

TOKENS, HELD = 20_000, 19_200
RULES = Pull(max_seconds=0.4)
TO_T = Decision("t", Reason.LEAST_LOADED)


def target(*givers: str, cached: int = 0, **facts) -> Candidate:
    made = candidate("t", cached=cached, **facts)
    return structs.replace(made, links={giver: link() for giver in givers})


def held(*, wait_s: float = 0.0, **by: int) -> Prefix:
    known = prefix(**by)
    return structs.replace(known, locations=tuple(x._replace(wait_s=wait_s) for x in known.locations))


def pulled(view: RequestView, *candidates: Candidate, decision: Decision = TO_T) -> Decision:
    made = pull(view, decision, candidates, RULES)
    assert isinstance(made, Decision)
    return made


def test_a_policy_that_knows_no_transfers_gets_them_too() -> None:
    view = request(tokens=TOKENS, prefix=held(h=HELD))
    made = pulled(view, target("h"), candidate("h", cached=HELD))
    assert (made.target, made.replicate_from, made.cached_tokens, made.unpulled) == ("t", "h", HELD, None)
    alone_s = candidate("t").engine.prefill_s(TOKENS, 0)
    assert 0.0 < made.estimated_ttft_s < alone_s / 2


def far(made: Candidate) -> Candidate:
    return structs.replace(made, links={"h": link(bytes_per_s=1e6)})


def closed(made: Candidate) -> Candidate:
    return structs.replace(made, links={"h": link()._replace(carries_kv=False)})


@pytest.mark.parametrize(
    ("why", "view", "there"),
    [
        (Unpulled.SLOWER, request(tokens=TOKENS, prefix=held(h=HELD)), far(target())),
        (Unpulled.SLOWER, request(tokens=TOKENS, prefix=held(h=HELD, wait_s=60.0)), target("h")),
        (Unpulled.SLOWER, request(tokens=TOKENS, prefix=held(h=HELD)), target("h", cached=HELD - 64)),
        (Unpulled.SLOW, request(tokens=100_000, prefix=held(h=99_200, wait_s=0.5)), target("h")),
        (Unpulled.NO_GIVER, request(tokens=TOKENS, prefix=held(h=HELD)), target()),
        (Unpulled.NO_GIVER, request(tokens=TOKENS, prefix=held(h=HELD)), closed(target())),
        (
            Unpulled.PICTURES,
            structs.replace(
                request(tokens=TOKENS, prefix=prefix(pullable=False, h=HELD)), unpulled=Unpulled.PICTURES
            ),
            target("h"),
        ),
    ],
)
def test_what_is_not_fetched_has_its_cause(why: Unpulled, view: RequestView, there: Candidate) -> None:
    named = replace_source(TO_T, "h")
    made = pulled(view, there, candidate("h", cached=HELD), decision=named)
    assert (made.replicate_from, made.unpulled) == ("", why)
    assert made.cached_tokens == there.overlap.device_tokens, "and the prediction is without it"


def replace_source(decision: Decision, source: str) -> Decision:
    return structs.replace(decision, replicate_from=source, cached_tokens=HELD)


def test_what_the_target_has_itself_is_not_worth_a_word() -> None:
    made = pulled(request(tokens=TOKENS, prefix=held(t=HELD, h=HELD)), target("h", cached=HELD))
    assert (made.replicate_from, made.unpulled) == ("", None)


def test_a_pool_whose_engines_hand_nothing_over_decides_as_ever() -> None:
    view = request(tokens=TOKENS, prefix=prefix(pullable=False, h=HELD))
    assert pulled(view, target("h"), candidate("h", cached=HELD)) == TO_T


def test_the_store_counts_as_what_the_target_has() -> None:
    """Where reading it is as fast as fetching."""
    view = request(tokens=TOKENS, prefix=held(h=HELD))
    there = target(stored=HELD)
    there = structs.replace(there, links={"h": link(bytes_per_s=there.engine.store_bytes_per_s)})
    assert pulled(view, there).unpulled is Unpulled.SLOWER


def test_the_giver_is_the_one_that_is_done_first() -> None:
    locations = Location("busy", HELD, 0.3), Location("free", HELD - 640)
    view = request(tokens=TOKENS, prefix=Prefix(locations=locations, pullable=True))
    made = pulled(view, target("busy", "free"))
    assert (made.replicate_from, made.cached_tokens) == ("free", HELD - 640)


def test_a_prompt_that_another_endpoint_prefills_fetches_nothing_else() -> None:
    split = structs.replace(TO_T, prefill="p")
    assert pulled(request(tokens=TOKENS, prefix=held(h=HELD)), target("h"), decision=split) is split


def test_headers_do_not_suffice_to_fetch() -> None:
    view = request(tokens=TOKENS, prefix=held(h=HELD), phase=Phase.HEADERS)
    assert pull(view, TO_T, [target("h")], RULES) is NEED_BODY


@pytest.mark.parametrize("carries", [True, False])
def test_ear_names_the_host_only_where_its_kv_can_follow(carries: bool) -> None:
    hot = candidate("h", pending=100_000, cached=HELD)
    there = structs.replace(target(), links={"h": link()._replace(carries_kv=carries)})
    view = request(tokens=TOKENS, of=session("h"), prefix=held(h=HELD))
    made = decide(view, [hot, there], "ear", Routing(policy=chosen("ear")), Random(0))
    assert isinstance(made, Decision)
    assert (made.target, made.moved_from) == ("t", "h")
    assert (made.replicate_from, made.unpulled) == (("h", None) if carries else ("", Unpulled.NO_GIVER))


def test_prefill_endpoints_give_too() -> None:
    p = candidate("p", cached=HELD)
    p = structs.replace(p, endpoint=replace(p.endpoint, role=Role.PREFILL))
    view = request(tokens=TOKENS, prefix=held(p=HELD))
    assert pulled(view, target("p"), p).replicate_from == "p"


# -- from host memory --------------------------------------------------------------------------------------


def offloaded(wait_s: float = 0.0, **by: int) -> Prefix:
    """Return who has how many tokens in host memory; all have HELD on their devices."""
    locations = tuple(Location(address, HELD, wait_s, tokens) for address, tokens in by.items())
    return Prefix(locations=locations, pullable=True, from_host=True)


def test_what_is_read_is_what_the_other_has_in_host_memory() -> None:
    view = request(tokens=TOKENS, prefix=offloaded(h=HELD - 640, g=HELD - 6_400))
    made = pulled(view, target("h", "g"))
    assert (made.replicate_from, made.cached_tokens) == ("h", HELD - 640)


def test_an_endpoint_without_host_memory_is_not_read() -> None:
    made = pulled(request(tokens=TOKENS, prefix=offloaded(h=0)), target("h"))
    assert (made.replicate_from, made.unpulled) == ("", Unpulled.NO_GIVER)


def test_what_the_target_has_in_its_own_host_memory_is_not_sent() -> None:
    """One that lacks a quarter loads the rest from its own."""
    view = request(tokens=TOKENS, prefix=offloaded(h=HELD))
    slow = link(bytes_per_s=9e8)
    there = [structs.replace(target("h", host=host), links={"h": slow}) for host in (0, HELD * 3 // 4)]
    assert [pulled(view, one).replicate_from for one in there] == ["", "h"]


def test_no_bound_holds_for_what_holds_nothing() -> None:
    view = request(tokens=100_000, prefix=structs.replace(offloaded(h=0), locations=()))
    far_away = structs.replace(view.prefix, locations=(Location("h", 99_200, 0.5, 99_200),))
    assert pulled(structs.replace(view, prefix=far_away), target("h")).replicate_from == "h"


def test_headers_do_not_suffice_to_name_a_source() -> None:
    view = request(tokens=TOKENS, prefix=offloaded(h=HELD), phase=Phase.HEADERS)
    assert pull(view, TO_T, [target("h")], RULES) is NEED_BODY
