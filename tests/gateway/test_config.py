"""A wrong call is told by the name of its option, and nothing is started."""

import sys

import pytest

from perilune_gateway.config import arguments

WRONG = {
    "--drain-seconds": ("is not a number of seconds", ["-1", "nan", "inf", "soon", ""]),
    "--grace-seconds": ("is not a number of seconds", ["-1", "nan", "inf", "soon", ""]),
    "--listen": ("is not IP:PORT", ["", "9002", ":9002", "a:", "a:65536", "a:-1", "a:²", "a:" + "9" * 5000]),
    "--admin": ("is not IP:PORT", ["9003"]),
    "--decision-log-max-bytes": ("is not a whole number above 0", ["0", "1e6"]),
    "--decision-log-keep": ("is not a whole number above 0", ["0", "-1", "1.5", "²", ""]),
    "--traces": (
        "is not http://HOST:PORT",
        ["", "collector:4318", "grpc://c:4317", "http://:1", "http://c:x"],
    ),
    "--traces-share": ("is not a number from 0 to 1", ["", "-0.1", "1.1", "nan", "1%"]),
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


def test_a_picker_alone_is_told_how_to_route(capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        arguments(["--kubernetes", "ns/p", "--routing", "r.yaml"])
    assert "a pool document has its own" in capsys.readouterr().err
    assert arguments(["--inference-pool", "ns/p", "--routing", "r.yaml"]).routing.name == "r.yaml"


@pytest.mark.parametrize(
    "words",
    [
        ["--inference-pool", "ns/p", "--engine-ca", "ca.crt"],
        ["--inference-pool", "ns/p", "--engine-hostname", "e"],
        ["--kubernetes", "ns/p", "--engine-ca", "ca.crt", "--engine-hostname", "e"],
    ],
)
def test_a_picker_alone_is_told_what_certificates_engines_have(words, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        arguments(words)
    assert "go together, with --inference-pool" in capsys.readouterr().err


def test_addresses_of_every_kind() -> None:
    for address in ("127.0.0.1:0", "[::1]:9002", "localhost:65535"):
        assert arguments(["--pool", "x", "--listen", address]).listen == address


@pytest.mark.parametrize(
    ("server", "says"),
    [
        ("state:6379", "is not redis://HOST:PORT"),
        ("http://state", "is not redis://HOST:PORT"),
        ("redis://:6379", "is not redis://HOST:PORT"),
        ("redis://state:x", "is not redis://HOST:PORT"),
        ("redis://user:password@state", "PERILUNE_STATE_PASSWORD"),
    ],
)
def test_a_server_of_shared_state_is_a_url_without_a_password(capsys, server: str, says: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        arguments(["--pool", "x", "--state-server", server])
    assert says in capsys.readouterr().err
    assert arguments(["--pool", "x", "--state-server", "rediss://state"]).state_server == "rediss://state"


def test_a_ca_of_the_server_needs_tls(capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        arguments(["--pool", "x", "--state-server", "redis://state", "--state-ca", "ca.pem"])
    assert "rediss://" in capsys.readouterr().err


def test_credentials_of_the_collector_are_not_arguments(capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        arguments(["--pool", "x", "--traces", "https://user:key@collector:4318"])
    assert "OTEL_EXPORTER_OTLP_HEADERS" in capsys.readouterr().err


def test_tracing_without_its_packages_says_what_to_install(capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    with pytest.raises(SystemExit, match="2"):
        arguments(["--pool", "x", "--traces", "http://collector:4318"])
    assert "pip install 'perilune[tracing]'" in capsys.readouterr().err
