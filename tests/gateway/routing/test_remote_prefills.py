"""Prompts that another endpoint prefills, over the router's real state: loads, and what is said of them."""

import json

import prompts_that_split
import pytest
from handing_rig import BLOCK, PAGES, text
from prometheus_client import generate_latest
from router_rig import A, B, C
from routing_objects import head

from perilune_gateway.model import NEED_BODY, Decision, Outcome, Reason, Routed, Unsplit
from perilune_gateway.model.handoff import GivenUp, HandoffOutcome
from perilune_gateway.observe import moves as move_rows
from perilune_gateway.observe.explain import to_json
from perilune_gateway.observe.stats import Snapshot
from perilune_gateway.request import block_hashes
from perilune_gateway.state.connectors import Connector

PROMPT = text(1, 3_200)


class Split(prompts_that_split.Split):
    """What is said of it."""

    def answered(self, routed: Routed) -> None:
        self.router.on_response(routed.ticket, 200, routed.destinations[0], True)
        self.finish(routed)

    def believed(self, ids: list[int]) -> set[str]:
        """Return the endpoints that are believed to cache the prompt's first block."""
        return set(self.state.index.find_matches(block_hashes.chain(ids, BLOCK, 0), self.now).device)

    def page(self) -> dict:
        router = self.router
        return move_rows.page(
            router.moves.planner,
            router.moves.handing_over.stats(),
            router.moves.remote_prefills.stats(),
            router.moves.pulling.stats(),
            self.state.calibration,
            self.now,
        )

    def metrics_text(self) -> str:
        router = self.router
        self.metrics.mirror(
            lambda: Snapshot(
                handoffs=router.moves.handing_over.stats(),
                remote_prefills=router.moves.remote_prefills.stats(),
                pulls=router.moves.pulling.stats(),
            )
        )
        return generate_latest(self.metrics.registry).decode()


def test_the_prefill_is_load_where_it_runs_and_its_end_is_the_copy() -> None:
    rig = Split()
    routed = rig.send("s", PROMPT)
    target = routed.destinations[0]
    assert routed.remote is not None
    assert target in (B, C)
    assert (routed.remote.source, routed.remote.target, routed.remote.bootstrap) == (A, target, PAGES[A])
    assert rig.pending() == {A: len(PROMPT), B: 0, C: 0}
    assert A not in routed.destinations
    rig.announce(A, PROMPT)
    assert rig.pending() == {A: 0, B: 0, C: 0}
    rig.router.moves.remote_prefills.given(routed.ticket, routed.remote)
    rig.announce(target, PROMPT)
    rig.answered(routed)
    assert {a: rig.load(a).in_flight for a in (A, B, C)} == {A: 0, B: 0, C: 0}
    (ended,) = rig.page()["prefills"]["ended"]
    assert (ended["outcome"], ended["source"], ended["target"], ended["session_id"]) == (
        *(HandoffOutcome.COPIED, A, target),
        "s",
    )
    lines = rig.metrics_text()
    assert 'perilune_prefills_total{where="remote"} 1.0' in lines
    assert 'perilune_handoffs_total{outcome="copied",reason="prefill"} 1.0' in lines
    record = rig.record(routed)
    assert (record.verdict.reason, record.prefill) == (Reason.SPLIT, A)
    page = to_json(record)
    assert f"it decodes what {A} prefills" in page["sentence"]
    assert page["estimated_s"] == record.verdict.estimated_ttft_s


def test_the_next_turn_stays_and_its_short_rest_is_prefilled_there() -> None:
    rig = Split()
    routed = rig.send("s", PROMPT)
    target = routed.destinations[0]
    rig.announce(target, PROMPT)
    rig.answered(routed)
    again = rig.send("s", [*PROMPT, *text(2, 320)])
    assert (again.destinations[0], again.remote) == (target, None)
    assert 'perilune_prefills_total{where="short"} 1.0' in rig.metrics_text()


def test_an_answer_that_ends_before_its_leg_has_the_kv() -> None:
    """The leg's end may be read later than the answer that the KV was for."""
    rig = Split()
    routed = rig.send("s", PROMPT)
    rig.announce(A, PROMPT)
    rig.announce(routed.destinations[0], PROMPT)
    rig.answered(routed)
    (ended,) = rig.page()["prefills"]["ended"]
    assert (ended["outcome"], ended["cause"]) == (HandoffOutcome.COPIED, None)
    assert rig.load(A).in_flight == 0


def test_what_is_not_accepted_becomes_load_of_the_target() -> None:
    rig = Split()
    routed = rig.send("s", PROMPT)
    assert routed.remote
    rig.router.moves.remote_prefills.failed(routed.ticket, routed.remote, GivenUp.NOT_ACCEPTED)
    rig.router.prefills_itself(routed.ticket)
    target = routed.destinations[0]
    assert rig.pending() == {A: 0, B: 0, C: 0} | {target: len(PROMPT)}
    assert rig.believed(PROMPT) == {target}, "the source computes nothing of it"
    rig.announce(target, PROMPT)
    assert rig.pending() == {A: 0, B: 0, C: 0}
    rig.answered(routed)
    (ended,) = rig.page()["prefills"]["ended"]
    assert (ended["outcome"], ended["cause"]) == (HandoffOutcome.EXPIRED, GivenUp.NOT_ACCEPTED)


