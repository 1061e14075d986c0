"""CPU of gateway and Envoy per request, over what Envoy alone needs for it, all in the same run.

    wrk, 20 connections, 64 rotating bodies ─▶ Envoy ─▶ 8 cheap endpoints
                                                 └─ gateway: transport × router

Cold: the decision needs the body. Warm: the session is known, the body never reaches the gateway. New: cold,
and each body's text begins with a number that no other has, so that the gateway neither parsed any of it
before nor has it in its index; such bodies have a gateway of their own, whose index they fill (h2 with the
real router; a tenth of the time of a round).

Routers: one that decides nothing, and the real one without tokenization (`tokenize: estimate`), whose own
account of its steps is printed too. CPU comes from the processes' own accounting, wrk's and the endpoints'
is not counted. Machines change their pace within seconds, so Envoy alone is measured anew before each
subject, and of some rounds the one with the median ratio of the two counts. The bars are on the gateway's
own, with the real router: gateway / Envoy alone. Beside it stand llm-d's picker's, and what is added in all:
(gateway + Envoy − Envoy alone) / Envoy alone.
"""

import asyncio
import itertools
import json
import os
import random
import re
import shutil
import sys
from collections import defaultdict
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from time import process_time

import aiohttp
import bars
import pytest
from running_envoy import Envoy

from perilune_api import pool as spec
from perilune_gateway.extproc import Transport, wire
from perilune_gateway.extproc.messages import Continue, Kind, Pick
from perilune_lab import envoy
from perilune_lab.child import Child, start

CONNECTIONS = 20
BODIES = 64
SIZES = {"1 KB": 1_000, "130 KB": 130_000, "220 KB": 220_000}
ENDPOINTS = 8
PARTS = Path(__file__).with_name("transport_parts.py")

BARS: dict[tuple[str, str, str], float] = {
    ("h2", "cold", "1 KB"): 2.5,
    ("h2", "warm", "1 KB"): 2.5,
    ("h2", "cold", "130 KB"): 4.0,
    ("h2", "cold", "220 KB"): 4.0,
    ("h2", "warm", "130 KB"): 1.2,
    ("h2", "warm", "220 KB"): 1.2,
    ("grpc", "cold", "130 KB"): 10.0,
    ("grpc", "cold", "220 KB"): 10.0,
    ("grpc", "warm", "130 KB"): 5.0,
    ("grpc", "warm", "220 KB"): 4.0,
}
"""What the gateway may cost, × Envoy alone, with the real router, without tokenization."""

GO_PICKER: dict[str, tuple[float, float]] = {
    "1 KB": (293 / 56, 346 / 56),
    "130 KB": (3320 / 111, 3410 / 111),
    "220 KB": (5480 / 190, 6250 / 190),
}
"""The mark of the field: the same ratio of llm-d's picker (llm-d-router at ebab687, in Go, its default policy
without tokenizer, 8 endpoints, bodies sent to it whole as its documentation sets it up), lowest and highest.
Measured once on a machine of this kind under the same load, not in this run."""

ON = {"cold": "body", "warm": "headers"}

RUNS = itertools.count()
"""Of wrk: new bodies have its number in them, and that of the request. One thread serves all connections."""

LUA = """
local requests, heads, tails, at, run, sent = {}, {}, {}, 0, 0, 0
local new, number, first = false, "%04x%08x", '"content": "'
function init(args)
  new, run = args[2] == "new", tonumber(args[3])
  for i = 0, BODIES - 1 do
    local file = io.open(args[1] .. "/" .. i .. ".json", "rb")
    local headers = {["content-type"] = "application/json"}
    if args[2] == "warm" then headers["x-session-id"] = "session-" .. i end
    local whole = wrk.format("POST", "/v1/chat/completions", headers, file:read("*a"))
    file:close()
    if new then
      local _, to = whole:find(first, 1, true)
      heads[i], tails[i] = whole:sub(1, to), whole:sub(to + 1 + #number:format(0, 0))
    else
      requests[i] = whole
    end
  end
end
function request()
  at = (at + 1) % BODIES
  if not new then return requests[at] end
  sent = sent + 1
  return heads[at] .. number:format(run, sent) .. tails[at]
end
function done(summary, latency)
  local e = summary.errors
  io.write(string.format("RESULT %d %d %d %d\\n", summary.requests,
    e.status + e.connect + e.read + e.write + e.timeout, summary.duration, latency:percentile(99)))
end
""".replace("BODIES", str(BODIES))


