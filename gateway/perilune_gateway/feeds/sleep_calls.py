"""Has engines sleep and wake, as the pool says (`asleep` of an endpoint, from the marks of its pod).

    what is wanted + what the engines' metrics say ─ due ─▶ POST /sleep or /wake_up ─▶ their next metrics

The operator marks a pod after its sessions have left, and the gateway asks the engine to sleep once nothing
runs on it. If the engine's metrics do not show that it did, the gateway asks again after AGAIN_S. One gateway
of the pool asks. An engine whose pod has no mark is left as it is, asleep or awake."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import aiohttp

from perilune_api.pool import EndpointSpec
from perilune_gateway.state.fleet import EndpointView

log = logging.getLogger(__name__)

LOOK_S = 0.5
AGAIN_S = 10.0
ANSWER_S = 30.0
"""Seconds for which an engine may take to answer: it moves its weights meanwhile."""
SLEEP, WAKE = "/sleep?level=1", "/wake_up"
"""Level 1 keeps the weights in host memory."""


class Asked(NamedTuple):
    """What an engine was asked last."""

    path: str
    at: float


def due(
    endpoints: Iterable[EndpointSpec],
    views: Mapping[str, EndpointView],
    asked: Mapping[str, Asked],
    now: float,
) -> dict[str, str]:
    """Return the path to ask of each engine, by its address. `views`: what is known of each endpoint; of one
    with several ranks the first."""
    found = {}
    for spec in endpoints:
        view = views.get(spec.address)
        if view is None or spec.asleep is None or spec.asleep is view.asleep:
            continue
        if spec.asleep and (view.load.in_flight or view.load.running or view.load.waiting):
            continue
        path = SLEEP if spec.asleep else WAKE
        last = asked.get(spec.address)
        if last is None or last.path != path or now - last.at >= AGAIN_S:
            found[spec.address] = path
    return found


async def run(
    endpoints: Callable[[], Iterable[EndpointSpec]],
    views: Callable[[], Mapping[str, EndpointView]],
    asks: Callable[[], bool],
    http: aiohttp.ClientSession,
    clock: Callable[[], float],
) -> None:
    """Ask until cancelled. `asks`: whether it is this gateway that does."""
    asked: dict[str, Asked] = {}
    while True:
        await asyncio.sleep(LOOK_S)
        specs = [spec for spec in endpoints() if spec.asleep is not None]
        if not (specs and asks()):
            continue
        now = clock()
        calls = due(specs, views(), asked, now)
        asked = {address: last for address, last in asked.items() if address in {s.address for s in specs}}
        asked |= {address: Asked(path, now) for address, path in calls.items()}
        await asyncio.gather(*(_ask(http, address, path) for address, path in calls.items()))


async def _ask(http: aiohttp.ClientSession, address: str, path: str) -> None:
    url, timeout = f"http://{address}{path}", aiohttp.ClientTimeout(total=ANSWER_S)
    try:
        async with http.post(url, timeout=timeout) as answer:
            said = str(answer.status)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        said = repr(error)
    log.info("asked an engine endpoint=%s path=%s answer=%s", address, path, said)
