"""Which pool of several gets a request; tests/integration/test_models_on_one_url.py asks through Envoy."""

import json
from dataclasses import dataclass, field

import pytest
from msgspec import structs
from router_rig import A, B, Rig, completion, pool
from routing_objects import head

from perilune_api import names
from perilune_api.pool import Limits, Lora, Metadata, Model, Pool, Routing, SessionKeys
from perilune_gateway.model import Answer, NeedBody, Outcome, Refusal, RefuseReason, RequestHead, Routed
from perilune_gateway.routing.pools import Chosen, Pools, by_weight

SALTED = Routing(session=SessionKeys(tenant_header="x-team"))


def named(name: str, address: str, model: Model, routing: Routing = Routing()) -> Pool:  # noqa: B008
    document = pool(endpoints=[address], model=model, routing=routing)
    return structs.replace(document, metadata=Metadata(name))


@dataclass
class Front:
    """A client's view of several pools."""

    rigs: list[Rig]
    refused: list[Refusal] = field(default_factory=list)

    def __post_init__(self) -> None:
        routers = [rig.router for rig in self.rigs]
        self.pools = Pools(routers, self.refused.append, stopwatch=lambda: 0.0)

    def ask(
        self, model: str, h: RequestHead | None = None, tokens: int = 40
    ) -> tuple[str, Routed | Refusal, bool]:
        """Ask, and return (the pool, its answer, whether the body was read)."""
        h = h or head("/v1/completions")
        chosen: object = self.pools.on_headers(h)
        read = isinstance(chosen, NeedBody)
        if read:
            chosen = self.pools.on_body(h, completion(range(tokens), model=model))
        if isinstance(chosen, Refusal):
            return "", chosen, read
        assert isinstance(chosen, Chosen)
        assert isinstance(chosen.verdict, Routed | Refusal)
        if isinstance(chosen.verdict, Routed):
            chosen.router.finished(chosen.verdict.ticket, Outcome.COMPLETED)
        return chosen.router.pool.metadata.name, chosen.verdict, read


def session(name: str, **headers: str) -> RequestHead:
    return head("/v1/completions", x_session_id=name, content_length="200", **headers)


@pytest.fixture
def front() -> Front:
    lora = Lora("tuned", "/adapters/tuned")
    one = Rig(named("one", A, Model(name="m", aliases=("chat",), loras=(lora,), tokenize="estimate")))
    two = Rig(named("two", B, Model(name="n", aliases=("chat",), tokenize="estimate", context_tokens=8_000)))
    return Front([one, two])


class TestAListOfOne:
    def test_gets_every_request(self) -> None:
        front = Front([Rig(named("one", A, Model(name="m", tokenize="estimate")))])
        listed = front.pools.on_headers(
            RequestHead(method="GET", path="/v1/models", headers={}, has_body=False)
        )
        assert isinstance(listed, Chosen)
        assert isinstance(listed.verdict, Routed)
        pool, verdict, read = front.ask("other")
        assert (pool, read) == ("one", True)
        assert isinstance(verdict, Refusal)
        assert "This pool" in verdict.message

    def test_records_all_refusals(self) -> None:
        front = Front([Rig(named("one", A, Model(name="m", tokenize="estimate")))])
        front.pools.refused(head("/v1/completions"), Refusal(RefuseReason.BAD_JSON, "no JSON"))
        (record,) = front.rigs[0].decisions.query("", 9)
        assert record.verdict == Refusal(RefuseReason.BAD_JSON, "no JSON")
        assert front.refused == []

    def test_is_one_of_several_while_others_are_awaited(self) -> None:
        rig = Rig(named("one", A, Model(name="m", tokenize="estimate")))
        pools = Pools([rig.router], lambda refusal: None, stopwatch=lambda: 0.0, more=True)
        listed = pools.on_headers(RequestHead(method="GET", path="/v1/models", headers={}, has_body=False))
        assert isinstance(listed, Answer)


@pytest.mark.parametrize(("model", "found"), [("m", "one"), ("tuned", "one"), ("n", "two")])
def test_the_model_or_its_adapter_chooses(front: Front, model: str, found: str) -> None:
    assert front.ask(model)[0] == found


def test_a_session_is_decided_by_its_headers_until_it_has_two_pools(front: Front) -> None:
    s = session("s")
    assert [front.ask("n", s)[::2] for _ in range(2)] == [("two", True), ("two", False)]
    read = head("/v1/completions", x_session_id="s", content_length="10")  # shorter than before
    assert front.ask("m", read)[::2] == ("one", True)
    assert [front.ask(model, s)[::2] for model in ("n", "m")] == [("two", True), ("one", True)]


