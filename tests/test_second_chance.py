"""A run that lets failed tests with real processes run once more, seen from outside."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG

SUPPORT = Path(__file__).parent / "support"
CONFTEST = f"""
import os, sys
sys.path.insert(0, {str(SUPPORT)!r})
from second_chance import SecondChance, run_alone

def told(config, nodeid):
    return os.environ["ALONE"] == "passes"

def pytest_addoption(parser):
    parser.addoption("--second-chance", action="store_true")

def pytest_configure(config):
    if config.option.second_chance:
        config.pluginmanager.register(SecondChance(told if "ALONE" in os.environ else run_alone))
"""
FAILS_ONCE = """
import pathlib
import pytest

@pytest.mark.parametrize("number", range({many}))
def test_fails_once(number):
    seen = pathlib.Path(__file__).with_suffix(f".{{number}}")
    if not seen.exists():
        seen.touch()
        raise ValueError("the first time")
"""
FAILS_ALWAYS = "def test_fails_always():\n    raise ValueError('every time')\n"


def run(folder: Path, files: dict[str, str], **env: str) -> tuple[int, str]:
    """Run pytest, and return the exit status and the output. `ALONE`: what comes of tests that run
    alone, which then do not run."""
    for name, text in {
        "tests/conftest.py": CONFTEST,
        "pytest.ini": "[pytest]\naddopts = --import-mode=importlib\n",
        **files,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "--second-chance", "tests"]
    # `-n 0` of the run alone needs xdist; other plugins would only take time
    env |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p xdist.plugin"}
    done = subprocess.run(
        command, cwd=folder, env=os.environ | env, capture_output=True, text=True, timeout=HANG, check=False
    )
    return done.returncode, done.stdout


def test_a_test_with_processes_that_passes_alone_is_named_and_passes_the_run(tmp_path: Path) -> None:
    status, said = run(tmp_path, {"tests/integration/test_it.py": FAILS_ONCE.format(many=1)})
    assert status == 0, said
    assert "ValueError: the first time" in said, "how it failed is not lost"
    last = said.strip().splitlines()[-2:]
    assert last[0].startswith("FLAKY tests/integration/test_it.py::test_fails_once")
    assert last[1].startswith("1 flaky")


@pytest.mark.parametrize(
    ("files", "alone", "words"),
    [
        pytest.param(
            {"tests/integration/test_it.py": FAILS_ALWAYS},
            "fails",
            "1 failed",
            marks=pytest.mark.heavy,
            id="it fails alone, too",
        ),
        pytest.param(
            {"tests/unit/test_it.py": FAILS_ONCE.format(many=1)}, "passes", "1 failed", id="a unit test"
        ),
        pytest.param(
            {
                "tests/unit/test_it.py": FAILS_ALWAYS,
                "tests/integration/test_it.py": FAILS_ONCE.format(many=1),
            },
            "passes",
            "2 failed",
            marks=pytest.mark.heavy,
            id="beside a unit test",
        ),
        pytest.param(
            {"tests/integration/test_it.py": FAILS_ONCE.format(many=3)},
            "passes",
            "3 flaky",
            id="more than two",
        ),
        pytest.param(
            {"tests/integration/test_it.py": FAILS_ONCE.format(many=7)},
            "passes",
            "7 failed",
            marks=pytest.mark.heavy,
            id="far too many",
        ),
    ],
)
def test_a_run_fails_all_the_same(tmp_path: Path, files: dict[str, str], alone: str, words: str) -> None:
    status, said = run(tmp_path, files, ALONE=alone)
    assert status == 1, said
    assert words in said.strip().splitlines()[-1]
