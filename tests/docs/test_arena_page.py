"""The arena's section of docs/benchmarks.md is made of docs/arena.json, and says why Perilune loses."""

from document_tables import DOCS

from perilune_research.arena import kept, table
from perilune_research.arena.contestants import CONTESTANTS
from perilune_research.arena.page import notes, place, section

ROWS = kept.read(DOCS / "arena.json")
NOTES = notes()


def test_the_page_shows_what_the_file_has():
    assert place(DOCS / "benchmarks.md")[1] == section(ROWS, NOTES)


def test_every_load_that_perilune_loses_has_a_reason_and_no_reason_is_stale():
    """The cure: an entry in notes.toml for each such load, and none for others."""
    assert {reason.group for reason in NOTES.lost} == set(table.lost(ROWS))
    assert len({reason.group for reason in NOTES.lost}) == len(NOTES.lost)


def test_every_router_by_url_is_described():
    played = {row.router for row in ROWS}
    assert set(NOTES.by_url) == played - {contestant.name for contestant in CONTESTANTS}


def test_the_file_has_one_row_for_each_cell_of_the_frozen_setting():
    assert len({row.key for row in ROWS}) == len(ROWS)
    assert {(row.engines, row.seconds, row.client) for row in ROWS} <= {(8, 20.0, "lab")}