def test_the_time_to_the_first_token_runs_from_the_headers(front: Front) -> None:
    h, rig = head("/v1/completions"), front.rigs[0]
    assert isinstance(front.pools.on_headers(h), NeedBody)
    rig.now += 3.0
    chosen = front.pools.on_body(h, completion(range(40), model="m"))
    assert isinstance(chosen, Chosen)
    rig.stored(A, range(40))
    assert rig.metrics.registry.get_sample_value(f"{names.FIRST_TOKENS}_sum") == 3.0


def test_after_a_404_of_the_engine_the_body_is_read(front: Front) -> None:
    s = session("s")
    front.ask("n", s)
    chosen = front.pools.on_headers(s)
    assert isinstance(chosen, Chosen)
    assert isinstance(chosen.verdict, Routed)
    chosen.router.on_response(chosen.verdict.ticket, 404, "", streamed=False)
    chosen.router.finished(chosen.verdict.ticket, Outcome.COMPLETED)
    assert isinstance(front.pools.on_headers(s), NeedBody)
    assert front.ask("m", s)[0] == "one"


def test_a_pool_may_have_every_body_of_its_sessions_read() -> None:
    mixed = Routing(session=SessionKeys(several_models=True))
    other = Rig(named("two", B, Model(name="n", tokenize="estimate")))
    front = Front([Rig(named("one", A, Model(name="m", tokenize="estimate"), mixed)), other])
    s = session("s")
    assert [front.ask("m", s)[2] for _ in range(3)] == [True, True, True]


def test_each_pool_finds_tenants_in_its_own_header() -> None:
    own = Rig(named("one", A, Model(name="m", tokenize="estimate"), SALTED))
    other = Rig(named("two", B, Model(name="n", tokenize="estimate")))
    front = Front([own, other])
    front.ask("n", session("s", x_team="red"))
    _, routed, _ = front.ask("m", head("/v1/completions", x_session_id="s", content_length="9", x_team="red"))
    assert isinstance(routed, Routed)
    assert own.record(routed).tenant == "red"


def test_an_unknown_model_is_of_no_pool(front: Front) -> None:
    _, refusal, _ = front.ask("o")
    assert isinstance(refusal, Refusal)
    assert refusal.reason is RefuseReason.UNKNOWN_MODEL
    assert refusal.message.endswith("This gateway serves: chat, m, n, tuned")
    assert front.refused == [refusal]
    assert all(len(rig.decisions) == 0 for rig in front.rigs)


def test_a_body_that_cannot_be_read_is_refused_once(front: Front) -> None:
    h = head("/v1/completions")
    assert isinstance(front.pools.on_headers(h), NeedBody)
    assert isinstance(front.pools.on_body(h, b"{"), Refusal)
    assert [refusal.reason for refusal in front.refused] == [RefuseReason.BAD_JSON]


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        pytest.param(b'[{"role":"\xff"}]', "not valid UTF-8", id="no UTF-8"),
        pytest.param(b'[{"role":7},{"role":"\xff"}]', "not valid UTF-8", id="after another message"),
    ],
)
def test_nor_is_one_that_cannot_be_read_where_weights_choose(front: Front, messages: bytes, why: str) -> None:
    asked = head("/v1/chat/completions")
    refusal = front.pools.on_body(asked, b'{"model":"chat","messages":%b}' % messages)
    assert isinstance(refusal, Refusal)
    assert (refusal.reason, refusal.status) == (RefuseReason.BAD_JSON, 400)
    assert why in refusal.message
    assert front.refused == [refusal]


def test_a_conversation_is_chosen_for_at_any_depth_that_can_be_read(front: Front) -> None:
    for depth in range(900, 1_000):
        content = b"[" * depth + b"]" * depth
        body = b'{"model":"chat","messages":[{"role":"system","content":%b}]}' % content
        chosen = front.pools.on_body(head("/v1/chat/completions"), body)
        if isinstance(chosen, Refusal):
            assert (chosen.reason, chosen.status) == (RefuseReason.BAD_JSON, 400)


def test_the_list_names_models_aliases_and_adapters(front: Front) -> None:
    answer = front.pools.on_headers(
        RequestHead(method="GET", path="/v1/models?x=1", headers={}, has_body=False)
    )
    assert isinstance(answer, Answer)
    data = json.loads(answer.body)["data"]
    assert [entry["id"] for entry in data] == ["m", "chat", "tuned", "n"]
    assert {e["id"]: (e["parent"], e.get("max_model_len")) for e in data} == {
        "m": (None, None),
        "chat": (None, 8_000),
        "tuned": ("m", None),
        "n": (None, 8_000),
    }


def test_other_requests_without_a_body_go_to_some_pool(front: Front) -> None:
    chosen = front.pools.on_headers(RequestHead(method="GET", path="/version", headers={}, has_body=False))
    assert isinstance(chosen, Chosen)
    assert isinstance(chosen.verdict, Routed)


