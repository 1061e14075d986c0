"""How many endpoints a pool should have, by what its gateways reported."""

from collections.abc import Sequence

import pytest

from perilune_api.inference_pool.checks import convert
from perilune_api.inference_pool.spec import Scaling, Signal
from perilune_api.pool import SpecError
from perilune_operator.scaling import Demand, replicas

QUEUE = Scaling(
    signal=Signal.QUEUE_SECONDS, min_replicas=2, max_replicas=6, target="2", up_seconds=10, down_seconds=60
)
KV = Scaling(
    signal=Signal.KV_USAGE, min_replicas=2, max_replicas=6, target="500m", up_seconds=10, down_seconds=60
)
METRIC = Scaling(min_replicas=2, max_replicas=6)
NOW = 1_000.0


def over(seconds: int, queue_s: float = 0.0, kv: float = 0.0) -> list[Demand]:
    """A reading every 5 s, up to now."""
    return [Demand(NOW - ago, queue_s, kv) for ago in range(seconds, -1, -5)]


@pytest.mark.parametrize(
    ("scaling", "now", "demands", "wanted"),
    [
        pytest.param(QUEUE, 3, [], 3, id="nothing is known"),
        pytest.param(QUEUE, 3, over(10, queue_s=10.0), 5, id="long queues for long enough"),
        pytest.param(QUEUE, 3, over(5, queue_s=10.0), 3, id="long queues, not for long enough"),
        pytest.param(
            QUEUE, 3, [*over(10, queue_s=10.0)[:-1], Demand(NOW, 8.0, 0.0)], 4, id="the least of them counts"
        ),
        pytest.param(QUEUE, 3, over(10, queue_s=1e6), 6, id="at most maxReplicas"),
        pytest.param(QUEUE, 3, over(10, queue_s=6.5), 3, id="within the tolerance"),
        pytest.param(QUEUE, 5, over(60), 4, id="one leaves at a time"),
        pytest.param(QUEUE, 5, over(55), 5, id="idle, not for long enough"),
        pytest.param(
            QUEUE, 5, [Demand(NOW - 60, 9.9, 0.0), *over(55)], 5, id="a burst within downSeconds keeps all"
        ),
        pytest.param(QUEUE, 5, over(60, kv=3.7), 5, id="the KV in use would not fit"),
        pytest.param(QUEUE, 2, over(60), 2, id="at least minReplicas"),
        pytest.param(QUEUE, 1, [], 2, id="below the bounds"),
        pytest.param(QUEUE, 9, [], 6, id="above the bounds"),
        pytest.param(QUEUE, 0, over(60, queue_s=10.0), 0, id="switched off"),
        pytest.param(KV, 3, over(10, kv=2.4), 5, id="full caches"),
        pytest.param(KV, 4, over(60, kv=1.0), 3, id="empty caches"),
        pytest.param(METRIC, 3, over(60, queue_s=10.0), 3, id="an autoscaler's business"),
    ],
)
def test_replicas_follow_the_load(scaling: Scaling, now: int, demands: Sequence[Demand], wanted: int) -> None:
    assert replicas(scaling, now, demands, NOW) == wanted


def test_a_load_that_rises_and_falls_is_followed_without_flapping() -> None:
    """Queues as of a pool whose endpoints each take 2 s of prefill, with engines that start at once."""
    at, now, since, changes = 0.0, 2, list[Demand](), list[int]()
    for demand in [3.0] * 60 + [11.0] * 60 + [3.0] * 120:
        for noise in (0.9, 1.1):
            at += 5.0
            since.append(Demand(at, demand * noise, 1.0))
            wanted = replicas(QUEUE, now, since, at)
            if wanted != now:
                changes.append(wanted)
                now, since = wanted, []
    assert changes == [5, 4, 3, 2]


@pytest.mark.parametrize(
    ("signal", "target", "words"),
    [
        ("kvUsage", "2", "a share of the KV cache above 0, at most 1"),
        ("queueSeconds", "0", "seconds above 0"),
    ],
)
def test_a_target_that_means_nothing_is_refused(signal: str, target: str, words: str) -> None:
    given = {"signal": signal, "target": target, "minReplicas": 1, "maxReplicas": 2}
    with pytest.raises(SpecError, match=rf"{words}.* - at `\$\.spec\.scaling\.target`"):
        convert({"model": {"name": "m"}, "scaling": given})


def test_a_pool_whose_endpoints_have_two_roles_does_not_scale_itself() -> None:
    scaling = {"signal": "queueSeconds", "minReplicas": 1, "maxReplicas": 2}
    given = {"model": {"name": "m"}, "prefillReplicas": 1, "mooncake": {"transfer": "handoff"}}
    with pytest.raises(SpecError, match=r"With prefillReplicas .* - at `\$\.spec\.scaling\.signal`"):
        convert({**given, "scaling": scaling})
