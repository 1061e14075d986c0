"""Who may be chosen, and who is told what where nobody may."""

import json

import pytest
from router_rig import A, B, Rig, completion, pool
from routing_objects import chosen, head

from perilune_api.pool import EndpointSpec, Limits, Lora, Model, Routing
from perilune_gateway.model import NeedBody, Refusal, RefuseReason, RequestHead, Routed
from perilune_gateway.state.facts import Unreached


def test_only_endpoints_of_the_subset_hint_are_chosen(rig: Rig) -> None:
    h = RequestHead(method="POST", path="/v1/completions", headers={}, subset=frozenset({B}))
    assert rig.route(h=h).destinations == (B,)


@pytest.mark.parametrize("subset", [frozenset(), frozenset({"1.1.1.1:1"})])
def test_a_subset_without_an_endpoint_of_ours_is_refused(rig: Rig, subset: frozenset[str]) -> None:
    refusal = rig.ask(h=RequestHead(method="POST", path="/v1/completions", headers={}, subset=subset))
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.status) == (RefuseReason.SUBSET_EMPTY, 503)


def test_a_draining_endpoint_keeps_its_sessions_and_takes_no_other() -> None:
    routing = Routing(policy=chosen("ear"))
    rig = Rig(pool(routing=routing))
    h = head("/v1/completions", x_session_id="s")
    host = rig.route(h=h).destinations[0]
    drained = [EndpointSpec(address=a, draining=a == host) for a in (A, B)]
    rig.router.configure(pool(routing=routing, endpoints=drained))
    assert rig.route(h=h).destinations[0] == host
    assert rig.route(range(100, 120)).destinations[0] != host


def test_no_endpoint_at_all() -> None:
    refusal = Rig(pool(endpoints=[])).ask()
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.status) == (RefuseReason.NO_ENDPOINT, 503)
    assert refusal.retry_after_s > 0


ON_DEMAND = Routing(limits=Limits(start_seconds=60.0))


@pytest.mark.parametrize(
    "listed",
    [
        pytest.param([], id="no endpoint"),
        pytest.param([EndpointSpec(address=A, ready=False)], id="one that starts"),
        pytest.param([EndpointSpec(address=A, draining=True)], id="one that leaves"),
    ],
)
def test_the_first_requests_of_a_pool_that_starts_on_demand_are_told_when_to_come_back(
    listed: list[EndpointSpec],
) -> None:
    rig = Rig(pool(endpoints=listed, routing=ON_DEMAND))
    told = []
    for _ in range(3):
        refusal = rig.ask()
        assert isinstance(refusal, Refusal)
        assert (refusal.reason, refusal.status) == (RefuseReason.STARTING, 429)
        told.append(refusal.retry_after_s)
        rig.now += 20.0
    assert told == [60.0, 40.0, 20.0]
    rig.router.configure(pool(endpoints=[A], routing=ON_DEMAND))
    assert rig.route().destinations == (A,)
    rig.router.configure(pool(endpoints=[], routing=ON_DEMAND))
    again = rig.ask()
    assert isinstance(again, Refusal)
    assert again.retry_after_s == 60.0


def test_the_next_start_begins_anew_although_no_request_came_between() -> None:
    rig = Rig(pool(endpoints=[], routing=ON_DEMAND))
    assert isinstance(rig.ask(), Refusal)
    rig.router.configure(pool(endpoints=[A], routing=ON_DEMAND))
    rig.now += 3_600.0
    rig.router.configure(pool(endpoints=[], routing=ON_DEMAND))
    again = rig.ask()
    assert isinstance(again, Refusal)
    assert again.retry_after_s == 60.0


def test_only_prompts_start_an_endpoint() -> None:
    rig = Rig(pool(endpoints=[], routing=ON_DEMAND))
    refusal = rig.router.on_headers(head("/v1/models", has_body=False))
    assert isinstance(refusal, Refusal)
    assert refusal.reason is RefuseReason.NO_ENDPOINT
    elsewhere = RequestHead(
        method="POST", path="/v1/completions", headers={}, subset=frozenset({"1.1.1.1:1"})
    )
    refusal = rig.ask(h=elsewhere)
    assert isinstance(refusal, Refusal)
    assert refusal.reason is RefuseReason.SUBSET_EMPTY


@pytest.mark.parametrize(
    ("body", "reason", "status"),
    [
        pytest.param(b"{", RefuseReason.BAD_JSON, 400, id="no JSON"),
        pytest.param(
            b'{"model": "other", "prompt": "x"}', RefuseReason.UNKNOWN_MODEL, 404, id="unknown model"
        ),
        pytest.param(completion(range(200)), RefuseReason.TOO_LONG, 400, id="longer than the context"),
        pytest.param(
            completion([[1], list(range(200))]), RefuseReason.TOO_LONG, 400, id="one of several is longer"
        ),
        pytest.param(b"x" * 5_000, RefuseReason.BODY_TOO_LARGE, 413, id="too many bytes"),
    ],
)
def test_a_body_that_cannot_be_served_is_refused_with_its_reason(
    body: bytes, reason: RefuseReason, status: int
) -> None:
    rig = Rig(
        pool(
            model=Model(name="m", context_tokens=200, tokenize="estimate"),
            routing=Routing(limits=Limits(max_body_bytes=4_000)),
        )
    )
    refusal = rig.router.on_body(head("/v1/completions"), body)
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.status) == (reason, status)
    assert len(rig.state.requests) == 0
    kept = rig.decisions.query(n=1)[0]
    assert kept.reason == reason
    assert "total" in kept.timings_us


def test_a_body_that_says_it_is_too_large_is_refused_unseen() -> None:
    rig = Rig(pool(routing=Routing(limits=Limits(max_body_bytes=4_000))))
    refusal = rig.router.on_headers(head("/v1/completions", content_length="4001"))
    assert isinstance(refusal, Refusal)
    assert refusal.reason is RefuseReason.BODY_TOO_LARGE


