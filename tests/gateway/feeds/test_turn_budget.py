"""A feed gives way to other work after its share of a turn."""

import asyncio

from perilune_gateway.feeds.turn_budget import TurnBudget


async def test_feeds_share_a_turn_of_the_loop():
    """Ten feeds with a batch each, of which a turn takes two."""
    now, turn = 0.0, 0
    applied: list[int] = []
    budget = TurnBudget(budget_s=0.002, clock=lambda: now)

    async def feed() -> None:
        nonlocal now
        await budget.begin()
        now += 0.001
        applied.append(turn)
        budget.end()

    feeds = [asyncio.create_task(feed()) for _ in range(10)]
    while len(applied) < len(feeds):
        turn += 1
        await asyncio.sleep(0)
    assert [applied.count(n) for n in sorted(set(applied))] == [2] * 5
