"""What the arena plays: engines whose speeds no router knows, and generated and recorded loads.

Do not change engines and loads, so that no router, not even ours, is tuned to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from perilune_gateway.model import H20_30B
from perilune_lab.demo.load import demo_load
from perilune_lab.processes.stack import EngineOptions
from perilune_lab.simulate.workload import prepare
from perilune_lab.traces.model import Mode, Session, Style, Trace, Turn, submitted_s
from perilune_lab.traces.source import open_trace

SLOWDOWNS = (0.5, 1.4, 0.7, 2.0)
"""Factors on the times that the gateway's default engine model predicts, for the engines in turn."""
NOISE = 0.15
"""Standard deviation of the logarithm of a step's time."""
SLOWED = 6.0
"""Factor on the times of the first engine, the fastest one, from halfway on (`Halfway.SLOW_ENGINE`)."""
RECORDED_SCALE = 4
"""Recorded prompts and answers are this many times shorter, since generated ones and KV pools are so, too."""
RECORDED_SPEED = 1.5
"""Factor on the speed of recorded requests, for four engines."""
RECORDED_WINDOW_S = 600.0
"""Each seed plays another part of the recording. This many seconds lie between the begins of two parts."""


class Client(StrEnum):
    """Who sends the requests and measures."""

    LAB = "lab"
    """The lab's own client."""
    AIPERF = "aiperf"
    """NVIDIA's AIPerf. It plays generated sessions to which nothing happens halfway."""


class Halfway(StrEnum):
    """What happens when half of the traffic's time is over."""

    SLOW_ENGINE = "slow engine"
    """The first engine becomes slower."""
    RESTART = "restart"
    """The router ends and starts again. Of Perilune, only the gateway restarts, behind an Envoy that fails
    open and goes on, as it is deployed."""


@dataclass(frozen=True, slots=True)
class Level:
    """One kind of load."""

    name: str
    sessions_per_s: float
    """Generated sessions that begin per second and engine; 0 if the load is recorded."""
    halfway: Halfway | None = None

    @property
    def recorded(self) -> bool:
        """Whether the load is a part of a recording."""
        return not self.sessions_per_s

    def __str__(self) -> str:
        if self.recorded:
            speed = recorded_speed(engines := Setting().engines)
            return (
                f"{self.name} (--trace; at {engines} engines {speed:g} times as fast, texts"
                f" 1/{RECORDED_SCALE} as long)"
            )
        return f"{self.name} {self.sessions_per_s:g}" + (f", halfway: {self.halfway}" if self.halfway else "")


LEVELS = (
    Level("ease", 0.3),
    Level("knee", 0.7),
    Level("beyond", 1.2),
    Level("slow-engine", 0.5, Halfway.SLOW_ENGINE),
    Level("restart", 0.5, Halfway.RESTART),
    Level("recorded", 0.0),
)


@dataclass(frozen=True, slots=True)
class Setting:
    """What all cells have in common."""

    engines: int = 8
    seconds: float = 20.0
    """Length of the traffic; the last turns end a little later."""
    first_port: int = 0
    """Port of the first engine; the others have the next ports. With 0 the system chooses all ports."""
    trace: Path | None = None
    """The recording that recorded loads play."""
    client: Client = Client.LAB


def engine_options(setting: Setting) -> EngineOptions:
    """Return the options of the engines, which run in real time and refuse what OpenAI's API refuses."""
    each = []
    for i in range(setting.engines):
        port = setting.first_port + i if setting.first_port else 0
        slowdown = SLOWDOWNS[i % len(SLOWDOWNS)]
        each.append(("--listen", f"127.0.0.1:{port}", "--slowdown", str(slowdown), "--noise", str(NOISE)))
    load = demo_load(setting.engines, 0, setting.seconds, 1.0)
    return EngineOptions(
        kv_tokens=load.kv_tokens,
        context_tokens=load.context_tokens,
        arguments=("--strict-openai",),
        each=tuple(each),
    )


@dataclass(frozen=True, slots=True)
class Traffic:
    """The sessions of one cell and how they are played."""

    sessions: tuple[Session, ...]
    style: Style = Style.CHAT
    mode: Mode = Mode.THINKTIME
    speed: float = 1.0


def traffic(setting: Setting, level: Level, seed: int) -> Traffic:
    """Return the traffic of one cell. Raises SpecError if the load is recorded and the recording cannot be
    read."""
    if not level.recorded:
        return Traffic(sessions(setting, level, seed))
    found = open_trace(str(setting.trace))
    speed = recorded_speed(setting.engines)
    window = _window(found, seed * RECORDED_WINDOW_S, setting.seconds * speed)
    return Traffic(tuple(sorted(window, key=lambda s: s.start_s)), found.style, Mode.MAX, speed)


def recorded_speed(engines: int) -> float:
    """Return the factor on the speed of recorded requests."""
    return RECORDED_SPEED * engines / len(SLOWDOWNS)


def _window(trace: Trace, after_s: float, seconds: float) -> Iterator[Session]:
    """Yield the sessions with the turns that were recorded in these seconds, each shortened."""
    for session in trace.sessions:
        kept = [turn for turn in session.turns if after_s <= submitted_s(turn) < after_s + seconds]
        if kept:
            yield replace(session, start_s=submitted_s(kept[0]), turns=tuple(map(_shorter, kept)))


def _shorter(turn: Turn) -> Turn:
    """Return the turn with every segment shortened by the same factor, so that prompts still share what they
    shared."""
    prompt = tuple(s._replace(tokens=-(-s.tokens // RECORDED_SCALE)) for s in turn.prompt)
    return replace(turn, prompt=prompt, output_tokens=-(-turn.output_tokens // RECORDED_SCALE))


def sessions(setting: Setting, level: Level, seed: int) -> tuple[Session, ...]:
    """Return the generated sessions that begin within the setting's seconds, each cut to the turns that an
    idle H20 would see by then. Every router gets all of these turns, however long it takes."""
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
