"""What the arena plays: engines that no router's beliefs describe, and three loads of agentic sessions.

Engines and loads are frozen, so that no router, ours included, is tuned to them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from perilune_gateway.model import H20_30B
from perilune_lab.demo.load import demo_load
from perilune_lab.stack import EngineOptions
from perilune_lab.traces.model import Session, Style, Trace
from perilune_research.simulator.workload import prepare

SLOWDOWNS = (0.5, 1.4, 0.7, 2.0)
"""How many times slower than the gateway's default belief each engine is, in turn: twice to half as fast."""


@dataclass(frozen=True, slots=True)
class Level:
    """How much load."""

    name: str
    sessions_per_s: float
    """Sessions that begin per second and engine."""


LEVELS = (Level("ease", 0.3), Level("knee", 0.7), Level("beyond", 1.2))


@dataclass(frozen=True, slots=True)
class Setting:
    """What all cells have in common."""

    engines: int = 4
    seconds: float = 30.0
    """Length of the traffic; the last turns end a little later."""
    first_port: int = 0
    """Port of the first engine, the others follow; 0: the system chooses."""


def engine_options(setting: Setting) -> EngineOptions:
    """Engines in real time, which refuse what OpenAI's API refuses."""
    each = []
    for i in range(setting.engines):
        port = setting.first_port + i if setting.first_port else 0
        slowdown = SLOWDOWNS[i % len(SLOWDOWNS)]
        each.append(("--listen", f"127.0.0.1:{port}", "--slowdown", str(slowdown)))
    load = demo_load(setting.engines, 0, setting.seconds, 1.0)
    return EngineOptions(
        kv_tokens=load.kv_tokens,
        context_tokens=load.context_tokens,
        arguments=("--strict-openai",),
        each=tuple(each),
    )


def sessions(setting: Setting, level: Level, seed: int) -> tuple[Session, ...]:
    """The sessions that begin within the setting's seconds, each cut to the turns that an idle H20 would see
    by then. Every router gets all of these turns, however long it takes."""
    load = demo_load(setting.engines, seed, setting.seconds, 1.0)
    load = replace(
        load, parameters=replace(load.parameters, sessions_per_s=level.sessions_per_s * setting.engines)
    )
    begun = []
    for session in load.sessions():
        if session.start_s >= setting.seconds:
            break
        begun.append(session)
    jobs = prepare(Trace("agentic", Style.CHAT, tuple(begun)), H20_30B, window_s=setting.seconds).jobs
    cut = (
        replace(session, turns=session.turns[: len(job.tasks)])
        for session, job in zip(begun, jobs, strict=True)
    )
    return tuple(session for session in cut if session.turns)
