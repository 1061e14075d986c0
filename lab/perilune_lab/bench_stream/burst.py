"""A burst of streamed requests: what is sent, and what client and engines saw of it.

1. Prompts, all different or all equal, are submitted together, every answer is streamed.
2. *Client side*: submit latency (submit → head of the response), TTFT, TPOT, ITL and latency of each request;
   TPOT = (last − first token) / (tokens − 1), ITL = gaps, pooled.
3. *Engine side*: what the engines' own histograms (/metrics, vLLM's names) grew by meanwhile. Their means are
   exact, their quantiles interpolated within buckets, as Prometheus does. There is none where they contradict
   the burst (`NoEngine`): behind a target with several engines each of the two pages may be another's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf, isfinite

import aiohttp
import msgspec
from msgspec import UNSET, UnsetType

from perilune_gateway.model import H20_30B
from perilune_lab.bench_stream.histograms import Histogram, Scrape, scrape
from perilune_lab.load.client import Load, models, run_load
from perilune_lab.load.result import Result
from perilune_lab.report import Quantiles, quantiles
from perilune_lab.traces.model import Segment, Session, Style, Turn
from perilune_lab.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Burst:
    """The requests that are sent."""

    requests: int = 32
    same: bool = False
    """Whether all prompts are equal; otherwise all differ from the first token on."""
    prompt_tokens: int = 384
    output_tokens: int = 8
    name: str = ""
    """Prompts are generated from this name: another name gives other prompts."""

    def expected_s(self) -> float:
        """Return the seconds that one H20 takes when nothing is cached before."""
        computed = 1 if self.same else self.requests
        prefill_s = H20_30B.prefill_s(self.prompt_tokens) * computed
        overhead_s = H20_30B.request_overhead_s(self.prompt_tokens) * self.requests
        step_s = H20_30B.decode_step_s(self.requests, self.requests * self.prompt_tokens)
        return prefill_s + overhead_s + self.output_tokens * step_s

    def sessions(self) -> list[Session]:
        return [self._session(i) for i in range(self.requests)]

    def _session(self, i: int) -> Session:
        session = f"burst-{self.name}-{i}"
        prompt = f"burst-{self.name}" if self.same else session
        turn = Turn(
            session=session,
            number=0,
            prompt=(Segment(prompt, self.prompt_tokens),),
            output_tokens=self.output_tokens,
        )
        return Session(session, 0.0, (turn,))


class Side(msgspec.Struct, frozen=True):
    """What one side saw. A field is absent if that side did not report it, or no stream had two tokens."""

    ttft_s: Quantiles | UnsetType
    tpot_s: Quantiles | UnsetType
    itl_s: Quantiles | UnsetType
    latency_s: Quantiles | UnsetType
    """Seconds from submission to the last token."""


class NoEngine(StrEnum):
    """Why a burst has no engine side."""

    NO_HISTOGRAMS = "no_histograms"
    """No page had vLLM's histograms with anything counted."""
    FALLEN = "fallen"
    """A counter went down: the pages were those of two engines, or the engine restarted meanwhile."""
    TOO_FEW = "too_few"
    """The target's page counted fewer requests than succeeded: others served them."""


