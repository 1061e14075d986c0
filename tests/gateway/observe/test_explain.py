"""Decision records: the ring, the counterfactual, the words."""

from random import Random

import pytest
from msgspec.structs import replace
from routing_objects import PLAIN, candidate, fleet, link, prefix, request, session

from perilune_api.policies import PolicyParams
from perilune_gateway.model import (
    NEED_BODY,
    Cost,
    Decision,
    DecisionRecord,
    Ending,
    Outcome,
    Phase,
    Reason,
    Refusal,
    RefuseReason,
    TokenSource,
    Unsplit,
    tenant_hash,
)
from perilune_gateway.observe.decisions import Decisions
from perilune_gateway.observe.explain import BECAUSE, counterfactual, sentence, summary, to_json
from perilune_gateway.policy import POLICIES
from perilune_gateway.routing.admission import predict

PREFILLS = (
    Cost("a", 0.5, {"queue_s": 0.0, "prefill_s": 0.5}),
    Cost("p", 1.0, {"queue_s": 1.0}),
    Cost("q", 0.75, {"queue_s": 0.75}),
)
"""What a prefill costs where the prompt is decoded, and at two prefill endpoints."""


def record(ordinal: int = 0, *, of: str = "", rows: int = 1, **changes: object) -> DecisionRecord:
    """Return a decision for endpoint a, of request r<ordinal>."""
    view = request(ordinal=ordinal, of=session("a", id=of) if of else None)
    candidates = tuple(candidate(chr(ord("a") + i), engine=PLAIN) for i in range(rows))
    base = DecisionRecord(
        view=view,
        verdict=Decision("a", Reason.HOST),
        policy="ear",
        candidates=candidates,
        destinations=("a",),
    )
    return replace(base, **changes)


class TestDecisions:
    def test_an_added_record_is_found_by_its_request(self):
        decisions = Decisions()
        decisions.add(record(7))
        assert decisions.get("r7") == record(7)
        assert decisions.get("r8") is None

    def test_the_oldest_leaves_when_the_ring_is_full(self):
        decisions = Decisions(capacity=3)
        for i in range(5):
            decisions.add(record(i))
        assert len(decisions) == 3
        assert [decisions.get(f"r{i}") is not None for i in range(5)] == [False, False, True, True, True]

    def test_candidate_rows_are_bounded_too_but_the_newest_stays(self):
        decisions = Decisions(capacity=100, max_rows=8)
        for i in range(4):
            decisions.add(record(i, rows=4))
        assert [r.request_id for r in decisions.query()] == ["r3", "r2"]
        decisions.add(record(9, rows=20))
        assert [r.request_id for r in decisions.query()] == ["r9"]

    def test_finish_fills_in_the_end(self):
        decisions = Decisions()
        number = decisions.add(record(1))
        decisions.finish(
            number,
            Ending(outcome=Outcome.COMPLETED, duration_s=2.5, served="b", status=200, cached_tokens=64),
        )
        found = decisions.get("r1")
        assert found is not None
        assert found.ending == Ending(
            outcome=Outcome.COMPLETED, duration_s=2.5, served="b", status=200, cached_tokens=64
        )
        assert replace(found, ending=None) == record(1)

    def test_finish_of_a_record_that_left_does_nothing(self):
        decisions = Decisions(capacity=1)
        number = decisions.add(record(1))
        decisions.add(record(2))
        decisions.finish(number, Ending(outcome=Outcome.FAILED, duration_s=1.0))
        assert decisions.query() == [record(2)]

    def test_a_new_record_does_not_inherit_the_end_of_the_one_whose_place_it_takes(self):
        decisions = Decisions(capacity=2)
        numbers = [decisions.add(record(i)) for i in range(2)]
        for number in numbers:
            decisions.finish(number, Ending(outcome=Outcome.COMPLETED, duration_s=1.0))
        decisions.add(record(2))
        decisions.finish(numbers[0], Ending(outcome=Outcome.FAILED, duration_s=9.0))
        assert [r.ending and r.ending.outcome for r in decisions.query()] == [None, Outcome.COMPLETED]

    def test_a_reused_id_means_the_newer_and_survives_the_older_one_leaving(self):
        decisions = Decisions(capacity=2)
        older, newer = record(1), record(1, cached_tokens=5)
        decisions.add(older)
        decisions.add(newer)
        assert decisions.get("r1") == newer
        decisions.add(record(2))  # the older one leaves
        assert decisions.get("r1") == newer
        decisions.add(record(3))  # the newer one leaves
        assert decisions.get("r1") is None

    def test_query_is_newest_first_by_session_and_bounded(self):
        decisions = Decisions()
        for i in range(10):
            decisions.add(record(i, of="even" if i % 2 == 0 else "odd"))
        assert [r.request_id for r in decisions.query(n=3)] == ["r9", "r8", "r7"]
        assert [r.request_id for r in decisions.query("even", n=2)] == ["r8", "r6"]
        assert decisions.query("nobody") == []
        assert decisions.query(n=0) == decisions.query(n=-1) == []


