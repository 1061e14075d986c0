"""How many endpoints a pool should have, by what its gateways reported."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from appliers import applier, plan_of
from msgspec import structs

from perilune_api.inference_pool.checks import convert
from perilune_api.inference_pool.spec import PrefillScaling, Scaling, Signal
from perilune_api.pool import SpecError
from perilune_operator.apply.ownership import Owner
from perilune_operator.observe.facts import Demand, Demands, Key, Observed
from perilune_operator.observe.readers import writer_of_replicas
from perilune_operator.plan import Plan, plan
from perilune_operator.render.objects import Defaults
from perilune_operator.scaling import replicas

QUEUE = Scaling(
    signal=Signal.QUEUE_SECONDS, min_replicas=2, max_replicas=6, target="2", up_seconds=10, down_seconds=60
)
KV = Scaling(
    signal=Signal.KV_USAGE, min_replicas=2, max_replicas=6, target="500m", up_seconds=10, down_seconds=60
)
TTFT = Scaling(
    signal=Signal.TTFT_ATTAINMENT,
    min_replicas=2,
    max_replicas=6,
    target="0.95",
    ttft_seconds=5.0,
    up_seconds=10,
    down_seconds=60,
)
METRIC = Scaling(min_replicas=2, max_replicas=6)
UP, DOWN = METRIC.up_seconds, METRIC.down_seconds
"""The defaults."""
NOW = 1_000.0
HOUR = 720
"""Number of readings of an hour, one every 5 s."""


def over(seconds: int, queue_s: float = 0.0, kv: float = 0.0) -> list[Demand]:
    """Return a reading every 5 s, up to now."""
    return [Demand(at=NOW - ago, queue_s=queue_s, kv_in_use=kv) for ago in range(seconds, -1, -5)]


def answering(
    seconds: int, late: int, of: int = 20, prefilling: int = 0, queue_s: float = 0.0, kv: float = 0.0
) -> list[Demand]:
    """Return a reading every 5 s, each of some requests, some of them late."""
    return [
        Demand(
            at=NOW - ago,
            queue_s=queue_s,
            kv_in_use=kv,
            first_tokens=of,
            in_time=of - late,
            prefilling=prefilling,
        )
        for ago in range(seconds, -1, -5)
    ]


def of_a_pool_of(now: int, demands: Sequence[Demand]) -> list[Demand]:
    """Return the same readings, of a pool that should have this number of endpoints."""
    return [replace(demand, wanted=now) for demand in demands]


def starting(demands: Sequence[Demand]) -> list[Demand]:
    """Return the same readings while one endpoint is not ready."""
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
            [
                Demand(at=NOW - 10, queue_s=10.0, kv_in_use=0.0),
                Demand(at=NOW - 5, queue_s=8.0, kv_in_use=0.0),
                Demand(at=NOW, queue_s=11.0, kv_in_use=0.0),
            ],
            4,
            id="the least of them counts",
        ),
        pytest.param(QUEUE, 3, over(10, queue_s=1e6), 6, id="at most maxReplicas"),
        pytest.param(QUEUE, 2, over(10, queue_s=11.0), 4, id="at most twice as many"),
        pytest.param(
            QUEUE,
            3,
            [*over(10, queue_s=12.0)[:-1], Demand(at=NOW, queue_s=11.0, kv_in_use=0.0)],
            3,
            id="a backlog that shrinks",
        ),
        pytest.param(QUEUE, 3, starting(over(20, queue_s=12.0)), 3, id="endpoints still start"),
        pytest.param(
            QUEUE,
            3,
            [*starting(over(20, queue_s=12.0)[:-1]), Demand(at=NOW, queue_s=12.0, kv_in_use=0.0)],
            3,
            id="all have just started",
        ),
        pytest.param(QUEUE, 3, starting(over(320, queue_s=12.0)), 6, id="endpoints that never are ready"),
        pytest.param(QUEUE, 3, over(10, queue_s=6.5), 3, id="within the tolerance"),
        pytest.param(QUEUE, 5, over(60), 4, id="one leaves at a time"),
        pytest.param(QUEUE, 5, over(55), 5, id="idle, not for long enough"),
        pytest.param(
            QUEUE,
            5,
            [Demand(at=NOW - 60, queue_s=9.9, kv_in_use=0.0), *over(55)],
            5,
            id="a burst within downSeconds keeps all",
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
    assert replicas(scaling, now, of_a_pool_of(now, demands), NOW) == wanted


def test_a_load_that_rises_and_falls_is_followed_without_flapping() -> None:
    """Queues as of a pool whose endpoints each take 2 s of prefill, with engines that start at once."""
    at, now, demands, changes = 0.0, 2, list[Demand](), list[int]()
    for queue_s in [3.0] * 60 + [11.0] * 60 + [3.0] * 120:
        for noise in (0.9, 1.1):
            at += 5.0
            demands.append(Demand(at=at, queue_s=queue_s * noise, kv_in_use=1.0, wanted=now))
            wanted = replicas(QUEUE, now, demands, at)
            if wanted != now:
                changes.append(wanted)
                now = wanted
    assert changes == [4, 5, 4, 3, 2]


@pytest.mark.parametrize(
    ("now", "demands", "wanted"),
    [
        pytest.param(3, [], 3, id="nothing is known"),
        pytest.param(3, answering(10, late=5, prefilling=3), 4, id="too late for long enough"),
        pytest.param(3, answering(10, late=5, prefilling=3, queue_s=24.0), 5, id="queues for two more"),
        pytest.param(2, answering(10, late=5, prefilling=2, queue_s=99.0), 4, id="at most twice as many"),
        pytest.param(3, answering(10, late=2, prefilling=3), 3, id="no later than chance explains"),
        pytest.param(3, answering(5, late=20, prefilling=3), 3, id="too late, not for long enough"),
        pytest.param(
            3,
            [*answering(10, late=9, prefilling=3)[:-1], *answering(0, late=1, prefilling=3)],
            3,
            id="the last ones came in time",
        ),
        pytest.param(3, answering(10, late=3, of=5, prefilling=3), 3, id="too few requests to tell"),
        pytest.param(3, answering(20, late=3, of=5, prefilling=3), 4, id="enough in a longer time"),
        pytest.param(3, answering(60, late=4, of=1, prefilling=3), 3, id="not even then"),
        pytest.param(3, starting(answering(20, late=9, prefilling=3)), 3, id="endpoints still start"),
        pytest.param(
            3,
            [*answering(10, late=9, prefilling=3, queue_s=9.0)[:-1], *answering(0, late=9, prefilling=3)],
            3,
            id="a backlog that shrinks",
        ),
        pytest.param(6, answering(10, late=9, prefilling=6), 6, id="at most maxReplicas"),
        pytest.param(
            5, answering(60, late=20, prefilling=2), 5, id="late, but for another reason than queues"
        ),
        pytest.param(5, answering(60, late=2), 4, id="late, and hardly anything to prefill"),
        pytest.param(4, answering(60, late=1, prefilling=1), 3, id="one leaves"),
        pytest.param(4, answering(55, late=1, prefilling=1), 4, id="in time, not for long enough"),
        pytest.param(4, answering(60, late=0, of=0), 3, id="no requests"),
        pytest.param(4, answering(60, late=1, prefilling=2), 4, id="too much work for those that remain"),
        pytest.param(4, answering(60, late=0, kv=2.8), 4, id="the KV in use would not fit"),
        pytest.param(2, answering(60, late=0), 2, id="at least minReplicas"),
    ],
)
def test_replicas_follow_the_share_of_first_tokens_in_time(
    now: int, demands: Sequence[Demand], wanted: int
) -> None:
    assert replicas(TTFT, now, of_a_pool_of(now, demands), NOW) == wanted


SEEDS = [0, pytest.param(1, marks=pytest.mark.heavy)]


class SimulatedPool:
    """A closed loop: requests of about a second of prefill go to the shortest queue, the operator's function
    sets the number of endpoints by the queues or the first tokens in time, and new ones take 30 to 90 s to
    become ready, unless told otherwise."""

    def __init__(self, scaling: Scaling, seed: int, start_s: tuple[float, float] = (30.0, 90.0)) -> None:
        self.scaling, self.rng, self.start_s = scaling, Random(seed), start_s
        self.at, self.wanted = 0.0, scaling.min_replicas
        self.queues_s = [0.0] * self.wanted
        self.ready_at: list[float] = []
        self.demands: deque[Demand] = deque(maxlen=HOUR)
        self.first_tokens: list[tuple[float, bool]] = []
        """When each comes, and whether in time."""
        self.coming_back: list[float] = []
        """When clients come that were refused because there was no endpoint."""
        self.came = self.unserved = 0
        """Since the last reading."""
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
        """Work for one second, in tenths."""
        for _ in range(10):
            if self.rng.random() < requests_per_s / 10:
                self.comes()
            self.queues_s = [queue_s - 0.1 if queue_s > 0.1 else 0.0 for queue_s in self.queues_s]

        back = [at for at in self.coming_back if at <= self.at]
        self.coming_back = [at for at in self.coming_back if at > self.at]
        for _ in back:
            self.comes()

    def comes(self) -> None:
        self.came += 1
        if not self.queues_s:
            self.unserved += 1
            self.coming_back.append(self.at + self.rng.uniform(5.0, 60.0))
            return
        shortest = self.queues_s.index(min(self.queues_s))
        self.queues_s[shortest] += self.rng.expovariate(1.0)
        ttft_s = self.queues_s[shortest]
        self.first_tokens.append((self.at + ttft_s, ttft_s <= self.scaling.ttft_seconds))

    def look(self) -> None:
        come = [in_time for at, in_time in self.first_tokens if at <= self.at]
        self.first_tokens = [(at, in_time) for at, in_time in self.first_tokens if at > self.at]
        self.demands.append(
            Demand(
                at=self.at,
                queue_s=sum(self.queues_s),
                kv_in_use=0.0,
                starting=len(self.ready_at),
                first_tokens=len(come),
                in_time=sum(come),
                prefilling=sum(queue_s > 0.0 for queue_s in self.queues_s),
                wanted=self.wanted,
                requests=self.came + sum(queue_s > 0.0 for queue_s in self.queues_s),
                unserved=self.unserved,
            )
        )
        self.came = self.unserved = 0
        wanted = replicas(self.scaling, self.wanted, tuple(self.demands), self.at)
        if wanted == self.wanted:
            return
        self.ready_at += [self.at + self.rng.uniform(*self.start_s) for _ in range(wanted - self.wanted)]
        left_s = sum(self.queues_s[wanted:])
        del self.queues_s[wanted:]
        if left_s:
            self.queues_s[0] += left_s
        self.changes.append(wanted)
        self.wanted = wanted


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("most", [6, 16])
@pytest.mark.parametrize(("target", "seconds"), [("0.95", 5.0), ("0.9", 3.0)])
def test_a_pool_follows_its_first_tokens_without_flapping(
    target: str, seconds: float, most: int, seed: int
) -> None:
    """Two endpoints do for the low load, six for the high one."""
    pool = SimulatedPool(
        structs.replace(
            TTFT, target=target, ttft_seconds=seconds, max_replicas=most, up_seconds=30, down_seconds=300
        ),
        seed,
    )
    pool.run(10, 0.5)
    assert pool.changes == []
    pool.run(30, 4.5)
    assert pool.wanted == 6
    pool.run(60, 0.5)
    assert pool.wanted == 2
    assert len(pool.changes) <= 6


@pytest.mark.parametrize(
    ("seconds", "down_seconds"), [(2.0, 60), pytest.param(0.5, 600, marks=pytest.mark.heavy)]
)
def test_a_target_that_no_number_of_endpoints_reaches_is_not_pursued(
    seconds: float, down_seconds: int
) -> None:
    """One in seven prompts takes longer than 2 s to prefill, and six in ten longer than half a second."""
    scaling = structs.replace(
        TTFT, ttft_seconds=seconds, max_replicas=30, up_seconds=30, down_seconds=down_seconds
    )
    pool = SimulatedPool(scaling, 0)
    pool.run(120, 0.5)
    assert len(pool.changes) <= 2
    pool.run(60, 4.5)
    assert 6 <= pool.wanted <= 8
    assert len(pool.changes) <= 6
    pool.run(80, 0.5)
    assert pool.wanted == 2
    assert len(pool.changes) <= 12


@pytest.mark.parametrize("seed", SEEDS)
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


ZERO = [structs.replace(scaling, min_replicas=0) for scaling in (QUEUE, KV, TTFT)]


def asking(demands: Sequence[Demand], requests: int, unserved: int = 0) -> list[Demand]:
    """Return the same readings while so many requests come."""
    return [replace(demand, requests=requests, unserved=unserved) for demand in demands]


def lacking(demands: Sequence[Demand]) -> list[Demand]:
    """Return the same readings without the page of a gateway."""
    return [replace(demand, missing=1) for demand in demands]


@pytest.mark.parametrize("scaling", ZERO)
@pytest.mark.parametrize(
    ("now", "demands", "wanted"),
    [
        pytest.param(0, [], 0, id="nothing is known"),
        pytest.param(0, over(3_600), 0, id="nothing comes"),
        pytest.param(0, asking(over(0), 1, 1), 1, id="a request that no endpoint can take"),
        pytest.param(0, [*asking(over(10), 1, 1)[:-1], *over(0)], 1, id="it came a reading ago"),
        pytest.param(1, over(60), 0, id="quiet for long enough"),
        pytest.param(1, over(55), 1, id="quiet, not for long enough"),
        pytest.param(5, over(60), 0, id="all leave where none is used"),
        pytest.param(1, lacking(over(60)), 1, id="quiet, as far as a part of the gateways know"),
        pytest.param(1, [*lacking(over(60)[:-1]), *over(0)], 0, id="the missing page came back, quiet"),
        pytest.param(0, lacking(asking(over(0), 1, 1)), 1, id="a part of the gateways has a request"),
        pytest.param(1, asking(over(60), 1), 1, id="a request in each reading"),
        pytest.param(
            1, [*asking(over(60), 1)[:1], *over(55)], 1, id="the last request was within downSeconds"
        ),
        pytest.param(1, [*starting(over(60)[:-1]), *over(0)], 1, id="quiet while it started"),
        pytest.param(1, asking(over(60, queue_s=0.1, kv=0.01), 1), 1, id="hardly used"),
    ],
)
def test_a_pool_leaves_zero_with_a_request_and_returns_after_quiet(
    scaling: Scaling, now: int, demands: Sequence[Demand], wanted: int
) -> None:
    assert replicas(scaling, now, of_a_pool_of(now, demands), NOW) == wanted


def test_a_pool_that_somebody_switched_off_stays_so() -> None:
    assert replicas(QUEUE, 0, of_a_pool_of(0, asking(over(60), 9, 9)), NOW) == 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("scaling", [ZERO[0], ZERO[2]])
def test_a_pool_goes_from_zero_to_six_and_back_in_few_changes(scaling: Scaling, seed: int) -> None:
    pool = SimulatedPool(structs.replace(scaling, up_seconds=30, down_seconds=300), seed)
    pool.run(20, 0.0)
    assert pool.changes == [], "it begins without any endpoint"
    pool.run(40, 4.5)
    assert pool.wanted in (5, 6)
    assert max(pool.changes) <= 6
    assert pool.coming_back == [], "whoever was refused at first was served"
    pool.run(60, 0.0)
    assert pool.wanted == 0
    assert pool.changes[0] == 1
    assert pool.changes[-1] == 0
    assert len(pool.changes) <= 6


MINUTE_LONG = (60.0, 60.0)
"""Seconds that each endpoint takes to start."""


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.heavy) for n in range(1, 20))])
@pytest.mark.parametrize("scaling", [QUEUE, TTFT])
@pytest.mark.parametrize("least", [0, 2])
def test_with_defaults_a_load_for_six_comes_and_goes_in_six_changes(
    least: int, scaling: Scaling, seed: int
) -> None:
    """`upSeconds` and `downSeconds` are the defaults, and every endpoint takes a minute to start."""
    pool = SimulatedPool(
        structs.replace(scaling, min_replicas=least, up_seconds=UP, down_seconds=DOWN), seed, MINUTE_LONG
    )
    low = 0.2 if least else 0.0
    pool.run(20, low)
    assert pool.changes == []
    pool.run(40, 4.5)
    assert pool.wanted in (5, 6)
    pool.run(90, low)
    assert pool.wanted == least
    assert len(pool.changes) <= 6
    assert pool.coming_back == [], "whoever was refused without an endpoint was served"


@pytest.mark.parametrize("rate", [0.5, 1.5, 2.5, 3.5, 4.5])
@pytest.mark.parametrize("scaling", [QUEUE, TTFT])
def test_four_hours_of_a_constant_load_change_nothing_after_ten_minutes(
    scaling: Scaling, rate: float
) -> None:
    pool = SimulatedPool(structs.replace(scaling, up_seconds=UP, down_seconds=DOWN), 1, MINUTE_LONG)
    pool.run(10, rate)
    changes = list(pool.changes)
    pool.run(230, rate)
    assert pool.changes == changes


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("scaling", "rate", "most_later"),
    [
        *((QUEUE, rate, 0) for rate in (1.5, 2.5, 3.5)),
        *((TTFT, rate, most) for rate, most in ((0.5, 0), (1.5, 5), (2.5, 3), (3.5, 0), (4.5, 0))),
    ],
)
def test_a_constant_load_whatever_the_seed_moves_the_number_up_at_most_once_more(
    scaling: Scaling, rate: float, most_later: int
) -> None:
    """First tokens are late by chance where a load is near what the endpoints can do, so that of 80 runs 8
    decide after more than ten minutes, and all of them but one in the first 22; none goes back."""
    later = []
    for seed in range(16):
        pool = SimulatedPool(structs.replace(scaling, up_seconds=UP, down_seconds=DOWN), seed, MINUTE_LONG)
        pool.run(10, rate)
        before, wanted = len(pool.changes), pool.wanted
        pool.run(12, rate)
        soon = len(pool.changes)
        pool.run(218, rate)
        assert pool.changes[before:] in ([], [wanted + 1]), seed
        later += [(seed, number >= soon) for number in range(before, len(pool.changes))]
    assert len(later) <= most_later, later
    assert sum(is_late for _, is_late in later) <= 1, later


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scaling": {"minReplicas": 0, "maxReplicas": 2}}, "Kubernetes' autoscalers keep one"),
        (
            {
                "scaling": {"minReplicas": 0, "maxReplicas": 2, "signal": "queueSeconds"},
                "mooncake": {"transfer": "handoff"},
                "prefillReplicas": 1,
            },
            "Endpoints that only prefill would go on",
        ),
        (
            {
                "scaling": {"minReplicas": 0, "maxReplicas": 2, "signal": "queueSeconds"},
                "gateway": {"replicas": 0},
            },
            "Gateways tell that a prompt found no endpoint",
        ),
    ],
)
def test_zero_is_refused_where_it_means_nothing(change: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words) as raised:
        convert({"model": {"name": "m"}, **change})
    assert "$.spec.scaling.minReplicas" in str(raised.value)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("most", "rate"), [(6, 2.5), (6, 3.2), (16, 6.0), (16, 9.0)])
def test_a_constant_load_changes_nothing_once_it_is_served(most: int, rate: float, seed: int) -> None:
    pool = SimulatedPool(structs.replace(QUEUE, max_replicas=most, up_seconds=30, down_seconds=300), seed)
    pool.run(10, rate)
    changes = list(pool.changes)
    pool.run(50, rate)
    assert pool.changes == changes


def test_a_constant_use_of_kv_changes_nothing() -> None:
    """Around the point at which an endpoint less would do."""
    rng, at, now, demands, changes = Random(1), 0.0, 3, list[Demand](), list[int]()
    for _ in range(4 * HOUR):
        at += 5.0
        demands.append(Demand(at=at, queue_s=0.0, kv_in_use=1.0 + rng.uniform(-0.08, 0.08), wanted=now))
        wanted = replicas(structs.replace(KV, up_seconds=0), now, demands[-HOUR:], at)
        if wanted != now:
            changes.append(wanted)
            now = wanted
    assert changes == []


@pytest.mark.parametrize("scaling", [QUEUE, KV, TTFT])
@pytest.mark.parametrize("now", [2, 4])
def test_old_readings_change_nothing(scaling: Scaling, now: int) -> None:
    """Whatever they said, gateways have not answered since."""
    for demands in (over(120), over(120, queue_s=30.0, kv=3.0), answering(120, late=9, prefilling=now)):
        old = [replace(demand, at=demand.at - 30.0) for demand in of_a_pool_of(now, demands)]
        assert replicas(scaling, now, old, NOW) == now


@pytest.mark.parametrize(
    ("now", "demands"),
    [pytest.param(4, over(120), id="idle"), pytest.param(2, over(120, queue_s=30.0), id="long queues")],
)
def test_readings_count_from_the_last_one_that_is_missing(now: int, demands: Sequence[Demand]) -> None:
    """`upSeconds` and `downSeconds` are times in which the load was known."""
    of_now = of_a_pool_of(now, demands)
    assert replicas(QUEUE, now, of_now, NOW) != now
    gap = [demand for demand in of_now if not NOW - 30 < demand.at < NOW - 5]
    assert replicas(QUEUE, now, gap, NOW) == now


@pytest.mark.parametrize(
    ("signal", "target", "words"),
    [
        ("kvUsage", "2", "a share of the KV cache above 0, at most 1"),
        ("queueSeconds", "0", "seconds above 0"),
        ("ttftAttainment", "2", "a share of requests above 0 and below 1"),
    ],
)
def test_a_target_that_means_nothing_is_refused(signal: str, target: str, words: str) -> None:
    given = {"signal": signal, "target": target, "minReplicas": 1, "maxReplicas": 2}
    with pytest.raises(SpecError, match=rf"{words}.* - at `\$\.spec\.scaling\.target`"):
        convert({"model": {"name": "m"}, "scaling": given})


def test_a_time_to_the_first_token_is_one_that_gateways_count() -> None:
    given = {"signal": "ttftAttainment", "target": "0.9", "minReplicas": 1, "maxReplicas": 2}
    with pytest.raises(SpecError, match=r"within 0.1, 0.2, .*, 60 s - at `\$\.spec\.scaling\.ttftSeconds`"):
        convert({"model": {"name": "m"}, "scaling": {**given, "ttftSeconds": 2.5}})
    assert convert({"model": {"name": "m"}, "scaling": {**given, "ttftSeconds": 7.5}}).scaling


LIMITS = {"minReplicas": 1, "maxReplicas": 4}
SPLIT = {"model": {"name": "m"}, "prefillReplicas": 2, "mooncake": {"transfer": "handoff"}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prefillReplicas": 0}, r"set it to 1 or more - at `\$\.spec\.prefillScaling`"),
        (
            {"prefillScaling": {**LIMITS, "target": "0"}},
            r"seconds above 0 - at `\$\.spec\.prefillScaling\.target`",
        ),
        (
            {"prefillScaling": {**LIMITS, "signal": "ttftAttainment", "target": "0.9", "ttftSeconds": 2.5}},
            r"- at `\$\.spec\.prefillScaling\.ttftSeconds`",
        ),
        ({"replicas": 2, "roleSwitching": {}}, r"the same load.* - at `\$\.spec\.roleSwitching`"),
    ],
)
def test_a_pool_of_two_roles_scales_each_of_them(change: dict[str, Any], words: str) -> None:
    given = {**SPLIT, "scaling": {**LIMITS, "signal": "kvUsage", "target": "0.7"}, "prefillScaling": LIMITS}
    made = convert(given)
    assert made.scaling
    assert made.prefill_scaling
    assert (made.scaling.signal, made.prefill_scaling.signal) == (Signal.KV_USAGE, Signal.QUEUE_SECONDS)
    with pytest.raises(SpecError, match=words):
        convert({**given, **change})


DECODE = Scaling(
    signal=Signal.KV_USAGE, min_replicas=2, max_replicas=8, target="0.7", up_seconds=30, down_seconds=300
)
PREFILL = PrefillScaling(min_replicas=1, max_replicas=4, target="2", up_seconds=30, down_seconds=300)
PREFILL_IN_TIME = structs.replace(PREFILL, signal=Signal.TTFT_ATTAINMENT, target="0.9", ttft_seconds=20.0)


class SimulatedRoles:
    """A pool of two roles, planned by the operator every 5 s. A prompt takes its seconds at the prefill
    endpoint of the shortest queue, and then holds a part of a KV cache for the seconds of its answer. New
    endpoints take 30 to 90 s to become ready. Both roles are told the same first tokens, which are those of
    the pool."""

    def __init__(self, prefill: PrefillScaling, seed: int) -> None:
        self.prefill, self.rng, self.at = prefill, Random(seed), 0.0
        self.wanted = {"serve": 2, "prefill": 1}
        self.queues_s = [0.0]
        self.ready_at: dict[str, list[float]] = {"serve": [], "prefill": []}
        self.answers: list[tuple[float, float]] = []
        """When each begins and ends."""
        self.first_tokens: list[tuple[float, bool]] = []
        """When each comes, and whether in time."""
        self.demands: dict[str, list[Demand]] = {"serve": [], "prefill": []}
        self.changes: list[tuple[str, int]] = []

    def run(self, minutes: int, prompts_per_s: float, prefill_s: float, answer_s: float) -> None:
        for _ in range(12 * minutes):
            self.at += 5.0
            for _ in range(int(prompts_per_s * 5) + (self.rng.random() < prompts_per_s * 5 % 1)):
                shortest = self.queues_s.index(min(self.queues_s))
                self.queues_s[shortest] += self.rng.expovariate(1 / prefill_s)
                ttft_s = self.queues_s[shortest]
                begins = self.at + ttft_s
                self.first_tokens.append((begins, ttft_s <= self.prefill.ttft_seconds))
                self.answers.append((begins, begins + self.rng.expovariate(1 / answer_s)))
            self.queues_s = [max(0.0, queue_s - 5.0) for queue_s in self.queues_s]
            self.answers = [(begin, end) for begin, end in self.answers if end > self.at]
            self.queues_s += [0.0 for due in self.ready_at["prefill"] if due <= self.at]
            self.ready_at = {duty: [d for d in due if d > self.at] for duty, due in self.ready_at.items()}
            in_use = sum(begin <= self.at for begin, _ in self.answers) / 10
            come = [in_time for at, in_time in self.first_tokens if at <= self.at]
            self.first_tokens = [(at, in_time) for at, in_time in self.first_tokens if at > self.at]
            reading = Demand(
                at=self.at, queue_s=0.0, kv_in_use=0.0, first_tokens=len(come), in_time=sum(come)
            )
            self.look("serve", DECODE, replace(reading, kv_in_use=in_use))
            busy = sum(queue_s > 0.0 for queue_s in self.queues_s)
            self.look("prefill", self.prefill, replace(reading, queue_s=sum(self.queues_s), prefilling=busy))

    def look(self, duty: str, scaling: Scaling | PrefillScaling, reading: Demand) -> None:
        now = self.wanted[duty]
        self.demands[duty].append(replace(reading, starting=len(self.ready_at[duty]), wanted=now))
        wanted = replicas(scaling, now, self.demands[duty][-HOUR:], self.at)
        if wanted == now:
            return
        self.ready_at[duty] += [self.at + self.rng.uniform(30.0, 90.0) for _ in range(wanted - now)]
        if duty == "prefill" and wanted < now:
            self.queues_s[0] += self.queues_s.pop()
        self.wanted[duty] = wanted
        self.changes.append((duty, wanted))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("prefill", [PREFILL, PREFILL_IN_TIME])
def test_each_role_follows_its_own_load(prefill: PrefillScaling, seed: int) -> None:
    """Long prompts need prefill endpoints, long answers others; neither load moves the other role, by
    whichever signal the prefill endpoints are scaled."""
    pool = SimulatedRoles(prefill, seed)
    pool.run(10, 0.4, prefill_s=1.0, answer_s=10.0)
    assert pool.changes == []
    pool.run(30, 0.4, prefill_s=7.0, answer_s=10.0)
    assert pool.wanted["prefill"] >= 3
    assert {duty for duty, _ in pool.changes} == {"prefill"}
    pool.run(60, 0.4, prefill_s=1.0, answer_s=100.0)
    assert (pool.wanted["prefill"], pool.wanted["serve"] >= 5) == (1, True)
    pool.run(60, 0.4, prefill_s=1.0, answer_s=10.0)
    assert pool.wanted == {"serve": 2, "prefill": 1}
    assert len(pool.changes) <= 16


def planned(change: dict[str, Any], live: int | None, queue_s: float) -> Plan:
    """Return the plan of a pool whose Deployment of prefill endpoints has `live` replicas."""
    spec = convert({**SPLIT, "replicas": 2, "engine": {"kind": "simulated"}, **change})
    name = Key("Deployment", "n", "p-prefill")
    made = {
        "kind": "Deployment",
        "metadata": {"name": "p-prefill", "namespace": "n"},
        "spec": {"replicas": live},
    }
    demands: Demands = {"prefill": of_a_pool_of(live or 2, over(60, queue_s=queue_s)), "serve": over(60)}
    observed = Observed(uid="u", generation=1, children={name: made} if live else {}, demands=demands)
    return plan("p", "n", spec, observed, NOW, Defaults(image="g", engine_image="e", master_image="m"))


@pytest.mark.parametrize(
    ("change", "live", "queue_s", "before", "after"),
    [
        ({"prefillScaling": {**LIMITS, "upSeconds": 10}}, None, 0.0, 2, 2),
        ({"prefillScaling": {**LIMITS, "upSeconds": 10}}, 3, 7.9, 3, 4),
        ({"prefillScaling": {**LIMITS, "downSeconds": 10}}, 3, 0.0, 3, 2),
        ({"prefillScaling": {"minReplicas": 4, "maxReplicas": 4}}, 3, 0.0, 3, 4),
        ({}, 3, 99.0, 2, 2),
    ],
)
def test_the_deployment_remembers_the_number_of_prefill_endpoints(
    change: dict[str, Any], live: int | None, queue_s: float, before: int, after: int
) -> None:
    made = planned(change, live, queue_s)
    assert (made.prefill, made.scale_to) == ((before, after), None)
    (deployment,) = [
        o for o in made.objects or () if o["metadata"]["name"] == "p-prefill" and o["kind"] == "Deployment"
    ]
    assert deployment["spec"]["replicas"] == after
    assert f"of {after} that prefill" in str(made.status)


def autoscaler(name: str, kind: str = "InferencePool", target: str = "p") -> dict[str, Any]:
    """One of somebody else's, such as KEDA's."""
    group = {"InferencePool": "perilune.dev/v1alpha1"}.get(kind, "apps/v1")
    return {
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": name, "namespace": "n"},
        "spec": {"scaleTargetRef": {"apiVersion": group, "kind": kind, "name": target}},
    }


@pytest.mark.parametrize(
    ("signal", "others", "writers"),
    [
        pytest.param("queueSeconds", [], None, id="the operator alone"),
        pytest.param("metric", [autoscaler("p-engine")], None, id="the pool's own autoscaler"),
        pytest.param("", [autoscaler("keda-hpa-p")], None, id="one of KEDA's alone"),
        pytest.param("", [autoscaler("a", target="other")], None, id="of another pool"),
        pytest.param("", [autoscaler("a", "Deployment", "web")], None, id="of another Deployment"),
        pytest.param("queueSeconds", [autoscaler("a")], "spec.scaling, a", id="operator and autoscaler"),
        pytest.param("", [autoscaler("a"), autoscaler("b")], "a, b", id="two autoscalers"),
        pytest.param(
            "metric", [autoscaler("p-engine"), autoscaler("b")], "b, p-engine", id="its own and another"
        ),
        pytest.param(
            "",
            [autoscaler("a", "Deployment", "p-engine")],
            "spec.replicas, a (of Deployment p-engine)",
            id="of the operator's Deployment",
        ),
    ],
)
def test_several_writers_of_replicas_are_a_condition(
    signal: str, others: list[dict[str, Any]], writers: str | None
) -> None:
    """The operator does not scale the pool meanwhile."""
    limits = {"minReplicas": 1, "maxReplicas": 4, "upSeconds": 0}
    scaling = {"scaling": {"signal": signal, **limits}} if signal else {}
    spec = convert({"model": {"name": "m"}, "replicas": 2, "engine": {"kind": "simulated"}, **scaling})
    children = {Key(o["kind"], "n", o["metadata"]["name"]): o for o in others}
    demands: Demands = {"serve": of_a_pool_of(2, over(60, queue_s=20.0))}
    made = plan(
        "p", "n", spec, Observed(uid="u", generation=1, children=children, demands=demands), NOW, Defaults()
    )
    told = [c.message for c in made.status.conditions if c.type == "ReplicasContested"]
    assert [message.partition(" is set by ")[2].partition(". ")[0] for message in told] == (
        [writers] if writers else []
    )
    assert (made.scale_to is not None) is (signal == "queueSeconds" and not writers)


@pytest.mark.parametrize(("signal", "contested"), [("queueSeconds", True), ("metric", False), ("", False)])
def test_who_writes_over_the_operators_number_is_a_writer(signal: str, *, contested: bool) -> None:
    """As a tool does that applies a manifest with replicas again."""
    scaling = {"scaling": {"signal": signal, "minReplicas": 1, "maxReplicas": 4, "upSeconds": 0}}
    spec = convert({"model": {"name": "m"}, "replicas": 2, **(scaling if signal else {})})
    demands: Demands = {"serve": of_a_pool_of(2, over(60, queue_s=20.0))}
    observed = Observed(uid="u", generation=1, demands=demands, overwritten_by="argocd")
    made = plan("p", "n", spec, observed, NOW, Defaults())
    told = [c.message for c in made.status.conditions if c.type == "ReplicasContested"]
    assert ["spec.scaling, argocd (which writes spec.replicas)" in message for message in told] == (
        [True] if contested else []
    )
    assert made.scale_to is None


@pytest.mark.parametrize(
    ("signal", "replicas", "live", "scale_to", "handed_over"),
    [
        pytest.param("metric", 1, 3, 3, True, id="an autoscaler goes on from what runs"),
        pytest.param("metric", 3, 3, None, False, id="it has nothing to go on from"),
        pytest.param("queueSeconds", 2, 2, 4, False, id="the operator's own decision"),
    ],
)
def test_what_is_handed_over_to_an_autoscaler_is_not_what_the_operator_decides(
    signal: str, replicas: int, live: int, scale_to: int | None, *, handed_over: bool
) -> None:
    limits = {"minReplicas": 1, "maxReplicas": 4, "upSeconds": 0, "signal": signal}
    spec = convert(
        {"model": {"name": "m"}, "replicas": replicas, "engine": {"kind": "simulated"}, "scaling": limits}
    )
    name = Key("Deployment", "n", "p-engine")
    body = {"kind": "Deployment", "metadata": {"name": "p-engine", "namespace": "n"}}
    demands: Demands = {"serve": of_a_pool_of(replicas, over(60, queue_s=20.0))}
    observed = Observed(
        uid="u", generation=1, children={name: {**body, "spec": {"replicas": live}}}, demands=demands
    )
    made = plan("p", "n", spec, observed, NOW, Defaults())
    assert (made.scale_to, made.handed_over) == (scale_to, handed_over)


class Scales:
    """A client whose server stores the pool's replicas as its version 12."""

    async def request(self, method: str, where: str, body: Any, **_: Any) -> Any:
        assert (method, where.rpartition("/")[2], body) == ("PATCH", "scale", {"spec": {"replicas": 2}})
        return {"metadata": {"resourceVersion": "12"}, "spec": {"replicas": 2}}


