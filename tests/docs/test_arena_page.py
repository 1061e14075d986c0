"""The arena's section of docs/benchmarks.md is made of docs/arena.json and docs/arena-aiperf.json, says why
Perilune loses, and tells the frozen setting as it is."""

from document_tables import DOCS, page, rows, section

from perilune_research.arena import kept, table
from perilune_research.arena.contestants import AIPERF, CONTESTANTS, DYNAMO, SGLANG, SMG, VLLM
from perilune_research.arena.loads import (
    LEVELS,
    NOISE,
    RECORDED_SCALE,
    RECORDED_WINDOW_S,
    SLOWDOWNS,
    SLOWED,
    Client,
    Halfway,
    Setting,
    engine_options,
    recorded_speed,
    sessions,
)
from perilune_research.arena.noise import NOISY
from perilune_research.arena.page import notes, place
from perilune_research.arena.page import section as generated
from perilune_research.arena.play import FAILED_S

FILE = DOCS / "arena.json"
ROWS = kept.read(FILE)
BY_AIPERF = kept.read(kept.file(FILE, Client.AIPERF))
NOTES = notes()
SETTING = Setting()
ABOUT = section(page("benchmarks.md"), "## Arena of routers")
LOADS = rows(section(ABOUT, "### How it is measured"), "load")
WORDS = " ".join(ABOUT.split())


def test_the_page_shows_what_the_files_have():
    assert place(DOCS / "benchmarks.md")[1] == generated(ROWS, NOTES, BY_AIPERF)


def test_every_load_that_perilune_loses_has_a_reason_and_no_reason_is_stale():
    """The cure: an entry in notes.toml for each such load, and none for others."""
    assert {reason.group for reason in NOTES.lost} == table.lost(ROWS).keys()
    assert len({reason.group for reason in NOTES.lost}) == len(NOTES.lost)
    assert all(reason.why.strip() and reason.changed.strip() for reason in NOTES.lost)


def test_every_router_by_url_is_described():
    played = {row.router for row in (*ROWS, *BY_AIPERF)}
    assert set(NOTES.by_url) == played - {contestant.name for contestant in CONTESTANTS}


def test_a_file_has_one_row_for_each_cell_of_the_frozen_setting():
    for client, kept_rows in ((Client.LAB, ROWS), (Client.AIPERF, BY_AIPERF)):
        assert len({row.key for row in kept_rows}) == len(kept_rows)
        assert {(row.engines, row.seconds, row.client) for row in kept_rows} <= {(8, 20.0, client)}


def test_engines_are_as_the_page_says():
    *first, last = (f"{slowdown:g}" for slowdown in SLOWDOWNS)
    assert f"in turn {', '.join(first)} and {last} times as slow" in WORDS
    assert f"by a standard deviation of {NOISE:g})" in WORDS
    assert f"a KV pool of {engine_options(SETTING).kv_tokens:,} tokens" in WORDS
    assert f"contexts ({engine_options(SETTING).context_tokens:,} tokens)" in WORDS
    assert (SETTING.engines, SETTING.seconds) == (8, 20.0)
    assert "**Engines.** Eight," in WORDS
    assert "new sessions begin for 20 s" in WORDS


def test_loads_are_as_the_page_says():
    told = {name: (float(rate), what) for name, rate, what, *_ in LOADS}
    assert told == {
        level.name: (level.sessions_per_s, HALFWAY[level.halfway]) for level in GENERATED.values()
    }


GENERATED = {level.name: level for level in LEVELS if not level.recorded}
HALFWAY = {
    None: "",
    Halfway.SLOW_ENGINE: f"an engine of the fastest kind becomes {SLOWED:g} times slower",
    Halfway.RESTART: "the router ends and starts again",
}


def test_the_traffic_of_the_first_seed_is_as_the_page_says():
    told = {name: (int(begun), int(turns)) for name, _, _, begun, turns, *_ in LOADS}
    for name, level in GENERATED.items():
        played = sessions(SETTING, level, 0)
        assert told[name] == (len(played), sum(len(session.turns) for session in played))


def test_recorded_traffic_is_as_the_page_says():
    speed = recorded_speed(SETTING.engines)
    assert f"Eight engines get it {speed:g} times as fast as recorded" in WORDS
    assert RECORDED_SCALE == 4
    assert "with prompts and answers a quarter as long" in WORDS
    assert f"plays {SETTING.seconds * speed:g} s of the recording" in WORDS
    assert f"begin {RECORDED_WINDOW_S:g} s later" in WORDS


def test_limits_and_versions_are_as_the_page_says():
    assert f"{NOISY * 100:g} % of the CPUs" in WORDS
    assert f"the worst latency, {FAILED_S:g} s" in WORDS
    assert all(str(package) in WORDS for package in (SGLANG, VLLM, SMG))
    assert f"Dynamo {DYNAMO.version} " in WORDS
    assert f"AIPerf {AIPERF.version} " in WORDS
