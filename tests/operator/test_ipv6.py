"""Pods whose address is an IPv6 one: what the operator renders for them, run on loopback."""

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from plans import NOW
from waiting import HANG

from perilune_api.inference_pool.checks import convert
from perilune_api.inference_pool.document import pool_document
from perilune_api.pool import EndpointSpec, Topology, dump
from perilune_operator.observe.facts import Observed
from perilune_operator.plan import plan
from perilune_operator.render.objects import Defaults

Object = dict[str, Any]
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def containers(spec: Object) -> dict[str, Object]:
    observed = Observed(uid="u", generation=1)
    objects = plan("p", "ns", convert(spec), observed, NOW, Defaults(ipv6=True)).objects or ()
    return {
        o["metadata"]["name"]: o["spec"]["template"]["spec"]["containers"][0]
        for o in objects
        if o["kind"] == "Deployment"
    }


@contextmanager
def running(program: str, args: list[str]) -> Iterator[dict[str, str]]:
    """Run a program until the end of the block, and yield what its line `ready` says."""
    command = [str(Path(sys.executable).parent / program), *args]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        yield dict(word.split("=", 1) for word in words if "=" in word)
    finally:
        process.terminate()
        process.wait(HANG)
        assert process.stdout is not None
        process.stdout.close()


def page(address: str, path: str) -> Any:
    with DIRECT.open(f"http://{address}{path}", timeout=HANG) as answer:
        return json.loads(answer.read() or b"null")


def with_free_ports(args: list[str]) -> list[str]:
    """As they are rendered, but for the ports, which others may have here, and the pod's address."""
    made = [arg.replace("$(POD_IP)", "::1") for arg in args]
    for port in ("9002", "9003", "8000"):
        made = [arg.replace(f"[::]:{port}", "[::]:0") for arg in made]
    for port in ("5557", "5558"):
        made = [arg.replace(f"[::]:{port}", "[::]:*") for arg in made]
    return made


def test_a_gateway_hears_an_engine_whose_address_is_ipv6(tmp_path: Path) -> None:
    spec: Object = {"model": {"name": "m"}, "engine": {"kind": "simulated"}}
    made = containers(spec)
    with running("perilune", ["engine", *with_free_ports(made["p-engine"]["args"])]) as engine:
        ports = {name: url.rpartition(":")[2] for name, url in engine.items()}
        for host in ("[::1]", "127.0.0.1"):  # the kubelet's probes, and the preStop hook
            page(f"{host}:{ports['http']}", "/health")
        address = f"[::1]:{ports['http']}"
        found = EndpointSpec(
            address=address,
            node="",
            events=(f"tcp://[::1]:{ports['events']}",),
            replay=(f"tcp://[::1]:{ports['replay']}",),
        )
        document = pool_document("p", "ns", convert(spec), Topology())
        spec_with = msgspec.structs.replace(document.spec, endpoints=(found,))
        file = tmp_path / "pool.yaml"
        file.write_bytes(dump(msgspec.structs.replace(document, spec=spec_with)))
        args = [arg for arg in with_free_ports(made["p-gateway"]["args"]) if "--kubernetes" not in arg]
        with running("perilune-gateway", [*args, f"--pool={file}"]) as gateway:
            admin = f"[::1]:{gateway['admin'].rpartition(':')[2]}"
            until = time.monotonic() + HANG
            while not page(admin, "/api/nodes/stats")["nodes"][0]["events"]["connected"]:
                assert time.monotonic() < until, page(admin, "/api/nodes/stats")
                time.sleep(0.1)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("p-engine", ["--host=::"], id="vllm"),
        pytest.param("p-master", ["--rpc_address=::", "--metrics_host=::"], id="the store's master"),
        pytest.param("p-gateway", ["--listen=[::]:9002", "--admin=[::]:9003"], id="the gateway"),
    ],
)
def test_every_program_listens_at_ipv6_addresses(name: str, words: list[str]) -> None:
    made = containers({"model": {"name": "m"}, "mooncake": {"store": {"enabled": True}}})[name]
    assert set(words) <= set(made["args"])
    assert "0.0.0.0" not in str(made)


@pytest.mark.parametrize(("kind", "offloads"), [("vllm", "cpu_bytes_to_use"), ("simulated", "--host-tokens")])
def test_engines_with_ipv6_addresses_offload_and_read_no_peers(kind: str, offloads: str) -> None:
    """vLLM's tier for peers binds to `tcp://HOST:PORT`, without brackets."""
    spec: Object = {"model": {"name": "m"}, "engine": {"kind": kind}, "mooncake": {"transfer": "offload"}}
    args = str(containers(spec)["p-engine"]["args"])
    assert offloads in args
    assert "5710" not in args
