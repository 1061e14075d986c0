"""The decision log's format: what is written is read back, and decided again the same."""

import json
import re
from dataclasses import replace
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from property_examples import examples
from routing_objects import PLAIN, candidate, chosen, link, prefix, request, session

from perilune_api.policies import EarParams
from perilune_api.pool import Limits, Metadata, Model, Pool, Routing, Spec, SpecError
from perilune_gateway.model import (
    Candidate,
    Cost,
    Decision,
    DecisionRecord,
    Ending,
    Location,
    Move,
    MoveReason,
    NeedBody,
    Outcome,
    Phase,
    Reason,
    Refusal,
    RefuseReason,
    RequestView,
    SessionKey,
    tenant_hash,
)
from perilune_gateway.observe.decision_log import SCHEMA, Cut, Ended, Logged, Writer, read
from perilune_gateway.policy import POLICIES
from perilune_gateway.routing.decide import decide

POOL = Pool(
    Metadata("p", "n"),
    Spec(
        Model(name="m"),
        routing=Routing(
            policy=chosen("perilune", ear=EarParams(cooldown_seconds=3.5)), limits=Limits(max_body_bytes=4096)
        ),
    ),
)
CANDIDATES = (
    candidate("a", pending=7, cached=64, links={"b": link(slowdown=1.25)}),
    candidate("b", pending_s=0.1, engine=PLAIN.scaled(1.5)),
    candidate("[::1]:80", draining=True),
)
RECORD = DecisionRecord(
    view=request(ordinal=3, tokens=500, of=session("a"), prefix=prefix(a=64, b=32, score=0.5)),
    verdict=Decision(
        "a", Reason.HOST, tuple(Cost(c.address, 0.1 * i, {"x": 1.0}) for i, c in enumerate(CANDIDATES))
    ),
    policy="perilune",
    candidates=CANDIDATES,
    excluded={"z": "ready"},
    destinations=("a", "b"),
    cached_tokens=64,
    timings_us={"parse": 12.5, "total": 30.0},
    time=1700000000.25,
    tenant="a tenant",
    seed=2**53 - 1,
)


def written(*records: DecisionRecord) -> list[bytes]:
    writer = Writer("1.0")
    data = writer.pool(POOL, 1.5) + b"".join(writer.decision(n, r) for n, r in enumerate(records))
    return data.splitlines(keepends=True)


def decided(lines: list[bytes]) -> Logged:
    (found,) = (entry for entry in read(lines, "log") if isinstance(entry, Logged))
    return found


class TestRoundTrip:
    def test_a_decision_comes_back_whole_but_for_what_is_left_out(self):
        found = decided(written(RECORD))
        assert found.routing == POOL.spec.routing
        totals = tuple(cost._replace(terms={}) for cost in RECORD.costs)
        assert found.record == structs.replace(
            RECORD,
            tenant=tenant_hash("a tenant"),
            verdict=Decision("a", Reason.HOST, totals),
        )

    def test_a_refusal_comes_back_without_its_message(self):
        refused = structs.replace(RECORD, verdict=Refusal(RefuseReason.OVERLOADED, "what a client said", 2.5))
        lines = written(refused)
        assert b"client said" not in b"".join(lines)
        assert decided(lines).record.verdict == Refusal(RefuseReason.OVERLOADED, "", 2.5)

    def test_a_planned_move_says_its_reason_and_names_no_tenant(self):
        move = Move(
            subject=SessionKey("secret tenant", "s"),
            reason=MoveReason.DRAIN,
            source="a",
            target="b",
            benefit_s=2.5,
        )
        planned = structs.replace(RECORD, verdict=Decision("b", Reason.PLANNED, moved_from="a", move=move))
        lines = written(planned)
        assert b"secret" not in b"".join(lines)
        said = json.loads(lines[-1])["verdict"]["move"]
        assert (said["reason"], said["target"], said["benefit_s"]) == ("drain", "b", 2.5)
        assert decided(lines).record.moved_from == "a"

    def test_a_request_that_no_policy_saw(self):
        plain = DecisionRecord(
            view=RequestView(request_id="r", ordinal=0, prompt_tokens=0, phase=Phase.HEADERS),
            verdict=Decision("a", Reason.PASS_THROUGH),
            policy="",
        )
        assert decided(written(plain)).record == plain

    def test_an_ending_names_its_decision(self):
        writer = Writer("1.0")
        ending = Ending(outcome=Outcome.FAILED, duration_s=1.5, served="b", status=503, cached_tokens=32)
        lines = [
            writer.pool(POOL, 0.0),
            writer.end(17, ending),
            writer.end(18, Ending(outcome=Outcome.COMPLETED, duration_s=0)),
        ]
        assert list(read(lines, "log")) == [
            Ended(17, ending),
            Ended(18, Ending(outcome=Outcome.COMPLETED, duration_s=0.0)),
        ]

    def test_endpoints_and_engines_are_written_once_until_the_next_pool_line(self):
        writer = Writer("1.0")

        def kinds(data: bytes) -> list[str]:
            return [json.loads(line)["kind"] for line in data.splitlines()]

        equal = structs.replace(
            RECORD, candidates=tuple(structs.replace(c, endpoint=replace(c.endpoint)) for c in CANDIDATES)
        )
        assert kinds(writer.pool(POOL, 0.0) + writer.decision(0, RECORD)) == [
            "pool", "endpoint", "engine", "endpoint", "engine", "endpoint", "decision"
        ]  # fmt: skip
        assert kinds(writer.decision(1, equal)) == ["decision"]
        moved = structs.replace(
            RECORD, candidates=(structs.replace(CANDIDATES[0], engine=PLAIN.scaled(1.1)),)
        )
        assert kinds(writer.decision(2, moved)) == ["engine", "decision"]
        assert kinds(writer.pool(POOL, 0.0) + writer.decision(3, RECORD))[1:3] == ["endpoint", "engine"]


