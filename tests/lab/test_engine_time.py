"""The routing of engines whose time passes faster."""

from perilune_api.policies import EarParams, PeriluneParams, PolicyChoice
from perilune_api.pool import Limits, Migration, Routing
from perilune_lab.processes.stack import in_engine_time


def test_seconds_shrink_and_the_rate_of_moves_grows_with_the_time_scale() -> None:
    routing = Routing(
        policy=PolicyChoice(
            ear=EarParams(cooldown_seconds=30.0),
            perilune=PeriluneParams(least_gain_seconds=4.0, least_gain_with_kv_seconds=0.5),
        ),
        migration=Migration(cooldown_seconds=20.0, hot_pending_seconds=1.5, moves_per_minute=50),
        limits=Limits(max_pending_seconds=8.0, ttft_slo_seconds=4.0, tpot_slo_seconds=0.2),
    )
    fast = in_engine_time(routing, 10.0)
    policy, migration, limits = fast.policy, fast.migration, fast.limits
    assert policy.ear.cooldown_seconds == 3.0
    assert policy.perilune == routing.policy.perilune  # its seconds follow the engines' speed by themselves
    assert (migration.cooldown_seconds, migration.hot_pending_seconds) == (2.0, 0.15)
    assert migration.moves_per_minute == 500
    assert (limits.max_pending_seconds, limits.ttft_slo_seconds, limits.tpot_slo_seconds) == (0.8, 0.4, 0.02)


def test_time_that_passes_as_it_does_changes_nothing() -> None:
    assert in_engine_time(Routing(), 1.0) == Routing()
