"""The arena's section of docs/benchmarks.md, made of the played cells and of what is written by hand in
`notes.toml`: why Perilune loses a load, and how routers that a user runs were set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from perilune_api.pool import SpecError
from perilune_research.arena.contestants import CONTESTANTS, OURS
from perilune_research.arena.kept import Row
from perilune_research.arena.loads import LEVELS
from perilune_research.arena.table import OLDER, Group, compared, grouped, legend, lost, newest, table

NOTES = Path(__file__).with_name("notes.toml")
_BEGIN, _END = "<!-- arena -->", "<!-- /arena -->"
NO_REASON = "no reason is known yet"


class Reason(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="kebab"):
    """Why Perilune loses under a load."""

    load: str
    session_header: bool
    why: str
    """A sentence: the reason, and what was changed because of it."""

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


def section(rows: Sequence[Row], said: Notes) -> str:
    """Return the section without its marks."""
    if not rows:
        return "No cell has been played yet."
    played = {row.router for row in rows}
    known = [contestant for contestant in CONTESTANTS if contestant.name in played]
    by_url = played - {contestant.name for contestant in CONTESTANTS}
    settings = [
        *legend(known),
        *(f"- {name}, by URL: {said.by_url.get(name, 'run by a user')}." for name in sorted(by_url)),
    ]
    parts = [[_about(rows)], _reasons(rows, said), compared(rows), table(rows), settings]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _about(rows: Sequence[Row]) -> str:
    """Say what was played, where and by which code, and what is missing."""
    first = rows[0]
    shares = [row.others for row in rows if row.others is not None]
    days = sorted({row.at[:10] for row in rows})
    lines = [
        f"{len(rows)} cells of {first.seconds:g} s, {first.engines} engines, client {first.client}, played"
        f" {' to '.join(dict.fromkeys((days[0], days[-1])))} · {_all(f'{row.cpus} CPUs' for row in rows)},"
        f" {_all(f'Python {row.python}' for row in rows)}"
        + (f" · other programs used {max(shares):.0%} of the CPUs at most" if shares else ""),
    ]
    groups = grouped(rows)
    everything = [Group(level.name, header) for header in (True, False) for level in LEVELS]
    if missing := [str(group) for group in everything if group not in groups]:
        lines.append(f"Not played yet: {'; '.join(missing)}.")
    today, codes = newest(rows), Counter(row.version for row in rows if row.router == OURS)
    if older := {code: number for code, number in codes.items() if code != today}:
        said = ", ".join(f"`{code}` ({number} cells)" for code, number in older.items())
        lines.append(
            f"{OLDER} Partly by older code of the gateway: {said}; the other cells are by `{today}`. The next"
            " run plays them again."
        )
    lines.append(
        "A ratio is Perilune's mean over that of the best other router: above 1, Perilune is behind."
    )
    return "\n".join(lines)


def _all(words: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(words))


def _reasons(rows: Sequence[Row], said: Notes) -> list[str]:
    """Return a line for each load that Perilune loses, the worst first."""
    why = {reason.group: reason.why for reason in said.lost}
    return [f"- Behind: **{group}**: {why.get(group, NO_REASON)}" for group in lost(rows)]


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
