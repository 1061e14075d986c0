"""The closed form against the simulated engine that takes every step."""

from math import inf
from random import Random

import pytest

from perilune_lab.engine.hashing import Algorithm, BlockHasher
from perilune_lab.engine.kv_cache import KvCache
from perilune_lab.engine.request import Request
from perilune_lab.engine.scheduler import Scheduler
from perilune_lab.simulate.h20 import H20, Hardware
from perilune_lab.simulate.runs import ROOT, Runs
from perilune_lab.simulate.workload import Task
from perilune_research.simulator.cache import RunCache
from perilune_research.simulator.engine import SimulatedEngine
from perilune_research.simulator.request import SimulatedRequest
from perilune_research.simulator.store import SimulatedStore

BLOCK = 16


class Bench:
    """One engine, played to the end."""

    def __init__(self, hardware: Hardware = H20, store: bool = False, pool_tokens: int = 281_600) -> None:
        self.runs = Runs()
        self.due: list[tuple[float, int]] = []
        self.finished: list[SimulatedRequest] = []
        self.store = SimulatedStore(self.runs, 1_000_000) if store else None
        self.engine = SimulatedEngine(
            0,
            hardware,
            RunCache(self.runs, pool_tokens),
            schedule=lambda at_s, version: self.due.append((at_s, version)),
            on_first_token=lambda s, now: None,
            on_finish=lambda s, now: self.finished.append(s),
            store=self.store,
        )
        self.submissions: list[tuple[float, SimulatedRequest]] = []

    def submit(
        self, at_s: float, run: int, prompt: int, output: int, number: int, **known: float
    ) -> SimulatedRequest:
        task = Task(
            session=0,
            number=number,
            run=run,
            prompt_tokens=prompt,
            answer_run=run,
            output_tokens=output,
            gap_s=0.0,
            timestamp_s=0.0,
        )
        request = SimulatedRequest(task, number, at_s, at_s)
        for name, value in known.items():
            setattr(request, name, value)
        self.submissions.append((at_s, request))
        return request

    def play(self) -> None:
        waiting = sorted(self.submissions, key=lambda row: row[0])
        while waiting or self.due:
            event = min(self.due, default=(inf, 0))
            if waiting and waiting[0][0] <= event[0]:
                at_s, request = waiting.pop(0)
                self.engine.add(request, at_s)
            else:
                self.due.remove(event)
                self.engine.event(*event)


