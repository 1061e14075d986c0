"""The tables of pages that people write, made from the sections' data."""

import json
from itertools import product
from pathlib import Path

import pytest

from perilune_lab.simulate import measure
from perilune_lab.simulate.deployment import Arm
from perilune_research.evaluation import metrics, summaries
from perilune_research.evaluation.metrics import Metric
from perilune_research.evaluation.plan import DEFAULT, THREE
from perilune_research.evaluation.pools import ARMS, SPLIT
from perilune_research.evaluation.rows import SCHEMA
from perilune_research.evaluation.summaries import figures, goals, policies, traffic
from perilune_research.evaluation.summaries.figures import Pages, Played

HERE = Played("page", "none", "R")


def page(folder: Path, name: str, rows: dict[tuple[str, str, str], dict[str, object]]) -> Pages:
    """Write a page's data: (deployment, load, policy) → its figures."""
    told = [
        {"deployment": pool, "load": load, "policy": policy, **figures}
        for (pool, load, policy), figures in rows.items()
    ]
    (folder / f"{name}.json").write_text(json.dumps({"schema": SCHEMA, "rows": told}))
    return Pages(folder)


def test_a_figure_is_the_mean_over_the_seeds(tmp_path: Path):
    pages = page(tmp_path, "page", {("none", "R", DEFAULT): {"ttft_s.p90": [1.0, 2.0, 6.0]}})
    assert pages.text(HERE, metrics.TTFT_P90) == "3"


@pytest.mark.parametrize("values", [[1.0, None], []])
def test_a_figure_that_some_seed_does_not_have_never_comes(tmp_path: Path, values: list[float | None]):
    pages = page(tmp_path, "page", {("none", "R", DEFAULT): {"ttft_s.p90": values}})
    assert pages.text(HERE, metrics.TTFT_P90) == "never"


def test_what_was_not_played_is_empty(tmp_path: Path):
    pages = page(tmp_path, "page", {})
    assert pages.text(HERE, metrics.TTFT_P90) == ""


@pytest.mark.parametrize(
    ("ratios", "text"),
    [
        pytest.param([2.0, 2.0], "2.00 [2.00–2.00]", id="two digits"),
        pytest.param([0.99, 0.99], "0.990 [0.990–0.990]", id="three close to 1"),
        pytest.param([0.9, 0.998], "0.948 [0.900–0.998]", id="three where a bound would read as 1.00"),
        pytest.param([1.0, 4.0], "2.000 [1.000–4.000]", id="geometric mean"),
    ],
)
def test_a_ratio_has_an_interval(ratios: list[float], text: str):
    assert figures.seed_by_seed(ratios) == text


def main_figures(value: float) -> dict[str, object]:
    return {metric.path: [value] * 3 for metric in metrics.MAIN}


def test_another_policy_is_ahead_if_it_is_better_in_each_seed_by_more_than_a_hundredth(tmp_path: Path):
    plain = {
        (pool, load, policy): main_figures(1.0)
        for pool in ARMS
        for load in THREE
        for policy in (DEFAULT, "ear", "sticky", "lmetric")
    }
    plain["store", "R", "ear"] |= {"ttft_s.p90": [0.8, 0.8, 0.8], "apc": [1.25, 1.25, 1.25]}
    plain["store", "R", "sticky"] |= {"ttft_s.p90": [0.1, 0.1, 1.1]}
    plain["store", "R", "lmetric"] |= {"ttft_s.p90": [0.995, 0.995, 0.995], "tpot_s.p99": [2.0, 2.0, 2.0]}
    page(tmp_path, "deployments", plain)
    plain["split", "R/2", "sticky"] |= {"ttft_s.p90": [0.5, 0.5, 0.5]}
    rows = policies.behind(page(tmp_path, "separate-prefill", plain)).rows
    assert [tuple(row) for row in rows if row[2] != "nothing"] == [
        ("", "R", "TTFT p90: `ear` 20 %. APC: `ear` 25 %"),
        ("`split`", "R/2", "TTFT p90: `sticky` 50 %"),
    ]


