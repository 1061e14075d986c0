"""The demo's load starts over for every policy and outlives one KV pool."""

from itertools import islice

import pytest

from perilune_lab.demo.load import OVERLOAD, demo_load


def test_the_demo_begins_anew_for_every_policy():
    load = demo_load(endpoints=4, seed=1, seconds=20, time_scale=5)
    assert list(islice(load.sessions(), 20)) == list(islice(load.sessions(), 20))


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("endpoints", "seconds", "time_scale"), [(4, 20, 5), (8, 60, 2.5), (2, 20, 10)])
def test_the_demos_sessions_outlive_one_kv_pool(endpoints: int, seconds: float, time_scale: float, seed: int):
    load = demo_load(endpoints, seed, seconds, time_scale)
    started = [s for s in islice(load.sessions(), 500) if s.start_s < seconds * time_scale]
    contexts = sum(s.turns[-1].prompt_tokens for s in started)
    assert contexts / endpoints > 1.5 * load.kv_tokens
    assert sum(len(s.turns) for s in started) > 150
    longest = max(t.prompt_tokens + t.output_tokens for s in started for t in s.turns)
    assert longest <= load.context_tokens < load.kv_tokens
    assert load.describe()["kv_tokens"] == 50_000


def test_overload_brings_the_usual_sessions_at_a_higher_rate():
    def sessions(times: float):
        return list(islice(demo_load(4, 1, 60, 2.5, times).sessions(), 50))

    usual, many = sessions(1.0), sessions(OVERLOAD)
    assert [len(s.turns) for s in many] == [len(s.turns) for s in usual]
    assert many[-1].start_s * OVERLOAD == pytest.approx(usual[-1].start_s)