class TestDecidedAgain:
    """The purpose of the log."""

    @settings(max_examples=examples(60))
    @given(
        st.lists(
            st.builds(
                candidate,
                st.sampled_from("abcdef"),
                pending=st.integers(0, 3) | st.integers(0, 50_000),
                pending_s=st.just(0.0) | st.floats(0, 20),
                in_flight=st.integers(0, 3),
                cached=st.integers(0, 900),
                draining=st.booleans(),
                kv_free=st.integers(0, 3_000),
                links=st.dictionaries(st.sampled_from("abcdef"), st.builds(link, slowdown=st.floats(0.1, 9))),
                engine=st.builds(PLAIN.scaled, st.floats(0.5, 2)),
            ),
            min_size=1,
            unique_by=lambda c: c.address,
        ),
        st.builds(
            request,
            of=st.none() | st.builds(session, st.sampled_from(["", *"abcdef"]), moved_s_ago=st.just(inf)),
            phase=st.sampled_from(Phase),
            prefix=st.builds(lambda tokens: prefix(a=tokens, b=tokens), st.integers(1, 900)),
            slo_ttft_s=st.just(0.0) | st.floats(0.01, 10),
        ),
        st.sampled_from(sorted(POLICIES)),
        st.integers(0, 2**53 - 1),
        st.floats(0, 5),
    )
    def test_same_values_same_seed_same_verdict(
        self,
        candidates: list[Candidate],
        view: RequestView,
        policy: str,
        seed: int,
        most_pending_s: float,
    ):
        routing = Routing(limits=Limits(max_pending_seconds=most_pending_s))
        pool = replace_routing(routing)
        verdict = decide(view, candidates, policy, routing, Random(seed))
        if isinstance(verdict, NeedBody):
            return
        writer = Writer("1.0")
        record = DecisionRecord(
            view=view, verdict=verdict, policy=policy, candidates=tuple(candidates), seed=seed
        )
        logged = decided((writer.pool(pool, 0.0) + writer.decision(0, record)).splitlines(keepends=True))
        r = logged.record
        again = decide(r.view, r.candidates, r.policy, logged.routing, Random(r.seed))
        assert again == verdict


def replace_routing(routing: Routing) -> Pool:
    return Pool(POOL.metadata, Spec(Model(name="m"), routing=routing))


class TestOtherVersions:
    def test_unknown_columns_are_ignored_and_missing_ones_have_their_default(self):
        lines = written(RECORD)
        head = json.loads(lines[0])
        load = head["columns"]["load"]
        load[load.index("waiting")] = "invented_later"
        lines[0] = json.dumps(head).encode()
        rows = decided(lines).record.candidates
        assert [c.load.waiting for c in rows] == [0, 0, 0]
        assert [c.load._replace(waiting=0) for c in rows] == [c.load._replace(waiting=0) for c in CANDIDATES]

    def test_unknown_fields_are_ignored(self):
        lines = written(RECORD)
        line = json.loads(lines[-1])
        line["later"] = 1
        line["view"]["later"] = {"x": [1]}
        lines[-1] = json.dumps(line).encode()
        assert decided(lines).record.view == RECORD.view


