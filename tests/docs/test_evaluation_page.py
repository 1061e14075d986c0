"""docs/evaluation names the deployment of every figure, and the command that made it."""

import json
import re
from pathlib import Path
from statistics import geometric_mean, median

import pytest
from document_tables import rows, section

from perilune_lab.quantiles import mean
from perilune_lab.simulate.deployment import Arm

FOLDER = Path(__file__).parents[2] / "docs" / "evaluation"
PAGE = (FOLDER / "README.md").read_text()
MADE = {path.stem: json.loads(path.read_text()) for path in FOLDER.glob("*.json")}
"""Data of the pages that a command made."""
MOST_BYTES = 100_000


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


def expected(arm: str, policy: str) -> list[object]:
    """Return the row that the page's table of that arm must have."""
    found = [
        *(figure(arm, load, policy, "ttft_s.p90") for load in ("R/2", "R", "1.25 R")),
        figure(arm, "R", policy, "e2e_s.p90"),
        1e3 * (figure(arm, "R", policy, "tpot_s.p99") or 0.0),
        100 * (figure(arm, "R", policy, "apc") or 0.0),
        figure(arm, "R", policy, "output_tokens_per_s"),
    ]
    return [policy, *("" if value is None else about(value) for value in found)]


def told(cell: str) -> object:
    """Return the number of a cell, or its text."""
    text = cell.replace(",", "").removesuffix(" %")
    return float(text) if re.fullmatch(r"[\d.]+", text) else text


@pytest.mark.parametrize("arm", [arm for arm in Arm if f"## Arm {arm}\n" in PAGE])
def test_the_pages_tables_have_every_policy_with_the_figures_of_the_data(arm: Arm):
    said = [[told(cell) for cell in row] for row in rows(section(PAGE, f"## Arm {arm}"), "policy")]
    played = {row["policy"] for row in DATA if (row["deployment"], row["load"]) == (arm, "R")}
    assert {row[0] for row in said} == played
    assert said == [expected(arm, str(row[0])) for row in said]


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
NUMBERS = {5: "five", 10: "ten"}


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
        ("none-four-gateways", "At 1.6 R it is {} times with four gateways"),
        ("handoff", "`handoff` ({})"),
        ("none-tenants", "two tenants ({})"),
    ],
)
def test_how_much_later_turns_wait_past_saturation_is_said(deployment: str, sentence: str):
    """Compared is TTFT p90 of the turns after a session's first one: at 1.6 R with it, and at R without."""
    path = "sessions.later_ttft_s.p90"
    past = mean(ADMISSION[f"{deployment}-admission", "1.6 R"][path])
    ratio = past / mean(ADMISSION[deployment, "R"][path])
    assert sentence.format(f"{ratio:.2f}") in " ".join(section(PAGE, "## Session admission").split())


SPEEDS = {
    "half": "half the speed",
    "as recorded": "recorded speed",
    "1.25 times": "1.25 x the speed",
    "its times": "recorded speed",
}
RECORDED = rows(section(PAGE, "### Recorded traffic"), "trace")


@pytest.mark.parametrize("row", RECORDED, ids=lambda row: " ".join(row[:3]))
def test_a_row_of_recorded_traffic_has_the_figures_of_the_data(row: list[str]):
    """Those of the default, and the lowest of the others."""
    trace, arm, speed, *cells = row
    deployment = f"{trace}-{arm}" + ("-timed" if speed == "its times" else "")
    played = {
        made["policy"]: made
        for made in MADE["recorded"]["rows"]
        if (made["deployment"], made["load"]) == (deployment, SPEEDS[speed])
    }
    ours = played.pop("perilune")
    for path, told_ours, told_next in (("ttft_s.p90", *cells[:2]), ("e2e_s.p90", *cells[2:])):
        policy, seconds = told_next.split()
        (lowest,) = min(made[path] for made in played.values())
        assert told(told_ours) == about(ours[path][0])
        assert (told(seconds), played[policy][path]) == (about(lowest), [lowest])


def test_all_speeds_of_recorded_traffic_are_told():
    assert len(RECORDED) == 16


