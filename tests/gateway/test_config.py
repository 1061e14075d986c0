"""A wrong call is told by the name of its option, and nothing is started."""

import pytest

from perilune_gateway.config import arguments

WRONG = {
    "--drain-seconds": ("is not a number of seconds", ["-1", "nan", "inf", "soon", ""]),
    "--grace-seconds": ("is not a number of seconds", ["-1", "nan", "inf", "soon", ""]),
    "--listen": ("is not IP:PORT", ["", "9002", ":9002", "a:", "a:65536", "a:-1", "a:²", "a:" + "9" * 5000]),
    "--admin": ("is not IP:PORT", ["9003"]),
    "--decision-log-max-bytes": ("is not a whole number above 0", ["0", "1e6"]),
    "--decision-log-keep": ("is not a whole number above 0", ["0", "-1", "1.5", "²", ""]),
    "--log-level": ("Unknown log level", ["loud", "info,perilune_gateway="]),
}


@pytest.mark.parametrize(
    ("option", "value", "says"), [(o, value, says) for o, (says, values) in WRONG.items() for value in values]
)
def test_a_wrong_value_is_named(capsys, option: str, value: str, says: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        arguments(["--pool", "x", f"{option}={value}"])
    said = capsys.readouterr().err
    assert f"argument {option}: " in said
    assert says in said


@pytest.mark.parametrize("name", ["p", "/p", "ns/", "ns/p/q"])
def test_a_pool_of_kubernetes_is_named_by_two_words(capsys, name: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        arguments(["--kubernetes", name])
    assert f"{name!r} is not NAMESPACE/NAME" in capsys.readouterr().err


def test_the_pool_comes_from_one_place(capsys) -> None:
    for words in ([], ["--pool", "x", "--kubernetes", "ns/p"]):
        with pytest.raises(SystemExit, match="2"):
            arguments(words)
    assert arguments(["--kubernetes", "ns/p"]).kubernetes == ("ns", "p")


def test_addresses_of_every_kind() -> None:
    for address in ("127.0.0.1:0", "[::1]:9002", "localhost:65535"):
        assert arguments(["--pool", "x", "--listen", address]).listen == address
