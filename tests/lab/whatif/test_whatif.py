"""`perilune whatif`: hand-made decisions, tallies reckoned by hand."""

import gzip
import json
import os
from io import StringIO
from pathlib import Path
from random import Random
from threading import Thread

import pytest
from msgspec.structs import replace
from rich.console import Console
from routing_objects import PLAIN, candidate, fleet, request, session

from perilune_api.policies import PeriluneParams, PolicyParams
from perilune_api.pool import Metadata, Model, Pool, Routing, Spec, SpecError
from perilune_gateway.model import (
    Candidate,
    Decision,
    DecisionRecord,
    Ending,
    Outcome,
    Phase,
    Reason,
    Refusal,
    RefuseReason,
)
from perilune_gateway.observe.decision_log import Logged, Writer
from perilune_gateway.policy import POLICIES
from perilune_lab.terminal import decision_logs
from perilune_lab.whatif import cli
from perilune_lab.whatif.arms import Arm, WhatIf
from perilune_lab.whatif.text import busiest

ROUTING = Routing()


def record(*candidates: Candidate, target: str = "a", **changes: object) -> DecisionRecord:
    """Of a session bound to a, which stays there."""
    base = DecisionRecord(
        view=request(of=session("a")),
        verdict=Decision(target, Reason.HOST),
        policy="ear",
        candidates=candidates or tuple(fleet(a=0, b=9)),
    )
    return replace(base, **changes)


def logged(of: DecisionRecord, number: int = 0) -> Logged:
    return Logged(number, of, ROUTING)


def seen(*entries: DecisionRecord, policies: tuple[str, ...] = ("sticky",), **params: str) -> WhatIf:
    found = WhatIf(policies=policies, params=params)
    for number, entry in enumerate(entries):
        found.take(logged(entry, number), "log")
    return found


class TestArms:
    def test_the_policy_that_recorded_comes_out_the_same(self):
        found = seen(as_ear_decides(), policies=("ear",))
        assert (found.decisions, found.as_recorded, found.arms["ear"].same) == (1, 1, 1)

    def test_one_that_does_not_is_counted(self):
        assert seen(record(target="b")).as_recorded == 0

    def test_other_choices_are_measured_by_the_facts_of_then(self):
        here = candidate("a", pending=5_000, pending_s=5.0, cached=400, engine=PLAIN)
        there = candidate("b", engine=PLAIN)
        arm = seen(record(here, there), policies=("least_loaded",)).arms["least_loaded"]
        # 1,000 tokens at 1 ms; a: 5 s of queue and 600 new ones, b: all of them
        assert (list(arm.ttft_s), arm.by_endpoint) == ([1.0], {"b": (1, 1000)})
        assert (arm.compared, arm.ttft_change_s) == (1, pytest.approx(1.0 - 5.6))
        assert (arm.same, arm.had_host, arm.off_host, arm.moves) == (0, 1, 1, 0)

    def test_overrides_hold_for_the_arms_only(self):
        hot = record(*fleet(a=500, b=9))
        assert seen(hot, policies=("ear",)).arms["ear"].moves == 0
        moved = seen(hot, policies=("ear",), **{"ear.hot_pending_tokens": "100"})
        assert (moved.arms["ear"].moves, moved.recorded.moves) == (1, 0)
        assert moved.arms["ear"].moved == {"s"}
        assert moved.arms["ear"].reasons == {"moved": 1}

    def test_what_needs_the_body_is_not_guessed(self):
        early = record(view=replace(request(of=session("a")), phase=Phase.HEADERS))
        arm = seen(early, policies=("mooncake",)).arms["mooncake"]
        assert (arm.needs_body, arm.decisions, arm.choices) == (1, 0, 0)

    def test_refusals_on_both_sides(self):
        refused = record(verdict=Refusal(RefuseReason.OVERLOADED, ""))
        found = seen(refused)
        assert (found.recorded.refused, found.arms["sticky"].refused) == (1, 0)
        assert found.arms["sticky"].compared == 0, "there is no recorded choice to compare with"

    def test_the_planners_choices_are_set_apart(self):
        found = seen(record(verdict=Decision("b", Reason.PLANNED, moved_from="a")))
        assert (found.planned, found.as_recorded, found.recorded.moves) == (1, 0, 1)

    def test_what_no_policy_took_is_only_counted(self):
        found = seen(record(policy=""), record(candidates=()))
        assert (found.without_policy, found.decisions) == (2, 0)

    def test_a_policy_of_another_version_is_named(self):
        with pytest.raises(SpecError, match="decision 0: Unknown policy 'newest', known are "):
            seen(record(policy="newest"))

    def test_the_busiest_endpoint_is_compared_with_the_mean_of_all(self):
        arm = Arm(policy="x")
        for target in "aab":
            arm.take(
                record(*fleet(a=0, b=0, c=0), target=target),
                Decision(target, Reason.RANDOM),
                PeriluneParams(),
            )
        assert arm.by_endpoint == {"a": (2, 2000), "b": (1, 1000)}
        assert busiest(arm, endpoints=3) == 2.0


