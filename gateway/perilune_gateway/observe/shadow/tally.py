"""The sums of all opinions of shadow policies, as stats, as a page, and as metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

from msgspec import Struct
from prometheus_client.core import CounterMetricFamily, Metric

from perilune_gateway.observe.shadow.opinion import Agreement, Opinion


class Skipped(StrEnum):
    """Why a decision is not judged, though it belongs to the share."""

    BUDGET = "budget"
    """Judging has taken all the CPU time that it may."""
    BEHIND = "behind"
    """Too many decisions wait to be judged, or the process starts."""
    UNFIT = "unfit"
    """It contains a value that cannot be encoded."""


class Stopped(StrEnum):
    """Why the process that judges was ended."""

    HUNG = "hung"
    """It judged nothing for too long, so the policy at work is asked no more."""
    DIED = "died"
    """It ended by itself, so the policy at work, if any, is asked no more."""


class Judged(Struct):
    """The opinions of one policy with one reason."""

    agreement: Counter[Agreement]
    slower_s: float = 0.0
    """Sum of the regrets above 0."""
    faster_s: float = 0.0
    """Sum of those below 0, as a positive number."""

    @property
    def verdicts(self) -> int:
        return self.agreement.total()


class PolicyTally(Struct, kw_only=True):
    """The opinions of one policy since the gateway's start."""

    by_reason: dict[str, Judged]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    decided_cached_tokens: int = 0
    compared: int = 0
    """Number of decisions whose regret is known."""
    estimated: int = 0
    """Number of decisions that were taken by the headers, and for which it would have read the body."""
    off: str = ""
    """Why it is asked no more; empty if it is asked."""

    def add(self, opinion: Opinion) -> None:
        judged = self.by_reason.get(opinion.reason)
        if judged is None:
            judged = self.by_reason[opinion.reason] = Judged(Counter())
        judged.agreement[opinion.agreement] += 1
        judged.slower_s += max(0.0, opinion.regret_s)
        judged.faster_s += max(0.0, -opinion.regret_s)
        self.compared += opinion.prompt_tokens > 0
        self.estimated += opinion.estimated
        self.prompt_tokens += opinion.prompt_tokens
        self.cached_tokens += opinion.cached_tokens
        self.decided_cached_tokens += opinion.decided_cached_tokens

    def count(self, agreement: Agreement) -> int:
        return sum(judged.agreement[agreement] for judged in self.by_reason.values())


class ShadowStats(Struct, frozen=True, kw_only=True):
    """Shadow policies at one moment."""

    policies: Mapping[str, PolicyTally]
    share: float
    cpu_budget: float
    """CPU cores that judging may take."""
    cpu_s: float
    """Seconds of CPU that judging has taken: those of its process, and those of preparing its input."""
    uptime_s: float
    """Seconds since judging began."""
    skipped: Mapping[Skipped, int]
    stopped: Mapping[Stopped, int]


def page(stats: ShadowStats) -> dict[str, Any]:
    """Return the values of /api/shadow."""
    return {
        "share": stats.share,
        "cpu": {
            "budget": stats.cpu_budget,
            "used": stats.cpu_s / stats.uptime_s if stats.uptime_s else 0.0,
            "used_seconds": stats.cpu_s,
        },
        "skipped": {why.value: n for why, n in stats.skipped.items()},
        "stopped": {why.value: n for why, n in stats.stopped.items()},
        "policies": [row(name, tally) for name, tally in stats.policies.items()],
    }


def row(name: str, tally: PolicyTally) -> dict[str, Any]:
    """Return one policy as plain values. Means are null without a decision that can be compared."""
    counts = {agreement: tally.count(agreement) for agreement in Agreement}
    decided = counts[Agreement.SAME] + counts[Agreement.OTHER] + counts[Agreement.REFUSED]
    regret_s = sum(judged.slower_s - judged.faster_s for judged in tally.by_reason.values())
    return {
        "policy": name,
        "off": tally.off,
        "decisions": {agreement.value: n for agreement, n in counts.items()},
        "estimated": tally.estimated,
        "agreement": counts[Agreement.SAME] / decided if decided else None,
        "regret_s": regret_s / tally.compared if tally.compared else None,
        "hit_ratio": _share(tally.cached_tokens, tally.prompt_tokens),
        "decided_hit_ratio": _share(tally.decided_cached_tokens, tally.prompt_tokens),
        "reasons": {
            reason: {
                "decisions": {agreement.value: n for agreement, n in judged.agreement.items()},
                "regret_s": (judged.slower_s - judged.faster_s) / judged.verdicts,
            }
            for reason, judged in sorted(tally.by_reason.items())
            if reason
        },
    }


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def families(stats: ShadowStats) -> Iterator[Metric]:
    """Yield the metrics."""

    def counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
        return CounterMetricFamily(f"perilune_shadow_{name}", text, labels=labels)

    decisions = counter(
        "decisions", "Decisions judged by shadow policies, by agreement.", "policy", "reason", "agreement"
    )
    estimated = counter(
        "estimated", "Of these, judged by what the headers told, though it would read the body.", "policy"
    )
    slower = counter(
        "slower_seconds", "Predicted TTFT that shadow policies would have added.", "policy", "reason"
    )
    faster = counter(
        "faster_seconds", "Predicted TTFT that shadow policies would have saved.", "policy", "reason"
    )
    prompt = counter("prompt_tokens", "Prompt tokens of the decisions that can be compared.", "policy")
    cached = counter(
        "cached_tokens", "Of these, tokens predicted to be cached where the shadow policy sends.", "policy"
    )
    decided = counter(
        "decided_cached_tokens", "Of these, tokens predicted to be cached where they were sent.", "policy"
    )
    for name, tally in stats.policies.items():
        nothing = Judged(
            Counter(dict.fromkeys(Agreement, 0))
        )  # rate() is wrong for a series that appears later
        for reason, judged in {"": nothing, **tally.by_reason}.items():
            for agreement, n in judged.agreement.items():
                decisions.add_metric((name, reason, agreement.value), n)
            slower.add_metric((name, reason), judged.slower_s)
            faster.add_metric((name, reason), judged.faster_s)
        estimated.add_metric((name,), tally.estimated)
        prompt.add_metric((name,), tally.prompt_tokens)
        cached.add_metric((name,), tally.cached_tokens)
        decided.add_metric((name,), tally.decided_cached_tokens)
    skipped = counter("skipped", "Decisions that were to be judged and were not.", "cause")
    for why, n in stats.skipped.items():
        skipped.add_metric((why.value,), n)
    stopped = counter("stopped", "Times that the process of shadow policies was ended.", "cause")
    for cause, n in stats.stopped.items():
        stopped.add_metric((cause.value,), n)
    cpu = counter("cpu_seconds", "CPU time that judging has taken.")
    cpu.add_metric((), stats.cpu_s)
    yield from (decisions, estimated, slower, faster, prompt, cached, decided, skipped, stopped, cpu)
