"""The operator's server of shared state speaks TLS, with a certificate that the operator makes."""

import asyncio
import os
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from appliers import applier, plan_of
from waiting import until

from perilune_api.inference_pool.checks import convert
from perilune_api.kube import Client
from perilune_api.pool import SpecError
from perilune_operator.apply import certificate
from perilune_operator.apply.ownership import Owner
from perilune_operator.observe.facts import Key, Object, Observed, key
from perilune_operator.plan import Plan, plan
from perilune_operator.render.objects import Defaults

OLD = Defaults(version="1.0.0", state_tls=False)
"""The version before had no certificates."""
NEW = Defaults(version="2.0.0")
HOST = "p-state.ns.svc"


def planned(defaults: Defaults, children: dict[Key, Object] | None = None, **spec: Any) -> Plan:
    observed = Observed(uid="u", generation=1, children=children or {})
    return plan("p", "ns", convert({"model": {"name": "m"}, **spec}), observed, 0.0, defaults)


def stored(made: Plan) -> dict[Key, Object]:
    """Return the cluster after the plan."""
    return {key(obj): obj for obj in made.objects or ()}


def pod(made: Plan, name: str) -> Any:
    return stored(made)[Key("Deployment", "ns", name)]["spec"]["template"]["spec"]


def speak(made: Plan) -> tuple[str, str]:
    """Return how gateways and server speak with each other."""
    asked = next(a for a in pod(made, "p-gateway")["containers"][0]["args"] if "--state-server" in a)
    listens = pod(made, "p-state")["containers"][0]["args"]
    return asked.partition("=")[2].partition(":")[0], "tls" if "--tls-port" in listens else "plain"


def test_gateways_and_server_speak_tls_with_one_certificate() -> None:
    made = planned(NEW)
    assert speak(made) == ("rediss", "tls")
    assert made.certificate is not None
    name = made.certificate["metadata"]["name"]
    volumes = [v for part in ("p-gateway", "p-state") for v in pod(made, part)["volumes"]]
    mounted = [v["secret"] for v in volumes if v["name"] == "state"]
    assert [secret["secretName"] for secret in mounted] == [name, name]
    keys = [[item["key"] for item in secret["items"]] for secret in mounted]
    assert keys == [["ca.crt"], ["tls.crt", "tls.key"]], "gateways do not have the key"
    server = pod(made, "p-state")["containers"][0]["args"]
    assert server[server.index("--port") + 1] == "0", "it listens to nobody without TLS"


@pytest.mark.parametrize(
    ("defaults", "gateway"),
    [
        pytest.param(NEW, {"state": {"tls": False}}, id="turned off"),
        pytest.param(replace(NEW, state_tls=False), {}, id="an operator without openssl"),
    ],
)
def test_without_certificates_both_speak_plain_text(defaults: Defaults, gateway: Object) -> None:
    made = planned(defaults, gateway=gateway)
    assert speak(made) == ("redis", "plain")
    assert made.certificate is None


@pytest.mark.parametrize("gateway", [{"replicas": 1}, {"state": {"server": "redis://mine:6379"}}])
def test_no_certificate_is_made_where_the_operator_runs_no_server(gateway: Object) -> None:
    assert planned(NEW, gateway=gateway).certificate is None


def test_tls_of_a_named_server_is_the_addresss() -> None:
    with pytest.raises(SpecError, match=r"rediss://.* - at `\$\.spec\.gateway\.state\.tls`"):
        planned(NEW, gateway={"state": {"server": "redis://mine:6379", "tls": False}})


def test_another_word_asks_for_another_certificate() -> None:
    first, second = planned(NEW), planned(NEW, secrets={"rotation": "2026"})
    assert first.certificate is not None
    assert second.certificate is not None
    assert first.certificate["metadata"]["name"] != second.certificate["metadata"]["name"]


@pytest.mark.parametrize(
    ("change", "spoken"),
    [
        pytest.param({}, ("redis", "plain"), id="a new operator"),
        pytest.param({"gateway": {"logLevel": "debug"}}, ("redis", "plain"), id="other gateways"),
        pytest.param({"rollout": {"revision": "latest"}}, ("rediss", "tls"), id="pods that follow"),
    ],
)
def test_gateways_and_server_of_an_earlier_version_change_together(
    change: Object, spoken: tuple[str, str]
) -> None:
    before = planned(OLD)
    assert speak(before) == ("redis", "plain")
    after = planned(NEW, stored(before), **change)
    assert speak(after) == spoken
    again = planned(NEW, stored(after), **change)
    assert speak(again) == spoken
    assert (again.status.available_revision is None) is (spoken == ("rediss", "tls"))


def test_tls_can_be_turned_on_and_off() -> None:
    off = planned(NEW, gateway={"state": {"tls": False}})
    on = planned(NEW, stored(off))
    assert speak(on) == ("rediss", "tls")
    assert speak(planned(NEW, stored(on), gateway={"state": {"tls": False}})) == ("redis", "plain")


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> None:
    """Connect one to the other in memory. Raises ssl.SSLError."""
    here, there = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(there, here, server_hostname=host),
        server.wrap_bio(here, there, server_side=True),
    ]
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue


async def test_a_certificate_is_trusted_by_its_host_and_no_other(tmp_path: Path) -> None:
    made, other = await certificate.make("p", HOST), await certificate.make("p", HOST)
    for name, text in made.items():
        (tmp_path / name).write_text(text)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    trusting = ssl.create_default_context(cadata=made["ca.crt"])
    trusting.verify_flags |= ssl.VERIFY_X509_STRICT
    shake_hands(server, trusting, HOST)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server, trusting, "other-state.ns.svc")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server, ssl.create_default_context(cadata=other["ca.crt"]), HOST)


async def test_a_certificate_that_openssl_does_not_make_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failing = tmp_path / "openssl"
    failing.write_text("#!/bin/sh\necho no random numbers >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(OSError, match="no random numbers"):
        await certificate.make("p", HOST)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert not certificate.is_possible()


async def test_the_certificate_is_created_once(client: Client, namespace: str) -> None:
    owner = Owner(namespace, "p", "uid")
    wanted = planned(NEW).certificate
    assert wanted is not None
    # Without its owner, of which the garbage collector would find that there is none.
    metadata = {**wanted["metadata"], "namespace": namespace, "ownerReferences": []}
    made = replace(plan_of([]), certificate={**wanted, "metadata": metadata})
    assert (await applier(client, owner).apply(made, {})).errors == ()
    where = f"/api/v1/namespaces/{namespace}/secrets/{metadata['name']}"
    first = await client.request("GET", where)
    assert set(first["data"]) == {"ca.crt", "tls.crt", "tls.key"}
    assert (await applier(client, owner).apply(made, {})).errors == ()
    assert (await client.request("GET", where))["data"] == first["data"]


async def test_an_operator_that_stops_meanwhile_leaves_no_openssl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    openssl, pid = tmp_path / "openssl", tmp_path / "pid"
    openssl.write_text(f"#!/bin/sh\necho $$ > {pid}.new\nmv {pid}.new {pid}\nexec sleep 600\n")
    openssl.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    making = asyncio.create_task(certificate.make("p", HOST))
    await until(pid.exists)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