def test_a_list_of_prompts_is_as_long_as_its_longest() -> None:
    rig = Rig(pool(model=Model(name="m", context_tokens=2_100, tokenize="estimate")))
    prompts = [list(range(i, i + 2_000)) for i in range(100)]
    assert isinstance(rig.router.on_body(head("/v1/completions"), completion(prompts)), Routed)


def test_overload_is_429_with_the_time_until_the_shortest_queue_fits() -> None:
    rig = Rig(pool(routing=Routing(limits=Limits(max_pending_seconds=2.0))))
    rig.queue(A, 5.0)
    rig.queue(B, 6.0)
    refusal = rig.ask()
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.retry_after_s) == (429, pytest.approx(3.0))


def test_a_client_learns_no_addresses_from_a_refusal(rig: Rig) -> None:
    for address in (A, B):
        rig.state.facts.tell(Unreached(address, rig.now))
    refusal = rig.ask()
    assert isinstance(refusal, Refusal)
    assert "not_ready: 2" in refusal.message
    assert A not in refusal.message


@pytest.mark.parametrize("path", ["/v1/chat/completions/batch", "/v1/audio/speech", "/inference/v1/generate"])
@pytest.mark.parametrize("method", ["POST", "GET"])
def test_a_path_that_is_not_supported_is_refused_by_its_name(path: str, method: str) -> None:
    rig = Rig(pool())
    refusal = rig.router.on_headers(head(path, method=method))
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.reason) == (404, RefuseReason.NOT_FOUND)
    assert refusal.message.startswith(f"{path} is not supported. Supported are /v1/chat/completions, ")
    assert len(rig.decisions) == 1


def test_a_web_socket_is_refused_at_once_and_nobodys_fault() -> None:
    rig = Rig(pool())
    asked = head("/v1/responses", method="GET", has_body=False, connection="upgrade", upgrade="WebSocket")
    refusal = rig.router.on_headers(asked)
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.reason) == (426, RefuseReason.UPGRADE)


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("model", [b"", b'"model":null,', b'"model":"",'])
def test_a_pool_of_one_model_serves_requests_that_name_none(bom: bytes, model: bytes) -> None:
    rig = Rig(pool(model=Model(name="m", aliases=("chat",), tokenize="estimate")))
    routed = rig.router.on_body(head("/v1/completions"), bom + b'{%b"prompt":"hi"}' % model)
    assert isinstance(routed, Routed)
    view = rig.record(routed).view
    assert view.model == "m"


def test_a_pool_with_adapters_asks_which_model_is_meant() -> None:
    rig = Rig(pool(model=Model(name="m", loras=(Lora("tuned", "/a"),), tokenize="estimate")))
    refusal = rig.router.on_body(head("/v1/completions"), b'{"prompt":"hi"}')
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.reason) == (400, RefuseReason.NO_MODEL)
    assert "m, tuned" in refusal.message


@pytest.mark.parametrize(
    ("path", "body", "tokens"),
    [
        ("/v1/embeddings", {"input": "x" * 4_000}, 1_000),
        ("/v1/embeddings", {"input": ["x" * 2_000, "y" * 2_000]}, 1_000),
        ("/v1/embeddings", {"input": [1] * 1_000}, 1_000),
        ("/v1/embeddings", {"input": [[1] * 400, [2] * 600]}, 1_000),
        ("/v1/rerank", {"query": "q", "documents": ["x" * 4_000]}, 1_000),
        ("/v2/rerank", {"query": "q", "documents": [{"text": "x" * 4_000}]}, 1_000),
        ("/v1/score", {"text_1": "x" * 2_000, "text_2": ["y" * 2_000]}, 1_000),
        ("/score", {"queries": "x" * 2_000, "documents": "y" * 2_000}, 1_000),
        ("/classify", {"input": "x" * 4_000}, 1_000),
        ("/pooling", {"messages": [{"role": "user", "content": "x" * 4_000}]}, 1_000),
    ],
)
def test_what_generates_nothing_is_counted_by_its_tokens_and_has_no_session(
    path: str, body: dict[str, object], tokens: int
) -> None:
    rig = Rig(pool())
    asked = head(path, x_session_id="s", content_length="9")
    loads = []
    for _ in range(2):
        assert isinstance(rig.router.on_headers(asked), NeedBody)
        routed = rig.router.on_body(asked, json.dumps({"model": "m", "user": "u", **body}).encode())
        assert isinstance(routed, Routed)
        assert rig.record(routed).session_id == ""
        loads.append(routed.destinations[0])
    assert set(loads) == {A, B}, "balanced by load"
    assert all(tokens * 0.95 < pending < tokens * 1.1 for pending in rig.pending().values())
    assert rig.state.sessions.bound == {}


def test_transfer_parameters_do_not_pass_where_nothing_is_generated() -> None:
    body = b'{"model":"m","input":"x","kv_transfer_params":{"do_remote_prefill":true}}'
    refusal = Rig(pool()).router.on_body(head("/v1/embeddings"), body)
    assert isinstance(refusal, Refusal)
    assert refusal.status == 400


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses/input_tokens", "/v1/embeddings"])
def test_a_compressed_body_is_read_also_of_a_known_session(path: str) -> None:
    rig = Rig(pool())
    rig.finish(rig.route(h=head("/v1/completions", x_session_id="s")))
    asked = head(path, x_session_id="s", content_length="900", content_encoding="gzip")
    assert isinstance(rig.router.on_headers(asked), NeedBody)
    assert isinstance(rig.router.on_body(asked, b'{"model":"m","prompt":"hi","input":"hi"}'), Routed)
