"""`perilune tune`: a decision log becomes sessions and a pool, halves are compared, and a user is told."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from policy_packages import MINE, installed
from routing_objects import candidate, prefix, request, session

from perilune_api.policies import EarParams, PolicyChoice
from perilune_api.pool import Metadata, Model, Pool, Routing, Spec, SpecError
from perilune_gateway.model import Decision, DecisionRecord, Ending, Outcome, Reason, Refusal, RefuseReason
from perilune_gateway.observe.decision_log import Ended, Logged, Writer
from perilune_lab.quantiles import mean
from perilune_lab.simulate.deployment import Arm
from perilune_lab.tune import cli
from perilune_lab.tune.gain import Change, change
from perilune_lab.tune.recorded import Recording, deployment, halves

ENDPOINTS = ("10.0.0.1:8000", "10.0.0.2:8000")
NEVER_HOT = PolicyChoice(name="ear", ear=EarParams(hot_pending_tokens=10**9))


def record(name: str, time: float, tokens: int, policy: str = "ear", **changes: object) -> DecisionRecord:
    base = DecisionRecord(
        view=request(of=session(ENDPOINTS[0], id=name), tokens=tokens),
        verdict=Decision(ENDPOINTS[0], Reason.HOST),
        policy=policy,
        candidates=tuple(candidate(address) for address in ENDPOINTS),
        time=time,
    )
    return replace(base, **changes)


def ending(seconds: float, prefilled_s: float | None = 0.5) -> Ending:
    return Ending(outcome=Outcome.COMPLETED, duration_s=seconds, prefilled_s=prefilled_s)


def read(*turns: tuple[DecisionRecord, Ending | None]) -> Recording:
    recording = Recording()
    for number, (made, ended) in enumerate(turns):
        recording.take(Logged(number, made, Routing()))
        if ended:
            recording.take(Ended(number, ended))
    return recording


def many(sessions: int = 16, turns: int = 3) -> list[tuple[DecisionRecord, Ending | None]]:
    """Sessions that begin together, and whose prompts grow."""
    return [
        (record(f"s{s}", 1000.0 + s / 4 + 8.0 * t, 20_000 * (t + 1)), ending(1.5))
        for t in range(turns)
        for s in range(sessions)
    ]


def written(folder: Path, policy: PolicyChoice = NEVER_HOT, sessions: int = 16) -> str:
    writer, file = Writer("1"), folder / "decisions.jsonl"
    pool = Pool(Metadata("p"), Spec(Model(name="m"), routing=Routing(policy=policy)))
    lines = [writer.pool(pool, 0.0)]
    for number, (made, ended) in enumerate(many(sessions)):
        lines.append(writer.decision(number, replace(made, policy=policy.name)))
        if ended:
            lines.append(writer.end(number, ended))
    file.write_bytes(b"".join(lines))
    return str(file)


class TestRecorded:
    def test_a_sessions_turns_extend_each_other_and_keep_their_gaps(self) -> None:
        recording = read(*many())
        tuned, held_out = halves(recording, deployment(recording), 10**6)
        assert (len(tuned.sessions), len(held_out.sessions)) == (8, 8)
        first = tuned.sessions[0]
        assert [turn.prompt_tokens for turn in first.turns] == [20_000, 40_000, 60_000]
        assert [turn.gap_s for turn in first.turns] == [0.0, 6.5, 6.5]
        assert first.turns[1].prompt[: len(first.turns[0].prompt)] == first.turns[0].prompt
        assert first.turns[0].answer in first.turns[1].prompt

    def test_no_session_is_in_both_halves_and_both_have_all_hours(self) -> None:
        recording = read(*many())
        tuned, held_out = halves(recording, deployment(recording), 10**6)
        names = [{s.session_id for s in half.sessions} for half in (tuned, held_out)]
        assert not names[0] & names[1]
        assert [s.start_s for s in held_out.sessions][:2] == [0.25, 0.75]

    def test_output_follows_from_the_time_after_the_prefill(self) -> None:
        made = record("s", 0.0, 1000)
        step_s = made.candidates[0].engine.decode_step_s(1, 1000)
        recording = read(*many(), (made, ending(0.5 + 100 * step_s)))
        tuned, held_out = halves(recording, deployment(recording), 10**6)
        (turn,) = next(s for s in (*tuned.sessions, *held_out.sessions) if s.session_id == " s").turns
        assert turn.output_tokens == 100

    def test_sessions_share_what_was_cached_of_their_first_prompt(self) -> None:
        known = replace(record("x", 999.0, 2000).view, prefix=prefix(a=1024))
        both = [replace(record(n, 999.0, 2000), view=replace(known, session=session(id=n))) for n in "xy"]
        recording = read(*((made, None) for made in both), *many())
        tuned, held_out = halves(recording, deployment(recording), 10**6)
        one, other = (half.sessions[0].turns[0].prompt for half in (tuned, held_out))
        assert one[:4] == other[:4]
        assert sum(segment.tokens for segment in one[:4]) == 1024
        assert one[4] != other[4]

    def test_a_prompt_that_became_shorter_begins_anew(self) -> None:
        recording = read(*many(), (record("s0", 2000.0, 500), None))
        half, _ = halves(recording, deployment(recording), 10**6)
        assert half.sessions[0].turns[-1].prompt_tokens == 500

    def test_the_pool_is_the_one_of_the_log(self) -> None:
        plain = deployment(read(*many()))
        assert (plain.arm, plain.endpoints, plain.prefill_endpoints) == (Arm.NONE, 2, 0)
        stored = tuple(candidate(address, stored=64) for address in ENDPOINTS)
        assert deployment(read((record("s", 0.0, 100, candidates=stored), None))).arm is Arm.STORE

    def test_what_cannot_be_played_is_counted(self) -> None:
        refused = record("r", 0.0, 100, verdict=Refusal(RefuseReason.OVERLOADED, ""))
        recording = read(*many(), (refused, None), (record("n", 0.0, 1, policy=""), None))
        recording.take(Logged(999, record("s0", 3000.0, 10**7), Routing()))
        halves(recording, deployment(recording), 10**6)
        assert (recording.refused, recording.without_policy, recording.too_long) == (1, 1, 1)

    def test_too_few_sessions_are_an_error(self) -> None:
        recording = read(*many(sessions=5))
        with pytest.raises(SpecError, match="5 sessions of the log can be played, and each half needs 8"):
            halves(recording, deployment(recording), 10**6)
        with pytest.raises(SpecError, match="no decision of a policy is in it"):
            deployment(Recording())


BEFORE = {session: [1.0 + session % 3, 2.0] for session in range(40)}


class TestChange:
    def test_a_change_of_every_session_is_sure(self) -> None:
        after = {s: [0.9 * v for v in values] for s, values in BEFORE.items()}
        found = change(BEFORE, after, mean)
        assert found.share == pytest.approx(-0.1)
        assert (found.low, found.high) == (pytest.approx(-0.1), pytest.approx(-0.1))

    def test_chance_is_not(self) -> None:
        after = {s: [v + (0.5 if s % 2 else -0.5) for v in values] for s, values in BEFORE.items()}
        found = change(BEFORE, after, mean)
        assert found.low < 0 < found.high

    @pytest.mark.parametrize(
        ("low", "high", "says"),
        [(-0.2, -0.05, "Fairly sure"), (-0.2, 0.05, "Not sure"), (0.02, 0.05, "Keep what you have")],
    )
    def test_what_an_interval_means_is_said(self, low: float, high: float, says: str) -> None:
        assert says in cli.verdict(Change(1.0, 1.0 + (low + high) / 2, low, high))


def test_it_finds_what_helps_and_says_how_sure_that_is(tmp_path: Path, capsys) -> None:
    """All sessions began at one of two endpoints, and none was ever hot."""
    report = tmp_path / "tuned.json"
    options = ["--parameters", "hotPendingTokens", "--trials", "6", "--seeds", "1", "--jobs", "1"]
    assert cli.main(["--log", written(tmp_path), *options, "--json", str(report)]) == 0
    said = capsys.readouterr()
    assert "48 turns of 16 sessions" in said.err
    assert "1/6: hotPendingTokens 1000000000" in said.err
    assert "log, prefill ends: p50 0.500 s" in said.out
    found = json.loads(report.read_bytes())
    assert found["now"] == {"hotPendingTokens": 10**9}
    assert found["schema"] == "perilune.tune/v1"
    assert len(found["tried"]) <= 6
    assert set(found["held_out"]) == {"TTFT mean", "TTFT p90", "E2E mean"}


def test_a_policy_of_a_package_is_tuned_too(tmp_path: Path, capsys) -> None:
    with installed(tmp_path, MINE):
        log = written(tmp_path, PolicyChoice(name="mine", outside={"mine": {"gainTokens": 0}}))
        assert cli.main(["--log", log, "--trials", "3", "--seeds", "1", "--jobs", "1"]) == 0
    said = capsys.readouterr()
    assert "searching gainTokens, longestGain of mine" in said.err
    assert "failed" not in said.out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--policy", "ears"], "Unknown policy 'ears', known are conductor"),
        (["--policy", "ear,sticky"], "ear,sticky: must be one policy - at `--policy`"),
        (["--policy", "sticky"], "sticky has no parameters to tune - at `--policy`"),
        (
            ["--parameters", "heat"],
            "ear has no parameter 'heat', known are hotPendingTokens, cooldown",
        ),
    ],
)
def test_what_is_wrong_with_a_call_is_said(tmp_path: Path, options: list[str], says: str, capsys) -> None:
    assert cli.main(["--log", written(tmp_path), *options]) == 2
    assert says in capsys.readouterr().err


def test_what_is_wrong_with_a_log_is_said(tmp_path: Path, capsys) -> None:
    assert cli.main(["--log", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl: No such file or directory" in capsys.readouterr().err
    assert cli.main(["--log", written(tmp_path, sessions=3)]) == 2
    assert "record for longer - at `--log`" in capsys.readouterr().err