COUPLING = {
    (row["deployment"], row["load"], row["policy"]): row["in_flight"] for row in MADE["coupling"]["rows"]
}
SLOWER = rows(PAGE[PAGE.index("**Slower engines") : PAGE.index("At half load no policy")], "arm")


@pytest.mark.parametrize("row", SLOWER, ids=lambda row: " ".join(row[:2]))
def test_turns_in_flight_with_slower_engines_are_those_of_the_data(row: list[str]):
    arm, policy, *cells = row
    for load, cell in zip(("R/2", "R", "1.25 R", "1.6 R"), cells, strict=True):
        usual, slower = (COUPLING[deployment, load, policy] for deployment in (arm, f"{arm}-slower"))
        assert told(cell.split()[0]) == about(mean(slower) / mean(usual))


SPLIT = {
    "the default": ("split", "perilune"),
    "ear": ("split", "ear"),
    "sticky": ("split", "sticky"),
    "four gateways": ("split-four-gateways", "perilune"),
    "no session moves to save time": ("split-never", "perilune"),
    "engines are 10 % slower": ("split-slower", "perilune"),
    "session admission, from a session's first request": ("split-admission", "perilune"),
    "prefill believed to take twice as long, noisy": ("split-told-double", "perilune"),
    "half as long, noisy": ("split-told-half", "perilune"),
    "engines up to 1.5 times as fast or slow, noisy": ("split-unequal", "perilune"),
    "up to twice as fast or slow, believed to take half as long, noisier": (
        "split-very-unequal",
        "perilune",
    ),
}
ELSEWHERE = {
    (row["deployment"], row["policy"], row["load"]): row["ttft_s.p90"]
    for row in MADE["separate-prefill-elsewhere"]["rows"]
}


def test_separate_prefill_elsewhere_is_that_of_the_data():
    table = PAGE[PAGE.index("| pool | R/2 | 0.64 | R |") : PAGE.index("- **At its own full load")]
    found = rows(table, "pool")
    assert [name for name, *_ in found] == list(SPLIT)
    for name, *cells in found:
        for load, cell in zip(("R/2", "0.64", "R"), cells, strict=True):
            seeds = ELSEWHERE.get((*SPLIT[name], load))
            assert told(cell) == about(mean(seeds)) if seeds else not cell, (name, load)


def test_turns_in_flight_are_told_of_eight_rows():
    assert len(SLOWER) == 8


MORE_LOADS = {(row["deployment"], row["load"], row["policy"]): row for row in MADE["more-loads"]["rows"]}
RATIOS = rows(PAGE[PAGE.index("The same at R/2 and 1.25 R") : PAGE.index("**No rival is ahead")], "arm")
RATIO_PATHS = ("ttft_s.p50", "ttft_s.p90", "e2e_s.p90", "tpot_s.p99", "apc", "output_tokens_per_s")


@pytest.mark.parametrize("row", RATIOS, ids=lambda row: " ".join(row[:3]))
def test_ratios_at_other_loads_are_those_of_sixteen_seeds(row: list[str]):
    arm, load, rival, *cells = row
    ours, theirs = MORE_LOADS[arm, load, "perilune"], MORE_LOADS[arm, load, rival]
    assert len(ours["seeds"]) == 16
    for path, cell in zip(RATIO_PATHS, cells, strict=True):
        ratios = [x / y for x, y in zip(ours[path], theirs[path], strict=True)]
        assert float(cell.split()[0]) == pytest.approx(geometric_mean(ratios), abs=0.0051)
        if "lower in" in cell:
            assert int(cell.split()[-1]) == sum(ratio < 1 for ratio in ratios)


def test_no_rival_is_ahead_at_other_loads_by_more_than_the_seeds_tell():
    """No interval of the ratios of TTFT p90 and of E2E p90 lies above 1 as a whole."""
    assert len(RATIOS) == 24
    for row in RATIOS:
        for cell in row[4:6]:
            low = float(re.findall(r"\[([\d.]+)–", cell)[0])
            assert low <= 1.0, row