def test_a_session_stays_where_it_is_when_weights_change(front: Front) -> None:
    first = {name: front.ask("chat", session(name))[0] for name in map(str, range(40))}
    assert set(first.values()) == {"one", "two"}
    routing = Routing(weight=0)
    front.rigs[0].router.configure(
        named("one", A, Model(name="m", aliases=("chat",), tokenize="estimate"), routing)
    )
    for name, found in first.items():
        h = head("/v1/completions", x_session_id=name, content_length="9")  # so that its body is read
        assert front.ask("chat", h)[0] == found
    assert {front.ask("chat", session(f"new {n}"))[0] for n in range(40)} == {"two"}


def test_a_sub_agent_goes_to_the_pool_of_its_parent(front: Front) -> None:
    for number in range(10):
        parent = front.ask("chat", session(f"{number}"))[0]
        for child in "abc":
            h = session(f"{number}/{child}", x_parent_session_id=f"{number}")
            assert front.ask("chat", h)[0] == parent


NAMES = [str(number).encode() for number in range(4_000)]


@pytest.mark.parametrize("canary", [0, 5, 50])
def test_new_sessions_are_shared_out_by_weight(canary: int) -> None:
    chosen = [by_weight({"stable": 100 - canary, "canary": canary}, name) for name in NAMES]
    assert chosen.count("canary") / len(NAMES) == pytest.approx(canary / 100, abs=0.02)


def test_a_higher_weight_takes_sessions_and_gives_none_away() -> None:
    before = {name for name in NAMES if by_weight({"a": 90, "b": 10}, name) == "b"}
    after = {name for name in NAMES if by_weight({"a": 80, "b": 20}, name) == "b"}
    assert before < after


def test_without_any_weight_all_pools_have_the_same() -> None:
    assert {by_weight({"a": 0, "b": 0}, name) for name in NAMES[:50]} == {"a", "b"}


@pytest.mark.parametrize("path", ["/v1/responses/input_tokens", "/v1/responses/compact", "/v1/embeddings"])
def test_the_body_names_the_pool_on_every_path(front: Front, path: str) -> None:
    h = head(path)
    assert isinstance(front.pools.on_headers(h), NeedBody)
    chosen = front.pools.on_body(h, b'{"model":"n","input":"count me"}')
    assert isinstance(chosen, Chosen)
    assert chosen.router.pool.metadata.name == "two"
    assert isinstance(chosen.verdict, Routed)


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_of_several_models_one_has_to_be_named(front: Front, path: str) -> None:
    h = head(path)
    assert isinstance(front.pools.on_headers(h), NeedBody)
    refusal = front.pools.on_body(h, b'{"prompt":"x"}')
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.reason) == (400, RefuseReason.NO_MODEL)
    assert "chat, m, n, tuned" in refusal.message


def test_one_pool_needs_no_name() -> None:
    front = Front([Rig(named("one", A, Model(name="m", tokenize="estimate")))])
    h = head("/v1/completions")
    assert isinstance(front.pools.on_headers(h), NeedBody)
    chosen = front.pools.on_body(h, b'{"prompt":"x"}')
    assert isinstance(chosen, Chosen)
    assert isinstance(chosen.verdict, Routed)


def test_no_pool_serves_other_paths(front: Front) -> None:
    refusal = front.pools.on_headers(head("/v1/chat/completions/batch"))
    assert isinstance(refusal, Refusal)
    assert refusal.status == 404
    assert front.refused == [refusal]


def test_a_pools_own_limit_of_bodies_holds(front: Front) -> None:
    routing = Routing(limits=Limits(max_body_bytes=100))
    front.rigs[0].router.configure(named("one", A, Model(name="m", tokenize="estimate"), routing))
    _, refusal, _ = front.ask("m", tokens=200)
    assert isinstance(refusal, Refusal)
    assert refusal.status == 413
    assert isinstance(front.ask("n", tokens=200)[1], Routed)


def test_a_response_that_a_client_named_is_in_the_pool_of_its_session(front: Front) -> None:
    front.ask("n", session("s"))
    page = head("/v1/responses/resp_mine", method="GET", has_body=False, x_session_id="s")
    chosen = front.pools.on_headers(page)
    assert isinstance(chosen, Chosen)
    assert isinstance(chosen.verdict, Routed)
    assert chosen.verdict.destinations == (B,)
    of_nobody = [
        head("/v1/responses/resp_mine", method="GET", has_body=False),
        head("/v1/responses/resp_mine/cancel", content_encoding="gzip"),
    ]
    for h in of_nobody:
        nobody = front.pools.on_headers(h)
        assert isinstance(nobody, Chosen)
        assert isinstance(nobody.verdict, Refusal)
