"""The evaluation: its plan is whole and names what exists; a tiny pool is played, kept, and told on pages."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from itertools import islice
from math import exp, inf
from pathlib import Path
from random import Random
from types import SimpleNamespace

import msgspec
import pytest
from rich.console import Console

from perilune_api.pool import Routing, SpecError
from perilune_gateway.policy import POLICIES
from perilune_lab.simulate import measure
from perilune_lab.simulate.deployment import Arm
from perilune_lab.simulate.faults import Faults
from perilune_lab.simulate.outcome import PlayedRequest, SimulatedOutcome
from perilune_lab.simulate.simulation import simulate
from perilune_lab.traces import agentic
from perilune_lab.traces.agentic import Agentic
from perilune_research.evaluation import capacity, carrying, cells, cli, metrics, page, plan, pools, traffic
from perilune_research.evaluation.capacity import Bounds
from perilune_research.evaluation.cells import Cell, Heat, heat
from perilune_research.evaluation.cost import cpu_s
from perilune_research.evaluation.plan import Play, Section, quick
from perilune_research.evaluation.pools import ARMS, POOLS
from perilune_research.evaluation.rows import Key, of_plan, planned, read
from perilune_research.evaluation.sections import SECTIONS
from perilune_research.evaluation.traffic import GREEDY, QUIET, varied
from perilune_research.kept import Kept
from perilune_research.sources import dependencies

FOLDER = Path(__file__).parents[2] / "docs" / "evaluation"
WRITTEN = {"README", "notes", "simulator"}
"""Pages that people write."""
WITHOUT_FIGURES = {"Question", "Deployment arms", "Not played", "Limits"}
"""Headings of the evaluation's page that tell no figures."""
BY_NAME = {section.name: section for section in SECTIONS}
TINY = Cell(policy="ear", rate=0.4, seed=1, endpoints=2, window_s=25.0, warmup_s=5.0)
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True, scope="module")
def coarse_intervals():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "RESAMPLES", 50)
        yield


# The plan


def _items(section: Section) -> list[Cell | capacity.Search]:
    return [item for each in planned(section) for item in each.items]


def _cells(section: Section) -> list[Cell]:
    return [each.cell if isinstance(each, capacity.Search) else each for each in _items(section)]


def test_every_page_that_a_command_makes_is_a_section():
    made = {path.stem for path in FOLDER.iterdir()} - WRITTEN
    assert made - BY_NAME.keys() == set()


def test_every_heading_that_tells_figures_has_a_section():
    headings = set(re.findall(r"^##+ (.+)$", (FOLDER / "README.md").read_text(), re.MULTILINE))
    told = {heading for section in SECTIONS for heading in section.told}
    assert headings - told - WITHOUT_FIGURES == set()


@pytest.mark.parametrize("section", SECTIONS, ids=BY_NAME)
def test_a_section_names_what_exists(section: Section):
    assert len(BY_NAME) == len(SECTIONS)
    assert not {*section.policies} - {*POLICIES}
    assert not {*section.pools} - POOLS.keys()
    assert section.told
    assert section.plays
    for play in section.plays:
        assert play.pools
        assert play.policies
        assert play.seeds
        assert play.loads or section.searched
    for load in section.loads:
        assert plan.rate(load) > 0


@pytest.mark.parametrize("section", SECTIONS, ids=BY_NAME)
def test_a_sections_deployments_are_pools_that_a_gateway_accepts(section: Section):
    for cell in {replace(each, seed=1, rate=1.0): each for each in _cells(section)}.values():
        assert cell.deployment.pool(cell.policy, cell.routing, cell.faults)


@pytest.mark.parametrize("section", SECTIONS, ids=BY_NAME)
def test_what_a_deployment_is_compared_with_is_played_beside_it(section: Section):
    if section.compared:
        against = {other for pool in section.pools if pool not in ARMS for other in POOLS[pool].against}
        assert against - {*section.pools} == set()


