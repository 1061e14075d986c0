"""Genuine vLLM engines behind `engine.tls`: what the operator renders for them, their certificate, Envoy and
gateway that verify it, and certificates that are renewed under load.

The certificate lies in a folder that changes as a mounted Secret does: the files are links through `..data`,
which is replaced whole. What a cluster adds (cert-manager, kubelets, another CA) is in
`e2e/test_certificates.py`, with simulated engines.
"""

import asyncio
import shutil
import socket
import ssl
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from enginebed import conversations, judged
from enginebed.completions import answering, ask, cached, until
from enginebed.marks import SHORT
from testbed.pki import Pki

pytestmark = [pytest.mark.real, pytest.mark.timeout(1200), pytest.mark.asyncio(loop_scope="session")]
PROMPT = [5 + n % 300 for n in range(400)]


class Secret:
    """A Secret with a certificate that a CA of its own has signed, mounted at a folder."""

    def __init__(self, pki: Path, folder: Path, hostname: str) -> None:
        self._pki, self._folder, self._hostname, self._written = Pki(pki), folder, hostname, 0
        self._pki.make_ca()
        folder.mkdir()
        self.renew()
        for name in ("tls.crt", "tls.key", "ca.crt"):
            (folder / name).symlink_to(f"..data/{name}")

    def renew(self) -> None:
        """Write a new certificate and key, as a kubelet does."""
        self._written += 1
        made, there = f"tls-{self._written}", self._folder / f"..{self._written}"
        self._pki.certificate(made, "engine", names=[f"DNS:{self._hostname}"], server=True)
        there.mkdir()
        for end in ("crt", "key"):
            shutil.copyfile(self._pki.path(f"{made}.{end}"), there / f"tls.{end}")
        shutil.copyfile(self._pki.path("ca.crt"), there / "ca.crt")
        new = self._folder / "..data_new"
        new.symlink_to(there.name)
        new.rename(self._folder / "..data")

    @property
    def certificate(self) -> bytes:
        """What a server presents."""
        return ssl.PEM_cert_to_DER_cert((self._folder / "tls.crt").read_text())


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def secret(rig, tiny):
    """Start two engines, gateway and Envoy, and return the engines' Secret."""
    model = {
        "name": "tiny",
        "source": str(tiny["qwen"]),
        "contextTokens": 4096,
        "tokenizer": str(tiny["qwen"]),
    }
    rendered = rig.render(
        {
            "model": model,
            "engine": {"args": ["--num-gpu-blocks-override=400"], "tls": {"secret": "made-here"}},
        }
    )
    tls = rendered.document.spec.engine.tls
    made = Secret(rig.folder / "pki", rig.tls_folder, tls.hostname)
    engines = [await rig.engine(rendered, number) for number in range(2)]
    await rig.ready(*engines)
    document = rendered.with_endpoints([engine.pod.address for engine in engines])
    await rig.start_gateway(document)
    await rig.start_envoy(document)
    made.engines, made.document = engines, document
    return made


def presented(address: str) -> bytes:
    """Return the certificate that an engine presents."""
    trust = ssl.create_default_context()
    trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), 10) as plain,
        trust.wrap_socket(plain) as sealed,
    ):
        certificate = sealed.getpeercert(binary_form=True)
    assert certificate
    return certificate


async def all_present(secret) -> bool:
    """Return whether both engines present what the Secret has."""
    return {presented(engine.address) for engine in secret.engines} == {secret.certificate}


async def not_scraped(rig) -> float:
    """Return how often the gateway could not read an engine's metrics."""
    async with rig.http.get(f"{rig.admin_url}/metrics") as page:
        lines = (await page.text()).splitlines()
    errors = (line for line in lines if line.startswith("perilune_scrape_errors_total"))
    return sum(float(line.rpartition(" ")[2]) for line in errors)


def refusals(rig) -> list[str]:
    """Return the gateway's words on metrics that it could not read for another cause than a busy engine."""
    lines = (rig.folder / "gateway.log").read_text().splitlines()
    return [line for line in lines if "metrics unreadable" in line and "TimeoutError" not in line]


async def test_engines_speak_tls_alone(rig, secret):
    assert await all_present(secret)
    for engine in secret.engines:
        with pytest.raises(aiohttp.ClientError):
            await rig.http.get(f"http://{engine.address}/health")


async def test_envoy_and_gateway_ask_them_so_and_predictions_are_exact(rig, secret):
    """The gateway reads metrics over TLS, and KV events, which are in plain text."""
    turns = [await ask(rig, rig.url, PROMPT, "sealed", max_tokens=4) for _ in range(3)]
    assert len({address for address, _ in turns}) == 1
    assert [cached(answer) for _, answer in turns] == [0, 384, 384]
    talks, phase = conversations.mixed(12, 1, "tiny"), judged.Phase("tls")
    await judged.play(rig, talks, phase, 20 if SHORT else 36)
    assert not phase.failed, judged.misses(phase)
    assert phase.exact == 1.0, judged.misses(phase)
    assert not refusals(rig)
    assert {problem["kind"] for problem in (await rig.page("/api/health"))["problems"]} <= {"learning"}


async def test_nothing_drops_while_certificates_are_renewed(rig, secret):
    """Twice, since vLLM's own --enable-ssl-refresh misses the second change. Answers that are streamed
    meanwhile go on, and no engine is started again."""
    began = [engine.pid for engine in secret.engines]
    phase, enough = judged.Phase("renewed"), asyncio.Event()
    talks = conversations.mixed(12, 2, "tiny")
    load = asyncio.create_task(judged.play(rig, talks, phase, 100_000, at_once=2, enough=enough))
    try:
        async with answering(rig, PROMPT, "sealed"):
            for _ in range(2):
                before = len(phase.requests)
                secret.renew()
                await until(lambda: all_present(secret))
                await until(lambda before=before: more(phase, before + 6))
    finally:
        enough.set()
        await load
    assert not phase.failed, judged.misses(phase)
    assert [engine.pid for engine in secret.engines] == began
    assert not refusals(rig)


async def more(phase, count) -> bool:
    return len(phase.requests) >= count


async def test_a_gateway_that_trusts_another_ca_sends_no_requests(rig, secret):
    rig.kill_gateway()
    await asyncio.shield(rig.gateway.ended)
    other = Pki(rig.folder / "other-pki")
    other.make_ca()
    shutil.copyfile(other.path("ca.crt"), rig.tls_folder / "..data" / "ca.crt")
    await rig.start_gateway(secret.document)

    async def none_is_read() -> bool:
        return await not_scraped(rig) >= 3 * len(secret.engines)

    await until(none_is_read)
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1}
    async with rig.http.post(f"{rig.url}/v1/completions", json=body) as answer:
        assert answer.status == 503, await answer.text()