async def test_it_is_seen_once_when_somebody_writes_over_the_operators_number() -> None:
    def pool(version: int, replicas: int) -> dict[str, Any]:
        return {"metadata": {"resourceVersion": f"{version}"}, "spec": {"replicas": replicas}}

    writes = applier(Scales(), Owner("n", "p", "u"))
    assert not writes.take_overwritten(pool(10, 1)), "nothing was written"
    await writes.apply(replace(plan_of(()), scale_to=2), {})
    for version, count, overwritten in (
        (11, 1, False),  # late news of what was before
        (12, 2, False),  # the operator's own write
        (13, 2, False),  # something else has changed
        (14, 3, True),
        (14, 3, False),  # once for each change
        (15, 3, False),
        (16, 1, True),
    ):
        assert writes.take_overwritten(pool(version, count)) is overwritten, (version, count)


def test_who_has_written_the_number_is_who_owns_the_field() -> None:
    def entry(manager: str, *fields: str) -> dict[str, Any]:
        spec = {f"f:{field}": {} for field in fields}
        return {"manager": manager, "operation": "Apply", "fieldsV1": {"f:spec": spec}}

    managed = [entry("kubectl", "model"), entry("gitops", "replicas", "engine"), {"manager": "kopf"}]
    assert writer_of_replicas({"metadata": {"managedFields": managed}}) == "gitops"
    assert writer_of_replicas({"metadata": {}}) == "somebody"