@pytest.mark.parametrize(
    ("metric", "values", "verdict"),
    [
        pytest.param(metrics.REGRET, [1.4, 1.5, 1.55], "met", id="met"),
        pytest.param(metrics.REGRET, [1.7, 1.8, 1.9], "missed", id="missed"),
        pytest.param(metrics.REGRET, [1.2, 1.9, 1.6], "not decided", id="not decided"),
        pytest.param(metrics.THRASH, [0.0, 0.0, 0.0], "met", id="none"),
        pytest.param(metrics.THRASH, [0.01, 0.0, 0.01], "not decided", id="some"),
    ],
)
def test_a_goal_is_judged_by_its_interval(tmp_path: Path, metric: Metric, values: list[float], verdict: str):
    bad = {goal.metric.path: [0.5, 0.5, 0.5] for goal in goals.GOALS} | {metric.path: values}
    played = {(pool, load, policy): bad for pool in ARMS for load in THREE for policy in (DEFAULT, "lmetric")}
    page(tmp_path, "held-back-seeds", {})
    for name in ("more-seeds", "more-loads", "deployments"):
        pages = page(tmp_path, name, played)
    (row,) = (
        row
        for goal, row in zip(goals.GOALS, goals.goals(pages).rows, strict=True)
        if goal.metric.path == metric.path
    )
    assert row[1].startswith(f"{verdict}: ")
    assert row[1].endswith(", 3 seeds")


def test_goals_are_judged_by_the_page_with_the_most_seeds(tmp_path: Path):
    three, split = ({goal.metric.path: [value] * 3 for goal in goals.GOALS} for value in (0.5, 0.7))
    policies = (DEFAULT, "lmetric")
    page(tmp_path, "deployments", dict.fromkeys(product(Arm, THREE, policies), three))
    page(tmp_path, "separate-prefill", dict.fromkeys(product(SPLIT, THREE, policies), split))
    for name in ("more-loads", "held-back-seeds"):
        page(tmp_path, name, {})
    more = {goal.metric.path: [0.5] * 16 for goal in goals.GOALS}
    rows = goals.goals(page(tmp_path, "more-seeds", {("none", "R", DEFAULT): more})).rows
    assert rows[0][1:3] == ["met: 0.5, 16 seeds", "met: 0.5, 3 seeds"]
    assert rows[0][5] == "met: 0.7, 3 seeds"


def test_a_goal_that_the_seeds_held_back_miss_is_not_decided(tmp_path: Path):
    good, bad = ({goal.metric.path: [value] * 16 for goal in goals.GOALS} for value in (1.0, 2.0))
    rows = dict.fromkeys(product(ARMS, THREE, (DEFAULT, "lmetric")), good)
    for name in ("deployments", "more-loads", "more-seeds"):
        page(tmp_path, name, rows)
    pages = page(tmp_path, "held-back-seeds", {("none", "R", DEFAULT): bad})
    assert goals.goals(pages).rows[0][1:3] == ["not decided: 1, 16 seeds; held back 2", "met: 1, 16 seeds"]


def test_the_next_policy_on_recorded_traffic_is_the_lowest_of_the_others(tmp_path: Path):
    slow, fast = ({"ttft_s.p90": [at_s], "e2e_s.p90": [at_s]} for at_s in (3.0, 2.0))
    rows = {
        (f"{trace}-{arm}{timed}", load, policy): figures
        for trace in ("conversation", "synthetic")
        for arm in ("none", "store", *SPLIT)
        for timed in ("", "-timed")
        for load in ("half the speed", "recorded speed", "1.25 x the speed")
        for policy, figures in ((DEFAULT, fast), ("ear", slow), ("sticky", fast))
    }
    table = traffic.recorded(page(tmp_path, "recorded", rows))
    assert len(table.rows) == 28
    assert {tuple(row[3:]) for row in table.rows} == {("2", "sticky 2", "2", "sticky 2")}


def test_only_what_is_between_the_marks_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    heat = {metric.path: [1.0] for metric in (*metrics.HEAT, metrics.WORST)}
    page(tmp_path, "heat", {(arm, "R", DEFAULT): heat for arm in ("none", "store")})
    text = "before\n\n<!-- waiting -->\nold\n<!-- /waiting -->\n\nafter <!-- note -->\n"
    monkeypatch.setattr(measure, "RESAMPLES", 50)
    made = summaries.filled(text, tmp_path)
    assert made.startswith("before\n\n<!-- waiting -->\n| pool | policy |")
    assert made.endswith("|\n<!-- /waiting -->\n\nafter <!-- note -->\n")
    assert "old" not in made
    assert summaries.filled(made, tmp_path) == made


def test_a_table_without_data_names_the_absent_file(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"heat\.json"):
        summaries.filled("<!-- waiting -->\n<!-- /waiting -->\n", tmp_path)