@dataclass(frozen=True)
class Measured:
    """One measurement; µs of CPU per request."""

    gateway_us: float
    envoy_us: float
    per_s: float
    p99_ms: float
    bodies_bytes: float
    """Received by the real gateway per request."""
    known: float
    """Of the bodies, those that the real gateway had read before, all or a part."""
    steps_us: dict[str, float]

    alone_us: float = 0.0
    """Of Envoy without a gateway, just before."""

    @property
    def added(self) -> float:
        return (self.gateway_us + self.envoy_us - self.alone_us) / self.alone_us

    @property
    def ratio(self) -> float:
        """The gateway's own, without what it makes Envoy do."""
        return self.gateway_us / self.alone_us


Key = tuple[str, ...]
"""(size) of Envoy alone; (size, transport, router, warmth) with a gateway."""


@dataclass
class Subject:
    """An Envoy, and the gateway behind it, if any."""

    envoy: Envoy
    gateway: Child | None = None
    admin: str = ""

    async def counted(self) -> dict[str, float]:
        """Step → seconds, as the gateway counts them; "bodies" → bytes; "known" → bodies."""
        if not self.admin:
            return {}
        async with aiohttp.ClientSession() as http, http.get(f"http://{self.admin}/metrics") as reply:
            text = await reply.text()
        steps = re.findall(r'^perilune_scheduling_seconds_sum\{step="(\w+)"\} (\S+)', text, re.MULTILINE)
        bodies = re.findall(r"^perilune_body_received_bytes_total (\S+)", text, re.MULTILINE)
        known = re.findall(r"^perilune_bodies_(?:known|parsed_in_part)_total (\S+)", text, re.MULTILINE)
        found = {name: float(value) for name, value in (*steps, ("bodies", *bodies))}
        return found | {"known": sum(map(float, known))}


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def write_bodies(folder: Path) -> None:
    words = [f"{random.Random(i).randbytes(4).hex()[: 3 + i % 6]}" for i in range(2_000)]
    for name, size in SIZES.items():
        (folder / name).mkdir()
        for i in range(BODIES):
            rng = random.Random(f"{name} {i}")
            text, turns = " ".join(rng.choices(words, k=size // 5)), []
            for at in range(0, size - 200, 2_000):
                turns.append(
                    {"role": ("user", "assistant")[len(turns) % 2], "content": text[at : at + 1_900]}
                )
            body = {"model": "m", "max_tokens": 64, "stream": True, "messages": turns}
            turns[-1]["content"] += "x" * max(0, size - len(json.dumps(body)))
            (folder / name / f"{i}.json").write_text(json.dumps(body))


async def load(subject: Subject, folder: Path, size: str, warmth: str, seconds: int) -> Measured:
    pids = [subject.envoy.pid, *([subject.gateway.pid] if subject.gateway else [])]
    before, counted = [cpu_s(pid) for pid in pids], await subject.counted()
    wrk = await asyncio.create_subprocess_exec(
        *("wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "-s", str(folder / "load.lua")),
        *(subject.envoy.url, "--", str(folder / size), warmth, str(next(RUNS))),
        stdout=asyncio.subprocess.PIPE,
    )
    text = (await wrk.communicate())[0].decode()
    used = [cpu_s(pid) - was for pid, was in zip(pids, before, strict=True)] + [0.0]
    requests, errors, took_us, p99_us = map(int, text.rpartition("RESULT ")[2].split())
    assert errors == 0, text
    spent = {name: (now - counted[name]) / requests for name, now in (await subject.counted()).items()}
    return Measured(
        gateway_us=used[1] / requests * 1e6,
        envoy_us=used[0] / requests * 1e6,
        per_s=requests / took_us * 1e6,
        p99_ms=p99_us / 1000,
        bodies_bytes=spent.pop("bodies", 0.0),
        known=spent.pop("known", 0.0),
        steps_us={name: value * 1e6 for name, value in spent.items()},
    )


def without_gateway(config: envoy.Json) -> envoy.Json:
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    manager["http_filters"] = [f for f in manager["http_filters"] if "ext_proc" not in f["name"]]
    return config


def write_pool(file: Path, endpoints: list[str]) -> None:
    pool = spec.Pool(
        metadata=spec.Metadata(name="bench"),
        spec=spec.Spec(
            model=spec.Model(name="m", tokenize="estimate"),
            endpoints=tuple(spec.EndpointSpec(address=address) for address in endpoints),
        ),
    )
    spec.check(pool)
    file.write_bytes(spec.dump(pool))


async def measure(folder: Path, rounds: int, seconds: int) -> tuple[dict[Key, Measured], dict[str, Measured]]:
    """Of each its median round; the same by size for new bodies."""
    write_bodies(folder)
    (folder / "load.lua").write_text(LUA)
    found: dict[Key, list[Measured]] = defaultdict(list)
    of_new: dict[str, list[Measured]] = defaultdict(list)
    async with AsyncExitStack() as stack:

        async def child(name: str, *command: str) -> tuple[Child, dict[str, str]]:
            started = await start(name, (sys.executable, *command), dict(os.environ), folder)
            stack.push_async_callback(started.stop, 5.0)
            return started, await started.until_ready(20)

        async def front(config: envoy.Json) -> Envoy:
            return await stack.enter_async_context(Envoy(config))

        async def real(name: str, transport: Transport) -> Subject:
            gateway, facts = await child(
                name,
                *("-m", "perilune_gateway.main", "--transport", transport, "--log-level", "warning"),
                *("--pool", str(folder / "pool.yaml"), "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"),
            )
            return Subject(await front(envoy.config(endpoints, [facts["ext_proc"]])), gateway, facts["admin"])

        async def compared(subject: Subject, size: str, warmth: str) -> tuple[Measured, Measured]:
            """Envoy alone, and right after it the subject."""
            before = await load(alone, folder, size, warmth, seconds)
            measured = await load(subject, folder, size, warmth, seconds)
            return before, replace(measured, alone_us=before.envoy_us)

        _, facts = await child("endpoint", str(PARTS), "endpoint", str(ENDPOINTS))
        endpoints = facts["at"].split(",")
        write_pool(folder / "pool.yaml", endpoints)
        alone = Subject(await front(without_gateway(envoy.config(endpoints, ["127.0.0.1:1"]))))
        subjects: dict[tuple[str, str], Subject] = {}
        for transport in Transport:
            trivial, facts = await child(
                f"trivial-{transport}", str(PARTS), "gateway", transport, endpoints[0]
            )
            subjects[transport, "none"] = Subject(
                await front(envoy.config(endpoints, [facts["ext_proc"]])), trivial
            )
            subjects[transport, "real"] = await real(f"real-{transport}", transport)
        reads_new = await real("new-h2", Transport.H2)
        for _ in range(rounds):
            for size in SIZES:
                for (transport, router), subject in subjects.items():
                    for warmth in ("cold", "warm"):
                        if warmth == "warm":
                            await load(subject, folder, size, warmth, 1)  # binds the sessions
                        before, measured = await compared(subject, size, warmth)
                        found[size,].append(before)
                        found[size, transport, router, warmth].append(measured)
                _, measured = await compared(reads_new, size, "new")
                assert measured.known == 0, size
                of_new[size].append(measured)
    return (
        {key: typical(measured) for key, measured in found.items()},
        {size: typical(measured) for size, measured in of_new.items()},
    )


def typical(measured: list[Measured]) -> Measured:
    """By its ratio to Envoy alone, or Envoy alone by its cost."""
    return sorted(measured, key=lambda m: m.ratio if m.alone_us else m.envoy_us)[len(measured) // 2]


def table(found: dict[Key, Measured]) -> list[str]:
    lines = [
        "| body | transport | router | decision on | gateway µs | Envoy µs | alone µs | **added ×** "
        "| gateway / alone | requests/s | p99 ms |",
        "|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for (size, *rest), m in found.items():
        if not rest:
            lines.append(f"| {size} | – | – | – | – | – | {m.envoy_us:.0f} | – | – "
                         f"| {m.per_s:,.0f} | {m.p99_ms:.1f} |")  # fmt: skip
            continue
        transport, router, warmth = rest
        lines.append(
            f"| {size} | {transport} | {router} | {ON[warmth]} | {m.gateway_us:.0f} | {m.envoy_us:.0f} "
            f"| {m.alone_us:.0f} | **{m.added:.1f}** | {m.ratio:.1f} | {m.per_s:,.0f} | {m.p99_ms:.1f} |"
        )
    return lines


def encode_us() -> float:
    """What answering costs of the codec: a pick and the answer's head, as a request with headers only has."""
    picks = [Pick(Kind.REQUEST_HEADERS, (f"10.0.0.{n}:80", "10.0.1.1:80")) for n in range(ENDPOINTS)]
    best_s = inf
    for _ in range(20):
        started = process_time()
        for pick in picks * 50:
            wire.encode(pick)
            wire.encode(Continue(Kind.RESPONSE_HEADERS))
        best_s = min(best_s, process_time() - started)
    return best_s / (50 * ENDPOINTS) * 1e6


PHASES = ("parse", "tokenize", "hash", "index", "policy")


def steps_table(found: dict[Key, Measured]) -> list[str]:
    encode = encode_us()
    lines = [
        "| body | transport | decision on | transport | " + " | ".join(PHASES) + " | record | encode |",
        "|---|---|---|" + "---:|" * (len(PHASES) + 3),
    ]
    for (size, transport, _, warmth), m in ((key, m) for key, m in found.items() if m.steps_us):
        steps = [m.steps_us.get(name, 0.0) for name in PHASES]
        bare = found[size, transport, "none", warmth].gateway_us - encode
        values = " | ".join(f"{us:.0f}" for us in (bare, *steps, m.steps_us["total"] - sum(steps), encode))
        lines.append(f"| {size} | {transport} | {ON[warmth]} | {values} |")
    return lines


def verdicts(found: dict[Key, Measured]) -> list[str]:
    """Every bar: the real router's own cost is judged, the rest stands beside it."""
    lines = [
        "| transport | body | decision on | bar | **gateway / alone** | | llm-d's picker "
        "| router none: gateway / alone | added × | router none: added × |",
        "|---|---|---|---:|---:|---|---:|---:|---:|---:|",
    ]
    for (transport, warmth, size), limit in BARS.items():
        real, none = (found[size, transport, router, warmth] for router in ("real", "none"))
        least, most = (f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}" for ratio in GO_PICKER[size])
        met = bars.verdict(real.ratio <= limit)
        lines.append(
            f"| {transport} | {size} | {ON[warmth]} | {limit:g} | **{real.ratio:.1f}** | {met} "
            f"| {least}–{most} | {none.ratio:.1f} | {real.added:.1f} | {none.added:.1f} |"
        )
    return lines


def new_table(of_new: dict[str, Measured]) -> list[str]:
    lines = [
        "| transport | body | decision on | **gateway / alone** | bar of that size | gateway µs | alone µs |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for size, m in of_new.items():
        limit = BARS["h2", "cold", size]
        lines.append(
            f"| h2 | {size} | {ON['cold']} | **{m.ratio:.1f}** | {limit:g} "
            f"| {m.gateway_us:.0f} | {m.alone_us:.0f} |"
        )
    return lines


def document(found: dict[Key, Measured], of_new: dict[str, Measured], rounds: int, seconds: int) -> str:
    return "\n".join(
        [
            "## Transport",
            "",
            f"{bars.machine()}. Envoy with one",
            f"worker, wrk with {CONNECTIONS} connections over {BODIES} bodies, {ENDPOINTS} endpoints; each",
            f"for {seconds} s just after Envoy alone; of {rounds} rounds the one with the median ratio.",
            "Clients, Envoy and gateway share the machine, whose pace changes within seconds: compare",
            "ratios, not rates, nor µs of one row with another's. CPU µs per request. The bars are on",
            "*gateway / alone* with",
            "the real router (default policy, tokens estimated from bytes): the gateway's CPU over Envoy's",
            "without it, which is how tables of pickers set the two side by side. *Added ×* = (gateway +",
            "Envoy − Envoy alone) / Envoy alone counts what Envoy spends on asking too; it is always larger,",
            "and stands beside, under no bar. Router *none* decides nothing: it is the transport alone.",
            "*llm-d's picker*, in Go, is sent every body; its ratio is of another run on such a machine.",
            "",
            *verdicts(found),
            "",
            *table(found),
            "",
            "By phase, µs per request: *transport* is the CPU of the gateway with router *none* (HTTP/2,",
            "protobuf, exchange); the others are the real router's own account, by its wall clock:",
            "",
            *steps_table(found),
            "",
            "Bodies that are new: above, the same ones come again and again, and the gateway remembers",
            "them. Here each one's text begins with another number: nothing of it was parsed before, nor",
            "is any prefix of it in the index, which fills with them. A gateway of its own with the real",
            "router, just after Envoy alone with bodies as new. The bar, set for bodies of any kind, stands",
            "here as a mark:",
            "",
            *new_table(of_new),
            "",
        ]
    )


@pytest.mark.bench
@pytest.mark.timeout(1800)
async def test_transport(tmp_path, request):
    if shutil.which("wrk") is None:
        pytest.skip("wrk is not installed (Debian: apt install wrk)")
    rounds, seconds = request.config.getoption("--rounds"), request.config.getoption("--seconds")
    found, of_new = await measure(tmp_path, rounds, seconds)
    text = document(found, of_new, rounds, seconds)
    bars.publish(request, "transport", text)
    for size, n_bytes in SIZES.items():
        for transport in Transport:
            assert found[size, transport, "real", "warm"].bodies_bytes < 0.02 * n_bytes
            assert found[size, transport, "real", "cold"].known > 0, "what counts them sees none"
        for warmth in ("cold", "warm"):
            fast, slow = (found[size, kind, "none", warmth].gateway_us for kind in ("h2", "grpc"))
            assert fast < slow / 2, (size, warmth)
