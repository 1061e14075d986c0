"""The lab reads the gateway's admin pages."""

import asyncio

import aiohttp
import pytest
from msgspec import UNSET
from prometheus_client import CollectorRegistry, generate_latest

from perilune_gateway.model import Decision, DecisionRecord, Reason, RequestView, Step
from perilune_gateway.observe.metrics import Metrics
from perilune_lab.admin_pages import Seen, conclude, phases, scheduling, watch
from perilune_lab.report import Scheduling


def decided(timings_us: dict[str, float]) -> DecisionRecord:
    decision = Decision("10.0.0.1:8000", Reason.COLD)
    return DecisionRecord(
        view=RequestView(request_id="r", ordinal=0, prompt_tokens=10),
        verdict=decision,
        policy="ear",
        timings_us=timings_us,
    )


def test_phases_are_means_of_those_that_happened():
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    text = generate_latest(registry).decode()
    assert phases(text) == {}
    for index_us in (200.0, 400.0):
        metrics.decided(decided({Step.INDEX.value: index_us, Step.TOTAL.value: 900.0}))
    assert phases(generate_latest(registry).decode()) == {"index": 0.3}


def test_scheduling_quantiles_are_in_milliseconds():
    rows = [{"scheduling_us": us} for us in (125.0, 250.0, 375.0, None)]
    assert scheduling(rows, {"index": 0.1}) == Scheduling(0.25, 0.25, pytest.approx(0.3725), {"index": 0.1})
    assert scheduling(rows[:1], {}) == Scheduling(0.125, 0.125, 0.125, UNSET)


def test_no_decisions_no_scheduling():
    assert scheduling([], {}) is None
    assert scheduling([{"scheduling_us": None}], {}) is None


async def test_pages_that_are_not_there_leave_everything_unknown():
    seen = Seen()
    async with aiohttp.ClientSession() as http:
        await conclude(http, "http://127.0.0.1:1", seen)
        sampling = asyncio.create_task(watch(http, "http://127.0.0.1:1", seen, every_s=0.001))
        await asyncio.wait({sampling}, timeout=0.05)
        assert not sampling.done()
        sampling.cancel()
        await asyncio.wait({sampling})
    assert seen == Seen()