class TestCounterfactual:
    def test_every_other_policy_answers_from_the_same_values(self):
        candidates = tuple(fleet(a=20_000, b=3, c=5))
        view = request(ordinal=2, tokens=100, of=session("a", moved_s_ago=5.0))
        taken = DecisionRecord(
            view=view, verdict=Decision("a", Reason.HOT_COOLDOWN), policy="ear", candidates=candidates
        )
        others = dict(counterfactual(taken, POLICIES, PolicyParams(), Random(1)))
        assert others.keys() == POLICIES.keys() - {"ear"}
        assert others["least_loaded"]["target"] == "b"
        assert others["least_loaded"]["same"] is False
        assert others["round_robin"] == {
            "target": "c",
            "reason": "round_robin",
            "same": False,
            "moved_from": "",
            "cached_tokens": 0,
            "estimated_s": predict(candidates[2], view).ttft_s,
        }
        assert others["sticky"]["target"] == "a"
        assert others["sticky"]["same"] is True

    def test_the_estimate_is_queue_fetch_and_prefill_by_the_store(self):
        row = candidate("a", cached=100, stored=900, pending_s=0.5, engine=PLAIN)
        taken = DecisionRecord(
            view=request(), verdict=Decision("a", Reason.COLD), policy="ear", candidates=(row,)
        )
        other = dict(counterfactual(taken, {"only": POLICIES["perilune"]}, PolicyParams(), Random(1)))["only"]
        assert (other["estimated_s"], other["cached_tokens"]) == (pytest.approx(0.5 + 0.4 + 0.1), 900)

    @pytest.mark.parametrize(
        ("policy", "after_s", "cached"),
        [
            pytest.param("perilune", 0.28, 900, id="pulls"),
            pytest.param("least_loaded", 1.0, 0, id="does not"),
        ],
    )
    def test_a_peer_counts_only_for_a_policy_that_pulls(self, policy: str, after_s: float, cached: int):
        host = candidate("a", cached=900, pending=90_000, pending_s=90.0, engine=PLAIN)
        other = candidate("b", links={"a": link(bytes_per_s=5e6)}, engine=PLAIN)
        view = request(tokens=1000, of=session("a"), prefix=prefix(a=900))
        taken = DecisionRecord(
            view=view, verdict=Decision("a", Reason.HOST), policy="ear", candidates=(host, other)
        )
        found = dict(counterfactual(taken, {policy: POLICIES[policy]}, PolicyParams(), Random(1)))[policy]
        assert found["target"] == "b"
        assert (found["estimated_s"], found["cached_tokens"]) == (pytest.approx(after_s), cached)

    def test_a_decision_that_pulls_reads_as_its_policy_reckoned(self):
        host = candidate("a", cached=900, pending_s=90.0, engine=PLAIN)
        other = candidate("b", links={"a": link(bytes_per_s=5e6)}, engine=PLAIN)
        view = request(tokens=1000, of=session("a"), prefix=prefix(a=900))
        decision = POLICIES["perilune"](view, [host, other], PolicyParams(), Random(1))
        assert isinstance(decision, Decision)
        taken = DecisionRecord(
            view=view, verdict=decision, policy="perilune", candidates=(host, other), cached_tokens=900
        )
        assert summary(taken)["estimated_s"] == pytest.approx(decision.estimated_ttft_s)
        assert sentence(taken).startswith(
            "b because the session moves here from a, which costs more: 900 of 1,000 prompt tokens cached"
            " there or fetched from a first; 0 tokens (0.00 s) queued before it; first token expected after"
            " 0.28 s"
        )

    @pytest.mark.parametrize(
        ("verdict", "expected"),
        [
            pytest.param(NEED_BODY, {"needs_body": True}, id="needs the body"),
            pytest.param(
                Refusal(RefuseReason.OVERLOADED, "all busy", 3.0),
                {"refused": "overloaded", "message": "all busy"},
                id="refuses",
            ),
        ],
    )
    def test_what_another_policy_answers_is_shown(self, verdict, expected):
        others = dict(counterfactual(record(), {"x": lambda *_: verdict}, PolicyParams(), Random(1)))
        assert others == {"x": expected}

    def test_without_candidates_there_is_nothing_to_ask(self):
        refused = record(verdict=Refusal(RefuseReason.NO_ENDPOINT, "none"), candidates=())
        assert dict(counterfactual(refused, POLICIES, PolicyParams(), Random(1))) == {}


