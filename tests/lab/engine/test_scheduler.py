"""The scheduler in virtual time: what runs when, and how long it takes."""

import random
from itertools import pairwise
from math import inf
from statistics import median

import pytest
from stepped_engine import SteppedEngine

from perilune_gateway.model import H20_30B
from perilune_lab.engine.kv_cache import Medium, Stored
from perilune_lab.engine.request import Finish
from perilune_lab.engine.scheduler import Limits
from perilune_lab.quantiles import quantile

OVERHEAD = H20_30B.request_overhead_s


def prompt(key: int, n: int) -> list[int]:
    """n tokens that differ from every other key's."""
    return [key * 100_000 + i for i in range(n)]


def gaps(steps, request):
    times = [step.ends_s for step in steps if request in step.emitted]
    return [b - a for a, b in pairwise(times)]


# time


def test_one_prompt_takes_what_the_engine_model_says():
    engine = SteppedEngine()
    request = engine.add(prompt(1, 20_000), 3)
    steps = engine.run()
    chunks = [(8192, 0), (8192, 8192), (3616, 16_384)]
    first = OVERHEAD(20_000) + sum(H20_30B.mixed_step_s([chunk], begins=not chunk[1]) for chunk in chunks)
    assert [step.tokens for step in steps] == [8192, 8192, 3616, 1, 1]
    assert request.first_token_s == pytest.approx(first)
    decode = H20_30B.decode_step_s(1, 20_001) + H20_30B.decode_step_s(1, 20_002)
    assert request.last_token_s - request.first_token_s == pytest.approx(decode)
    assert request.finish is Finish.LENGTH


def test_steps_of_an_unsteady_engine_take_as_many_times_longer():
    steady, unsteady = SteppedEngine(), SteppedEngine(noise=iter([2.0, 0.5]).__next__)
    times = []
    for engine in (steady, unsteady):
        engine.add(prompt(1, 1_000), 2)
        times.append([step.ends_s - step.started_s for step in engine.run()])
    (prefill_s, decode_s), twice_and_half = times
    assert twice_and_half == pytest.approx([2 * prefill_s, decode_s / 2])


def test_a_short_prompt_joins_the_steps_of_a_long_one_that_may_not_fill_them():
    engine = SteppedEngine(limits=Limits(tokens_per_prompt=2048))
    long = engine.add(prompt(1, 16_384), 1)
    engine.run(0.01)
    short = engine.add(prompt(2, 100), 1)
    steps = engine.run()
    assert [new for step in steps for request, new, _ in step.prefilled if request is long] == [2048] * 8
    assert short.first_token_s < long.first_token_s


def test_decode_goes_on_beside_the_chunks_of_another_prompt():
    engine = SteppedEngine()
    talking = engine.add(prompt(1, 100), 200)
    engine.run(0.1)
    reading = engine.add(prompt(2, 16_384), 1)
    steps = engine.run()
    mixed = [step for step in steps if step.prefilled and step.decoded]
    # A decoding sequence takes one token of the budget of every step.
    assert [(new, before) for step in mixed for _, new, before in step.prefilled] == [
        (8191, 0),
        (8191, 8191),
        (2, 16_382),
    ]
    assert all(talking in step.emitted for step in mixed)
    assert reading.first_token_s == mixed[-1].ends_s


def test_nothing_happens_before_its_time_and_a_late_look_shifts_nothing():
    often, late = SteppedEngine(), SteppedEngine()
    requests = [engine.add(prompt(1, 5000), 50) for engine in (often, late)]
    for _ in range(1000):
        often.run(0.002)
    late.run(2.0)
    assert len(often.steps) == len(late.steps)
    assert requests[0].last_token_s == requests[1].last_token_s
    assert all(step.ends_s <= 2.0 for step in late.steps)


def test_idle_engine_has_nothing_due():
    engine = SteppedEngine()
    assert engine.scheduler.next_s() == inf
    engine.add(prompt(1, 10))
    assert engine.scheduler.next_s() == pytest.approx(OVERHEAD(10))
    engine.run()
    assert engine.scheduler.idle
    assert engine.scheduler.next_s() == inf