def test_no_two_deployments_are_the_same():
    """`split` hands KV over in any arm, so there is no second one with hand-offs."""
    assert len({str(pool.changes) for pool in POOLS.values()}) == len(POOLS)
    one, other = (
        replace(TINY, split=True, arm=arm).deployment.pool("perilune", Routing(), Faults())
        for arm in (Arm.NONE, Arm.HANDOFF)
    )
    assert one == other


def test_cells_that_sections_share_are_played_once():
    main, more = (set(_cells(BY_NAME[name])) for name in ("deployments", "more-seeds"))
    assert main & more
    assert {cell.seed for cell in main & more} == {1, 2, 3}


def test_engines_and_links_that_differ_from_the_belief_are_played_at_r():
    found = {cell.faults: cell.rate for cell in _cells(BY_NAME["beliefs"]) if cell.faults != Faults()}
    assert set(found.values()) == {1.0}
    assert len(found) == len(pools.FAULTS) + len(pools.LINKS)


def test_traces_are_files_of_the_folder_and_count_by_their_names():
    section = replace(BY_NAME["recorded"], traces=Path("/there"))
    cell = _cells(section)[0]
    assert cell.trace == "/there/mooncake_conversation.jsonl.gz"
    elsewhere = _cells(replace(section, traces=Path("/elsewhere")))[0]
    assert elsewhere.key == cell.key


def test_the_small_evaluation_takes_about_ten_minutes_of_two_processes():
    small = {item for section in SECTIONS for item in _items(quick(section))}
    assert 120 < sum(map(cpu_s, small)) < 900
    assert {section.name for section in map(quick, SECTIONS) if not _items(section)} == set()


def test_costs_grow_with_load_gateways_and_stores():
    cell = Cell(policy="perilune", rate=1.0, seed=1)
    assert cpu_s(cell) == pytest.approx(9.1, abs=0.1)
    costs = [
        cpu_s(replace(cell, **change))
        for change in ({"gateways": 4}, {"arm": Arm.STORE}, {"split": True}, {"rate": 1.6})
    ]
    assert all(cost > cpu_s(cell) for cost in costs)
    assert cpu_s(replace(cell, trace="a.jsonl", limit=1_000)) < cpu_s(replace(cell, trace="a.jsonl"))


# What a cell plays


def test_cells_that_play_the_same_traffic_are_batched():
    many = [replace(TINY, policy=policy, seed=seed) for policy in ("ear", "sticky") for seed in (1, 2)]
    assert [{cell.seed for cell in batch} for batch in cells.batches(many)] == [{1}, {2}]
    impatient = [TINY, replace(TINY, patience_s=60.0)]
    assert len(cells.batches(impatient)) == 2


def test_only_the_code_of_the_played_policy_counts():
    others = {f"perilune_gateway.policy.{name}" for name in POLICIES if name != "ear"}
    found = dependencies((*cells.COMPUTES, "perilune_gateway.policy.ear"), others)
    assert "perilune_gateway.policy.ear" in found
    assert "perilune_gateway.policy.sticky" not in found
    assert "perilune_gateway.policy.cost" in found
    assert cells.code("ear") != cells.code("sticky")


def test_only_the_parameters_that_vary_differ():
    assert varied(Agentic(), [("system_prompts", 0.7)]) == Agentic(system_prompts=2)
    assert varied(Agentic(), [("gap_scale", 1.3)]) == Agentic(gap_scale=1.3)
    mu, sigma = varied(Agentic(), [("answer", 1.3)]).answer
    assert exp(mu) == pytest.approx(1.3 * exp(Agentic().answer[0]))
    assert sigma == Agentic().answer[1]
    every = {varied(Agentic(), [(name, factor)]) for name in pools.VARIED for factor in pools.FACTORS}
    assert len(every - {Agentic()}) == 2 * len(pools.VARIED)


