"""The arena's section of docs/benchmarks.md, made of the played cells and of what is written by hand in
`notes.toml`: why Perilune loses a load and what was changed, and how routers that a user runs were set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from perilune_api.pool import SpecError
from perilune_research.arena.contestants import AIPERF, CONTESTANTS
from perilune_research.arena.kept import Row
from perilune_research.arena.loads import LEVELS, Halfway
from perilune_research.arena.table import STALE, Group, compared, grouped, legend, lost, stale, table

NOTES = Path(__file__).with_name("notes.toml")
_BEGIN, _END = "<!-- arena -->", "<!-- /arena -->"
NO_REASON = "no reason is known yet."
RESTARTED = (
    "Under `restart`, of ours only the gateway restarts, behind an Envoy that fails open and goes on serving,"
    " as it is deployed, while the other routers lose their listener (of one by URL restarts what its command"
    " restarts)."
)


class Reason(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """Why Perilune loses under a load."""

    load: str
    session_header: bool
    why: str
    """A sentence: the reason."""
    changed: str
    """A sentence: what was changed because of it; or nothing, and why not."""

    @property
    def group(self) -> Group:
        return Group(self.load, self.session_header)


class Notes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """What is written by hand."""

    lost: tuple[Reason, ...] = ()
    by_url: dict[str, str] = {}
    """Router that a user ran → its version and settings."""


def notes(path: Path = NOTES) -> Notes:
    """Read the notes. Raises msgspec.DecodeError for a wrong file."""
    return msgspec.toml.decode(path.read_bytes(), type=Notes)


def section(rows: Sequence[Row], said: Notes, by_aiperf: Sequence[Row] = ()) -> str:
    """Return the section without its marks. `by_aiperf`: the cells that AIPerf has played, which have a table
    of their own."""
    if not rows and not by_aiperf:
        return "No cell has been played yet."
    played = {row.router for row in (*rows, *by_aiperf)}
    known = [contestant for contestant in CONTESTANTS if contestant.name in played]
    by_url = played - {contestant.name for contestant in CONTESTANTS}
    settings = [
        *legend(known),
        *(f"- {name}, by URL: {said.by_url.get(name, 'run by a user')}." for name in sorted(by_url)),
    ]
    parts = [*(_by_lab(rows, said) if rows else ()), *(_by_aiperf(by_aiperf) if by_aiperf else ()), settings]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _by_lab(rows: Sequence[Row], said: Notes) -> list[list[str]]:
    groups = grouped(rows)
    everything = [Group(level.name, header) for header in (True, False) for level in LEVELS]
    missing = [str(group) for group in everything if group not in groups]
    restarts = {level.name for level in LEVELS if level.halfway is Halfway.RESTART}
    return [
        [
            *_about(rows),
            *([f"Not played yet: {'; '.join(missing)}."] if missing else []),
            "A ratio is Perilune's mean over that of the best other router: above 1, Perilune is behind.",
        ],
        _reasons(rows, said),
        compared(rows),
        [RESTARTED] if any(group.load in restarts for group in groups) else [],
        table(rows),
    ]


def _by_aiperf(rows: Sequence[Row]) -> list[list[str]]:
    return [
        [f"**Sent and measured by NVIDIA's AIPerf {AIPERF.version}.**", *_about(rows)],
        compared(rows) or table(rows),
    ]


def _about(rows: Sequence[Row]) -> list[str]:
    """Say what was played, where, and by what code."""
    first = rows[0]
    shares = [row.others for row in rows if row.others is not None]
    untold = sorted({row.router for row in rows if row.others is None})
    days = sorted({row.at[:10] for row in rows})
    lines = [
        f"{len(rows)} cells of {first.seconds:g} s, {first.engines} engines, client {first.client}, played"
        f" {' to '.join(dict.fromkeys((days[0], days[-1])))} · {_all(f'{row.cpus} CPUs' for row in rows)},"
        f" {_all(f'Python {row.python}' for row in rows)}"
        + (f" · other programs used {max(shares):.0%} of the CPUs at most" if shares else "")
        + (f", which cannot be told for {_all(untold)}" if untold else "")
    ]
    if old := stale(rows):
        lines.append(
            f"{STALE} {len(old)} of these cells are by older code, of the router or of engines, loads and"
            " client. The next run that names the router plays them again."
        )
    return lines


def _all(words: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(words))


def _reasons(rows: Sequence[Row], said: Notes) -> list[str]:
    """Return a line for each load that Perilune loses, the worst first."""
    known = {reason.group: f"{reason.why} Changed: {reason.changed}" for reason in said.lost}
    lines = []
    for group, behind in lost(rows).items():
        figures = _all(one.figure.removesuffix(" s") for one in behind)
        seeds = " (one seed)" if all(one.seeds == 1 for one in behind) else ""
        lines.append(f"- Behind: **{group}**, in {figures}{seeds}: {known.get(group, NO_REASON)}")
    return lines


def place(path: Path) -> tuple[str, str, str]:
    """Return the page's text up to the section, the section, and what follows it. Raises SpecError if the
    page has no marks for it."""
    text = path.read_text() if path.exists() else ""
    before, begun, rest = text.partition(f"{_BEGIN}\n")
    old, ended, after = rest.partition(_END)
    if not (begun and ended):
        raise SpecError(f"{path} has no place for the arena, {_BEGIN} … {_END} - at `--page`")
    return before + begun, old.rstrip("\n"), ended + after


def write(path: Path, text: str) -> None:
    """Replace the section."""
    before, _, after = place(path)
    path.write_text(f"{before}{text}\n{after}")
