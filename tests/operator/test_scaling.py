"""How many endpoints a pool should have, by what its gateways reported."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from msgspec import structs

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


def starting(demands: Sequence[Demand]) -> list[Demand]:
    """The same readings while one endpoint is not ready."""
    return [replace(demand, starting=1) for demand in demands]


@pytest.mark.parametrize(
    ("scaling", "now", "demands", "wanted"),
    [
        pytest.param(QUEUE, 3, [], 3, id="nothing is known"),
        pytest.param(QUEUE, 3, over(10, queue_s=10.0), 5, id="long queues for long enough"),
        pytest.param(QUEUE, 3, over(5, queue_s=10.0), 3, id="long queues, not for long enough"),
        pytest.param(
            QUEUE,
            3,
            [Demand(NOW - 10, 10.0, 0.0), Demand(NOW - 5, 8.0, 0.0), Demand(NOW, 11.0, 0.0)],
            4,
            id="the least of them counts",
        ),
        pytest.param(QUEUE, 3, over(10, queue_s=1e6), 6, id="at most maxReplicas"),
        pytest.param(QUEUE, 2, over(10, queue_s=11.0), 4, id="at most twice as many"),
        pytest.param(
            QUEUE, 3, [*over(10, queue_s=12.0)[:-1], Demand(NOW, 11.0, 0.0)], 3, id="a backlog that shrinks"
        ),
        pytest.param(QUEUE, 3, starting(over(20, queue_s=12.0)), 3, id="endpoints still start"),
        pytest.param(
            QUEUE,
            3,
            [*starting(over(20, queue_s=12.0)[:-1]), Demand(NOW, 12.0, 0.0)],
            3,
            id="all have just started",
        ),
        pytest.param(QUEUE, 3, starting(over(320, queue_s=12.0)), 6, id="endpoints that never are ready"),
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
    assert changes == [4, 5, 4, 3, 2]


class SimulatedPool:
    """A closed loop: requests of about a second of prefill go to the shortest queue, the operator's function
    sets the number of endpoints by the queues, and new ones take 30 to 90 s to become ready."""

    def __init__(self, scaling: Scaling, seed: int) -> None:
        self.scaling, self.rng = scaling, Random(seed)
        self.at, self.wanted = 0.0, scaling.min_replicas
        self.queues_s = [0.0] * self.wanted
        self.ready_at: list[float] = []
        self.demands: list[Demand] = []
        self.changes: list[int] = []

    def run(self, minutes: int, requests_per_s: float) -> None:
        for _ in range(60 * minutes):
            self.at += 1.0
            self.queues_s += [0.0 for due in self.ready_at if due <= self.at]
            self.ready_at = [due for due in self.ready_at if due > self.at]
            self.work(requests_per_s)
            if self.at % 5 == 0:
                self.look()

    def work(self, requests_per_s: float) -> None:
        """One second, in tenths."""
        for _ in range(10):
            if self.rng.random() < requests_per_s / 10:
                shortest = self.queues_s.index(min(self.queues_s))
                self.queues_s[shortest] += self.rng.expovariate(1.0)
            self.queues_s = [max(0.0, queue_s - 0.1) for queue_s in self.queues_s]

    def look(self) -> None:
        self.demands.append(Demand(self.at, sum(self.queues_s), 0.0, len(self.ready_at)))
        wanted = replicas(self.scaling, self.wanted, self.demands, self.at)
        if wanted == self.wanted:
            return
        self.ready_at += [self.at + self.rng.uniform(30.0, 90.0) for _ in range(wanted - self.wanted)]
        if wanted < self.wanted:
            self.queues_s[0] += self.queues_s.pop()
        self.changes.append(wanted)
        self.wanted, self.demands = wanted, []


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("most", [6, 16])
def test_a_pool_follows_its_load_up_and_down_while_endpoints_take_time_to_start(most: int, seed: int) -> None:
    """Two endpoints do for the low load, five for the high one."""
    scaling = structs.replace(QUEUE, max_replicas=most, up_seconds=30, down_seconds=300)
    pool = SimulatedPool(scaling, seed)
    pool.run(10, 0.5)
    pool.run(30, 4.5)
    assert 5 <= max(pool.changes) <= 8
    pool.run(60, 0.5)
    assert pool.wanted == 2
    turning = pool.changes.index(max(pool.changes))
    assert pool.changes[: turning + 1] == sorted(pool.changes[: turning + 1])
    assert pool.changes[turning:] == sorted(pool.changes[turning:], reverse=True)
    assert len(pool.changes) <= (6 if most == 6 else 8)


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
