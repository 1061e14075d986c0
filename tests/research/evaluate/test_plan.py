"""The plan: what is simulated for what, each point once."""

from dataclasses import replace

import pytest

from perilune_research.evaluate import plan
from perilune_research.evaluate.cells import Cell, Scenario
from perilune_research.evaluate.evaluation import studies_of
from perilune_research.evaluate.figures import FIGURES
from perilune_research.simulator.deployment import Deployment
from perilune_research.simulator.policies import POLICIES

AT_R = Scenario(rate=1.0)
SIZE = plan.size(quick=False, seeds=4, first=11)


def test_seeds_are_paired_and_the_side_studies_have_half_of_them():
    assert SIZE.seeds == (11, 12, 13, 14)
    assert SIZE.side_seeds == (11, 12)
    assert len(plan.size(quick=False, seeds=None, first=1).side_seeds) >= 16


def test_every_policy_plays_every_load_with_every_seed():
    cells = plan.cells(AT_R, ["matrix"], SIZE)
    played = {(cell.profile.policy, cell.scenario.rate, cell.seed) for cell in cells}
    assert played == {(p, r, s) for p in POLICIES for r in (0.5, 1.0, 1.25) for s in SIZE.seeds}
    beyond = {(cell.profile.policy, cell.seed) for cell in plan.cells(AT_R, ["overload"], SIZE)}
    assert beyond >= {(p, s) for p in POLICIES for s in SIZE.side_seeds}


def test_points_of_two_studies_are_simulated_once():
    names = list(plan.STUDIES)
    together = plan.cells(AT_R, names, SIZE)
    assert len(together) == len(set(together))
    alone = sum(len(plan.cells(AT_R, [name], SIZE)) for name in names)
    assert len(together) < alone


@pytest.mark.parametrize("name", [name for name in plan.NEEDS if name.startswith("f")])
def test_every_part_is_drawn_from_studies_that_exist(name: str):
    assert set(plan.NEEDS[name]) <= {*plan.STUDIES, plan.CAPACITY}
    assert name in FIGURES


def test_only_what_a_part_needs_is_simulated():
    assert studies_of(["f7"]) == ["overload", "ablation"]
    assert studies_of(["f7", "bars"]) == ["matrix", "overload", "admission", "links", "ablation", "capacity"]


def test_a_cell_is_named_by_everything_that_it_is_made_of():
    one = Cell(AT_R, plan.OURS, 1)
    others = [
        Cell(AT_R, plan.OURS, 2),
        Cell(AT_R, plan.STAY, 1),
        Cell(replace(AT_R, deployment=Deployment.STORE), plan.OURS, 1),
        Cell(plan.admission_scenario(AT_R, "R", on=True), plan.OURS, 1),
        Cell(plan.belief(AT_R, "R", "told 2 ×"), plan.OURS, 1),
        Cell(plan.gap_scenario(AT_R, "R", 30.0), plan.OURS, 1),
        Cell(plan.slower(AT_R), plan.OURS, 1),
    ]
    assert len({one.key, *(other.key for other in others)}) == 8


def test_other_gaps_leave_the_turns_as_they_are():
    def turns(scenario: Scenario) -> list[tuple[int, int, int]]:
        workload = scenario.workload(3)
        return [(t.session, t.number, t.prompt_tokens) for job in workload.jobs for t in job.tasks]

    small = Scenario(rate=0.5, window_s=300.0, warmup_s=0.0)
    chatbot = plan.gap_scenario(small, "R", 30.0)
    assert turns(chatbot) == turns(small)
    assert {t.gap_s for job in chatbot.workload(3).jobs for t in job.tasks} == {0.0, 30.0}


def test_every_study_plays_the_arm_of_the_evaluation_and_names_the_one_that_does_not():
    at_r = replace(AT_R, deployment=Deployment.BOTH)
    for name, study in plan.STUDIES.items():
        arms = {point.scenario.deployment for point in study.points(at_r)}
        assert arms == ({Deployment.NONE, Deployment.PULL} if name == "conductor" else {Deployment.BOTH})


def test_only_where_engines_hand_kv_over_policies_are_played_beside_the_planner():
    beside = {arm: set(plan.every(replace(AT_R, deployment=arm))) - set(plan.EVERY) for arm in Deployment}
    assert {arm for arm, planned in beside.items() if planned} == {Deployment.HANDOFF, Deployment.BOTH}
