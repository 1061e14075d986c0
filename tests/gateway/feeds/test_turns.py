"""Other work than requests gives way to them after its share of a turn."""

import asyncio

import pytest

from perilune_gateway.feeds.turns import Nap, Turns, Work


class Bench:
    """Work that takes a millisecond per step, on a clock of its own."""

    def __init__(self, budget_s: float) -> None:
        self.now = self.turn = 0.0
        self.steps: list[tuple[str, float]] = []
        """(name, turn of the loop) of each step."""
        self.turns = Turns(budget_s, lambda: self.now)

    def work(self, name: str, steps: int) -> Work[str]:
        for _ in range(steps):
            self.now += 0.001
            self.steps.append((name, self.turn))
            yield
        return name

    async def until(self, *futures: asyncio.Future) -> None:
        for _ in range(100):
            if all(future.done() for future in futures):
                return
            await asyncio.sleep(0)
            self.turn += 1
        raise AssertionError("it does not end")


async def test_a_turn_of_the_loop_takes_two_steps_of_all():
    bench = Bench(budget_s=0.002)
    await bench.until(*(bench.turns.run(bench.work(str(n), 1)) for n in range(10)))
    turns = [turn for _, turn in bench.steps]
    assert [turns.count(turn) for turn in sorted(set(turns))] == [2] * 5


@pytest.mark.parametrize(("requests_s", "steps"), [(0.001, 2), (0.004, 4), (0.1, 5)])
async def test_work_gets_as_much_time_as_requests_took_and_five_milliseconds_at_most(
    requests_s: float, steps: int
):
    bench = Bench(budget_s=0.002)
    done = bench.turns.run(bench.work("work", 40))
    while not done.done():
        await asyncio.sleep(0)
        bench.now += requests_s
        bench.turn += 1
    turns = [turn for _, turn in bench.steps]
    counts = [turns.count(turn) for turn in sorted(set(turns))]
    assert counts[0] == 2, "nothing waited before"
    assert set(counts[1:-1]) == {steps}


async def test_long_work_does_not_delay_short_work():
    bench = Bench(budget_s=0.002)
    long, short = bench.turns.run(bench.work("long", 50)), bench.turns.run(bench.work("short", 2))
    await bench.until(short)
    assert [name for name, _ in bench.steps] == ["long", "short"] * 2 + ["long"] * (len(bench.steps) - 4)
    assert not long.done()
    await bench.until(long)
    assert (await long, await short) == ("long", "short")


async def test_work_that_fails_fails_alone():
    bench = Bench(budget_s=1.0)

    def broken() -> Work[None]:
        yield
        raise ValueError("broken")

    failing, other = bench.turns.run(broken()), bench.turns.run(bench.work("other", 3))
    await bench.until(failing, other)
    with pytest.raises(ValueError, match="broken"):
        await failing
    assert await other == "other"


async def test_cancelled_work_takes_no_further_step():
    bench = Bench(budget_s=0.001)
    work = bench.turns.run(bench.work("cancelled", 50))
    await asyncio.sleep(0)
    work.cancel()
    await bench.until(bench.turns.run(bench.work("next", 1)))
    assert [name for name, _ in bench.steps] == ["cancelled", "next"]


async def test_work_rests_until_it_is_woken():
    bench, nap = Bench(budget_s=1.0), Nap()

    def resting() -> Work[str]:
        for n in range(3):
            bench.steps.append((f"resting {n}", bench.turn))
            yield nap
        return "rested"

    resting_, other = bench.turns.run(resting()), bench.turns.run(bench.work("other", 5))
    await bench.until(other)
    assert [name for name, _ in bench.steps if "resting" in name] == ["resting 0"]
    for _ in range(3):
        nap.wake()
        await asyncio.sleep(0)
    assert await resting_ == "rested"
    assert [name for name, _ in bench.steps if "resting" in name] == [f"resting {n}" for n in range(3)]


async def test_a_nap_that_was_woken_before_is_over_at_once():
    bench, nap = Bench(budget_s=1.0), Nap()

    def resting() -> Work[str]:
        nap.wake()
        nap.wake()
        yield nap
        return "rested"

    await bench.until(resting_ := bench.turns.run(resting()))
    assert await resting_ == "rested"


async def test_resting_work_that_is_cancelled_never_goes_on():
    bench, nap = Bench(budget_s=1.0), Nap()

    def resting() -> Work[None]:
        yield nap
        raise AssertionError("it was cancelled")

    resting_ = bench.turns.run(resting())
    await asyncio.sleep(0)
    resting_.cancel()
    nap.wake()
    await bench.until(bench.turns.run(bench.work("next", 1)))
    assert resting_.cancelled()


async def test_the_share_of_the_loop_that_work_takes():
    bench = Bench(budget_s=1.0)
    await bench.until(bench.turns.run(bench.work("", 2_000)))
    bench.now += 2.0
    assert bench.turns.busy() == pytest.approx(0.5)
    bench.now += 20.0
    bench.turns.busy()
    bench.now += 20.0
    assert bench.turns.busy() == 0.0, "only the last seconds count"
