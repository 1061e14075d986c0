"""What engines that the operator does not run lack for exact routing, from what they told. Pure.

    Seen (an engine) + Expected (the pool) ─▶ lacks ─▶ Finding…, worst first ─▶ health, metric, doctor

What a lack costs and what cures it, says `perilune_api.findings`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from perilune_api.findings import ADVICE, Finding
from perilune_api.pool import Pool
from perilune_gateway.model.engine_facts import EngineFacts
from perilune_gateway.model.kv_events import EventStats

SPEAKING_BLOCKS = 64
"""Blocks of prompts, after which an engine that publishes its events has published one."""
FIXED_SEED = (0, 29)
"""The first version of vLLM that hashes with a fixed seed unless PYTHONHASHSEED is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the engines of a pool should have in common. Empty and 0: anything."""

    models: frozenset[str] = frozenset()
    block_size: int = 0
    hash_algorithm: str = ""
    seeded: bool = False
    """Whether the pool names the seed of the hashes."""
    tokenizes: bool = False
    """Whether the gateway needs no /tokenize."""
    listed: bool = False
    """Whether a pool document lists the engines and where they publish, instead of selecting them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is known of one engine."""

    facts: EngineFacts
    events: bool
    """Whether it is known where it publishes KV events."""
    replay: bool
    silent: bool = False
    """Whether nothing comes from there: see `is_silent`."""
    tokenizes: bool = True
    """Whether it answers /tokenize."""
    other_tokens: bool = False
    """Whether it made other tokens of the same prompt than expected."""
    transfers: bool = False
    """Whether it hands KV over."""


@dataclass(frozen=True, slots=True)
class Lack:
    """A finding, the engines that have it, and what to do."""

    finding: Finding
    endpoints: Sequence[str]
    costs: str
    cure: str
    exact: bool = False
    """Whether routing is exact nevertheless."""


def expected(pool: Pool) -> Expected:
    """Return what a pool's engines should have in common."""
    spec = pool.spec
    return Expected(
        models=frozenset({spec.model.name, *spec.model.aliases} - {""}),
        block_size=spec.engine.block_size,
        hash_algorithm=spec.engine.hashing.algorithm.value,
        seeded=bool(spec.engine.hashing.seed),
        tokenizes=bool(spec.model.tokenizer) or spec.model.tokenize in ("local", "estimate"),
        listed=spec.engine.selector is None and bool(spec.endpoints),
    )


def lacks(seen: Seen, expected: Expected) -> tuple[Finding, ...]:
    """Return what one engine lacks, worst first."""
    if seen.facts.trouble:
        return (Finding.UNREACHABLE,)
    found = set(_lacks(seen, expected))
    return tuple(finding for finding in Finding if finding in found)


def _lacks(seen: Seen, expected: Expected) -> Iterator[Finding]:
    told = seen.facts
    if expected.models and not any(model.id in expected.models for model in told.models):
        yield Finding.OTHER_MODEL
    if told.asleep:
        yield Finding.ASLEEP
    if told.prefix_caching is False:
        yield Finding.NO_PREFIX_CACHING
    if told.block_size and expected.block_size and told.block_size % expected.block_size:
        yield Finding.BLOCK_SIZE
    if not seen.events:
        yield Finding.NO_EVENTS
    elif seen.silent:
        yield Finding.EVENTS_SILENT
    elif not seen.replay:
        yield Finding.NO_REPLAY
    if told.hash_algorithm and expected.hash_algorithm not in ("", told.hash_algorithm):
        yield Finding.HASHING
    if seen.other_tokens:
        yield Finding.TOKENS
    if not seen.tokenizes and not expected.tokenizes:
        yield Finding.NO_TOKENIZE
    if not told.has_metrics:
        yield Finding.NO_METRICS
    if seen.events and not expected.seeded and is_older(told.version, FIXED_SEED):
        yield Finding.RANDOM_SEED
    if not seen.transfers:
        yield Finding.NO_TRANSFER


def is_silent(events: EventStats, served_tokens: float, block_size: int) -> bool:
    """Return whether events that should come do not: nothing is connected, or the engine has served prompts
    of many blocks, and not one event has come. (Prompts that are shorter than a block make none.)"""
    came = events.batches or events.replayed
    return not events.connected or (not came and served_tokens >= SPEAKING_BLOCKS * max(1, block_size))


def is_older(version: str, than: tuple[int, int]) -> bool:
    """Whether a version of vLLM is known to be older."""
    numbers = re.match(r"v?(\d{1,6})\.(\d{1,6})", version)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) < than


def together(found: Mapping[str, Sequence[Finding]], expected: Expected) -> tuple[Lack, ...]:
    """Return the findings of all engines, by address, worst first."""
    having = {f: [address for address, own in found.items() if f in own] for f in Finding}
    return tuple(
        Lack(f, of, ADVICE[f].costs, cure(f, expected), ADVICE[f].exact) for f, of in having.items() if of
    )


def cure(finding: Finding, expected: Expected) -> str:
    """Return what to change, with the flag's value where it follows from what engines should have in
    common."""
    if finding is Finding.BLOCK_SIZE and expected.block_size:
        size = expected.block_size
        return f"start it with --block-size {size} (--page-size {size} of SGLang), like the rest of the pool"
    if finding is Finding.HASHING and expected.hash_algorithm:
        algorithm = expected.hash_algorithm
        return f"start it with --prefix-caching-hash-algo {algorithm}, like the rest of the pool"
    advice = ADVICE[finding]
    return (expected.listed and advice.listed) or advice.cure
