"""CPU of the gateway per request of growing conversations, by size, over what Envoy alone needs for them.

    64 conversations on 20 connections ─▶ Envoy ─▶ 8 cheap endpoints
                                            └─ gateway (HTTP/2, default policy, tokens estimated from bytes)

Each body extends the one before by an answer and a tool's result, as an agent's do, from a first turn of 1 KB
up to 220 KB. Measured are `TURNS` turns around each size, once without a session header, so that the gateway
reads each body whole, and once with one, so that it decides by the headers. First turns of 1 KB are always
read whole.

A machine's pace changes within seconds. So Envoy alone takes turns with the gateway, 64 requests each, and
with `--against PYTHON`, the interpreter of another checkout's virtual environment, that checkout's gateway
does too: the figures "now / before" are of that. Every round has new conversations. Of all turns' ratios the
median counts.
"""

import sys
from collections import defaultdict
from pathlib import Path
from random import Random
from statistics import median
from textwrap import fill
from typing import NamedTuple

import bars
import pytest
from conversations import Client, Conversation
from gateway_processes import Processes, cpu_s

CONNECTIONS, CONVERSATIONS, TURNS = 20, 64, 8
FIRST = 1_000
SIZES = (4_000, 16_000, 64_000, 130_000, 220_000)
ENDPOINTS = 8
ALONE, OURS, OTHER = "Envoy alone", "this checkout", "the other checkout"
GO_PICKER = {1_000: "5.2–6.2", 130_000: "30–31", 220_000: "29–33"}
"""CPU of llm-d's picker over Envoy alone, lowest and highest: llm-d-router at ebab687, its default policy
without tokenizer, 8 endpoints, bodies sent to it whole as its documentation sets it up."""
MAX_RATIO = 1.25
"""What a request may cost at most, × what it costs in the other checkout."""


class Key(NamedTuple):
    """What is measured. `named`: with a session header."""

    size: int
    subject: str
    named: bool


Found = dict[Key, list[float]]
"""CPU µs per request, of every turn in order; of Envoy alone Envoy's, else the gateway's."""


class Subject:
    """An Envoy with its client, and the process whose CPU counts."""

    def __init__(self, client: Client, pid: int) -> None:
        self._client = client
        self._pid = pid

    async def cost_us(self, conversations: list[Conversation], size: int) -> float:
        """CPU per request of the conversations' next turns, to which they grow first."""
        before = cpu_s(self._pid)
        await self._client.play(conversations, size)
        return (cpu_s(self._pid) - before) / len(conversations) * 1e6


def around(size: int) -> list[int]:
    """Sizes of the turns that are measured, 2,000 bytes or an eighth apart, after one that is not."""
    step = min(2_000, size // 8)
    return [size + step * (at - TURNS // 2) for at in range(TURNS + 1)]


async def one_round(subjects: dict[str, Subject], rng: Random, found: Found) -> None:
    """Let the subjects take turns: each plays one turn of its conversations, then all play the next turn."""
    for _ in range(TURNS):
        for name, subject in subjects.items():
            new = [Conversation(rng) for _ in range(CONVERSATIONS)]
            found[Key(FIRST, name, False)].append(await subject.cost_us(new, FIRST))
    lines = [
        (name, named, [Conversation(rng, named) for _ in range(CONVERSATIONS)])
        for named in (False, True)
        for name in subjects
        if not (named and name == ALONE)
    ]
    for size in SIZES:
        for turn, grown in enumerate(around(size)):
            for name, named, conversations in lines if turn % 2 else reversed(lines):
                us = await subjects[name].cost_us(conversations, grown)
                if turn:
                    found[Key(size, name, named)].append(us)


async def measure(folder: Path, rounds: int, transport: str, other: str) -> Found:
    """`other`: the interpreter of another checkout; empty for none."""
    found: Found = defaultdict(list)
    async with Processes(folder, ENDPOINTS, CONNECTIONS) as processes:
        alone = await processes.envoy_alone()
        subjects = {ALONE: Subject(alone.client, alone.envoy_pid)}
        for name, python in ((OURS, sys.executable), (OTHER, other)):
            if python:
                behind = await processes.gateway(python, transport)
                subjects[name] = Subject(behind.client, behind.gateway_pid)
        for at in range(rounds):
            await one_round(subjects, Random(at), found)
    return found


def ratio(found: Found, key: Key, to: Key) -> float:
    """Return the median of the ratios of every turn."""
    return median(one / other for one, other in zip(found[key], found[to], strict=True))


def table(found: Found) -> list[str]:
    compared = any(key.subject == OTHER for key in found)
    lines = [
        "| body | decision on | gateway µs | Envoy alone µs | **gateway / alone** | llm-d's picker / alone |",
        "|---|---|---:|---:|---:|---:|",
    ]
    if compared:
        lines = [f"{lines[0]} before: gateway / alone | **now / before** | |", f"{lines[1]}---:|---:|---|"]
    for key in sorted(key for key in found if key.subject == OURS):
        alone, other = Key(key.size, ALONE, False), key._replace(subject=OTHER)
        picker = GO_PICKER.get(key.size, "")
        line = (
            f"| {key.size / 1000:.0f} KB{', first turn' if key.size == FIRST else ''} "
            f"| {'headers' if key.named else 'body'} | {median(found[key]):.0f} | {median(found[alone]):.0f} "
            f"| **{ratio(found, key, alone):.1f}** | {picker} |"
        )
        if compared:
            more = ratio(found, key, other)
            line += (
                f" {ratio(found, other, alone):.1f} | **{more:.2f}** | {bars.verdict(more <= MAX_RATIO)} |"
            )
        lines.append(line)
    return lines


def document(found: Found, rounds: int, transport: str) -> str:
    title = "Growing conversations" if transport == "h2" else f"Growing conversations, {transport}"
    text = (
        f"{bars.machine()}. {CONVERSATIONS} conversations on {CONNECTIONS} connections, one Envoy worker,"
        f" {ENDPOINTS} endpoints, default policy, tokens estimated from bytes. Each body extends the one"
        f" before by an answer and a tool's result; {TURNS} turns of each conversation around each size,"
        f" {rounds} rounds with new conversations. CPU per request, user and system, of the gateway's"
        " process and of an Envoy without it: medians, the ratios' of 64 requests beside 64 others."
        " *Headers*: a known session header decides, and the body stays with Envoy; *body*: without a"
        " session header the gateway reads the body whole. *llm-d's picker* is in Go and reads every body"
        " (lowest and highest of one run on such a machine, with bodies that repeat). Client, Envoys and"
        " gateway share the machine, so compare ratios rather than µs."
    )
    return "\n".join([f"## {title}", "", fill(text, 110), "", *table(found)])


@pytest.mark.bench
@pytest.mark.timeout(1200)
async def test_growing_conversations(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    option = request.config.getoption
    rounds, transport = option("--rounds"), option("--transport")
    found = await measure(tmp_path, rounds, transport, option("--against"))
    name = "growing" if transport == "h2" else f"growing-{transport}"
    bars.publish(request, name, document(found, rounds, transport))
