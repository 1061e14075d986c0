"""Histograms of engines' /metrics pages: reads, sums over engines, subtracts; computes quantiles.

Quantiles are interpolated linearly within a bucket, from 0 in the first and held at the last bound in the
open one, as Prometheus' histogram_quantile does. A page that cannot be read or has none adds nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

import aiohttp
from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True)
class Histogram:
    """`buckets`: upper bound → observations up to it, cumulative."""

    buckets: Mapping[float, float] = field(default_factory=dict)
    sum: float = 0.0
    count: float = 0.0

    def quantile(self, q: float) -> float:
        """Return the q-quantile. Raises ValueError for an empty histogram."""
        if not self.count:
            raise ValueError("no observations")
        rank, below, low = q * self.count, 0.0, 0.0
        for bound, total in sorted(self.buckets.items()):
            if total >= rank and total > below:
                return low if bound == inf else low + (bound - low) * (rank - below) / (total - below)
            below, low = total, bound
        return low

    @property
    def falls(self) -> bool:
        """Whether a difference of two scrapes has a negative count, which a single engine that was not
        restarted cannot give."""
        up_to = [0.0, *(total for _, total in sorted(self.buckets.items()))]
        return self.sum < 0 or self.count < 0 or any(b < a for a, b in pairwise(up_to))

    def plus(self, other: Histogram, sign: int = 1) -> Histogram:
        bounds = {*self.buckets, *other.buckets}
        return Histogram(
            {b: self.buckets.get(b, 0.0) + sign * other.buckets.get(b, 0.0) for b in bounds},
            self.sum + sign * other.sum,
            self.count + sign * other.count,
        )


EMPTY = Histogram()


@dataclass(frozen=True, slots=True)
class Scrape:
    """Histograms by name."""

    histograms: Mapping[str, Histogram] = field(default_factory=dict)

    def since(self, before: Scrape) -> Scrape:
        return Scrape({n: h.plus(before.histograms.get(n, EMPTY), -1) for n, h in self.histograms.items()})

    def plus(self, other: Scrape) -> Scrape:
        names = {*self.histograms, *other.histograms}
        return Scrape(
            {n: self.histograms.get(n, EMPTY).plus(other.histograms.get(n, EMPTY)) for n in sorted(names)}
        )


async def scrape(http: aiohttp.ClientSession, engines: Sequence[str]) -> Scrape:
    """Read the pages of all `engines` (URLs) and sum their histograms."""
    total = Scrape()
    for url in engines:
        try:
            async with http.get(f"{url}/metrics") as response:
                text = await response.text() if response.status == 200 else ""
            total = total.plus(parse(text))
        except (aiohttp.ClientError, TimeoutError, ValueError):
            continue
    return total


def parse(text: str) -> Scrape:
    """Parse a page in Prometheus' text format; series of one name are summed. Raises ValueError."""
    found: dict[str, Histogram] = {}
    for family in text_string_to_metric_families(text):
        if family.type != "histogram":
            continue
        buckets: dict[float, float] = {}
        total = count = 0.0
        for sample in family.samples:
            if sample.name.endswith("_bucket"):
                bound = float(sample.labels.get("le", ""))
                buckets[bound] = buckets.get(bound, 0.0) + sample.value
            elif sample.name.endswith("_sum"):
                total += sample.value
            elif sample.name.endswith("_count"):
                count += sample.value
        found[family.name] = Histogram(buckets, total, count)
    return Scrape(found)