def as_ear_decides() -> DecisionRecord:
    taken = record()
    verdict = POLICIES["ear"](taken.view, taken.candidates, PolicyParams(), Random(0))
    assert isinstance(verdict, Decision)
    return replace(taken, verdict=verdict, time=1000.0)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    writer = Writer("1.0")
    ear = as_ear_decides()
    path = tmp_path / "log.jsonl"
    path.write_bytes(
        writer.pool(Pool(Metadata("p"), Spec(Model(name="m"), routing=ROUTING)), 0.0)
        + writer.decision(0, ear)
        + writer.end(0, Ending(outcome=Outcome.COMPLETED, duration_s=1.0))
        + writer.decision(1, replace(ear, time=1060.0))
    )
    return path


class TestCommand:
    def test_every_live_policy_by_default(self, log, capsys):
        assert cli.main(["--decisions", str(log)]) == 0
        out = capsys.readouterr().out
        assert "2 decisions over 60 s" in out
        assert "2 of 2 come out as recorded" in out
        assert "1 completed" in out
        assert all(policy in out for policy in POLICIES)
        assert "perilune simulate" in out

    def test_the_document_says_what_the_table_does(self, log, tmp_path, capsys):
        out = tmp_path / "out.json"
        arguments = [
            "--decisions",
            str(log),
            "--policy",
            "round_robin,sticky",
            "--limit",
            "1",
            "--json",
            str(out),
        ]
        assert cli.main(arguments) == 0
        found = json.loads(out.read_bytes())
        assert (found["schema"], found["decisions"], found["as_recorded"]) == ("perilune.whatif/v1", 1, 1)
        assert found["policies"].keys() == {"round_robin", "sticky"}
        assert found["policies"]["sticky"]["same"] == 1
        assert found["policies"]["sticky"]["endpoints"] == {"a": {"requests": 1, "uncached_tokens": 1000}}

    def test_several_files_and_gzip(self, log, tmp_path, capsys):
        packed = tmp_path / "log.jsonl.gz"
        packed.write_bytes(gzip.compress(log.read_bytes()))
        assert cli.main(["--decisions", str(packed), str(log), "--policies", "sticky"]) == 0
        assert "4 decisions" in capsys.readouterr().out

    @pytest.mark.parametrize("packed", [False, True])
    def test_a_pipe_is_read_too(self, log, tmp_path, packed, capsys):
        content = gzip.compress(log.read_bytes()) if packed else log.read_bytes()
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        writer = Thread(target=pipe.write_bytes, args=(content,))
        writer.start()
        assert cli.main(["--decisions", str(pipe), "--policy", "sticky"]) == 0
        writer.join()
        assert "2 decisions" in capsys.readouterr().out

    def test_progress_of_a_file_and_of_a_pipe(self, log, tmp_path, monkeypatch):
        monkeypatch.setattr(decision_logs, "PROGRESS_EVERY_S", 0.0)
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        Thread(target=pipe.write_bytes, args=(log.read_bytes(),)).start()
        told = []
        for path in (log, pipe):
            err = Console(file=StringIO(), record=True)
            cli.replay(cli.parse(["--decisions", str(path), "--policy", "sticky"]), err)
            told.append(err.export_text().splitlines()[-1])
        assert told == ["100%: 2 decisions", "2 decisions"]

    def test_the_table_comes_though_the_disk_is_full(self, log, capsys):
        assert cli.main(["--decisions", str(log), "--json", "/dev/full"]) == 2
        said = capsys.readouterr()
        assert said.err.splitlines()[-1].endswith("No space left on device - at `--json`")
        assert "2 decisions" in said.out

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--policy", "magic"], "Unknown policy 'magic'"),
            (["--policy", "static_pd"], "Unknown policy 'static_pd'"),
            (["--params", "cooldown_seconds"], "'cooldown_seconds' is not NAME=VALUE"),
        ],
    )
    def test_a_wrong_call_is_explained(self, log, arguments, said, capsys):
        assert cli.main(["--decisions", str(log), *arguments]) == 2
        assert said in capsys.readouterr().err

    def test_a_broken_file_is_told_with_its_line(self, log, capsys):
        lines = log.read_bytes().splitlines(True)
        log.write_bytes(b"".join([*lines[:3], b"no json\n", *lines[3:]]))
        assert cli.main(["--decisions", str(log)]) == 2
        assert f"{log}: line 4 is not JSON" in capsys.readouterr().err

    def test_a_cut_last_line_is_skipped_and_said(self, log, capsys):
        log.write_bytes(log.read_bytes()[:-20])
        assert cli.main(["--decisions", str(log), "--policy", "sticky"]) == 0
        assert "was cut when the gateway was killed" in capsys.readouterr().out.replace("\n", " ")

    def test_a_missing_file_is_named(self, tmp_path, capsys):
        assert cli.main(["--decisions", str(tmp_path / "none")]) == 2
        assert "No such file" in capsys.readouterr().err

    def test_a_log_without_decisions(self, log, capsys):
        log.write_bytes(log.read_bytes().splitlines(True)[0])
        assert cli.main(["--decisions", str(log)]) == 1
        assert "no decision of a policy" in capsys.readouterr().err
