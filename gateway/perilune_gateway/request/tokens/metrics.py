"""Metrics of the tokenizer for /metrics, read at each scrape. The series of all labels exist from the start,
because a rate over a series that appears later is wrong."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from perilune_gateway.model import TokenSource
from perilune_gateway.request.tokens.causes import Cause
from perilune_gateway.request.tokens.incremental import IncrementalEncoder, Why
from perilune_gateway.request.tokens.media_names import Named
from perilune_gateway.request.tokens.tokenizer import Tokenizer


class TokenMetrics:
    """A collector for prometheus_client. Register it once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def describe(self) -> Iterator[Metric]:
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        tokenizer = self._tokenizer
        prompts = CounterMetricFamily(
            "perilune_tokenized_prompts",
            "Prompts tokenized, by the source of their tokens.",
            labels=("source",),
        )
        for source in TokenSource:
            prompts.add_metric((source.value,), tokenizer.counts[source])
        yield prompts
        passed = CounterMetricFamily(
            "perilune_tokenizer_passed_on", "Times that a source had no tokens, by cause.", labels=("cause",)
        )
        for cause in Cause:
            passed.add_metric((cause.value,), tokenizer.causes[cause])
        yield passed
        media = CounterMetricFamily(
            "perilune_media_parts",
            "Pictures, sound and video in prompts, by what gives them their names in engines, or by why none"
            " is known.",
            labels=("named",),
        )
        rows = tokenizer.media.table()
        for named in Named:
            media.add_metric((named.value,), sum(row.parts for row in rows if row.named is named))
        yield media
        if tokenizer.local is not None:
            yield from _local(tokenizer.local)


def _local(local: IncrementalEncoder) -> Iterator[Metric]:
    encoder = local.encoder
    about = {"library": encoder.library.value, "why": encoder.why, "why_whole": encoder.cuts.why_none}
    yield InfoMetricFamily(
        "perilune_tokenizer", "The library that encodes, and why it is not fastokens.", value=about
    )
    texts = CounterMetricFamily(
        "perilune_encoded_texts",
        "Texts encoded by the local tokenizer, by what was known of them.",
        labels=("known",),
    )
    texts.add_metric(("part",), local.hits)
    for why in Why:  # not over the counter, to which other threads may add a key
        texts.add_metric((why.value,), local.whole[why])
    yield texts
    yield _count("perilune_kept_tokens", "Tokens taken from earlier texts.", local.kept_tokens)
    yield _count("perilune_encoded_tokens", "Tokens that had to be encoded.", local.encoded_tokens)
    yield _count(
        "perilune_known_texts_evicted",
        "Parts of earlier texts dropped because memory is limited.",
        local.evicted,
    )
    held = GaugeMetricFamily("perilune_known_texts_bytes", "Memory used by tokens of earlier texts.")
    held.add_metric((), local.held_bytes)
    yield held


def _count(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, value=value)