class TestWords:
    def test_every_reason_has_words(self):
        assert BECAUSE.keys() == set(Reason)

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            pytest.param(
                {"cached_tokens": 768},
                "a because it is the session's host (hot: no): 768 of 1,000 prompt tokens cached there;"
                " 0 tokens (0.00 s) queued before it; first token expected after 1.00 s.",
                id="host",
            ),
            pytest.param(
                {"policy": "sticky"},
                "a because it is the session's host: 0 of 1,000 prompt tokens cached there;"
                " 0 tokens (0.00 s) queued before it; first token expected after 1.00 s.",
                id="host, hot or not",
            ),
            pytest.param(
                {
                    "verdict": Decision("a", Reason.COLD),
                    "view": request(of=session("gone")),
                    "excluded": {"gone": "not_ready"},
                },
                "a because the session's host gone may not be chosen and its cost is the lowest:"
                " 0 of 1,000 prompt tokens cached there; 0 tokens (0.00 s) queued before it;"
                " first token expected after 1.00 s; not considered: gone (not_ready).",
                id="host gone",
            ),
            pytest.param(
                {"verdict": Decision("a", Reason.MOVED, moved_from="b")},
                "a because the session moves here from b, which is hot: 0 of 1,000 prompt tokens"
                " cached there; 0 tokens (0.00 s) queued before it; first token expected after 1.00 s.",
                id="moved",
            ),
            pytest.param(
                {"view": replace(request(phase=Phase.HEADERS), token_source=TokenSource.ESTIMATE)},
                "a because it is the session's host (hot: no): 0 of ~1,000 prompt tokens cached there;"
                " 0 tokens (0.00 s) queued before it; first token expected after 1.00 s;"
                " decided without the body.",
                id="estimated from the headers",
            ),
            pytest.param(
                {"verdict": Decision("a", Reason.HOST, unsplit=Unsplit.CHEAPER, prefill_costs=PREFILLS)},
                "a because it is the session's host (hot: no): 0 of 1,000 prompt tokens cached there;"
                " 0 tokens (0.00 s) queued before it; first token expected after 1.00 s;"
                " prefilled here (cheaper: 0.50 s here, 0.75 s at q).",
                id="prefilled where it is cheaper",
            ),
            pytest.param(
                {"verdict": Decision("a", Reason.SPLIT, prefill="p", prefill_costs=PREFILLS)},
                "a because it decodes what p prefills: 0 of 1,000 prompt tokens cached there;"
                " 0 tokens (0.00 s) queued before it; first token expected after 0.00 s;"
                " prefill costs 0.50 s here, 1.00 s at p.",
                id="prefilled elsewhere",
            ),
            pytest.param(
                {"verdict": Decision("b", Reason.SPLIT, prefill="q", prefill_costs=PREFILLS)},
                "b because it decodes what q prefills: 0 of 1,000 prompt tokens cached there;"
                " prefill costs 0.50 s at a, 0.75 s at q.",
                id="decoded elsewhere than the policy chose",
            ),
            pytest.param(
                {"verdict": Decision("a", Reason.HOST, unsplit=Unsplit.SHORT)},
                "a because it is the session's host (hot: no): 0 of 1,000 prompt tokens cached there;"
                " 0 tokens (0.00 s) queued before it; first token expected after 1.00 s;"
                " prefilled here (short).",
                id="too short to prefill elsewhere",
            ),
            pytest.param(
                {"verdict": Decision("z", Reason.PASS_THROUGH), "candidates": ()},
                "z because the request is not one for the model, so any ready endpoint may take it.",
                id="pass-through",
            ),
            pytest.param(
                {"verdict": Refusal(RefuseReason.UNKNOWN_MODEL, "no model x"), "candidates": ()},
                "refused with 404 unknown_model: no model x.",
                id="refused",
            ),
            pytest.param(
                {
                    "verdict": Refusal(RefuseReason.NO_ENDPOINT, "none is ready"),
                    "excluded": {f"e{i}": "ready" for i in range(5)},
                },
                "refused with 503 no_endpoint: none is ready;"
                " not considered: e0 (ready), e1 (ready), e2 (ready) and 2 more.",
                id="excluded",
            ),
            pytest.param(
                {
                    "verdict": Decision("a", Reason.FORCED),
                    "ending": Ending(outcome=Outcome.COMPLETED, duration_s=1.0, served="b", status=200),
                },
                "a because the conformance header names it; served by fallback b.",
                id="fallback",
            ),
        ],
    )
    def test_a_decision_is_told_in_a_sentence(self, changes, expected):
        assert sentence(record(**changes)) == expected