def test_the_smaller_tenant_sends_the_same_alone_and_beside_the_greedy_one():
    alone, both = (
        replace(TINY, tenants=who, rate=0.4, window_s=240.0).workload() for who in ((QUIET,), (QUIET, GREEDY))
    )
    quiet = [job for job in both.jobs if job.tenant == QUIET]
    assert [(job.name, job.start_s) for job in quiet] == [(job.name, job.start_s) for job in alone.jobs]
    greedy = [job for job in both.jobs if job.tenant == GREEDY]
    assert len(greedy) > 5 * len(quiet) > 0


def test_bodies_that_are_hard_to_guess_have_all_that_makes_them_so():
    plain = list(islice(agentic.sessions(Agentic(sessions_per_s=1.0), 3), 400))
    hard = traffic.hard_to_guess(plain, 3)
    assert hard == traffic.hard_to_guess(plain, 3)
    assert [session.start_s for session in hard] == sorted(session.start_s for session in hard)
    texts = [session.turns[0].session for session in hard]
    names = [session.session_id for session in hard]
    whole = [session for session in hard if "/" not in session.turns[0].session]
    assert len(whole) == 400
    assert 15 < 400 - len({session.session_id for session in whole}) < 60
    assert sum("/side" in text for text in texts) > 30
    assert sum("/agent" in text for text in texts) > 30
    assert all(
        name in {s.session_id for s in whole}
        for name, text in zip(names, texts, strict=True)
        if "/side" in text
    )
    assert any(s.key.endswith("/said") for each in whole for turn in each.turns for s in turn.prompt)


def test_deciding_twice_changes_nothing_and_leads_to_the_same_endpoint():
    cell = replace(TINY, policy="perilune", twice=True, window_s=600.0, warmup_s=60.0)
    workload = cell.workload()
    once = simulate(workload, cell.deployment, cell.policy, cell.routing, cell.faults, seed=1)
    ((_, result),) = cells.compute([cell])
    assert result.run == msgspec.structs.replace(measure.run(once, workload), per_endpoint=msgspec.UNSET)
    twice = result.twice
    assert twice.turns > 100
    assert 0 < twice.read < twice.turns
    assert twice.same_share >= 0.98


def waited(endpoint: int, submitted_s: float, first_token_s: float, tokens: int) -> PlayedRequest:
    request = PlayedRequest(SimpleNamespace(prompt_tokens=tokens, output_tokens=1), 0, submitted_s)
    request.endpoint, request.first_token_s = endpoint, first_token_s
    return request


def test_heat_is_what_waits_over_time():
    """The window is ten seconds. At the second endpoint 100 tokens wait for 4 s, and another 200 for the last
    two of these."""
    played = [waited(1, 10, 14, 100), waited(1, 12, 14, 200), waited(0, 20, 20, 5), waited(-1, 0, inf, 9)]
    outcome = SimulatedOutcome(policy="ear", deployment="", addresses=["a", "b"], requests=played)
    assert heat(outcome, 10.0, 250.0) == (
        Heat(pending_tokens=80.0, hot_share=0.2),
        Heat(pending_tokens=0.0, hot_share=0.0),
    )
    assert heat(outcome, 30.0, 250.0) == (Heat(pending_tokens=0.0, hot_share=0.0),) * 2


# Pages


BASE = replace(plan.BASE, endpoints=2, window_s=25.0, warmup_s=5.0)
SMALL = (
    Section(
        name="apart",
        title="a small pool",
        plays=(
            Play(("none", "store"), ("0.4",), ("perilune", "sticky"), (1, 2)),
            Play(("split",), ("0.4",), ("perilune",), (1,)),
        ),
        base=BASE,
        apart=True,
    ),
    Section(
        name="together",
        title="several pools",
        plays=(Play(("none", "none-never", "none-four-gateways"), ("0.4",), ("perilune", "sticky"), (1,)),),
        base=BASE,
        shown=(metrics.TTFT_P90, metrics.HOT, *metrics.HEAT),
    ),
    Section(
        name="paired",
        title="a deployment beside another, seed by seed",
        plays=(Play(("none", "none-admission"), ("0.4",), ("perilune",), (1, 2)),),
        base=BASE,
        shown=(metrics.SESSION_P90,),
        compared=(),
        paired=(metrics.OUTPUT, metrics.SESSION_P99),
    ),
    Section(
        name="searched",
        title="capacity",
        plays=(Play(("none",), (), ("perilune", "sticky"), (1,)),),
        base=BASE,
        searched=True,
    ),
)