# sharing


def test_three_equal_prompts_in_one_admission_are_prefilled_once():
    engine = SteppedEngine()
    requests = [engine.add(prompt(1, 1600)) for _ in range(3)]
    (step,) = engine.run()
    assert step.prefill_forwards == 1
    assert (step.misses, step.hits) == (1, 2)
    assert [new for _, new, _ in step.prefilled] == [1600, 16, 16]
    assert [request.cached_tokens for request in requests] == [0, 1584, 1584]
    stored = [change for change in step.changes if isinstance(change, Stored)]
    assert [len(change.digests) for change in stored] == [100, 1, 1]
    alone = SteppedEngine()
    alone.add(prompt(1, 1600))
    (solo,) = alone.run()
    assert step.ends_s - step.started_s < 1.1 * (solo.ends_s - solo.started_s)


def test_misses_of_one_admission_share_one_forward_and_sampling_keeps_their_order():
    engine = SteppedEngine()
    engine.add(prompt(9, 400))
    engine.run()
    requests = [engine.add(prompt(key, 400)) for key in (1, 9, 2, 3)]
    (step,) = engine.run()
    assert (step.misses, step.hits, step.prefill_forwards) == (3, 1, 1)
    assert step.emitted == requests


def test_next_turn_finds_prompt_and_answer():
    engine = SteppedEngine()
    first = engine.add(prompt(1, 100), prompt(7, 60))
    engine.run()
    second = engine.add(prompt(1, 100) + prompt(7, 60) + prompt(8, 40), 1)
    engine.run()
    assert first.cached_tokens == 0
    # 159 tokens have KV (the last answer token was never fed back): 9 full blocks.
    assert second.cached_tokens == 144


def unique_prompts(serial: bool):
    """32 unique prompts at once, 16 fit into a step."""
    engine = SteppedEngine(limits=Limits(serial_misses=serial, tokens_per_step=16 * 256 + 16))
    requests = [engine.add(prompt(key, 256), 32) for key in range(32)]
    steps = engine.run()
    ttft = [r.first_token_s - r.arrived_s for r in requests]
    tpot = [(r.last_token_s - r.first_token_s) / (r.produced - 1) for r in requests]
    itl = [gap for r in requests for gap in gaps(steps, r)]
    end = max(r.last_token_s for r in requests)
    return {
        "ttft_p50": median(ttft),
        "ttft_p95": quantile(sorted(ttft), 0.95),
        "tpot_p50": median(tpot),
        "itl_p99": quantile(sorted(itl), 0.99),
        "e2e_p50": median(r.last_token_s - r.arrived_s for r in requests),
        "s_per_token": end / sum(r.produced for r in requests),
    }, sum(step.prefill_forwards for step in steps)


def test_batched_misses_beat_serial_ones_as_published():
    """Simulated, ms: TTFT p50 1055 → 393, p95 1395 → 526, TPOT p50 27 → 20, ITL p99 681 → 265, latency p50
    1877 → 1008. Other hardware and another model than the published ones, so ratios are compared."""
    published = {
        "ttft_p50": 418 / 143,
        "ttft_p95": 799 / 260,
        "tpot_p50": 141 / 100,
        "itl_p99": 401 / 150,
        "e2e_p50": 1416 / 862,
        "s_per_token": 254 / 164,
    }
    (serial, serial_forwards), (batched, batched_forwards) = unique_prompts(True), unique_prompts(False)
    assert (serial_forwards, batched_forwards) == (32, 2)
    for name, ratio in published.items():
        assert serial[name] / batched[name] == pytest.approx(ratio, rel=0.4), name


def test_serial_misses_stall_decode_and_batched_ones_do_not():
    stalls = {}
    for serial in (True, False):
        engine = SteppedEngine(limits=Limits(serial_misses=serial))
        talking = engine.add(prompt(99, 64), 400)
        engine.run(0.5)
        for key in range(16):
            engine.add(prompt(key, 256), 4)
        steps = engine.run()
        stalls[serial] = max(gaps(steps, talking))
    assert stalls[True] == pytest.approx(0.68, abs=0.01)
    assert stalls[False] == pytest.approx(0.27, abs=0.01)


