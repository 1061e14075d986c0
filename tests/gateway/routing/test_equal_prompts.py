"""Equal prompts: each request is decided for itself, and finds what the others left."""

import json

from router_rig import A, B, Rig
from routing_objects import head

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def chat(**more: object) -> bytes:
    return json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": "Hello " * 50}], **more}
    ).encode()


def test_whose_request_it_is_the_headers_tell_each_time(rig: Rig) -> None:
    body = chat(user="u", session_id="of the body")
    ids = [
        rig.record(rig.router.on_body(head(CHAT, x_request_id=name, **more), body)).session_id
        for name, more in {"a": {}, "b": {"x_session_id": "of the headers"}, "c": {}}.items()
    ]
    assert ids == ["of the body", "of the headers", "of the body"]


def test_the_last_turn_of_one_ends_no_equal_prompts_session(rig: Rig) -> None:
    last = rig.route(range(40), head(COMPLETIONS, x_request_id="a", x_dynamo_session_final="true"))
    other = rig.route(range(40), head(COMPLETIONS, x_request_id="b"))
    rig.finish(last)
    assert (
        rig.record(rig.route(range(44), head(COMPLETIONS, x_request_id="c"))).target == other.destinations[0]
    )
    assert len(rig.state.sessions) == 1


def test_equal_prompts_meet_each_others_cache_and_leave_one_session(rig: Rig) -> None:
    routed = [rig.route(range(40), head(COMPLETIONS, x_request_id=str(n))) for n in range(6)]
    assert {r.destinations[0] for r in routed} == {A, B}, "nobody's host binds the others"
    assert rig.record(routed[-1]).cached_tokens > 0
    assert len(rig.state.sessions) == sum(rig.state.sessions.bound.values()) == 1
    goes_on = rig.record(rig.route(range(44), head(COMPLETIONS, x_request_id="on")))
    assert goes_on.session_id == rig.record(routed[-1]).session_id
    assert goes_on.target == routed[-1].destinations[0]