def play(folder: Path, *words: str, sections: Sequence[Section] = SMALL) -> str:
    """Return what the command says."""
    options = cli.parse(["--jobs", "1", "--out", str(folder), "--work", str(folder), *words])
    said = Console(file=StringIO(), width=200)
    cli.run(replace(options, sections=tuple(sections)), said)
    return said.file.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation")
    assert "apart: 9 to play" in play(folder)
    return folder


def test_every_section_is_a_page_with_its_data(folder: Path):
    for section in SMALL:
        text = (folder / f"{section.name}.md").read_text()
        data = json.loads((folder / f"{section.name}.json").read_text())
        assert text.startswith(f"# Evaluation: {section.title}\n")
        assert "**simulated**" in text
        assert f"`{data['command']}` makes this page" in text
        assert {row["deployment"] for row in data["rows"]} == {*section.pools}
        assert all(f"`{pool}`" in text for pool in section.pools)


def test_a_section_with_tables_apart_has_one_for_each_deployment(folder: Path):
    text = (folder / "apart.md").read_text()
    assert all(f"## Deployment {pool} at 0.4\n" in text for pool in ("none", "store", "split"))
    assert "## Against the goals, perilune" in text
    assert "of `none`" in text
    rows = json.loads((folder / "apart.json").read_text())["rows"]
    assert {(row["deployment"], row["policy"]): row["seeds"] for row in rows} == {
        ("none", "perilune"): [1, 2],
        ("none", "sticky"): [1, 2],
        ("store", "perilune"): [1, 2],
        ("store", "sticky"): [1, 2],
        ("split", "perilune"): [1],
    }
    assert all(len(row["apc"]) == len(row["seeds"]) for row in rows)


def test_other_sections_have_one_table_of_what_is_played(folder: Path):
    text = (folder / "together.md").read_text()
    assert len(re.findall(r"^\| none-never \| 0.4 \| (?:perilune|sticky) \| 1 \| ", text, re.MULTILINE)) == 2
    assert "hottest: pending tokens" in text
    assert "coolest" not in text, "two endpoints have no eighth"


def test_deployments_are_compared_seed_by_seed(folder: Path):
    """No session of so small a load is refused, so admission changes nothing."""
    text = (folder / "paired.md").read_text()
    assert "| none-admission | 0.4 | none | perilune | 1, worst 1 | 1, worst 1 |" in text


def turn(
    session: int, number: int, submitted_s: float, finished_s: float, lost: bool = False
) -> PlayedRequest:
    task = SimpleNamespace(
        session=session, number=number, ideal_at_s=submitted_s, prompt_tokens=1, output_tokens=1
    )
    played = PlayedRequest(task, 0, submitted_s)
    played.finished_s, played.rejected = finished_s, lost
    return played


def test_a_session_that_was_lost_never_ends():
    came_before = [turn(0, 0, 1, 2), turn(0, 1, 12, 13)]
    whole, lost = [turn(1, 1, 15, 19), turn(1, 0, 11, 14)], [turn(2, 0, 12, 30, lost=True)]
    assert cells.sessions_s([*came_before, *whole, *lost], 10.0) == [8.0, inf]


def test_a_figure_that_is_never_reached_is_told_so():
    assert page.estimate([1.0, inf], metrics.SESSION_P90.form) == "never"
    never, finite = (1.0, 2.0, inf), (2.0, 2.0, 4.0)
    assert page.seed_by_seed(never, finite, metrics.SESSION_P90) == "1 [0.5–never], worst never"
    assert page.seed_by_seed(finite, never, metrics.SESSION_P90) == "1 [0–2], worst 2"
    assert page.seed_by_seed((inf, 1.0), (inf, 2.0), metrics.OUTPUT) == "0.75 [0.5–1], worst 0.5"


