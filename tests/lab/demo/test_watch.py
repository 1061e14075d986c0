"""What the demo asks of the gateway's admin pages at the end of a run."""

from types import SimpleNamespace

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from prometheus_client import CollectorRegistry, generate_latest

from perilune_gateway.model import Decision, DecisionRecord, Reason, RequestView
from perilune_gateway.observe.explain import summary
from perilune_gateway.observe.metrics import Metrics
from perilune_lab.demo.watch import Watch
from perilune_lab.report import Scheduling


async def test_scheduling_times_come_with_their_steps():
    registry = CollectorRegistry()
    timings_us = {"index": 200.0, "total": 500.0}
    record = DecisionRecord(
        view=RequestView(request_id="r", ordinal=0, prompt_tokens=10),
        verdict=Decision("h:1", Reason.HOST),
        policy="ear",
        timings_us=timings_us,
    )
    Metrics(registry).decided(record)

    async def decisions(request: web.Request) -> web.Response:
        return web.json_response({"decisions": [summary(record)]})

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry))

    app = web.Application()
    app.add_routes([web.get("/api/decisions", decisions), web.get("/metrics", metrics)])
    async with TestServer(app) as server, aiohttp.ClientSession(server.make_url("/")) as http:
        watch = Watch(SimpleNamespace(endpoints=()), "ear", 1.0)
        await watch.ask_scheduling(http)
    assert watch.scheduling == Scheduling(0.5, 0.5, 0.5, {"index": pytest.approx(0.2)})
