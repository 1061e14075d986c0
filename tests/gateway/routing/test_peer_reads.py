"""KV that an endpoint reads from another one's host memory, over the router's real state."""

import json
from collections.abc import Sequence

import pytest
from handing_rig import BLOCK, text
from msgspec import structs
from prometheus_client import generate_latest
from router_rig import USUAL, A, B, C, Rig, pool
from routing_objects import chosen, head

from perilune_api.pool import EndpointSpec, Pool, Pull, Routing
from perilune_gateway.model import Outcome, Reason, Routed, Tier, Unpulled
from perilune_gateway.model.handoff import GivenUp, HandoffOutcome
from perilune_gateway.observe import moves as move_rows
from perilune_gateway.observe.explain import to_json
from perilune_gateway.observe.stats import Snapshot
from perilune_gateway.request import block_hashes

HELD = text(1, 6_400)
PROMPT = [*HELD, *text(2, 100)]
PEERS = {A: "10.0.0.1:5710", B: "10.0.0.2:5710", C: "10.0.0.3:5710"}


class Peers(Rig):
    """A has a prompt's first 6,400 tokens on its device and in host memory."""

    def __init__(self, *, enabled: bool = True, offloaded: bool = True) -> None:
        self.enabled = enabled
        super().__init__(self.pool())
        for address in PEERS:
            self.state.host_tiers.answered(address)
        self.holds(A, HELD, offloaded=offloaded)

    def pool(self, draining: str = "") -> Pool:
        listed = [
            EndpointSpec(address=a, events=(f"tcp://{a}",), draining=a == draining, peer=peer)
            for a, peer in PEERS.items()
        ]
        routing = Routing(policy=chosen("round_robin"), pull=Pull(enabled=self.enabled))
        return pool(endpoints=listed, routing=routing, engine=USUAL)

    def holds(self, address: str, ids: Sequence[int], *, offloaded: bool = True) -> None:
        self.stored(address, ids)
        if offloaded:
            chain = block_hashes.chain(list(ids), BLOCK, 0)
            self.state.index.stored(address, Tier.HOST, chain, self.now)

    def ask_of(self, target: str, ids: Sequence[int] = PROMPT, **body: object) -> Routed:
        asked = head("/v1/completions")
        asked.subset = frozenset({target})
        return self.route(ids, asked, **body)

    def another(self, seed: int) -> list[int]:
        """Another prompt of which A holds all but the end."""
        self.holds(A, held := text(seed, 6_400))
        return [*held, *text(seed + 100, 100)]

    def ends(self, routed: Routed, cached: int | None = None, outcome: Outcome = Outcome.COMPLETED) -> None:
        self.router.on_response(routed.ticket, 200, "", False)
        if cached is not None:
            self.router.on_usage(routed.ticket, cached)
        self.finish(routed, outcome)

    def why(self, routed: Routed) -> Unpulled | None:
        return self.record(routed).unpulled

    def ended(self) -> list[tuple[HandoffOutcome, GivenUp | None]]:
        return [(one.outcome, one.cause) for one in self.router.moves.fetched().recent]


def test_the_request_goes_on_at_once_and_names_the_source() -> None:
    rig = Peers()
    routed = rig.ask_of(B)
    assert (routed.pull, routed.remote) == (None, None), "nothing is held"
    assert routed.attachment
    source = json.loads(routed.attachment.params)["remote_kv_source"]
    assert (source["remote_host"], source["remote_port"]) == ("10.0.0.1", 5710)
    assert len(source["kv_request_id"]) == 36
    assert routed.attachment.headers == (("x-perilune-transfer-target", B),)
    assert rig.pending() == {A: 0, B: 100, C: 0}, "the source computes nothing"
    page = to_json(rig.record(routed))
    assert page["pulled_from"] == A
    assert f"read from the host memory of {A}" in page["sentence"]


def test_each_decision_has_an_id_of_its_own() -> None:
    rig = Peers()
    ids = set()
    for target in (B, C):
        attachment = rig.ask_of(target).attachment
        assert attachment
        ids.add(json.loads(attachment.params)["remote_kv_source"]["kv_request_id"])
    assert len(ids) == 2


