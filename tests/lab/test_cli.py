"""`perilune`: dispatch, help, and how it ends."""

import subprocess
import sys
from importlib import import_module
from types import SimpleNamespace

import pytest
from waiting import HANG

from perilune_api.pool import SpecError
from perilune_lab import cli
from perilune_lab.terminal import commands
from perilune_lab.terminal.exits import NOT_WRITTEN, PIPE_CLOSED
from perilune_research import __main__ as research


@pytest.fixture
def mains(monkeypatch):
    """Replace the modules of the named commands: mains(demo=function)."""

    def put(**functions) -> None:
        known = cli.PROGRAM.commands
        modules = {known[name].module: SimpleNamespace(main=main) for name, main in functions.items()}
        monkeypatch.setattr(commands, "import_module", modules.__getitem__)

    return put


def test_passes_arguments_and_status(mains):
    seen = []
    mains(demo=lambda argv: seen.append(list(argv)) or 3)
    assert cli.main(["demo", "--endpoints", "4", "--help"]) == 3
    assert seen == [["--endpoints", "4", "--help"]]


def test_imports_only_what_is_asked_for():
    code = (
        "import sys; from perilune_lab.cli import main; main(['--help']);"
        " sys.exit(any(m in sys.modules for m in ('asyncio', 'aiohttp', 'msgspec', 'rich')))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h", "demo"]])
@pytest.mark.parametrize("program", [cli, research], ids=["perilune", "research"])
def test_help_shows_every_command_with_an_example_before_the_options(capsys, program, argv):
    try:
        ended = program.main(argv)
    except SystemExit as end:
        ended = end.code
    assert ended == 0
    text = capsys.readouterr().out.partition("\noptions:\n")[0]
    for name, command in program.PROGRAM.commands.items():
        assert f"  {name}" in text
        assert f"$ {program.PROGRAM.name} {command.example}" in text
        assert command.example.split()[0] == name


def test_help_begins_with_the_demo_and_shares_no_command_with_the_research(capsys):
    assert cli.main([]) == 0
    help_text = capsys.readouterr().out
    names = [line.split()[0] for line in help_text.splitlines() if line.startswith("  ") and line[2] != " "]
    assert names[:2] == ["demo", "engine"]
    assert not set(names) & set(research.PROGRAM.commands)


@pytest.mark.parametrize("program", [cli, research], ids=["perilune", "research"])
def test_every_command_has_a_main(program):
    for command in program.PROGRAM.commands.values():
        assert callable(import_module(command.module).main)


def test_the_version_is_printed(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == "perilune 0.1.0\n"


@pytest.mark.parametrize(
    ("word", "says"),
    [
        pytest.param("dmeo", "unknown command 'dmeo'; did you mean `perilune demo`?", id="near"),
        pytest.param("xyzzy", "unknown command 'xyzzy' (commands: demo, engine", id="far"),
    ],
)
def test_an_unknown_command_suggests_a_near_one(capsys, word, says):
    assert cli.main([word, "--endpoints", "4"]) == 2
    assert says in capsys.readouterr().err


def raises(error):
    def main(argv):
        raise error

    return main


def test_ctrl_c_ends_a_command_with_130(mains):
    mains(demo=raises(KeyboardInterrupt()))
    assert cli.main(["demo"]) == 130


def test_a_wrong_document_is_one_line(mains, capsys):
    mains(demo=raises(SpecError("Expected `int` - at `$.spec`")))
    assert cli.main(["demo"]) == 2
    assert capsys.readouterr().err == "perilune: Expected `int` - at `$.spec`\n"


def test_a_bug_travels_up(mains):
    mains(demo=raises(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["demo"])


PRINTS = {
    "print": "print('x' * 100_000) or 0",
    "a little": "print('x') or 0",
    "console": "Console().print('x') or 0",
    "console, SystemExit": "Console().print('x') or sys.exit(3)",
    "console, twice": "Console().print('x') or Console().print('x') or 0",
}


@pytest.mark.parametrize("how", PRINTS)
def test_reader_of_the_pipe_left(how: str):
    process = subprocess.Popen(
        printing(PRINTS[how]), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    _, errors = process.communicate(timeout=HANG)
    assert (process.returncode, errors) == (PIPE_CLOSED, "")


@pytest.mark.parametrize("how", PRINTS)
def test_a_full_disk_is_one_line(how: str):
    with open("/dev/full", "w") as full:
        ended = subprocess.run(printing(PRINTS[how]), stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == NOT_WRITTEN
    assert ended.stderr == "perilune: No space left on device: not everything was written\n"


@pytest.mark.parametrize("how", PRINTS)
@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_closed_streams_are_written_to_in_vain(how: str, closed: str):
    program = ["sh", "-c", f'exec "$0" "$@" {closed}', *printing(PRINTS[how])]
    ended = subprocess.run(program, capture_output=True)
    assert (ended.returncode, ended.stderr) == (3 if "exit" in PRINTS[how] else 0, b"")


def printing(expression: str) -> list[str]:
    """Start a process of ours whose command is `expression`."""
    code = (
        "import sys, types; from perilune_lab import cli; from perilune_lab.terminal import commands;"
        " from perilune_lab.terminal.console import Console;"
        f" commands.import_module = lambda _: types.SimpleNamespace(main=lambda argv: {expression});"
        " sys.exit(cli.main(['trace']))"
    )
    return [sys.executable, "-c", code]


def test_other_errors_of_the_system_travel_up(mains):
    mains(demo=raises(FileNotFoundError(2, "No such file")))
    with pytest.raises(FileNotFoundError):
        cli.main(["demo"])