# room


def test_a_full_pool_preempts_the_last_and_recomputes_it_to_the_same_tokens():
    engine = SteppedEngine(blocks=21, block_size=16)  # 320 tokens
    first, second = engine.add(prompt(1, 100), 120), engine.add(prompt(2, 100), 120)
    steps = engine.run()
    assert (first.preemptions, second.preemptions) == (0, 1)
    assert sum(step.preempted for step in steps) == 1
    for request in (first, second):
        assert request.table.tokens[100:] == list(range(1, 121))
        assert request.finish is Finish.LENGTH
    assert second.cached_tokens == 0  # as counted at first admission
    assert engine.cache.usage == 0.0


def test_admission_waits_until_the_whole_prompt_fits():
    engine = SteppedEngine(blocks=21, block_size=16)
    first, second = engine.add(prompt(1, 200), 10), engine.add(prompt(2, 200), 1)
    engine.run(OVERHEAD(200) + 0.02)
    assert first in engine.scheduler.running
    assert engine.scheduler.waiting == [second]
    engine.run()
    assert second.scheduled_s == first.last_token_s


def test_at_most_max_sequences_run():
    engine = SteppedEngine(limits=Limits(max_sequences=2))
    for key in range(5):
        engine.add(prompt(key, 20), 3)
    steps = engine.run()
    assert max(len(step.batch) for step in steps) == 2
    assert [r.ordinal for step in steps for r in step.finished] == [0, 1, 2, 3, 4]


def test_priority_orders_the_queue_and_chooses_the_victim():
    engine = SteppedEngine(limits=Limits(max_sequences=1, by_priority=True))
    busy = engine.add(prompt(0, 20), 5)
    engine.run(OVERHEAD(20) + 0.001)
    late, urgent = engine.add(prompt(1, 20), priority=5), engine.add(prompt(2, 20), priority=-1)
    engine.run()
    assert [busy.ordinal, urgent.ordinal, late.ordinal] == [0, 1, 2]

    engine = SteppedEngine(blocks=21, block_size=16, limits=Limits(by_priority=True))
    humble, proud = engine.add(prompt(1, 100), 120, priority=1), engine.add(prompt(2, 100), 120)
    engine.run()
    assert (humble.preemptions, proud.preemptions) == (1, 0)


# leaving


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.3, 2.0], ids=["queued", "arriving", "prefill", "decode"])
def test_abort_frees_everything_at_once(after_s):
    engine = SteppedEngine()
    request = engine.add(prompt(1, 20_000), 1000)
    engine.run(after_s)
    engine.scheduler.abort(request, engine.now)
    assert request.finish is Finish.ABORT
    assert engine.cache.usage == 0.0
    other = engine.add(prompt(2, 100), 5)
    engine.run()
    assert other.produced == 5
    assert engine.scheduler.idle


def test_abort_amid_a_step_leaves_its_neighbours_tokens_alone():
    engine = SteppedEngine()
    one, two = engine.add(prompt(1, 100), 50), engine.add(prompt(2, 100), 50)
    engine.run(0.1)
    before = one.produced
    engine.scheduler.abort(one, engine.now)
    engine.run()
    assert (one.produced, two.produced) == (before, 50)
    engine.scheduler.abort(one, engine.now)  # again: nothing
    assert engine.cache.usage == 0.0


# the store


