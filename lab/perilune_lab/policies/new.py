"""`perilune policy new NAME`: writes a package with a policy that works, and its tests, to begin with.

Exit status: 0; 2 for a name that cannot be one, or a folder that is not empty.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template

from perilune_api.policies import OUTSIDE_NAME
from perilune_api.pool import SpecError
from perilune_gateway.policy import OURS
from perilune_gateway.policy.contract import VERSION
from perilune_lab.terminal.exits import wrong_call

RESERVED = ("all", "pull", "migration", "engine_priority")
"""Names that mean something else where options name policies or their parameters."""

_EPILOG = """\
example:
  perilune policy new mine && cd mine
  pip install --no-deps -e . && python -m pytest
  perilune simulate --policies mine,perilune

The package has one module with the policy, its parameters, tests, and the entry point by which `perilune` and
gateways find it. docs/policies.md explains the contract, and how a policy gets to a gateway.
"""


def main(argv: Sequence[str]) -> int:
    """Write the package. Return the exit status."""
    args = _parser().parse_args(argv)
    folder = args.folder or Path(args.name)
    try:
        written = write(args.name, folder)
    except SpecError as error:
        return wrong_call("perilune policy new", error)
    for path in written:
        print(path)
    print(f"next: cd {folder} && pip install --no-deps -e . && python -m pytest", file=sys.stderr)
    return 0


def write(name: str, folder: Path) -> list[Path]:
    """Write a package with a policy of this name into a new or empty folder, and return its files. Raises
    SpecError."""
    if not re.fullmatch(OUTSIDE_NAME, name):
        raise SpecError(
            f"{name!r} is no name of a policy: small letters, digits and _, a letter first - at `NAME`"
        )
    if name in (*OURS, *RESERVED):
        raise SpecError(f"Perilune uses the name {name!r} itself: choose another name - at `NAME`")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SpecError(f"{folder} is there and not empty: choose another with `--folder`")
    module = f"{name}_policy"
    values = {
        "name": name,
        "module": module,
        "package": module.replace("_", "-"),
        "type": "".join(map(str.capitalize, name.split("_"))) + "Parameters",
        "contract": VERSION,
        "version": version("perilune"),
    }
    written = []
    for template, target in (
        ("pyproject.toml.txt", "pyproject.toml"),
        ("README.md.txt", "README.md"),
        ("policy.py.txt", f"{module}.py"),
        ("test_policy.py.txt", f"tests/test_{name}.py"),
    ):
        text = (files("perilune_lab.policies") / "template" / template).read_text()
        path = folder / target
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(Template(text).substitute(values))
        except OSError as error:
            raise SpecError(f"{path} cannot be written: {error.strerror} - at `--folder`") from None
        written.append(path)
    return written


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="perilune policy",
        description="Begin a policy of your own.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="new", required=True)
    new = commands.add_parser(
        "new",
        description="Write a package with a policy that works, and its tests, to begin with.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        help="write a package with a policy of your own",
    )
    new.add_argument("name", metavar="NAME", help="the policy's name, such as mine or least_busy")
    new.add_argument("--folder", type=Path, metavar="DIR", help="where to write it; new or empty [NAME]")
    return parser