def test_what_is_only_on_a_device_cannot_be_read() -> None:
    rig = Peers(offloaded=False)
    routed = rig.ask_of(B)
    assert (routed.attachment, rig.why(routed)) == (None, Unpulled.NO_GIVER)


@pytest.mark.parametrize("silent", [A, B])
def test_an_engine_whose_port_is_silent_neither_gives_nor_reads(silent: str) -> None:
    rig = Peers()
    rig.state.host_tiers.forget(silent)
    routed = rig.ask_of(B)
    assert (routed.attachment, rig.why(routed)) == (None, Unpulled.NO_GIVER)


def test_a_draining_endpoint_lets_others_read() -> None:
    rig = Peers()
    rig.router.configure(rig.pool(draining=A))
    assert rig.ask_of(B).attachment


def test_a_pool_that_does_not_pull_reads_nothing() -> None:
    rig = Peers(enabled=False)
    routed = rig.ask_of(B)
    assert (routed.attachment, rig.why(routed)) == (None, None)


def test_a_request_that_cannot_name_a_source_is_computed() -> None:
    rig = Peers()
    routed = rig.ask_of(B, n=2)
    assert (routed.attachment, rig.why(routed)) == (None, Unpulled.REQUEST)


def test_nobody_else_reads_from_a_source_that_keeps_a_request_waiting() -> None:
    rig = Peers()
    first = rig.ask_of(B)
    rig.now += 5.0
    second = rig.ask_of(C)
    assert (second.attachment, rig.why(second)) == (None, Unpulled.FAILED)
    rig.stored(B, PROMPT)
    rig.ends(first)
    assert rig.ended() == [(HandoffOutcome.EXPIRED, GivenUp.NOT_TAKEN)]
    third = rig.ask_of(C, rig.another(7))
    assert rig.why(third) is Unpulled.SLOWER, "and later ones expect it to be as slow again"


def test_a_long_answer_makes_no_source_late() -> None:
    """Of a prompt that has no block of its own, no KV event says when it was computed."""
    rig = Peers()
    first = rig.ask_of(B, [*HELD, 7])
    rig.now += 60.0
    assert rig.ask_of(C).attachment
    rig.ends(first, 6_400)
    assert rig.ended() == [(HandoffOutcome.COPIED, None)]


@pytest.mark.parametrize("streamed", [True, False])
def test_an_answer_that_overtakes_the_event_ends_the_transfer(streamed: bool) -> None:
    """Engines send the head of a stream before its first token."""
    rig = Peers()
    routed = rig.ask_of(B)
    rig.router.on_response(routed.ticket, 200, "", streamed)
    assert rig.router.moves.fetched().open == int(streamed)
    rig.stored(B, PROMPT)
    assert rig.router.moves.fetched().open == 0


@pytest.mark.parametrize(
    ("cached", "outcome", "cause", "again"),
    [
        (6_400, HandoffOutcome.COPIED, None, None),
        (None, HandoffOutcome.UNSEEN, None, None),
        (3_200, HandoffOutcome.FAILED, GivenUp.RECOMPUTED, Unpulled.FAILED),
    ],
)
def test_the_engine_report_says_how_it_ended(
    cached: int | None, outcome: HandoffOutcome, cause: GivenUp | None, again: Unpulled | None
) -> None:
    rig = Peers()
    routed = rig.ask_of(B)
    assert rig.router.moves.fetched().open == 1
    rig.ends(routed, cached)
    assert rig.ended() == [(outcome, cause)]
    assert rig.router.moves.fetched().open == 0
    assert rig.why(rig.ask_of(B, rig.another(7))) is again


def test_a_source_that_failed_is_left_alone_for_a_while_only() -> None:
    rig = Peers()
    rig.ends(rig.ask_of(B), 0)
    rig.now += 9.0
    assert rig.why(rig.ask_of(C, rig.another(7))) is Unpulled.FAILED
    rig.now += 2.0
    assert rig.ask_of(C, rig.another(8)).attachment


