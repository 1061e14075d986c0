"""What a request's span says, and what it keeps to itself."""

import pytest
from document_tables import page, rows, section
from msgspec.structs import replace
from router_rig import A, Rig, pool
from routing_objects import candidate, head, request, session

from perilune_api.pool import EndpointSpec, Routing
from perilune_gateway.model import (
    Decision,
    DecisionRecord,
    Ending,
    Outcome,
    Reason,
    Refusal,
    RefuseReason,
    Routed,
    Step,
    TokenSource,
)
from perilune_gateway.model.tracing import SAMPLED, Trace
from perilune_gateway.observe.spans import Span, span_of

TRACE = Trace(trace_id=1, span_id=2, parent_id=3, flags=SAMPLED, started_at=99.5, operation="chat")
DECISION = Decision("b", Reason.MOVED, moved_from="a", prefill="c")
RECORD = DecisionRecord(
    view=replace(request(tokens=100, of=session("a", id="secret-session")), model="m"),
    verdict=DECISION,
    policy="ear",
    candidates=(candidate("a"), candidate("b")),
    cached_tokens=64,
    timings_us=dict.fromkeys(Step, 10.0),
    time=100.0,
    tenant="secret-tenant",
    queued_s=0.25,
    trace=TRACE,
)
ENDING = Ending(
    outcome=Outcome.COMPLETED,
    duration_s=2.0,
    served="10.0.0.2:8000",
    status=200,
    cached_tokens=80,
    output_tokens=7,
    answered_s=0.1,
    prefilled_s=0.05,
)
REFUSAL = Refusal(RefuseReason.NO_ENDPOINT, "no endpoint for secret-session")


def test_a_span_says_what_was_decided_why_and_when() -> None:
    span = span_of(RECORD, ENDING)
    assert (span.trace, span.ended_at, span.failed) == (TRACE, 102.0, False)
    assert span.events == (("decided", 100.0), ("prefilled", 100.05), ("answered", 100.1))
    said = span.attributes
    assert said["perilune.policy"] == "ear"
    assert said["perilune.reason"] == "moved"
    assert (said["perilune.endpoint"], said["perilune.moved_from"]) == ("b", "a")
    assert said["perilune.prefill_endpoint"] == "c"
    assert said["perilune.queued_seconds"] == 0.25
    assert said["perilune.step.policy_seconds"] == pytest.approx(1e-5)
    assert said["perilune.cached_tokens.predicted"] == 64
    assert (said["perilune.outcome"], said["http.response.status_code"]) == ("completed", 200)


def test_it_is_named_and_counted_as_opentelemetry_does() -> None:
    span = span_of(RECORD, ENDING)
    assert span.name == "chat m"
    theirs = ("gen_ai", "error", "server")
    said = {name: value for name, value in span.attributes.items() if name.startswith(theirs)}
    assert said == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.cache_read.input_tokens": 80,
        "gen_ai.usage.output_tokens": 7,
        "server.address": "10.0.0.2",
        "server.port": 8000,
    }
    estimated = replace(RECORD, view=replace(RECORD.view, token_source=TokenSource.ESTIMATE))
    assert "gen_ai.usage.input_tokens" not in span_of(estimated, ENDING).attributes


@pytest.mark.parametrize(
    ("outcome", "status", "said"),
    [(Outcome.COMPLETED, 400, "400"), (Outcome.FAILED, 503, "503"), (Outcome.FAILED, 0, "failed")],
)
def test_an_answer_that_is_an_error_says_which(outcome: Outcome, status: int, said: str) -> None:
    span = span_of(RECORD, Ending(outcome=outcome, duration_s=2.0, served="b", status=status))
    assert (span.attributes["error.type"], span.failed) == (said, True)


def test_a_span_is_silent_of_sessions_and_tenants() -> None:
    for span in (
        span_of(RECORD, ENDING),
        span_of(replace(RECORD, verdict=REFUSAL), None),
    ):
        assert "secret" not in repr(span)


@pytest.mark.parametrize("reason", [RefuseReason.OVERLOADED, RefuseReason.NO_ENDPOINT])
def test_a_refusal_ends_its_span_as_an_error_with_its_reason(reason: RefuseReason) -> None:
    refusal = Refusal(reason, "message")
    span = span_of(replace(RECORD, verdict=refusal), None)
    assert (span.ended_at, span.failed, span.attributes["error.type"]) == (100.0, True, reason)
    assert span.attributes["perilune.refusal"] == reason
    assert span.attributes["http.response.status_code"] == refusal.status
    assert not {"perilune.endpoint", "server.address", "server.port"} & set(span.attributes)