NOTHING = Side(UNSET, UNSET, UNSET, UNSET)


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One burst. Times are engine seconds: wall seconds × the time scale."""

    name: str
    requests: int
    succeeded: int
    prompt_tokens: int
    output_tokens: int
    counted: int
    """Requests whose answer had the engine's own counts; other prompts count as they were meant, other
    answers by their events."""
    cached_tokens: int | UnsetType
    """Absent if no answer reported it."""
    seconds: float
    """Seconds from the first submission to the last token."""
    submit_s: Quantiles | UnsetType
    client: Side
    engine: Side
    no_engine: NoEngine | UnsetType = UNSET
    """Absent where the engine side has anything at all."""

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0


async def measure(
    name: str, target: str, engines: Sequence[str], burst: Burst, *, model: str = "", time_scale: float = 1.0
) -> tuple[Measured, Counter[str]]:
    """Send a burst; return what was measured, and how often each error occurred. The engine side is read from
    `engines` (URLs), or from the target if there are none; the target then has to have counted every request.
    Raises TargetError if the target does not answer."""
    pages = engines or [target]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(10.0)) as http:
        before = await scrape(http, pages)
        load = Load(
            target=target,
            model=model or (await models(target) or [""])[0],
            style=Style.TEXT,
            concurrency=burst.requests,
            time_scale=time_scale,
        )
        results = await run_load(burst.sessions(), load, Vocabulary().words_for)
        grown = (await scrape(http, pages)).since(before)
    errors = Counter(result.error for result in results if not result.succeeded)
    return summarize(name, results, grown, time_scale, counts_all=not engines), errors


def summarize(
    name: str, results: Sequence[Result], grown: Scrape, time_scale: float, *, counts_all: bool = True
) -> Measured:
    """Compute both sides. `grown` is what the burst added to the engines' histograms; `counts_all` says
    whether they must contain every request of the burst."""
    good = [r for r in results if r.succeeded]
    cached = [r.cached_tokens for r in good if r.cached_tokens is not None]
    end = max((r.submitted_at_s + r.e2e_s for r in good if r.e2e_s is not None), default=0.0)

    def scaled(values: Sequence[float | None]) -> Quantiles | UnsetType:
        return quantiles(value * time_scale for value in values if value is not None)

    engine, no_engine = _engine_side(grown, len(good) if counts_all else 0)
    return Measured(
        name=name,
        requests=len(results),
        succeeded=len(good),
        prompt_tokens=sum(r.prompt_tokens for r in good),
        output_tokens=sum(r.output_tokens for r in good),
        counted=sum(r.counted for r in good),
        cached_tokens=sum(cached) if cached else UNSET,
        seconds=(end - min((r.submitted_at_s for r in results), default=0.0)) * time_scale if good else 0.0,
        submit_s=scaled([r.accepted_s for r in good]),
        client=Side(
            scaled([r.ttft_s for r in good]),
            scaled([r.tpot_s for r in good]),
            scaled([gap for r in good for gap in r.itl_s]),
            scaled([r.e2e_s for r in good]),
        ),
        engine=engine,
        no_engine=no_engine,
    )


ENGINE_NAMES = (
    ("vllm:time_to_first_token_seconds",),
    ("vllm:request_time_per_output_token_seconds",),
    ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    ("vllm:e2e_request_latency_seconds",),
)
"""Histograms in the order of Side's fields, with newer names first and those of older engines after them."""


def _engine_side(grown: Scrape, at_least: int) -> tuple[Side, NoEngine | UnsetType]:
    """Return the engine side, or why there is none. If one histogram shows that the pages do not belong to
    this burst, none of them is used. `at_least` is the number of requests that must have been counted."""
    found = [_histogram(grown, names) for names in ENGINE_NAMES]
    if any(histogram and histogram.falls for histogram in found):
        return NOTHING, NoEngine.FALLEN
    ttft, _, _, latency = found  # the others count only requests with at least two tokens
    if any(histogram and histogram.count < at_least for histogram in (ttft, latency)):
        return NOTHING, NoEngine.TOO_FEW
    side = Side(*map(_quantiles, found))
    return side, NoEngine.NO_HISTOGRAMS if side == NOTHING else UNSET


def _histogram(grown: Scrape, names: Sequence[str]) -> Histogram | None:
    return next((grown.histograms[name] for name in names if name in grown.histograms), None)


def _quantiles(found: Histogram | None) -> Quantiles | UnsetType:
    if found is None or not (0 < found.count < inf and isfinite(found.sum)):
        return UNSET
    return Quantiles(found.sum / found.count, *(found.quantile(q) for q in (0.5, 0.9, 0.95, 0.99)))