class TestJson:
    def test_prefill_costs_are_told_with_their_terms(self):
        out = to_json(record(verdict=Decision("a", Reason.HOST, prefill_costs=PREFILLS)))
        assert [(each["address"], each["cost"]) for each in out["prefill_costs"]] == [
            ("a", 0.5),
            ("p", 1.0),
            ("q", 0.75),
        ]
        assert out["prefill_costs"][1]["terms"] == {"queue_s": 1.0}

    def test_the_chosen_row_carries_its_terms(self):
        candidates = tuple(fleet(a=7, b=3))
        costs = (Cost("a", 7.0, {"pending": 7.0}), Cost("b", 3.0, {"pending": 3.0}))
        taken = DecisionRecord(
            view=request(of=session("b", id="s1")),
            verdict=Decision("b", Reason.LEAST_LOADED, costs),
            policy="least_loaded",
            candidates=candidates,
            excluded={"c": "draining"},
            destinations=("b", "a"),
            cached_tokens=250,
            timings_us={"policy": 12.0, "total": 40.0},
            time=0.5,
            tenant="acme",
        )
        out = to_json(taken, {"random": {"target": "a"}})
        assert [(c["address"], c["chosen"], c["cost"], c["terms"]) for c in out["candidates"]] == [
            ("a", False, 7.0, {"pending": 7.0}),
            ("b", True, 3.0, {"pending": 3.0}),
        ]
        assert out["reason"] == "least_loaded"
        assert out["excluded"] == {"c": "draining"}
        assert out["destinations"] == ["b", "a"]
        assert out["timings_us"] == {"policy": 12.0, "total": 40.0}
        assert out["counterfactual"] == {"random": {"target": "a"}}
        assert out["session"]["host"] == "b"
        assert (out["session_id"], out["tenant"]) == ("s1", tenant_hash("acme"))
        assert (out["time"], out["hit_ratio"]) == ("1970-01-01T00:00:00.500+00:00", 0.25)

    def test_a_refusal_has_no_target_and_says_why(self):
        refused = record(verdict=Refusal(RefuseReason.BAD_JSON, "not JSON"), candidates=())
        out = to_json(refused)
        assert (out["target"], out["reason"], out["message"]) == ("", "bad_json", "not JSON")
        assert out["candidates"] == []
        assert out["estimated_s"] is None

    def test_a_running_request_has_no_ending(self):
        assert summary(record())["ending"] is None
        ended = summary(record(ending=Ending(outcome=Outcome.CANCELLED, duration_s=0.5)))
        assert ended["ending"]["outcome"] == "cancelled"