def test_a_request_that_ends_elsewhere_or_early_says_so() -> None:
    rig = Peers()
    routed = rig.ask_of(B)
    rig.router.on_response(routed.ticket, 200, C, True)
    rig.finish(routed)
    rig.finish(rig.ask_of(C, rig.another(7)), Outcome.CANCELLED)
    assert rig.ended() == [
        (HandoffOutcome.FAILED, GivenUp.ELSEWHERE),
        (HandoffOutcome.FAILED, GivenUp.LEFT),
    ]


def test_the_bytes_count_until_the_prompt_is_computed() -> None:
    rig = Peers()
    rig.ask_of(B)
    stats = rig.router.moves.planner.stats(rig.now)
    assert stats.in_flight == {(A, B): rig.state.calibration.engine.kv_bytes(6_400)}
    rig.now += 0.2
    rig.stored(B, PROMPT)
    assert rig.router.moves.planner.stats(rig.now).in_flight == {}


def test_a_planned_move_is_priced_with_it_and_the_sessions_request_reads() -> None:
    costs_s = {}
    for enabled in (True, False):
        rig = Peers(enabled=enabled)
        asked = head("/v1/completions", x_session_id="s")
        asked.subset = frozenset({A})
        rig.finish(rig.route(HELD, asked))
        rig.holds(A, HELD)
        rig.router.configure(rig.pool(draining=A))
        rig.router.plan_moves()
        (move,) = rig.router.moves.planner.by_request
        assert (move.source, bool(move.transfer_bytes)) == (A, enabled)
        costs_s[enabled] = move.cost_s
        routed = rig.route(PROMPT, head("/v1/completions", x_session_id="s"))
        assert rig.record(routed).reason == Reason.PLANNED
        assert bool(routed.attachment) is enabled
    assert costs_s[True] < costs_s[False] / 2, "without it all is computed"


def test_no_more_of_an_endpoint_than_its_copies() -> None:
    rig = Peers()
    prompts = [rig.another(seed) for seed in range(10, 15)]
    reads = [rig.ask_of(B, prompt) for prompt in prompts]
    assert [bool(read.attachment) for read in reads] == [True] * 4 + [False]
    assert rig.why(reads[-1]) is Unpulled.BUSY


def test_a_rank_is_read_at_its_own_port() -> None:
    rig = Peers()
    both = EndpointSpec(address=A, events=("tcp://10.0.0.1:1", "tcp://10.0.0.1:2"), peer=PEERS[A])
    whole = rig.pool()
    spec = structs.replace(whole.spec, endpoints=(both, whole.spec.endpoints[1]))
    rig.router.configure(structs.replace(whole, spec=spec))
    for address in (f"{A}#0", f"{A}#1", B):
        rig.state.host_tiers.answered(address)
    rig.holds(f"{A}#1", HELD)
    attachment = rig.ask_of(B).attachment
    assert attachment
    assert json.loads(attachment.params)["remote_kv_source"]["remote_port"] == 5711


def test_pages_and_metrics_count_it() -> None:
    rig = Peers()
    rig.ends(rig.ask_of(B), 6_400)
    router = rig.router
    page = move_rows.page(
        *(
            router.moves.planner,
            router.moves.handing_over.stats(),
            router.moves.remote_prefills.stats(),
            router.moves.fetched(),
        ),
        *(rig.state.calibration, rig.now, sorted(rig.state.host_tiers.known)),
    )
    assert page["peers"] == [A, B, C]
    (one,) = page["pulls"]["ended"]
    assert (one["source"], one["target"], one["outcome"], one["pulled_tokens"]) == (A, B, "copied", 6_400)
    rig.metrics.mirror(
        lambda: Snapshot(
            handoffs=router.moves.handing_over.stats(),
            remote_prefills=router.moves.remote_prefills.stats(),
            pulls=router.moves.fetched(),
        )
    )
    lines = generate_latest(rig.metrics.registry).decode()
    assert 'perilune_pulls_total{outcome="fetched"} 1.0' in lines
    assert 'perilune_handoffs_total{outcome="copied",reason="pull"} 1.0' in lines
