"""What the demo shows while it runs: one `Frame` of values, drawn as a live view or printed in lines.

    client results ─┐
    admin API ──────┼─▶ Frame ─▶ render (rich, on a terminal) │ line (anywhere else)
    stack.deaths ───┘

`render` and `line` are pure. Cost: one frame is about 3 ms, drawn four times a second.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.table import Table
from rich.text import Text

from perilune_lab.terminal.formats import as_percent

_BAR_CELLS = 8
_COLUMNS = 96
_BAR_FULL_QUEUE_S = 4.0
"""Seconds (engine time) of queued prefill at which the bar is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointRow:
    """One endpoint. The queue is in engine seconds, ratios are 0–1, None is not known yet."""

    name: str
    address: str
    place: str = ""
    queue_s: float = 0.0
    hit_ratio: float | None = None
    kv_usage: float = 0.0
    sessions: int = 0
    in_flight: int = 0
    dead: str = ""
    """How the engine ended; empty while it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRow:
    """One decision of the gateway."""

    clock: str
    """hh:mm:ss"""
    session: str
    target: str
    """Name of the endpoint; empty if the request was refused."""
    reason: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    moved_from: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One moment of a run."""

    policy: str
    elapsed_s: float
    seconds: float
    time_scale: float
    finished: int = 0
    """Requests answered."""
    failed: int = 0
    open: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Cached prompt tokens of these, as the engines report."""
    migrations: int = 0
    ttft_p90_s: float | None = None
    """Engine seconds."""
    endpoints: Sequence[EndpointRow] = ()
    decisions: Sequence[DecisionRow] = ()
    """Newest first."""

    @property
    def apc(self) -> float | None:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def draining(self) -> bool:
        """Whether the time is over, so that only open requests still run."""
        return self.elapsed_s >= self.seconds


def percent(ratio: float | None) -> str:
    return "–" if ratio is None else as_percent(ratio, 0)


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s"


def line(frame: Frame) -> str:
    """Render the frame as one line."""
    dead = sum(1 for row in frame.endpoints if row.dead)
    return (
        f"{frame.policy:<12} {frame.elapsed_s:5.1f} s  requests {frame.finished:>4}"
        f"  APC {percent(frame.apc):>4}  TTFT p90 {_seconds(frame.ttft_p90_s):>7}"
        f"  moves {frame.migrations}"
        + (f"  failed {frame.failed}" if frame.failed else "")
        + (f"  dead endpoints {dead}" if dead else "")
    )


def render(frame: Frame) -> RenderableType:
    """Render the frame in 80 to 96 columns and endpoints + 14 lines."""
    return Constrain(Group(_title(frame), _endpoints(frame), _decisions(frame)), _COLUMNS)


def _title(frame: Frame) -> RenderableType:
    grid = Table.grid(expand=True)
    grid.add_column()
    grid.add_column(justify="right")
    left = Text.assemble(
        ("perilune demo ", "bold"),
        (f" {frame.policy} ", "bold reverse cyan"),
        (
            "  finishing open requests"
            if frame.draining
            else f"  {frame.elapsed_s:.0f} of {frame.seconds:g} s"
        ),
    )
    right = Text("simulated engines", style="dim")
    if frame.time_scale != 1.0:
        right.append(f" × {frame.time_scale:g}")
    grid.add_row(left, right)
    totals = Text.assemble(
        ("requests ", "dim"), f"{frame.finished}", (f" + {frame.open} open", "dim"),
        ("   APC ", "dim"), (percent(frame.apc), "bold green"),
        ("   TTFT p90 ", "dim"), (_seconds(frame.ttft_p90_s), "bold"),
        ("   moves ", "dim"), f"{frame.migrations}",
    )  # fmt: skip
    if frame.failed:
        totals.append(f"   failed {frame.failed}", style="bold red")
    return Group(grid, totals)


def _bar(share: float, style: str) -> Text:
    filled = round(min(max(share, 0.0), 1.0) * _BAR_CELLS)
    return Text.assemble(("━" * filled, style), ("─" * (_BAR_CELLS - filled), "bright_black"))


def _endpoints(frame: Frame) -> RenderableType:
    table = Table(box=box.SIMPLE_HEAD, expand=True, pad_edge=False, padding=0, header_style="dim")
    for name in ("endpoint", "place"):
        table.add_column(name, no_wrap=True)
    table.add_column("queued prefill", no_wrap=True)
    table.add_column("cache hits", no_wrap=True)
    for name in ("KV", "sessions", "open"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in frame.endpoints:
        if row.dead:
            table.add_row(
                Text(row.name, style="red strike"), row.place, Text(row.dead, style="red"), "", "", "", ""
            )
            continue
        share = row.queue_s / _BAR_FULL_QUEUE_S
        heat = "green" if share < 0.25 else "yellow" if share < 0.75 else "red"
        table.add_row(
            row.name,
            Text(row.place, style="dim"),
            _bar(share, heat) + Text(f" {row.queue_s:5.2f} s"),
            _bar(row.hit_ratio or 0.0, "cyan") + Text(f" {percent(row.hit_ratio):>4}"),
            percent(row.kv_usage),
            str(row.sessions),
            str(row.in_flight),
        )
    return table


_REASON_STYLES = {"host": "green", "moved": "bold magenta", "cold": "blue"}


def _decisions(frame: Frame) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(5):
        table.add_column(no_wrap=True)
    for row in frame.decisions:
        hit = row.cached_tokens / row.prompt_tokens if row.prompt_tokens else 0.0
        reason = Text(row.reason, style=_REASON_STYLES.get(row.reason, ""))
        if row.moved_from:
            reason.append(f" ← {row.moved_from}", style="dim")
        table.add_row(
            Text(row.clock, style="dim"),
            row.session,
            Text.assemble(("→ ", "dim"), row.target) if row.target else Text("refused", style="red"),
            reason,
            Text(f"{row.prompt_tokens:,} tokens, {as_percent(hit, 0)} cached"),
        )
    return Group(Text("last decisions", style="dim"), table)
