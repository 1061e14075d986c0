"""What a report asks of the gateway's admin pages: policy, endpoints, queue lengths, scheduling times.

Reads `/api/nodes/stats`, `/api/decisions` and `/metrics`. A page that cannot be read leaves its fields
unknown: a run's measurements do not fail because of it. Cost: three pages at the end of a run, one small page
per queue sample.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from msgspec import UNSET
from prometheus_client.parser import text_string_to_metric_families

from perilune_lab.quantiles import mean, quantile
from perilune_lab.report import Scheduling

_HISTOGRAM = "perilune_scheduling_seconds"
_TOTAL = "total"
_KEPT = 1000
UNREADABLE = (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError)
"""Errors of a page that is missing or has another form than expected."""


@dataclass(slots=True)
class Seen:
    """What the pages said; None where a page could not be read."""

    policy: str | None = None
    endpoints: int | None = None
    scheduling: Scheduling | None = None
    queues: list[list[float]] = field(default_factory=list)
    """Running + waiting of every endpoint, a row per sample."""


async def unreadable(http: aiohttp.ClientSession, admin_url: str) -> str:
    """Return why the pages cannot be read; empty if they can."""
    try:
        (await page(http, f"{admin_url}/api/nodes/stats"))["nodes"]
    except UNREADABLE as error:
        return str(error) or type(error).__name__
    return ""


async def watch(http: aiohttp.ClientSession, admin_url: str, seen: Seen, every_s: float = 0.5) -> None:
    """Sample queue lengths until cancelled."""
    while True:
        try:
            nodes = (await page(http, f"{admin_url}/api/nodes/stats"))["nodes"]
            seen.queues.append(queues(nodes))
            seen.endpoints = len(nodes)
        except UNREADABLE:
            pass  # the next sample may work
        await asyncio.sleep(every_s)


def queues(nodes: Iterable[Mapping[str, Any]]) -> list[float]:
    """Return running + waiting of every endpoint of `/api/nodes/stats`."""
    return [float(node["load"]["running"] + node["load"]["waiting"]) for node in nodes]


async def conclude(http: aiohttp.ClientSession, admin_url: str, seen: Seen) -> None:
    """Read policy and scheduling times at the end of a run."""
    try:
        decisions = (await page(http, f"{admin_url}/api/decisions?n={_KEPT}"))["decisions"]
        seen.policy = next((row["policy"] for row in decisions if row["policy"]), None)
        async with http.get(f"{admin_url}/metrics") as answer:
            by_phase = phases(await answer.text())
        seen.scheduling = scheduling(decisions, by_phase)
    except UNREADABLE:
        pass  # stays unknown


def scheduling(decisions: Sequence[Mapping[str, Any]], by_phase: Mapping[str, float]) -> Scheduling | None:
    """Return the quantiles over the newest 1,000 decisions, which the gateway keeps; `by_phase` covers all.
    None without decisions."""
    took_ms = sorted(row["scheduling_us"] / 1e3 for row in decisions if row.get("scheduling_us") is not None)
    if not took_ms:
        return None
    return Scheduling(
        mean=mean(took_ms),
        p50=quantile(took_ms, 0.5),
        p99=quantile(took_ms, 0.99),
        by_phase=dict(by_phase) or UNSET,
    )


def phases(metrics: str) -> dict[str, float]:
    """Return the mean milliseconds per phase that happened, from the gateway's Prometheus text."""
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics):
        if family.name == _HISTOGRAM:
            for sample in family.samples:
                into = {f"{_HISTOGRAM}_sum": sums, f"{_HISTOGRAM}_count": counts}.get(sample.name)
                if into is not None:
                    into[sample.labels["step"]] = sample.value
    return {step: sums[step] / n * 1e3 for step, n in counts.items() if n and step != _TOTAL}


async def page(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """Return a page. Raises one of UNREADABLE."""
    async with http.get(url) as answer:
        answer.raise_for_status()
        found: dict[str, Any] = await answer.json()
        return found
