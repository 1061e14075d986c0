"""A program with commands, `PROGRAM COMMAND …`: imports the module of the named command and calls its `main`.

The module of a command has `main(argv: Sequence[str]) -> int` and an argparse parser of its own. Only the
module of the command that runs is imported, so help is quick. Exit status: the command's own; 2 for a wrong
call or a wrong document, 74 when a disk is full, 130 after Ctrl-C, 141 when the reader of a pipe has left.

Ctrl-C is told in one sentence. A command whose work so far is kept, or shown, raises KeyboardInterrupt with
that sentence.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from errno import EDQUOT, EFBIG, EIO, ENOSPC
from importlib import import_module
from importlib.metadata import version
from typing import NamedTuple

from perilune_lab.terminal.exits import INTERRUPTED, NOT_WRITTEN, PIPE_CLOSED, WRONG_CALL, wrong_call

_DISK_ERRORS = {ENOSPC, EDQUOT, EFBIG, EIO}


class Command(NamedTuple):
    module: str
    summary: str
    """One line for the program's help: what the command does."""
    example: str
    """Arguments of a typical call, the command's name first."""


class Program(NamedTuple):
    """What the help shows: the description, the commands group by group, and the closing words."""

    name: str
    """How a user calls it: `perilune`."""
    description: str
    groups: Mapping[str, Mapping[str, Command]]
    """Heading → name → command, in the order in which the help lists them."""
    closing: str = ""

    @property
    def commands(self) -> dict[str, Command]:
        return {name: command for group in self.groups.values() for name, command in group.items()}


def run(program: Program, argv: Sequence[str]) -> int:
    """Run the command that `argv` names and return the exit status. argparse ends a wrong call of a command
    with SystemExit(2). Errors that are not the user's, a peer's or the disk's are raised."""
    _replace_closed_streams()
    try:
        try:
            return _dispatch(program, argv)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt as interrupt:
        _say_interrupted(" ".join([program.name, *argv[:1]]), str(interrupt) or "nothing is kept")
        return INTERRUPTED
    except BrokenPipeError:
        _discard_stdout()
        return PIPE_CLOSED
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        _discard_stdout()
        print(f"{program.name}: {error.strerror}: not everything was written", file=sys.stderr)
        return NOT_WRITTEN
    except Exception as error:
        from perilune_api.pool import SpecError  # msgspec is slow to import and help does not need it

        if not isinstance(error, SpecError):
            raise
        return wrong_call(program.name, error)


def _dispatch(program: Program, argv: Sequence[str]) -> int:
    commands = program.commands
    if argv and argv[0] in commands:
        status: int = import_module(commands[argv[0]].module).main(argv[1:])
        return status
    parser = _parser(program)
    args, _ = parser.parse_known_args(argv)
    if args.version:
        print(f"{program.name} {version('perilune')}")
        return 0
    if args.command is None:
        parser.print_help()
        return 0 if not argv else WRONG_CALL
    near = get_close_matches(args.command, commands, n=1)
    hint = f"; did you mean `{program.name} {near[0]}`?" if near else ""
    known = ", ".join(commands)
    return wrong_call(program.name, f"unknown command {args.command!r}{hint} (commands: {known})")


def _parser(program: Program) -> argparse.ArgumentParser:
    lines = [program.description, ""]
    for heading, commands in program.groups.items():
        lines.append(f"{heading}:")
        for name, command in commands.items():
            lines += [f"  {name:<14}{command.summary}", f"{'':16}$ {program.name} {command.example}"]
        lines.append("")
    parser = argparse.ArgumentParser(
        prog=program.name,
        usage=f"{program.name} COMMAND …",
        description="\n".join(lines[:-1]),
        epilog=f"`{program.name} COMMAND --help` explains a command and its options.\n{program.closing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    return parser


def _say_interrupted(command: str, work_so_far: str) -> None:
    own_line = "\n" if sys.stderr.isatty() else ""  # after the terminal's ^C
    print(f"{own_line}{command}: interrupted: {work_so_far}", file=sys.stderr)


def _replace_closed_streams() -> None:
    """Replace the streams that `>&-` closed, for which Python has no sys.stdout; what is written there is
    discarded."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - until the process ends


def _discard_stdout() -> None:
    """Keep the interpreter's flush at exit from failing, and reporting, what `run` has handled."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
