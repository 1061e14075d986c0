"""Fair shares, live: what a tenant that sends ten times as much costs another one. Each of the two tests
takes 25 minutes.

Envoy, one gateway or two that share their state, with the default policy, and simulated engines in real time.
The same sessions of the smaller tenant are played alone with fair shares, beside those of the larger one
without them, and beside them with fair shares (`enginePriority.fairShare`, `sessionAdmission`). Sessions are
short ones of coding agents (`SHORT`), so that a minute holds many. Clients send again what is refused, as
OpenAI's SDKs do; the time to a first token counts from a turn's first arrival. A turn that is given up never
has one, and one that the end of the play cuts off has had none for so long.
"""

import asyncio
import shutil
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from itertools import takewhile
from math import inf
from typing import NamedTuple

import bars
import pytest
from ports import free_port
from running_envoy import Envoy

from perilune_api import pool
from perilune_lab.load.bodies import Words
from perilune_lab.load.client import RETRIES, Load, may_retry, run_load
from perilune_lab.load.result import Result
from perilune_lab.processes.child import Child, start
from perilune_lab.processes.envoy import config
from perilune_lab.processes.stack import EngineOptions, Stack
from perilune_lab.traces import agentic
from perilune_lab.traces.model import Session
from perilune_lab.vocabulary import Vocabulary
from perilune_research.crosscheck.workload import SHORT
from perilune_research.evaluation.traffic import GREEDY, QUIET, TIMES

ENGINES = EngineOptions(kv_tokens=100_000, context_tokens=32_768)
ENDPOINTS, WINDOW_S, SEEDS = 3, 60.0, (1, 2, 3)
RATES = {"below saturation": 2.0, "above it": 4.0}
"""Sessions per second of both tenants. Simulated, TTFT p90 is 0.4 s and 15 s."""
SERVER = shutil.which("valkey-server") or shutil.which("redis-server") or ""
HELD_S = 20.0
"""Seconds for which a new session is held at most, less than a play has."""
COST, OUTPUT = 1.3, 0.98
"""Goals: TTFT p90 of the smaller tenant over that alone, output tokens of both over those in turn."""


class Played(NamedTuple):
    p90_s: float
    """TTFT p90 of the smaller tenant; infinite if it gave up more than a tenth of its turns."""
    output_tokens: int
    turns: int
    """Number of the smaller tenant's turns."""
    given_up: int
    """Turns of both tenants."""
    cut_off: int
    """Turns of both tenants that the end left without an answer."""


def sessions_of(tenant: str, rate: float, seed: int) -> list[Session]:
    """Make a tenant's sessions, so many per second."""
    made = agentic.sessions(replace(SHORT, sessions_per_s=rate), seed)
    return [replace(s, tenant=tenant) for s in takewhile(lambda s: s.start_s < WINDOW_S, made)]


async def play(sessions: Sequence[Session], words: Words, gateways: int, *, fair: bool) -> Played:
    """Play the sessions on a fresh stack."""
    routing = pool.Routing(
        engine_priority=pool.EnginePriority(fair_share=fair),
        session_admission=pool.SessionAdmission(enabled=fair, max_wait_seconds=HELD_S),
    )
    engines = replace(ENGINES, arguments=("--scheduling", "priority" if fair else "fcfs"))
    async with served(engines, routing, gateways) as url:
        load = Load(target=url, model=engines.model, seconds=WINDOW_S, grace_s=WINDOW_S, retry=True)
        results = await run_load(sessions, load, words)
    return measured(results, {s.session_id for s in sessions if s.tenant == QUIET})


@asynccontextmanager
async def served(engines: EngineOptions, routing: pool.Routing, gateways: int) -> AsyncIterator[str]:
    """Yield the URL of a fresh stack. Several gateways share their state."""
    one = gateways == 1
    async with AsyncExitStack() as exits:
        stack = Stack(engines=ENDPOINTS, options=engines, routing=routing, with_gateway=one, with_envoy=one)
        await exits.enter_async_context(stack)
        if one:
            yield stack.url
            return

        async def started(name: str, *command: str) -> Child:
            stack.children[name] = await start(name, command, {}, stack.folder)
            return stack.children[name]

        port, processors = free_port(), []
        await started("server", SERVER, "--port", f"{port}", "--bind", "127.0.0.1", "--save", "")
        shared = ("--pool", str(stack.pool_file), "--state-server", f"redis://127.0.0.1:{port}")
        for number in range(gateways):
            listen = ("--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0")
            gateway = await started(f"gateway-{number}", *stack.programs.gateway, *shared, *listen)
            processors.append((await gateway.until_ready(60))["ext_proc"])
        envoy = Envoy(config(stack.endpoints, processors, message_timeout_s=routing.message_timeout_s))
        yield (await exits.enter_async_context(envoy)).url


