import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ports import free_port

from perilune_operator.main import arguments, can_make_certificates


@pytest.mark.parametrize(
    ("given", "said"),
    [
        pytest.param("--listen=8080", "'8080' is not IP:PORT", id="no address"),
        pytest.param("--listen=127.0.0.1:http", "'127.0.0.1:http' is not IP:PORT", id="no number"),
        pytest.param("--lease-seconds=1", "'1' is not a whole number of seconds from 2", id="too short"),
        pytest.param("--monitor-label=release", "'release' is not KEY=VALUE", id="no value"),
    ],
)
def test_what_cannot_be_meant_is_refused(given: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments([given])
    assert said in capsys.readouterr().err


def test_it_listens_where_the_option_says() -> None:
    assert arguments([]).listen == ("127.0.0.1", 8080)
    assert arguments(["--listen=0.0.0.0:9"]).listen == ("0.0.0.0", 9)
    assert arguments(["--listen=[::1]:9"]).listen == ("::1", 9)
    assert arguments(["--listen=:9"]).listen == (None, 9)


@pytest.mark.parametrize(("own", "family"), [("10.0.0.1", "ipv4"), ("fd00::1", "ipv6"), ("", "ipv4")])
def test_pods_listen_at_addresses_of_the_operators_own_family(
    own: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POD_IP", own)
    assert arguments([]).ip_family == family
    assert arguments(["--ip-family=ipv6"]).ip_family == "ipv6"


def test_an_operator_that_can_make_no_certificates_says_what_goes_without_tls(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert can_make_certificates()
    assert caplog.messages == []
    monkeypatch.setenv("PATH", "/nowhere")
    assert not can_make_certificates()
    assert "without TLS" in caplog.text


def test_an_operator_that_waits_for_an_api_server_ends_when_told_to(tmp_path: Path) -> None:
    """Without waiting for its own tasks, which kopf would give 5 s."""
    access = tmp_path / "kubeconfig"
    cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{free_port()}"}}
    user = {"name": "u", "user": {"token": "t"}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    access.write_text(
        json.dumps({"clusters": [cluster], "users": [user], "contexts": [context], "current-context": "c"})
    )
    command = [sys.executable, "-m", "perilune_operator.main", "--listen=127.0.0.1:0"]
    inside = {"KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"}
    environment = {key: value for key, value in os.environ.items() if key not in inside}
    environment["KUBECONFIG"] = str(access)
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as operator:
        try:
            assert operator.stderr is not None
            assert any("waiting for an API server that serves" in line for line in operator.stderr)
            operator.terminate()
            said = operator.stderr.read()
        finally:
            operator.kill()
    assert operator.returncode == 0, said
    _, cancelled, after = said.partition("Startup activity is only partially executed")
    assert cancelled
    assert "failed" not in after, "its tasks go on"
