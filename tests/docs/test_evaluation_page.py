"""docs/evaluation names the deployment of every figure, and the command that made it."""

import json
import re
from pathlib import Path
from statistics import median

import pytest
from document_tables import section

from perilune_lab.quantiles import mean
from perilune_lab.simulate import measure
from perilune_lab.simulate.deployment import Arm
from perilune_research.evaluation import page
from perilune_research.evaluation.plan import Section
from perilune_research.evaluation.rows import read
from perilune_research.evaluation.sections import SECTIONS
from perilune_research.evaluation.summaries import DOCUMENTS, TABLES, filled

FOLDER = Path(__file__).parents[2] / "docs" / "evaluation"
PAGE = (FOLDER / "README.md").read_text()
MADE = {path.stem: json.loads(path.read_text()) for path in FOLDER.glob("*.json")}
"""Data of the pages that a command made."""
MOST_BYTES = 150_000


def test_the_page_says_that_it_is_simulated_and_explains_every_arm():
    assert "Everything here is **simulated**" in PAGE
    assert {arm: f"| `{arm}` |" in PAGE for arm in Arm} == dict.fromkeys(Arm, True)


@pytest.mark.parametrize("name", MADE)
def test_a_made_page_names_its_command_has_little_data_and_is_linked(name: str):
    data = MADE[name]
    assert data["simulated"]
    assert f"`{data['command']}`" in (FOLDER / f"{name}.md").read_text()
    assert f"({name}.md)" in PAGE
    assert (FOLDER / f"{name}.json").stat().st_size < MOST_BYTES


def _without_intervals(page: str) -> str:
    """Return a page without its intervals, and the table that depends on them."""
    kept = re.sub(r"## Where another policy is ahead.*?(?=^## )", "", page, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r" \[[^\[\]]*–[^\[\]]*\]", "", kept)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_a_made_page_is_that_of_its_data(section: Section, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure, "RESAMPLES", 2)
    rows = read(FOLDER / f"{section.name}.json")
    made = page.text(section, rows)
    written = (FOLDER / f"{section.name}.md").read_text()
    assert _without_intervals(made) == _without_intervals(written)


def test_every_deployment_of_a_made_page_has_a_table_or_a_row():
    for name, data in MADE.items():
        page = (FOLDER / f"{name}.md").read_text()
        played = {(row["deployment"], row["load"]) for row in data["rows"]}
        missing = [key for key in played if f"## Deployment {key[0]} at {key[1]}\n" not in page]
        assert [key for key in missing if f"| {key[0]} | {key[1]} |" not in page] == []


DATA = MADE["deployments"]["rows"]


def figure(deployment: str, load: str, policy: str, path: str) -> float | None:
    """Return the mean of a figure over the seeds that the page names; None if it was not played."""
    wanted = (deployment, load, policy)
    found = [row for row in DATA if (row["deployment"], row["load"], row["policy"]) == wanted]
    assert all(row["seeds"][:3] == [1, 2, 3] for row in found)
    return mean(found[0][path][:3]) if found else None


def about(value: float) -> object:
    """Return what equals a number of three significant digits, made from the value before it was stored."""
    return pytest.approx(value, rel=6e-3)


def told(cell: str) -> object:
    """Return the number of a cell, or its text."""
    text = cell.replace(",", "").removesuffix(" %")
    return float(text) if re.fullmatch(r"[\d.]+", text) else text


@pytest.mark.parametrize(
    ("title", "sentence", "figures"),
    [
        pytest.param(
            "In short",
            "falls from {} s to {} s, at 1.25 R from {} s to {} s",
            [(arm, load, "perilune", "ttft_s.p90") for load in ("R", "1.25 R") for arm in ("none", "store")],
            id="a store",
        ),
        pytest.param(
            "In short",
            "at R by {} s to {} s for the next policy",
            [("none", "R", policy, "ttft_s.p90") for policy in ("perilune", "kv_linear")],
            id="the default",
        ),
        pytest.param(
            "Claims of others",
            "{} s at R, `sticky` with shared endpoints {} s; at R/2 {} s and {} s",
            [
                (*pair, "ttft_s.p50")
                for pair in (
                    ("split", "R", "least_loaded"),
                    ("none", "R", "sticky"),
                    ("split", "R/2", "least_loaded"),
                    ("none", "R/2", "sticky"),
                )
            ],
            id="separate prefill",
        ),
        pytest.param(
            "Claims of others",
            "| {} × at R, {} × at 1.25 R in `none` |",
            [("none", load, "lmetric", "wall_clock_factor") for load in ("R", "1.25 R")],
            id="the replay",
        ),
        pytest.param(
            "Claims of others",
            "{} against {} of `lmetric` at R/2, {} against {} at R",
            [("none", load, name, "interference") for load in ("R/2", "R") for name in ("sticky", "lmetric")],
            id="interference",
        ),
    ],
)
def test_a_sentence_has_the_figures_of_the_data(title: str, sentence: str, figures: list[tuple[str, ...]]):
    text = " ".join(section(PAGE, f"## {title}").split())
    found = re.search(re.escape(sentence).replace(r"\{\}", r"([\d.,]+)"), text)
    assert found, sentence
    assert [told(each) for each in found.groups()] == [about(figure(*each) or 0.0) for each in figures]