@pytest.mark.parametrize(
    ("endpoint", "server", "port"),
    [
        pytest.param("10.0.0.9:8001#3", "10.0.0.9", 8001, id="a rank of a server"),
        pytest.param("[fd00::9]:8000", "fd00::9", 8000, id="an address of IPv6"),
    ],
)
def test_the_server_is_the_endpoint_that_answered(endpoint: str, server: str, port: int) -> None:
    said = span_of(RECORD, replace(ENDING, served=endpoint)).attributes
    assert (said["server.address"], said["server.port"]) == (server, port)


def test_an_engine_that_fails_is_an_error() -> None:
    assert span_of(RECORD, Ending(outcome=Outcome.FAILED, duration_s=2.0, served="b", status=503)).failed
    assert not span_of(RECORD, Ending(outcome=Outcome.CANCELLED, duration_s=2.0)).failed


def test_every_attribute_is_documented() -> None:
    table = rows(section(page("observability.md"), "## Traces"), "attribute")
    documented = {row[0] for row in table}
    spans = span_of(RECORD, ENDING), span_of(replace(RECORD, verdict=REFUSAL), None)
    said = {name for span in spans for name in span.attributes}
    documented = {name for cell in documented for name in cell.split("`, `")}
    said = {"perilune.step.STEP_seconds" if ".step." in name else name for name in said}
    assert documented == said


class TestARoutersRequests:
    """Records of a real router."""

    @pytest.fixture
    def spans(self) -> list[Span]:
        return []

    @pytest.fixture
    def rig(self, spans: list[Span]) -> Rig:
        return Rig(pool(), send_span=spans.append)

    def test_a_request_has_one_span_at_its_end(self, rig: Rig, spans: list[Span]) -> None:
        asked = head("/v1/completions", x_session_id="s")
        asked.trace = TRACE
        routed = rig.route(h=asked)
        assert spans == []
        rig.now += 0.5
        rig.stored(routed.destinations[0], range(20))
        rig.now += 0.5
        rig.router.on_response(routed.ticket, 200, routed.destinations[0], True)
        rig.now += 1.0
        rig.finish(routed)
        (span,) = spans
        assert span.trace is TRACE
        assert span.attributes["perilune.endpoint"] == routed.destinations[0]
        (_, decided), *rest = span.events
        assert [(name, at - decided) for name, at in rest] == [
            ("prefilled", pytest.approx(0.5)),
            ("answered", pytest.approx(1.0)),
        ]
        assert span.ended_at - decided == pytest.approx(2.0)

    def test_a_page_and_a_refusal_have_spans_too(self, rig: Rig, spans: list[Span]) -> None:
        models = head("/v1/models", method="GET", has_body=False)
        models.trace = replace(TRACE, operation="")
        routed = rig.router.on_headers(models)
        assert isinstance(routed, Routed)
        rig.finish(routed)
        wrong = head("/v1/completions")
        wrong.trace = TRACE
        assert isinstance(rig.ask(h=wrong, model="unknown"), Refusal)
        assert [span.attributes.get("perilune.reason") for span in spans] == ["pass_through", None]
        assert spans[0].name == "page"
        assert [name for name in spans[0].attributes if name.startswith("gen_ai")] == []
        assert spans[1].attributes["perilune.refusal"] == "unknown_model"

    def test_only_sampled_requests_have_one(self, rig: Rig, spans: list[Span]) -> None:
        unsampled = head("/v1/completions")
        unsampled.trace = replace(TRACE, flags=0)
        rig.finish(rig.route(h=unsampled))
        rig.finish(rig.route())
        unsampled.trace = replace(TRACE, flags=0)
        assert isinstance(rig.ask(h=unsampled, model="unknown"), Refusal)
        assert spans == []


def test_without_kv_events_the_prefills_end_is_not_known() -> None:
    spans: list[Span] = []
    rig = Rig(pool(endpoints=[EndpointSpec(address=A)], routing=Routing()), send_span=spans.append)
    asked = head("/v1/completions")
    asked.trace = TRACE
    rig.finish(rig.route(h=asked))
    assert [name for name, _ in spans[0].events] == ["decided"]
