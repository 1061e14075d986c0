"""Shadow policies and a canary in a real gateway: opinions come from a process of their own, and both arms'
requests are counted as they end."""

import asyncio
from itertools import count
from typing import Any

import aiohttp
import msgspec
from routing_objects import chosen
from waiting import HANG

from perilune_api import names
from perilune_api import pool as spec
from perilune_api.trial import Arm, Sums, trial_of
from perilune_lab.processes.stack import EngineOptions, Stack

OPTIONS = EngineOptions(time_scale=50.0, kv_tokens=100_000)
ROUTING = spec.Routing(
    shadow=spec.Shadow(policies=("perilune", "least_loaded"), cpu=1.0),
    canary=spec.Canary(policy=chosen("least_loaded"), share=0.5),
)


async def page(stack: Stack, http: aiohttp.ClientSession, path: str) -> Any:
    async with http.get(stack.admin_url + path) as answer:
        assert answer.status == 200
        return await answer.json()


async def turn(stack: Stack, http: aiohttp.ClientSession, session: str, number: int) -> None:
    prompt = f"{session} {number} " + "word " * 100
    body = {"model": OPTIONS.model, "prompt": prompt, "max_tokens": 4, "stream": True}
    body["stream_options"] = {"include_usage": True}
    headers = {"x-session-id": session}
    async with http.post(stack.url + "/v1/completions", json=body, headers=headers) as answer:
        text = await answer.text()
        assert answer.status == 200, text


def known(trying: Any) -> bool:
    """Return whether each shadow policy has judged, and all is known of both arms."""
    judged = all(policy["agreement"] is not None for policy in trying["shadow"]["policies"])
    return judged and None not in [
        value
        for arm in trying["canary"]["arms"].values()
        for name, value in arm.items()
        if name != "tpot_s"  # by default the gateway does not see answers
    ]


async def test_shadow_policies_and_a_canary_of_a_real_gateway() -> None:
    async with Stack(engines=2, options=OPTIONS, routing=ROUTING) as stack, aiohttp.ClientSession() as http:
        trying: Any = None
        async with asyncio.timeout(HANG):
            for number in count():
                await turn(stack, http, f"session-{number % 20}", number)
                trying = await page(stack, http, "/api/trying")
                if number > 20 and known(trying):
                    break
        shadow, canary = trying["shadow"], trying["canary"]
        assert [(policy["policy"], policy["off"]) for policy in shadow["policies"]] == [
            ("perilune", ""),
            ("least_loaded", ""),
        ]
        assert shadow["cpu"]["used_seconds"] > 0
        assert shadow["stopped"] == {"hung": 0, "died": 0}
        assert (canary["state"], canary["reason"]) == ("Running", "TooFewSessions")
        assert all(arm["failed"] == 0 for arm in canary["arms"].values())
        assert sum(arm["sessions"] for arm in canary["arms"].values()) == 20

        told = await page(stack, http, names.CANARY_PAGE)
        (sums,) = (msgspec.convert(each, Sums) for each in told.values())
        assert sums.trial == trial_of(stack.pool.spec.routing)
        assert sum(sums.whole(arm).requests for arm in Arm) == number + 1

        decided = (await page(stack, http, "/api/decisions?n=50"))["decisions"]
        assert {row["policy"] for row in decided} == {"perilune", "least_loaded"}