def test_a_prompt_that_was_computed_counts_as_cached_though_its_request_goes_elsewhere() -> None:
    rig = Split()
    routed = rig.send("s", PROMPT)
    assert routed.remote
    rig.router.moves.remote_prefills.given(routed.ticket, routed.remote)
    other = B if routed.destinations[0] == C else C
    rig.router.on_response(routed.ticket, 200, other, True)
    assert rig.believed(PROMPT) == {A, other}


def test_the_queue_of_a_tenant_is_its_own_wherever_its_prompts_are_prefilled() -> None:
    rig = Split()
    routed = rig.route(PROMPT, head("/v1/completions", x_session_id="s", authorization="ann"))
    assert routed.remote
    queue_s = rig.state.loads.share_of_queue_s
    tenant = rig.record(routed).tenant
    at_the_source = queue_s(tenant)
    assert at_the_source > 0.0
    rig.router.moves.remote_prefills.failed(routed.ticket, routed.remote, GivenUp.REFUSED)
    assert queue_s(tenant) == 0.0
    rig.router.prefills_itself(routed.ticket)
    assert queue_s(tenant) == pytest.approx(at_the_source)


@pytest.mark.parametrize("cause", [GivenUp.UNREACHABLE, GivenUp.REFUSED])
def test_a_prefill_endpoint_that_fails_costs_no_answer(cause: GivenUp) -> None:
    rig = Split()
    routed = rig.send("s", PROMPT)
    assert routed.remote
    rig.router.moves.remote_prefills.failed(routed.ticket, routed.remote, cause)
    rig.answered(routed)
    assert rig.router.moves.remote_prefills.stats().given_up == {cause: 1}
    another = rig.send("t", text(3, 3_200))
    assert (another.remote is None) == (cause is GivenUp.UNREACHABLE), (
        "one that is not reached is not asked again"
    )


def test_a_request_that_another_endpoint_serves_has_no_remote_any_more() -> None:
    rig = Split()
    cancelled = []
    routed = rig.send("s", PROMPT)
    assert routed.remote
    rig.router.moves.remote_prefills.giving(routed.ticket, routed.remote, lambda: cancelled.append("leg"))
    target = routed.destinations[0]
    other = B if target == C else C
    rig.router.on_response(routed.ticket, 200, other, True)
    assert rig.load(A).in_flight == 0
    assert rig.pending() == {A: 0, B: 0, C: 0} | {other: len(PROMPT)}, "it computes all of it"
    assert rig.believed(PROMPT) == {other}
    rig.announce(other, PROMPT)
    assert rig.pending() == {A: 0, B: 0, C: 0}
    rig.finish(routed)
    assert rig.router.moves.remote_prefills.stats().given_up == {GivenUp.ELSEWHERE: 1}
    assert cancelled == ["leg"]


def test_a_leg_that_begins_after_its_request_has_ended_is_cancelled_at_once() -> None:
    rig, cancelled = Split(), []
    routed = rig.send("s", PROMPT)
    assert routed.remote
    rig.finish(routed, Outcome.CANCELLED)
    rig.router.moves.remote_prefills.giving(routed.ticket, routed.remote, lambda: cancelled.append("leg"))
    assert cancelled == ["leg"]


def test_a_client_that_leaves_ends_the_prefill() -> None:
    rig = Split()
    routed = rig.send("s", PROMPT)
    rig.finish(routed, Outcome.CANCELLED)
    assert rig.router.moves.remote_prefills.stats().given_up == {GivenUp.LEFT: 1}
    assert rig.load(A).in_flight == 0


def test_connectors_that_are_silent_or_unlike_give_nothing() -> None:
    rig = Split()
    rig.state.connectors.forget(A)
    assert rig.send("s", PROMPT).remote is None
    rig.state.connectors.answered(A, Connector(["engine"], 2))
    assert rig.send("t", text(5, 3_200)).remote is None
    assert 'perilune_prefills_total{where="no_giver"} 2.0' in rig.metrics_text()


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"type": "text", "text": "x"}, None),
        ({"type": "image_url", "image_url": {"url": "http://a/b.png"}}, Unsplit.PICTURES),
        ({"type": "input_audio", "input_audio": {"data": "AA"}}, Unsplit.PICTURES),
        ({"type": "video_url", "video_url": {"url": "http://a/b.mp4"}}, Unsplit.PICTURES),
        ({"type": "image_embeds", "image_embeds": "AA"}, Unsplit.PICTURES),
    ],
)
def test_prompts_with_pictures_are_prefilled_where_they_are_decoded(
    part: dict[str, object], why: Unsplit | None
) -> None:
    rig = Split()
    content = [{"type": "text", "text": "word " * 8_000}, part]
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
    asked = head("/v1/chat/completions")
    assert rig.router.on_headers(asked) is NEED_BODY
    routed = rig.router.on_body(asked, body)
    assert isinstance(routed, Routed)
    decision = rig.record(routed).verdict
    assert isinstance(decision, Decision)
    assert (bool(routed.remote), decision.unsplit) == (why is None, why)
