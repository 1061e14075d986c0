"""The report on large fleets puts figures next to their bars."""

from array import array

import pytest

from perilune_lab.report import Run
from perilune_research.simulator.cli import main
from perilune_research.simulator.harness import Played
from perilune_research.simulator.large_fleet import lines
from perilune_research.simulator.routing import Seen


def played(seen: Seen, peak_bytes: int = 2**20) -> Played:
    return Played(
        rate=1.0,
        seed=1,
        run=Run(policy="ear", requests=1, succeeded=1, rejected=0, success_rate=1.0),
        simulated_s=1.0,
        wall_s=1.0,
        seen=seen,
        peak_bytes=peak_bytes,
    )


def test_a_small_fleet_has_nothing_to_say():
    assert list(lines([played(Seen())])) == []


@pytest.mark.parametrize(
    ("took_s", "agreed", "said"),
    [
        ([0.001] * 100, 200, ("1.00 ms (p99, bar 2 ms: met)", "100.00% of 200", "bar 99.5%: met")),
        ([0.003] * 100, 198, ("3.00 ms (p99, bar 2 ms: MISSED)", "99.00% of 200", "bar 99.5%: MISSED")),
    ],
)
def test_figures_stand_beside_their_bars(took_s: list[float], agreed: int, said: tuple[str, ...]):
    seen = Seen(decision_s=array("d", took_s), audited=100, agreed=agreed // 2)
    first, memory = lines([played(seen), played(seen, 3 * 2**20)])
    assert first.startswith("ear: a decision takes")
    for part in said:
        assert part in first
    assert memory == "largest process: 3 MiB of memory"


def test_the_command_prints_them(capsys: pytest.CaptureFixture[str]):
    call = "--policies lmetric_plus_one --endpoints 100 --rates 8 --seeds 1 --window 20 --warmup 0 --jobs 1"
    assert main(call.split()) == 0
    out = capsys.readouterr().out
    assert "lmetric_plus_one: a decision takes" in out
    assert "MiB of memory" in out
