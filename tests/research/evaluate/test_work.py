"""Simulations are kept: computed once, found again, cut lines dropped."""

from pathlib import Path

import pytest

from perilune_research import sources
from perilune_research.evaluate import work as module
from perilune_research.evaluate.cells import Cell, Profile, Scenario
from perilune_research.evaluate.search import Search
from perilune_research.evaluate.work import Work
from perilune_research.kept import Progress

TINY = Scenario(rate=0.4, endpoints=2, window_s=60.0, warmup_s=10.0)
CELLS = [Cell(TINY, Profile(policy), seed) for policy in ("ear", "round_robin") for seed in (1, 2)]


def test_a_second_call_finds_what_the_first_computed(tmp_path: Path):
    first = Work(tmp_path, 1)
    results = first.results(CELLS)
    assert first.computed == 4
    second = Work(tmp_path, 1)
    assert second.results(CELLS) == results
    assert second.computed == 0


def test_an_interrupted_call_goes_on_where_it_was(tmp_path: Path):
    def interrupt(p: Progress) -> None:
        if p.done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Work(tmp_path, 1, interrupt).results(CELLS)
    after = Work(tmp_path, 1)
    after.results(CELLS)
    assert after.computed == 2  # the first seed's two policies were kept


def test_a_line_that_was_cut_short_is_dropped(tmp_path: Path):
    first = Work(tmp_path, 1)
    results = first.results(CELLS)
    content = first.path.read_bytes()
    first.path.write_bytes(content[:-40])
    second = Work(tmp_path, 1)
    again = second.results(CELLS)
    assert second.computed == 1
    assert {c: r.run for c, r in again.items()} == {c: r.run for c, r in results.items()}


@pytest.mark.parametrize(
    "rest", [b'{"key": "a', b'{"key": "a\n', b"\0\n"], ids=["cut", "cut, then more", "zeros"]
)
def test_what_is_no_line_is_dropped(rest: bytes, tmp_path: Path):
    first = Work(tmp_path, 1)
    first.results(CELLS[:1])
    with first.path.open("ab") as file:
        file.write(rest)
    second = Work(tmp_path, 1)
    results = second.results(CELLS)
    assert second.computed == 3
    third = Work(tmp_path, 1)
    assert third.results(CELLS) == results
    assert third.computed == 0


def test_processes_give_what_one_gives(tmp_path: Path):
    alone = Work(tmp_path / "one", 1).results(CELLS)
    both = Work(tmp_path / "two", 2).results(CELLS)
    assert {c: (r.run, r.extra) for c, r in both.items()} == {c: (r.run, r.extra) for c, r in alone.items()}


def test_other_code_has_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before = Work(tmp_path, 1).path
    assert Work(tmp_path, 1).path == before
    code = sources.dependencies(module.COMPUTES)
    changed = {**code, "perilune_gateway.policy.ear": b"other"}
    monkeypatch.setattr(sources, "dependencies", lambda modules, leave_out: changed)
    module.fingerprint.cache_clear()
    assert Work(tmp_path, 1).path != before
    module.fingerprint.cache_clear()


def test_capacities_are_kept_too(tmp_path: Path):
    search = Search(TINY, Profile("round_robin"), 1)
    first = Work(tmp_path, 1)
    found = first.found([search])
    second = Work(tmp_path, 1)
    assert second.found([search]) == found
    assert (first.computed, second.computed) == (1, 0)


def test_progress_counts_every_cell(tmp_path: Path):
    seen: list[Progress] = []
    Work(tmp_path, 1, seen.append).results(CELLS, "cells")
    assert seen == [Progress(0, 4, "cells"), Progress(2, 4, "cells"), Progress(4, 4, "cells")]


def test_progress_tells_what_an_earlier_call_has_kept(tmp_path: Path):
    Work(tmp_path, 1).results(CELLS[:1])
    seen: list[Progress] = []
    Work(tmp_path, 1, seen.append).results(CELLS)
    assert seen[0] == Progress(0, 3, "cells", kept=1)
