"""How tests are shared out among workers, seen from outside."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from second_chance import plain

HERE = Path(__file__).parent
CONFTEST = f"""
import sys
sys.path.insert(0, {str(HERE / "support")!r})
exec(open({str(HERE / "conftest.py")!r}).read())
"""
NOTES = """
import os, pathlib, pytest

@pytest.mark.parametrize("number", range(4))
@pytest.mark.xdist_group("{group}")
def test_it(number):
    with open(pathlib.Path(__file__).with_name("{group}"), "a") as file:
        print(os.environ["PYTEST_XDIST_WORKER"], file=file)
"""


def test_the_tests_of_a_group_run_on_one_worker_from_whichever_file(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    for number in range(6):
        (tmp_path / f"test_{number}.py").write_text(NOTES.format(group="ab"[number % 2]))
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup"]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p xdist.plugin"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    workers = [(tmp_path / group).read_text().split() for group in "ab"]
    assert [len(each) for each in workers] == [12, 12]
    assert [len(set(each)) for each in workers] == [1, 1]


@pytest.mark.parametrize(
    ("nodeid", "name"),
    [
        ("test_it.py::test_it", "test_it.py::test_it"),
        ("test_it.py::test_it@group", "test_it.py::test_it"),
        ("test_it.py::test_it[a@b]", "test_it.py::test_it[a@b]"),
        ("test_it.py::test_it[a@b]@group", "test_it.py::test_it[a@b]"),
    ],
)
def test_a_test_that_runs_alone_is_named_without_its_group(nodeid: str, name: str) -> None:
    assert plain(nodeid) == name