class TestBrokenFiles:
    @pytest.mark.parametrize("cut", [1, 20, -2], ids=["one byte", "early", "late"])
    def test_a_cut_last_line_is_skipped_and_said(self, cut):
        lines = written(RECORD, RECORD)
        found = list(read([*lines[:-1], lines[-1][:cut]], "log"))
        assert [type(entry) for entry in found] == [Logged, Cut]
        assert found[-1] == Cut(len(lines))

    def test_a_cut_line_before_a_restart_is_skipped_and_said(self):
        lines = written(RECORD)
        found = list(read([*lines, lines[-1][:99] + b"\n", *lines], "log"))
        assert [type(entry) for entry in found] == [Logged, Cut, Logged]

    def test_a_gateway_may_be_killed_in_its_very_first_line(self):
        lines = written(RECORD)
        found = list(read([lines[0][:9] + b"\n", *lines], "log"))
        assert [type(entry) for entry in found] == [Cut, Logged]

    def test_a_file_of_which_no_line_can_be_read_is_no_log(self):
        with pytest.raises(SpecError, match="line 1 is not JSON"):
            list(read([written(RECORD)[0][:9]], "log"))

    @pytest.mark.parametrize(
        ("break_line", "said"),
        [
            pytest.param(lambda i, line: b"{" if i == 2 else line, "line 3 is not JSON", id="in the middle"),
            pytest.param(lambda i, line: b"hello" if i == 0 else line, "line 1 is not JSON", id="other file"),
            pytest.param(
                lambda i, line: b"[]" if i == 1 else line, "line 2: it is not an object", id="a list"
            ),
            pytest.param(
                lambda i, line: b"{}" if i == 0 else line,
                f"line 1: no `pool` line with {SCHEMA}",
                id="other JSON",
            ),
            pytest.param(
                lambda i, line: line.replace(SCHEMA.encode(), b"perilune.decisions/v3"),
                "line 1: its schema is 'perilune.decisions/v3', only perilune.decisions/v2 can be read",
                id="later schema",
            ),
            pytest.param(
                lambda i, line: line.replace(b'"prompt_tokens":500', b'"prompt_tokens":"x"'),
                "line 7: Expected `int`, got `str` - at `$.prompt_tokens`",
                id="wrong type",
            ),
            pytest.param(lambda i, line: b"" if i == 1 else line, "line 2 is not JSON", id="blank"),
            pytest.param(
                lambda i, line: b'{"kind":"end","n":1,"outcome":"?","duration_s":1}' if i == 1 else line,
                "line 2: Invalid enum value '?' - at `$.outcome`",
                id="unknown outcome",
            ),
            pytest.param(
                lambda i, line: b'{"kind":"surprise"}' if i == 1 else line,
                "line 2: unknown kind 'surprise'",
                id="unknown kind",
            ),
            pytest.param(
                lambda i, line: line.replace(b'"id":1', b'"id":9'),
                "line 7: it names an endpoint or engine that no earlier line defines",
                id="numbers nobody explained",
            ),
            pytest.param(
                lambda i, line: line.replace(b"[[0,[", b"[[0,[99,"),
                "line 7: a row has 13 values for the 12 columns",
                id="a row too long",
            ),
            pytest.param(
                lambda i, line: line.replace(b"[[0,[7", b'[[0,["7"'),
                "line 7: Expected `int`, got `str` - at `$[0]`",
                id="a cell of a wrong type",
            ),
            pytest.param(
                lambda i, line: line.replace(b"],[64,64,64],", b"],[64,64,64],1" + b"0" * 400 + b","),
                "line 7: a row has 10 values for the 9 columns",
                id="a cell too many",
            ),
            pytest.param(
                lambda i, line: re.sub(rb"(?<=\[64,64,64\],)[^,]+", b"1" + b"0" * 400, line),
                f"line 7 does not match {SCHEMA}: int too large",
                id="a number beyond all bounds",
            ),
        ],
    )
    def test_what_is_wrong_is_said_with_its_line(self, break_line, said):
        lines = [break_line(i, line) for i, line in enumerate(written(RECORD))]
        with pytest.raises(SpecError) as error:
            list(read(lines, "some.jsonl"))
        assert str(error.value).startswith(f"some.jsonl: {said}")

    @settings(max_examples=examples(100))
    @given(st.data())
    def test_garbage_raises_nothing_else(self, data):
        lines = written(RECORD)
        i = data.draw(st.integers(0, len(lines) - 1))
        if data.draw(st.booleans(), "bytes"):
            at = data.draw(st.integers(0, len(lines[i]) - 1))
            junk = data.draw(st.binary(max_size=8) | st.sampled_from([b"null", b"[]", b'"', b"1e999", b"{"]))
            lines[i] = lines[i][:at] + junk + lines[i][at + data.draw(st.integers(0, 9)) :]
        else:
            lines[i] = json.dumps(other_value(json.loads(lines[i]), data)).encode()
        try:
            list(read(lines, "log"))
        except SpecError as error:
            told = str(error)
        else:
            told = "log: line"
        assert told.startswith("log: line")

    def test_a_line_too_deep_for_json_is_an_error_too(self):
        with pytest.raises(SpecError, match="line 1 is not JSON"):
            list(read([b"[" * 100_000], "log"))


def other_value(value: object, data: st.DataObject) -> object:
    """Return the same with one part replaced by something else."""
    if isinstance(value, dict | list) and value and data.draw(st.booleans(), "deeper"):
        key = data.draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
        value[key] = other_value(value[key], data)
        return value
    return data.draw(st.sampled_from([None, True, -1, 2**70, 1e300, "", "x", [], [[]], {}, {"x": [None]}]))


def test_locations_come_back_as_such():
    view = decided(written(RECORD)).record.view
    assert view.prefix.locations == (Location("a", 64), Location("b", 32))