def test_a_capacity_is_found_for_each_policy(folder: Path):
    text = (folder / "searched.md").read_text()
    assert "## Deployment none at capacity" in text
    assert "| sticky | 1 |" in text


def test_a_policy_that_serves_no_rate_in_time_has_no_capacity():
    (shown,) = capacity.tables({"none": {"perilune": {1: 1.0, 2: 2.0}, "sticky": {1: 0.0, 2: 0.5}}})
    assert shown.rows[1][2:6] == ("none, 0.5", "0.25", "∞, 4", "6")


def test_rows_of_todays_code_are_not_played_again(folder: Path, tmp_path: Path):
    """Nothing that an earlier call has kept is at hand."""
    pages = {path: path.read_bytes() for path in folder.glob("*.md")}
    said = play(folder, "--work", str(tmp_path))
    assert all(f"{section.name}: 0 to play" in said for section in SMALL)
    assert {path: path.read_bytes() for path in folder.glob("*.md")} == pages


def test_what_was_played_is_kept(folder: Path, tmp_path: Path):
    said = play(folder, "--out", str(tmp_path))
    assert all(f"{section.name}: 0 to play" in said for section in SMALL)
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{section.name}.{end}" for section in SMALL for end in ("md", "json")
    }


def by_other_code(data: dict[str, list[dict[str, object]]], policy: str, **figures: object) -> bytes:
    """Return a section's data in which one policy's rows were played by other code, with other figures."""
    rows = [{**row, "code": "other", **figures} if row["policy"] == policy else row for row in data["rows"]]
    return json.dumps(data | {"rows": rows}).encode()


def test_only_rows_of_other_code_are_played_again(folder: Path, tmp_path: Path):
    data = json.loads((folder / "apart.json").read_text())
    (tmp_path / "apart.json").write_bytes(by_other_code(data, "sticky", apc=[9.0, 9.0]))
    section = SMALL[0]
    assert "apart: 4 to play" in play(tmp_path, "--estimate", sections=[section])
    said = play(tmp_path, "--deployments", "store", sections=[section])
    assert "apart: 2 to play" in said
    assert "apart.md, 1 of its 5 rows played by other code" in said
    rows = read(tmp_path / "apart.json")
    assert rows[Key("none", "0.4", "sticky")]["apc"] == [9.0, 9.0]
    played, again = (each[Key("store", "0.4", "sticky")] for each in (read(folder / "apart.json"), rows))
    assert again["apc"] == played["apc"] != [9.0, 9.0]


def carry(folder: Path, words: Sequence[str] = ()) -> tuple[int, str]:
    """Carry the rows of the first section over, and return the exit status and what was said."""
    options = cli.parse(["--carry", "9", "--jobs", "1", "--out", str(folder), "--work", str(folder), *words])
    said = Console(file=StringIO(), width=200)
    status = cli.run(replace(options, sections=SMALL[:1]), said)
    return status, said.file.getvalue()


def test_rows_whose_sample_is_the_same_are_carried_over(folder: Path, tmp_path: Path):
    data = json.loads((folder / "apart.json").read_text())
    (tmp_path / "apart.json").write_bytes(by_other_code(data, "sticky"))
    status, said = carry(tmp_path)
    assert (status, said.count(": the same")) == (0, 2)
    assert "apart: 2 rows are of today's code" in said
    assert json.loads((tmp_path / "apart.json").read_text()) == data
    assert (tmp_path / "apart.md").read_bytes() == (folder / "apart.md").read_bytes()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "2 of 2 were played, and 2 have changed"),
        (("--minutes", "1e-9"), "0 of 2 were played, and 0 have changed"),
    ],
    ids=["another figure", "no time"],
)
def test_no_row_is_carried_over_if_one_is_not_the_same(
    folder: Path, tmp_path: Path, words: tuple[str, ...], why: str
):
    was = by_other_code(json.loads((folder / "apart.json").read_text()), "sticky", apc=[9.0, 9.0])
    (tmp_path / "apart.json").write_bytes(was)
    status, said = carry(tmp_path, words)
    assert status == 1
    assert why in said
    assert "nothing is carried over" in said
    assert (tmp_path / "apart.json").read_bytes() == was