ADMISSION = {
    (row["deployment"], row["load"]): row
    for name in ("admission", "admission-elsewhere")
    for row in MADE[name]["rows"]
}
NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"]


@pytest.mark.parametrize(
    ("deployment", "sentence"),
    [
        (
            "none",
            r"the median at R is {} times .*?; the worst seed has {} times, and {} of 16 are more than 10 %",
        ),
        (
            "none-long",
            r"seed by seed {} times [^,]*, {} times in the worst seed, and more than 10 % worse in {} of",
        ),
    ],
)
def test_what_session_admission_costs_new_sessions_at_r_is_said_seed_by_seed(deployment: str, sentence: str):
    """Compared is TTFT p90, counted from a session's first request, with and without session admission."""
    pair = (ADMISSION[deployment, "R"]["ttft_s.p90"], ADMISSION[f"{deployment}-admission", "R"]["ttft_s.p90"])
    ratios = [with_it / without for without, with_it in zip(*pair, strict=True)]
    text = " ".join(section(PAGE, "## Session admission").split())
    found = re.search(sentence.replace("{}", r"([\d.]+|\w+)"), text)
    assert found
    middle, worst, worse = found.groups()
    assert (told(middle), told(worst)) == (about(median(ratios)), about(max(ratios)))
    assert worse == NUMBERS[sum(ratio > 1.1 for ratio in ratios)]


@pytest.mark.parametrize(
    ("deployment", "sentence"),
    [
        ("none", "the seeds do not decide that: of the means it is {} times in `none`"),
        ("none-four-gateways", "{} with four gateways"),
        ("handoff", "{} in `handoff`"),
        ("none-tenants", "{} with two tenants"),
    ],
)
def test_what_later_turns_wait_past_saturation_is_said_to_be_undecided(deployment: str, sentence: str):
    """Compared is TTFT p90 of the turns after a session's first one: at 1.6 R with it, and at R without."""
    path = "sessions.later_ttft_s.p90"
    past, at_r = ADMISSION[f"{deployment}-admission", "1.6 R"][path], ADMISSION[deployment, "R"][path]
    ratio, low, high = measure.ratio(past, at_r)
    assert low < 2.0 < high
    assert sum(one / other > 2.0 for one, other in zip(past, at_r, strict=True)) in (7, 8, 9)
    said = " ".join(section(PAGE, "## Session admission").split())
    assert sentence.format(f"{ratio:.2f} [{low:.2f}–{high:.2f}]") in said


SIXTEEN = {
    (name, row["deployment"], row["load"], row["policy"]): row
    for name in ("more-seeds", "held-back-seeds", "more-loads")
    for row in MADE[name]["rows"]
}


@pytest.mark.parametrize("rival", [key for key in SIXTEEN if key[-1] != "perilune"], ids=" ".join)
@pytest.mark.parametrize("path", ["ttft_s.p90", "e2e_s.p90"])
def test_no_rival_is_ahead_by_more_than_sixteen_seeds_tell(rival: tuple[str, ...], path: str):
    """No interval of the default's figure over the rival's lies above 1 as a whole."""
    ours, theirs = SIXTEEN[*rival[:-1], "perilune"][path], SIXTEEN[rival][path]
    assert len(ours) == 16
    _, low, _ = measure.ratio(ours, theirs)
    assert low <= 1.0


def test_the_pages_tables_are_those_of_the_data():
    assert filled(PAGE, FOLDER) == PAGE


def test_every_table_is_on_a_page():
    pages = "".join((FOLDER / name).read_text() for name in DOCUMENTS)
    assert [name for name in TABLES if f"<!-- {name} -->" not in pages] == []
