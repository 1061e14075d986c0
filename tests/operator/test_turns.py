"""Who goes when. No clock runs: tasks go as far as they can, in the order of the event loop."""

import asyncio

import pytest

from perilune_operator.turns import Turn, Turns


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_all_begin_before_any_goes_on() -> None:
    told: list[str] = []
    turns = Turns(2, clock=lambda: 0.0)

    async def work(name: str) -> None:
        async with Turn(turns) as turn:
            told.append(f"{name} begins")
            await asyncio.sleep(0)
            await turn.step_back()
            told.append(f"{name} goes on")

    await asyncio.gather(*(work(name) for name in "abcd"))
    assert told == [
        *("a begins", "b begins", "c begins", "d begins"),
        *("a goes on", "b goes on", "c goes on", "d goes on"),
    ]


async def test_never_more_than_so_many() -> None:
    now = most = 0
    turns = Turns(3, clock=lambda: 0.0)

    async def work() -> None:
        nonlocal now, most
        async with Turn(turns) as turn:
            for part in range(2):
                now += 1
                most = max(most, now)
                await asyncio.sleep(0)
                now -= 1
                if not part:
                    await turn.step_back()

    await asyncio.gather(*(work() for _ in range(9)))
    assert (now, most) == (0, 3)


async def test_how_long_it_stood_back() -> None:
    seconds = 0.0
    turns = Turns(1, clock=lambda: seconds)
    first = Turn(turns)
    async with first:
        other = asyncio.create_task(turns.take(0))
        await asyncio.sleep(0)
        back = asyncio.create_task(first.step_back())
        await settle()
        assert (other.done(), back.done()) == (True, False)
        seconds = 7.0
        turns.give()
        await back
    assert first.stood_back_s == 7.0


@pytest.mark.parametrize("granted", [False, True], ids=["while it waits", "when its turn has just come"])
async def test_who_goes_away_holds_up_nobody(granted: bool) -> None:
    turns = Turns(1, clock=lambda: 0.0)
    await turns.take(0)
    gone, next_ = asyncio.create_task(turns.take(0)), asyncio.create_task(turns.take(0))
    await settle()
    if granted:
        turns.give()
        gone.cancel()
    else:
        gone.cancel()
        await settle()
        turns.give()
    await settle()
    assert (gone.cancelled(), next_.done()) == (True, True)


async def test_an_error_gives_the_turn_back() -> None:
    turns = Turns(1, clock=lambda: 0.0)

    async def work() -> None:
        async with Turn(turns) as turn:
            await turn.step_back()
            raise KeyError

    with pytest.raises(KeyError):
        await work()
    async with asyncio.timeout(1):
        await turns.take(0)
