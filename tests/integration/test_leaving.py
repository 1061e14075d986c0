"""Engines that leave hand their sessions over first: one whose pod is deleted, before its preStop hook ends,
and all engines of a pool that are replaced one after the other.

Our gateway, which watches pods, real Envoy, simulated engines that hand KV over, the hook and the decisions
of the operator, and a stand-in for the API server's two collections.
"""

import asyncio
import time
from collections import Counter
from pathlib import Path

import pytest
from pod_stack import BLOCK, CONTEXT, Stack, address, begin, pod_stack
from waiting import HANG

from perilune_api import names
from perilune_operator.observe import readers
from perilune_operator.observe.gateway_pages import gateway_stats
from perilune_operator.rollout import RELEASE_S, Drain, Rolling, drain

SESSIONS, ENGINES = 8, 3
SESSION_S = 20.0
"""Longest wait for sessions. A gateway that has just begun names no engine as drained."""


async def test_a_deleted_engines_sessions_leave_with_their_kv_before_it_ends(tmp_path: Path) -> None:
    async with pod_stack(tmp_path, ENGINES, ENGINES) as stack:
        sessions = await begin(stack, SESSIONS)
        theirs = [s for s in sessions if s.host == f"{address(0)}:8000"]
        assert theirs
        with stack.talking(sessions):
            await stack.delete(0)
            turns = {s.name: len(s.ids) for s in sessions}
            async with asyncio.timeout(HANG):  # turns after its end
                while any(len(s.ids) == turns[s.name] for s in sessions):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        assert stack.failed == []
        assert {s.host for s in sessions} == {f"{address(n)}:8000" for n in range(1, ENGINES)}
        copied = await copied_tokens(stack)
        assert copied.keys() == {s.name for s in theirs}
        found_what_was_copied(stack, copied)


@pytest.mark.heavy
async def test_a_rolling_update_takes_each_session_along_once(tmp_path: Path) -> None:
    """New engines come one after the other, as a Deployment makes them, and the operator's own decisions say
    which old one leaves, and when."""
    v1, v2 = {names.TEMPLATE: "v1"}, {names.TEMPLATE: "v2"}
    async with pod_stack(tmp_path, ENGINES, 2 * ENGINES, **v1) as stack:
        sessions = await begin(stack, SESSIONS)
        with stack.talking(sessions):
            deletions = []
            for number in range(ENGINES):
                new = ENGINES + number
                await stack.start_engine(new, **v2)
                await stack.hands_over(ENGINES + 1)
                left = await until_released(stack)
                assert not [s.name for s in sessions if s.host == f"{address(left)}:8000"]
                deletions.append(asyncio.create_task(stack.delete(left)))
            await asyncio.gather(*deletions)
        assert stack.failed == []
        assert {s.host for s in sessions} <= {f"{address(ENGINES + n)}:8000" for n in range(ENGINES)}
        ended = (await stack.page("/api/moves"))["ended"]
        drained = Counter(e["session_id"] for e in ended if e["reason"] == "drain" and e["handoff"])
        assert drained == Counter(s.name for s in sessions), "each session is handed over once"
        found_what_was_copied(stack, await copied_tokens(stack))


async def copied_tokens(stack: Stack) -> dict[str, int]:
    """Return session → tokens that its host held when the copy began, of those that were handed over."""
    ended = ((e["session_id"], e["handoff"]) for e in (await stack.page("/api/moves"))["ended"])
    return {name: of["tokens"] for name, of in ended if of and of["outcome"] == "switched"}


def found_what_was_copied(stack: Stack, copied: dict[str, int]) -> None:
    assert {name for name, _ in stack.moved} == copied.keys()
    assert min(copied.values()) >= CONTEXT // BLOCK * BLOCK
    assert all(found >= copied[name] for name, found in stack.moved), (stack.moved, copied)


async def until_released(stack: Stack) -> int:
    """Mark pods as the operator says until an old engine may leave; return its number."""
    async with asyncio.timeout(HANG):
        while True:
            made = await plan(stack)
            for mark in made.marks:
                here = stack.api.pods[mark.pod]
                meta = here["metadata"]
                both = meta["annotations"] | mark.annotations
                stack.api.put(
                    here
                    | {"metadata": meta | {"annotations": {k: v for k, v in both.items() if v is not None}}}
                )
            if made.min_ready_s == RELEASE_S:
                (name,) = made.leaving
                return int(name.removeprefix("engine-"))
            await asyncio.sleep(0.2)


async def plan(stack: Stack) -> Drain:
    stats = gateway_stats({"gateway": await stack.metrics()})
    facts = [readers.pod(here, stats) for here in stack.api.pods.values()]
    workload = {"spec": {"replicas": ENGINES}}
    gateways = frozenset({"gateway"})
    rolling = Rolling("v2", ENGINES)
    return drain(facts, ENGINES, workload, frozenset(), gateways, SESSION_S, time.time(), rolling)