def stepped(rows: list[tuple[float, list[int], int]], pool_tokens: int) -> list[Request]:
    """Play the same requests, taking every step: (arrival, tokens, output tokens)."""
    cache = KvCache(BlockHasher(Algorithm.SHA256, BLOCK), pool_tokens // BLOCK + 1)
    scheduler = Scheduler(cache, H20.engine)
    requests = []
    for i, (at_s, tokens, output) in enumerate(rows):
        scheduler.advance(at_s)
        request = Request(str(i), cache.open(list(tokens)), [0] * output)
        requests.append(request)
        scheduler.add(request, at_s)
    while not scheduler.idle:
        scheduler.advance(scheduler.next_s())
    return requests


@pytest.mark.parametrize("seed", range(6))
def test_it_gives_the_times_of_an_engine_that_takes_every_step(seed: int):
    rng = Random(seed)
    bench = Bench()
    rows, at_s = [], 0.0
    prompts: dict[int, tuple[int, list[int]]] = {}
    for n in range(25):
        at_s += rng.expovariate(2.0)
        known = prompts.get(rng.randrange(8)) if n else None
        if known is None:
            length = BLOCK * rng.randint(10, 1500) + 1
            known = bench.runs.add(ROOT, length + 1000), [n * 50_000 + i for i in range(length)]
            prompts[n % 8] = known
        run, tokens = known
        output = rng.randint(1, 400)
        bench.submit(at_s, run, len(tokens), output, n)
        rows.append((at_s, tokens, output))
    bench.play()
    theirs = stepped(rows, 281_600)
    for request, (_, ours) in zip(theirs, bench.submissions, strict=True):
        assert ours.cached_tokens == pytest.approx(request.cached_tokens, abs=BLOCK)
        assert ours.first_token_s - ours.submitted_s == pytest.approx(
            request.first_token_s - request.arrived_s, rel=0.01, abs=0.010
        )
        assert ours.finished_s - ours.submitted_s == pytest.approx(
            request.finished_s - request.arrived_s, rel=0.01, abs=0.010
        )


def test_equal_prompts_together_are_computed_once():
    bench = Bench()
    run = bench.runs.add(ROOT, 5_000)
    first, second = (bench.submit(0.0, run, 4_000, 1, n) for n in range(2))
    bench.play()
    assert (first.cached_tokens, second.cached_tokens) == (0, 3_984)
    assert second.first_token_s == first.first_token_s


def test_when_the_pool_is_full_the_youngest_is_computed_again():
    bench = Bench(pool_tokens=10_000)
    runs = [bench.runs.add(ROOT, 10_000) for _ in range(2)]
    rows = [bench.submit(0.0, run, 4_000, 2_000, n) for n, run in enumerate(runs)]
    bench.play()
    assert [s.preemptions for s in rows] == [0, 1]
    assert all(s.produced == 2_000 for s in rows)
    assert rows[1].finished_s > rows[0].finished_s
    assert bench.engine.kv_usage == pytest.approx(0.0)
    assert bench.engine.cache.used_tokens <= 10_000


def test_a_prompt_waits_for_room():
    bench = Bench(pool_tokens=10_000)
    runs = [bench.runs.add(ROOT, 10_000) for _ in range(2)]
    first, second = (bench.submit(0.0, run, 6_000, 100, n) for n, run in enumerate(runs))
    bench.play()
    assert second.first_token_s > first.finished_s


def test_a_more_urgent_request_goes_first():
    bench = Bench()
    rows = [
        bench.submit(0.0, bench.runs.add(ROOT, 20_000), 20_000 - 10, 1, n, priority=p)
        for n, p in enumerate([0, 5, 1])
    ]
    bench.play()
    assert rows[2].first_token_s < rows[1].first_token_s


def test_a_transfer_comes_before_the_prefill_or_beside_it():
    times = {}
    for name, known in {
        "serial": {"fetched_tokens": 8_000, "ready_s": 3.0},
        "overlapped": {"fetched_tokens": 8_000, "transfer_ends_s": 3.0},
        "recomputed": {},
    }.items():
        bench = Bench()
        s = bench.submit(0.0, bench.runs.add(ROOT, 30_000), 24_000, 50, 0, **known)
        bench.play()
        times[name] = s.first_token_s
        assert s.cached_tokens == known.get("fetched_tokens", 0)
    rest_s = H20.engine.prefill_s(16_000, 8_000)
    assert times["serial"] == pytest.approx(3.0 + rest_s, rel=0.05)
    assert times["overlapped"] == pytest.approx(max(3.0, rest_s), rel=0.05)
    assert times["recomputed"] == pytest.approx(H20.engine.prefill_s(24_000), rel=0.05)


def test_a_store_is_read_where_the_device_has_nothing():
    bench = Bench(store=True, pool_tokens=40_000)
    run, other = bench.runs.add(ROOT, 30_000), bench.runs.add(ROOT, 40_000)
    bench.submit(0.0, run, 24_000, 1, 0)
    bench.submit(10.0, other, 40_000, 1, 1)  # drives the first one out
    again = bench.submit(30.0, run, 24_000, 1, 2)
    bench.play()
    assert again.store_tokens == pytest.approx(24_000, abs=BLOCK)
    waited_s = again.first_token_s - again.submitted_s
    assert waited_s == pytest.approx(H20.engine.store_s(24_000), rel=0.25)


def test_a_dead_engine_gives_back_what_it_had():
    bench = Bench()
    rows = [bench.submit(0.0, bench.runs.add(ROOT, 9_000), 8_000, 100, n) for n in range(3)]
    for at_s, s in bench.submissions:
        bench.engine.add(s, at_s)
    bench.engine.event(*min(bench.due))
    assert set(bench.engine.die()) == set(rows)
    assert (bench.engine.running, bench.engine.waiting, bench.engine.kv_usage) == (0, 0, 0.0)
