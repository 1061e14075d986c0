"""What the results of an evaluation depend on: found in the sources, held against what really runs."""

import gc
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FrameType

import pytest

from perilune_api.pool import MoveTrigger
from perilune_gateway.policy import POLICIES
from perilune_gateway.routing.pull import ANSWER_S
from perilune_lab.simulate.deployment import Arm
from perilune_research.evaluation.cells import COMPUTES, Cell, compute
from perilune_research.evaluation.traffic import GREEDY, QUIET
from perilune_research.sources import ONLY_SHOWN, OURS, dependencies

SMALL = Cell(policy="perilune", rate=0.4, seed=1, endpoints=2, window_s=25.0, warmup_s=5.0)


@cache
def found() -> Mapping[str, bytes]:
    return dependencies(COMPUTES)


def names_of(path: str) -> str:
    """Return the module name of a source file of ours."""
    parts = Path(path).with_suffix("").parts
    at = max(i for i, part in enumerate(parts) if part.startswith(OURS))
    return ".".join(part for part in parts[at:] if part != "__init__")


def test_every_file_that_runs_is_one_that_results_depend_on():
    ran: set[str] = set()

    def see(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            ran.add(frame.f_code.co_filename)

    gc.collect()  # what other tests have left must not run meanwhile
    before = sys.getprofile()
    sys.setprofile(see)
    try:
        compute([replace(SMALL, policy=policy) for policy in POLICIES])
        compute([replace(SMALL, arm=arm, triggers=tuple(MoveTrigger)) for arm in Arm])
        compute([replace(SMALL, split=True)])
        compute([replace(SMALL, twice=True)])
        compute([replace(SMALL, tenants=(QUIET, GREEDY), traffic=(("answer", 0.7),))])
    finally:
        sys.setprofile(before)
    ours = {names_of(path) for path in ran if f"/{OURS}" in path and path.endswith(".py")}
    assert len(ours) > 40
    assert ours <= found().keys()


@pytest.mark.parametrize(
    "name",
    [
        "perilune_api.pool",
        "perilune_gateway.policy.others.near_cache",
        "perilune_gateway.moves.handoff",
        "perilune_lab.report",
        "perilune_lab.simulate.engine",
    ],
)
def test_a_module_is_its_bytes(name: str):
    assert found()[name] == Path(str(import_module(name).__file__)).read_bytes()


def test_a_constant_is_its_value():
    assert found()["perilune_gateway.routing.pull.ANSWER_S"] == repr(ANSWER_S).encode()


def test_what_only_shows_does_not_count():
    assert not found().keys() & {
        *ONLY_SHOWN,
        "perilune_lab.simulate.tables",
        "perilune_research.evaluation.page",
    }


def test_imports_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "perilune_made_up"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text(
        "from __future__ import annotations\n"
        "import json\n"
        "from typing import TYPE_CHECKING\n"
        "from perilune_made_up import b\n"
        "from perilune_made_up.c import LIMIT\n"
        "if TYPE_CHECKING:\n    from perilune_made_up.never import X\n"
        "def f():\n    import perilune_made_up.d\n    from perilune_made_up.e import g\n"
    )
    for name in "bcde":
        (package / f"{name}.py").write_text("LIMIT = 7\ndef g(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert list(dependencies(["perilune_made_up.a"])) == [
        "perilune_made_up",
        "perilune_made_up.a",
        "perilune_made_up.b",
        "perilune_made_up.c.LIMIT",
        "perilune_made_up.d",
        "perilune_made_up.e",
    ]