def measured(results: Sequence[Result], quiet: set[str]) -> Played:
    attempts: dict[tuple[str, int], list[Result]] = defaultdict(list)
    for result in results:
        attempts[result.session, result.turn].append(result)
    waited, given_up, cut_off = [], 0, 0
    for (session, _), tried in attempts.items():
        first, last = min(r.submitted_at_s for r in tried), max(tried, key=lambda r: r.submitted_at_s)
        if last.succeeded and last.ttft_s is not None:
            seconds = last.submitted_at_s + last.ttft_s - first
        elif len(tried) > RETRIES or not may_retry(last):
            seconds, given_up = inf, given_up + 1
        else:
            seconds, cut_off = WINDOW_S - first, cut_off + 1
        if session in quiet:
            waited.append(seconds)
    output = sum(r.output_tokens for r in results if r.finished_at_s <= WINDOW_S)
    return Played(bars.quantile(waited, 0.9), output, len(waited), given_up, cut_off)


async def rows(words: Words, gateways: int) -> list[str]:
    found = []
    for name, rate in RATES.items():
        for seed in SEEDS:
            share = rate / (1.0 + TIMES)
            few = [Session("start", 0.0, ()), *sessions_of(QUIET, share, seed)]  # both begin at 0
            both = sorted(few + sessions_of(GREEDY, TIMES * share, seed + 1_000), key=lambda s: s.start_s)
            alone = await play(few, words, gateways, fair=True)
            in_turn = await play(both, words, gateways, fair=False)
            fair = await play(both, words, gateways, fair=True)
            cost, output = fair.p90_s / alone.p90_s, fair.output_tokens / in_turn.output_tokens
            found.append(
                f"| {name}, {rate:g} | {seed} | {fair.turns} | {alone.p90_s:.2f} | {in_turn.p90_s:.2f} |"
                f" {fair.p90_s:.2f} | {cost:.2f} | {bars.verdict(cost <= COST)} | {output:.2f} |"
                f" {bars.verdict(output >= OUTPUT)} | {in_turn.given_up}, {fair.given_up} |"
                f" {in_turn.cut_off}, {fair.cut_off} |"
            )
            print(found[-1], flush=True)
    return found


@pytest.mark.bench
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("gateways", [1, 2])
def test_what_a_tenant_at_ten_times_its_share_costs_another(
    request: pytest.FixtureRequest, gateways: int
) -> None:
    found = asyncio.run(rows(Vocabulary().words_for, gateways))
    name, head = ("tenants", _HEAD) if gateways == 1 else ("tenants-two-gateways", _TWO)
    bars.publish(request, name, "\n".join([*head, *_COLUMNS, *found, ""]))


_HEAD = f"""\
## Tenants

`make bench-long ARGS='-k ten_times'` · {bars.machine()}

A tenant alone, and beside one that sends {TIMES:g} times as much: Envoy, one gateway with its default policy,
{ENDPOINTS} simulated engines in real time, {WINDOW_S:g} s of coding agents' sessions of 9 to 14 turns, with a
quarter of the usual lengths and a twentieth of the gaps. *In turn*: without fair shares. *Fair*, and *alone*:
`enginePriority.fairShare` and `sessionAdmission`. TTFT p90 is that of the smaller tenant's turns in seconds,
from their first arrival. *Output*: tokens of both tenants. *Given up*, *cut off*: turns that clients gave up,
and that the end left without an answer, in turn and fair. Goals: at most {COST:g} times the TTFT alone, and
at least {OUTPUT:g} of the output in turn.
""".splitlines()
_TWO = f"""\
### Tenants behind two gateways

The same, with two gateways that share their state (`--state-server`), behind one Envoy · {bars.machine()}
""".splitlines()
_COLUMNS = """
| sessions/s | seed | turns | alone | in turn | fair | fair / alone | | output | | given up | cut off |
|---|---:|---:|---:|---:|---:|---:|---|---:|---|---:|---:|
""".splitlines()
