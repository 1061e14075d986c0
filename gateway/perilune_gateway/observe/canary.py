"""The canary of a pool as this gateway knows it: a page, metrics, and the sums that the operator reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import exp, expm1
from typing import Any

from msgspec import Struct
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from perilune_api.pool import Canary
from perilune_api.trial import Arm, Difference, Measure, Sums, Tally, Verdict


class CanaryStats(Struct, frozen=True, kw_only=True):
    """A canary at one moment."""

    canary: Canary
    sums: Sums
    verdict: Verdict


def page(stats: CanaryStats) -> dict[str, Any]:
    """Return the values of /api/canary."""
    canary, verdict = stats.canary, stats.verdict
    return {
        "policy": canary.policy.name,
        "share": canary.share,
        "tolerance": canary.tolerance,
        "trial": stats.sums.trial,
        "state": verdict.state.value,
        "reason": verdict.reason.value,
        "arms": {arm.value: arm_row(stats.sums.whole(arm)) for arm in Arm},
        "worse_by": {measure.value: _worse_by(measure, d) for measure, d in verdict.differences.items()},
    }


def arm_row(whole: Tally) -> dict[str, Any]:
    """Return one arm as plain values; null what is not known of any request. Times are geometric means."""
    return {
        "sessions": whole.sessions,
        "requests": whole.requests,
        "failed": whole.failed,
        "ttft_s": exp(whole.ttft_log / whole.first_tokens) if whole.first_tokens else None,
        "tpot_s": exp(whole.tpot_log / whole.streams) if whole.streams else None,
        "hit_ratio": whole.cached_tokens / whole.prompt_tokens if whole.prompt_tokens else None,
    }


def _worse_by(measure: Measure, difference: Difference) -> Mapping[str, float]:
    """Return by how much the canary is worse: times as shares of the pool's, failures as a share of all
    requests. Below 0 it is better."""
    bounds = {"about": difference.value, "at_least": difference.low, "at_most": difference.high}
    if measure is Measure.FAILURES:
        return bounds
    return {name: expm1(bound) for name, bound in bounds.items()}


def families(stats: CanaryStats) -> Iterator[Metric]:
    """Yield the metrics, since the trial began."""
    rows = {arm.value: arm_row(stats.sums.whole(arm)) for arm in Arm}

    def of_arms(family: GaugeMetricFamily | CounterMetricFamily, field: str) -> Metric:
        for arm, row in rows.items():
            if row[field] is not None:
                family.add_metric((arm,), row[field])
        return family

    for name, text, field in (
        ("sessions", "Sessions that began in the trial, by arm.", "sessions"),
        ("requests", "Requests of the trial that ended, by arm.", "requests"),
        ("failures", "Of these, requests that failed or were refused, by arm.", "failed"),
    ):
        yield of_arms(CounterMetricFamily(f"perilune_canary_{name}", text, labels=("arm",)), field)
    for name, text, field in (
        ("ttft_seconds", "Geometric mean of the seconds to the first token, by arm.", "ttft_s"),
        ("tpot_seconds", "Geometric mean of the seconds per output token, by arm.", "tpot_s"),
        ("hit_ratio", "Cached share of prompt tokens, by arm.", "hit_ratio"),
    ):
        yield of_arms(GaugeMetricFamily(f"perilune_canary_{name}", text, labels=("arm",)), field)
    worse = GaugeMetricFamily(
        "perilune_canary_worse_by",
        "By how much the canary is worse, as far as this gateway knows; below 0 it is better.",
        labels=("measure", "bound"),
    )
    for measure, difference in stats.verdict.differences.items():
        for bound, value in _worse_by(measure, difference).items():
            worse.add_metric((measure.value, bound), value)
    yield worse
