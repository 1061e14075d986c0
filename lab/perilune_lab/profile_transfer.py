"""How fast KV comes from another engine: the two legs of a hand-off, timed (`perilune profile --peer`).

    new prompt ─▶ peer computes it ─▶ give leg to the peer ─┬─▶ seconds of the take leg
                                      take leg to the target ┘   − seconds of the same prompt, cached there

What is left is the transfer. Two lengths and more give its fixed seconds and its speed. The engines need
vLLM's MooncakeConnector, and, behind the operator's door, the pool's secret.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from random import Random
from statistics import median
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import aiohttp
import msgspec

from perilune_api import names
from perilune_api.topology import NIC_GBITS, Bandwidth, Level
from perilune_gateway.feeds import bootstrap_pages
from perilune_lab.load.client import TargetError
from perilune_lab.profile_fit import factors

FOUND_SHARE = 0.9
"""The least share of a prompt that the target must have had without computing it."""
TIMEOUT_S = 120.0
LEAST_S = 1e-4
"""Shorter differences of seconds tell nothing."""
LEAST_ID, MOST_ID = 5, 300
"""Token ids that every vocabulary has, without special ones in most."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The engine that gives."""

    url: str
    bootstrap: str
    """`ip:port` of its MooncakeConnector's page."""
    secret: str = ""


@dataclass(frozen=True, slots=True)
class Moved:
    """One length. Seconds are medians over the repetitions."""

    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Transfer:
    rows: Sequence[Moved]
    taker: str = "TAKER"
    """Host of the engine to which KV came, as its URL names it."""
    giver: str = "GIVER"

    def fit(self) -> tuple[float, float]:
        """Return (fixed seconds, tokens per second); without fixed seconds if there is one length only, with
        infinite speed if more tokens took no longer."""
        if len(self.rows) == 1:
            return 0.0, self.rows[0].tokens / max(self.rows[0].seconds, LEAST_S)
        fixed_s, token_s = factors(
            [(1.0, float(row.tokens)) for row in self.rows], [max(row.seconds, LEAST_S) for row in self.rows]
        )
        return fixed_s, 1.0 / token_s if token_s else inf

    @property
    def largest_error(self) -> float:
        """The greatest of |measured / fitted − 1|."""
        fixed_s, tokens_per_s = self.fit()
        return max(abs(row.seconds / (fixed_s + row.tokens / tokens_per_s) - 1.0) for row in self.rows)

    def nic_gbits(self, kv_bytes_per_token: int, level: Level = Level.RACK) -> float:
        """Return the speed of network cards by which the pool's cost model predicts these seconds, between
        nodes of such a distance."""
        _, tokens_per_s = self.fit()
        return NIC_GBITS * tokens_per_s * kv_bytes_per_token / Bandwidth().at(level)


async def measure(
    target: str, peer: Peer, model: str, lengths: Sequence[int], repeat: int, time_scale: float
) -> Transfer:
    """Measure the transfer. Raises TargetError if an engine cannot be reached, or hands nothing over."""
    dice, timeout = Random(), aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        page = await bootstrap_pages.ask(http, peer.bootstrap)
        if page is None:
            raise TargetError(f"http://{peer.bootstrap}/query names no engine (MooncakeConnector)")

        async def computed(tokens: int) -> Sequence[int]:
            """Return a new prompt that the peer has computed, so that the give leg computes nothing."""
            prompt = [dice.randrange(LEAST_ID, MOST_ID) for _ in range(tokens)]
            await _ask(http, peer.url, model, prompt)
            return prompt

        async def once(prompt: Sequence[int]) -> float:
            tokens, transfer = len(prompt), uuid4().hex
            give = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
            take = {
                "do_remote_decode": False,
                "do_remote_prefill": True,
                "remote_bootstrap_addr": f"http://{peer.bootstrap}",
                "remote_engine_id": page.engine_ids[0],
                "transfer_id": transfer,
            }
            _, (taken_s, cached) = await asyncio.gather(
                _ask(http, peer.url, model, prompt, give, peer.secret),
                _ask(http, target, model, prompt, take, peer.secret),
            )
            again_s, _ = await _ask(http, target, model, prompt)
            if cached < FOUND_SHARE * tokens:
                came = f"of {tokens} tokens {cached} came from {peer.url}"
                raise TargetError(f"{came}, the rest was computed; the logs of the two engines say why")
            return max(0.0, taken_s - again_s) * time_scale

        async def some(tokens: int) -> Moved:
            seconds = []
            for _ in range(repeat):
                prompt = await computed(tokens)
                await once(await computed(lengths[0]))  # connects the engines, which may have idled
                seconds.append(await once(prompt))
            return Moved(tokens, median(seconds))

        rows = [await some(tokens) for tokens in lengths]
        taker, giver = (urlsplit(url).hostname or url for url in (target, peer.url))
        return Transfer(rows, taker, giver)


async def _ask(
    http: aiohttp.ClientSession,
    url: str,
    model: str,
    prompt: Sequence[int],
    params: Mapping[str, Any] | None = None,
    secret: str = "",
) -> tuple[float, int]:
    """Return the seconds of one answer of one token, and the prompt's cached tokens. Raises TargetError."""
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    if params:
        body["kv_transfer_params"] = params
    headers = {names.ENGINE_SECRET_HEADER: secret} if secret else {}
    began = perf_counter()
    try:
        async with http.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
            text = await answer.read()
            seconds = perf_counter() - began
            if answer.status != 200:
                raise TargetError(f"{url} answers {answer.status}: {text[:200].decode(errors='replace')}")
            usage = msgspec.json.decode(text)["usage"]
            return seconds, (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError, KeyError) as error:
        raise TargetError(f"{url}: {error!r}") from error