def test_a_row_that_is_not_there_or_lacks_a_figure_is_not_carried_over(folder: Path):
    section, rows = SMALL[0], read(folder / "apart.json")
    plan = planned(section)
    del rows[plan[0].key]
    rows[plan[1].key] = {name: each for name, each in rows[plan[1].key].items() if name != "apc"}
    assert [each.plan for each in carrying.carryable(section, plan, rows)] == plan[2:]


def test_what_can_be_carried_over_is_sampled_with_each_policy(folder: Path):
    section, rows = SMALL[0], read(folder / "apart.json")
    every = carrying.carryable(section, planned(section), rows)
    for seed in range(8):
        some = carrying.sample(every, Random(seed), 2)
        assert {one.of.plan.key.policy for one in some} == {"perilune", "sticky"}
    assert len(carrying.sample(every, Random(0), 9)) == 5


def test_a_capacity_that_has_changed_is_not_carried_over(folder: Path):
    section, rows = SMALL[-1], read(folder / "searched.json")
    (first, *_) = carrying.carryable(section, planned(section), rows)
    (capacity_of_it,) = first.row["sessions_per_s"]
    one = carrying.Sampled(first, 0)
    same, other = (Bounds(low=rate, high=rate, cpu_s=1.0) for rate in (capacity_of_it, 2 * capacity_of_it))
    assert carrying.different(one, same) == []
    assert carrying.different(one, other) == [
        f"sessions_per_s is {2 * capacity_of_it:.4g}, was {capacity_of_it:g}"
    ]


def test_a_row_of_other_simulations_is_none_of_the_section(folder: Path):
    rows = read(folder / "apart.json")
    assert len(of_plan(planned(SMALL[0]), rows)) == 5
    more = replace(SMALL[0], plays=(Play(("none",), ("0.4",), ("perilune", "sticky"), (1, 2, 3)),))
    assert of_plan(planned(more), rows) == {}
    other = replace(SMALL[0], base=replace(BASE, window_s=26.0))
    assert of_plan(planned(other), rows) == {}


def test_a_row_without_a_figure_of_the_section_is_outdated(folder: Path):
    rows = read(folder / "apart.json")
    assert not any(each.is_outdated(rows[each.key]) for each in planned(SMALL[0]))
    more = replace(SMALL[0], shown=(*metrics.MAIN, metrics.LOST))
    assert all(each.is_outdated(rows[each.key]) for each in planned(more))