class Pool:
    """A store in memory."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()

    def leading(self, digests):
        return next((i for i, digest in enumerate(digests) if digest not in self.held), len(digests))

    def put(self, digests):
        new = [digest not in self.held for digest in digests]
        self.held.update(digests)
        return new


def test_a_prefix_in_the_store_is_loaded_instead_of_computed():
    pool = Pool()
    one, two = SteppedEngine(store=pool), SteppedEngine(store=pool)
    cold = one.add(prompt(1, 32_000), 1)
    one.run()
    warm = two.add(prompt(1, 32_000), 1)
    (step,) = two.run()
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 31_984)
    assert warm.store_tokens == 31_984
    loaded = H20_30B.store_s(31_984)
    expected = OVERHEAD(32_000) + loaded + H20_30B.mixed_step_s([(16, 31_984)])
    assert warm.first_token_s == pytest.approx(expected)
    assert warm.first_token_s < 0.3 * cold.first_token_s
    # What was loaded is announced as an ordinary device store; the pool had everything already.
    assert [len(c.digests) for c in step.changes if isinstance(c, Stored) and c.medium is Medium.DEVICE] == [
        1999,
        1,
    ]
    assert not [c for c in step.changes if isinstance(c, Stored) and c.medium is Medium.SHARED]


@pytest.mark.parametrize("stretches", [False, True])
@pytest.mark.parametrize(("stores_answers", "blocks"), [(True, 8), (False, 2)])
def test_blocks_are_put_into_the_store_and_announced_one_by_one(stores_answers, blocks, stretches):
    """Prompt and answer fill 140 tokens, but the KV of an answer's last token is never computed."""
    pool = Pool()
    limits = Limits(stores_answers=stores_answers, stretches=stretches)
    engine = SteppedEngine(store=pool, limits=limits)
    request = engine.add(prompt(1, 40), prompt(7, 100))
    steps = engine.run()
    shared = [
        c for step in steps for c in step.changes if isinstance(c, Stored) and c.medium is Medium.SHARED
    ]
    assert [len(change.digests) for change in shared] == [1] * blocks
    assert [change.tokens for change in shared] == [
        (prompt(1, 40) + prompt(7, 100))[16 * n : 16 * n + 16] for n in range(blocks)
    ]
    assert pool.held == set(request.table.chain[:blocks])


def test_the_next_turn_loads_the_answer_from_the_store():
    pool = Pool()
    one, two = SteppedEngine(store=pool), SteppedEngine(store=pool)
    one.add(prompt(1, 40), prompt(7, 100))
    one.run()
    turn = two.add(prompt(1, 40) + prompt(7, 100) + prompt(9, 20))
    two.run()
    assert turn.store_tokens == 128


def test_a_loading_request_that_leaves_frees_its_blocks():
    pool = Pool()
    one, two = SteppedEngine(store=pool), SteppedEngine(store=pool)
    one.add(prompt(1, 32_000))
    one.run()
    request = two.add(prompt(1, 32_000))
    two.run(0.2)
    assert two.scheduler.loading == [request]
    two.scheduler.abort(request, two.now)
    assert two.cache.usage == 0.0
    two.run()
    assert two.scheduler.idle


# what the request log promises


def test_admission_order_suffices_to_recompute_the_hit_rate():
    """Growing sessions, many at once, a pool that evicts: replayed one by one in admission order, the hit
    rate differs by less than two points."""
    rng = random.Random(1)
    engine = SteppedEngine(blocks=2500)
    history = {session: prompt(session, rng.randrange(500, 4000)) for session in range(40)}
    requests = []
    for _ in range(200):
        session = rng.randrange(40)
        answer = [rng.randrange(5000) for _ in range(rng.randrange(1, 200))]
        requests.append(engine.add(history[session], answer))
        history[session] = history[session] + answer + prompt(1000 + len(requests), rng.randrange(20, 300))
        if len(history[session]) > 12_000:
            history[session] = history[session][:1000]
        engine.run(rng.expovariate(2.0))
    engine.run()
    assert sum(step.preempted for step in engine.steps) == 0

    offline = SteppedEngine(blocks=2500)
    again = []
    for request in sorted(requests, key=lambda request: request.ordinal):
        tokens = request.table.tokens
        again.append(offline.add(tokens[: request.prompt_tokens], tokens[request.prompt_tokens :]))
        offline.run()
    total = sum(request.prompt_tokens for request in requests)
    rates = [sum(request.cached_tokens for request in ran) / total for ran in (requests, again)]
    assert 0.3 < rates[0] < 0.9
    assert abs(rates[0] - rates[1]) < 0.02
