"""Every command as a new user meets it: its help teaches, and a mistake is answered with what is wrong."""

from importlib import import_module

import pytest

from perilune_api.pool import SpecError
from perilune_gateway import config as gateway
from perilune_lab import cli
from perilune_lab.terminal.exits import WRONG_CALL
from perilune_operator import main as operator
from perilune_research import __main__ as research

COMMANDS = {
    f"{program.PROGRAM.name} {name}": import_module(command.module).main
    for program in (cli, research)
    for name, command in program.PROGRAM.commands.items()
} | {"perilune-gateway": gateway.arguments, "perilune-operator": operator.main}
MAIN = {name.rpartition(" ")[2]: main for name, main in COMMANDS.items()}
NOBODY = "http://127.0.0.1:9"


def ended(main, argv: list[str]) -> int | None:
    """Return the exit status; a document's error is reported by the program (tests/lab/test_cli.py)."""
    try:
        status: int | None = main(argv)
    except SystemExit as end:
        return int(end.code or 0)
    except SpecError as error:
        print(error)
        return WRONG_CALL
    return status


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_what_it_does_and_shows_examples(name: str, capsys) -> None:
    assert ended(COMMANDS[name], ["--help"]) == 0
    text = capsys.readouterr().out
    usage, _, rest = text.partition("\n\n")
    assert usage.startswith(f"usage: {name}")
    assert rest[0].isupper(), "a sentence follows the usage"
    assert "\nexample" in text or "\n  $ " in text


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_option_is_named(name: str, capsys) -> None:
    assert ended(COMMANDS[name], ["--frobnicate"]) == WRONG_CALL
    said = capsys.readouterr().err
    assert said.startswith(f"usage: {name}")
    assert "--frobnicate" in said or "required" in said


@pytest.mark.parametrize(
    ("name", "argv", "says"),
    [
        ("demo", ["--endpoints", "none"], "--endpoints"),
        ("demo", ["--policy", "fastest"], "Unknown policy 'fastest', known are "),
        ("engine", ["--kv-tokens", "0"], "argument --kv-tokens: must be a whole number above 0"),
        ("engine", ["--noise", "-1"], "argument --noise: must be 0 or a number above it"),
        ("envoy", ["--pool", "/absent"], "/absent cannot be read: No such file"),
        ("replay", ["--target", "localhost", "--trace", "agentic"], "--target: must begin with http://"),
        ("replay", ["--target", NOBODY, "--trace", "/absent"], "/absent: No such file"),
        ("replay", ["--target", "http://", "--trace", "agentic"], "--target: must name a host and a port"),
        ("profile", ["--target", "http://127.0.0.1:99999"], "--target: must name a host and a port"),
        ("replay", ["--mode", "fast"], "--mode: must be one of thinktime, timestamps, max, got fast"),
        ("envoy", ["127.0.0.1:9", "--mode", "fast"], "--mode: must be one of "),
        ("simulate", ["--arm", "x"], "--arm: must be one of none, "),
        ("envoy", ["127.0.0.1:9", "--gateway-ca", "/absent"], "/absent is no file - at `--gateway-ca`"),
        ("bench-stream", ["--target", "localhost"], "--target: must begin with http://"),
        ("profile", ["--target", "localhost"], "--target: must begin with http://"),
        ("trace", ["stats", "/absent"], "/absent: No such file"),
        ("explain", ["--last", "none"], "argument --last: invalid int value"),
        ("whatif", ["--decisions", "/absent"], "/absent: No such file"),
        ("simulate", ["--policies", "fastest"], "nknown policy 'fastest', known are "),
        ("crosscheck", ["--policies", "fastest"], "nknown policy 'fastest', known are "),
        ("evaluation", ["--out"], "argument --out: expected one argument"),
        ("evaluation", ["--sections", "moon"], "unknown 'moon', known are "),
        ("demo", ["--endpoints", "100000"], "--endpoints: must be at most 256"),
        ("arena", ["--engine-port", "65533"], "above 65535 - at `--engine-port`"),
        ("arena", ["--routers", "nginx"], "unknown 'nginx' (known: "),
        ("perilune-gateway", ["--pool", "p.yaml", "--listen", "nowhere"], "--listen"),
        ("perilune-operator", ["--listen", "nowhere"], "--listen"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_right(name: str, argv: list[str], says: str, capsys) -> None:
    assert ended(MAIN[name], argv) == WRONG_CALL
    said = capsys.readouterr()
    assert says in said.err + said.out
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    ("name", "argv"),
    [
        ("replay", ["--target", NOBODY, "--trace", "agentic", "--limit", "1"]),
        ("bench-stream", ["--target", NOBODY]),
        ("profile", ["--target", NOBODY]),
        ("explain", ["x", "--gateway", NOBODY]),
    ],
)
def test_a_server_that_is_not_there_is_named(name: str, argv: list[str], capsys) -> None:
    assert ended(MAIN[name], argv) == 1
    said = capsys.readouterr().err
    assert NOBODY in said
    assert "refused" in said