def test_rows_that_are_not_planned_any_more_are_left_out(folder: Path, tmp_path: Path):
    for name in ("searched.json", "apart.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    fewer = replace(SMALL[-1], plays=(Play(("none",), (), ("perilune",), (1,)),))
    play(tmp_path, "--pages", sections=[fewer])
    assert [key.policy for key in read(tmp_path / "searched.json")] == ["perilune"]
    assert "sticky" not in (tmp_path / "searched.md").read_text()


@pytest.mark.parametrize(
    "content", [b"", b'{"schema":"perilune.evaluation/v1","rows":[]}', b"[]"], ids=["cut", "older", "other"]
)
def test_a_file_that_is_no_data_of_a_section_is_named(tmp_path: Path, content: bytes):
    (tmp_path / "apart.json").write_bytes(content)
    with pytest.raises(SpecError, match=r"apart.json is no data of a section"):
        play(tmp_path, "--pages", sections=SMALL[:1])


def test_pages_are_made_of_data_alone(folder: Path, tmp_path: Path):
    for section in SMALL:
        (tmp_path / f"{section.name}.json").write_bytes((folder / f"{section.name}.json").read_bytes())
    play(tmp_path, "--pages")
    for section in SMALL:
        assert (tmp_path / f"{section.name}.md").read_bytes() == (folder / f"{section.name}.md").read_bytes()


def test_without_data_there_is_nothing_to_make_pages_of(tmp_path: Path):
    assert "apart: nothing of it was played" in play(tmp_path, "--pages")
    assert not [*tmp_path.glob("*.md")]


def test_policies_are_compared_in_the_seeds_that_both_have(folder: Path):
    section, rows = SMALL[0], read(folder / "apart.json")
    key = Key("none", "0.4", "sticky")
    rows[key] = {**rows[key], "seeds": [1], "ttft_s.p90": rows[key]["ttft_s.p90"][:1]}
    found = page.Found(section, rows)
    ratio, low, high = found.quotient("0.4", ("none", "sticky"), ("none", "perilune"), metrics.TTFT_P90)
    assert low == ratio == high


def test_a_section_that_is_not_complete_writes_no_page(tmp_path: Path):
    said = play(tmp_path, "--minutes", "1e-9", sections=SMALL[:1])
    assert "apart: 5 rows are missing, so it is not written" in said
    assert not [*tmp_path.glob("*.md")]


def test_an_estimate_plays_nothing(tmp_path: Path):
    said = play(tmp_path, "--estimate")
    assert "in all about" in said
    assert not [*tmp_path.glob("*")]


def test_what_only_one_call_can_do_is_refused_together():
    with pytest.raises(SystemExit):
        cli.parse(["--carry", "9", "--pages"])


def test_a_part_is_played_into_an_empty_folder(tmp_path: Path):
    said = play(tmp_path, "--deployments", "split", sections=SMALL[:1])
    assert "apart.md, 4 of its 5 rows played by other code or not at all" in said
    assert [key.deployment for key in read(tmp_path / "apart.json")] == ["split"]


def test_recorded_traffic_that_is_not_there_is_left_out(tmp_path: Path):
    words, recorded = ("--traces", str(tmp_path)), [BY_NAME["recorded"]]
    assert "recorded is left out" in play(tmp_path, "--estimate", *words, sections=recorded)
    assert "left out" not in play(tmp_path, "--pages", *words, sections=recorded)


def test_the_small_evaluation_leaves_the_pages_of_docs_alone():
    assert cli.parse(["--quick"]).out != cli.parse([]).out == Path("docs/evaluation")
    assert all(section.small for section in cli.parse(["--quick"]).sections)


def test_a_pattern_that_fits_no_deployment_is_named():
    assert cli.parse(["--deployments", "split*,none"]).deployments == ("split*", "none")
    with pytest.raises(SpecError, match="'moon' fits no deployment"):
        cli.parse(["--deployments", "moon"])


def test_seeds_are_told_as_spans():
    assert page.spans([1, 2, 3, 7, 1001, 1002]) == "1–3, 7, 1001–1002"


def test_an_unknown_section_is_named():
    with pytest.raises(SpecError, match="unknown 'moon', known are"):
        cli.parse(["--sections", "moon"])


# Results that are kept


class Square(msgspec.Struct, frozen=True):
    value: int


class Number(int):
    @property
    def key(self) -> str:
        return str(int(self))


def squares(batch: Sequence[Number]) -> list[tuple[Number, Square]]:
    return [(n, Square(n * n)) for n in batch]


def test_no_batch_begins_after_the_time_is_up(tmp_path: Path):
    path, numbers = tmp_path / "squares.jsonl", [Number(n) for n in range(4)]

    def split(these: Sequence[Number]) -> list[list[Number]]:
        return [[n] for n in these]

    late = Kept(path, 1, until=0.0)
    assert late.results(numbers, split, squares, Square, "squares") == {}
    found = Kept(path, 1).results(numbers[:2], split, squares, Square, "squares")
    assert {int(n): square.value for n, square in found.items()} == {0: 0, 1: 1}
    late = Kept(path, 1, until=0.0)
    assert {int(n) for n in late.results(numbers, split, squares, Square, "squares")} == {0, 1}
