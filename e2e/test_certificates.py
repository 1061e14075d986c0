"""Certificates by cert-manager for what a request passes: they are issued, and renewed under load.

A client verifies the Gateway's listener, whose certificate is the Gateway's owner's. Envoy verifies our
gateway, whose certificate the operator asks for (`gateway.tls.issuer`). Another CA takes the place of the one
that has signed all. Engines speak TLS alone (`engine.tls`): Envoy and our gateway verify them, whose
certificate the operator asks for too. With `clientCertificates` our gateway also verifies Envoy, which has
its certificate from its owner, by the EnvoyProxy. (Envoy Gateway 1.9.1 hands its Envoys that Secret for the
sake of the engines' TLS; where only an external processor needs it, its translator forgets it.)
"""

import json
import socket
import ssl
import time

import pytest

from perilune_api import names
from testbed import cert_manager, envoy_gateway
from testbed.http import eventually, under_load
from testbed.pool import LivePool, is_ready
from testbed.shell import succeeds

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

NAME, NAMESPACE, HOST = "sealed", "default", "sealed.test"
ROOT, CA, NEXT_CA, TRUSTED = "sealed-root", "sealed-ca", "sealed-next-ca", "sealed-trusted"
LISTENER, CLIENT = "sealed-listener", "sealed-client"
GATEWAY = names.gateway_name(NAME)
GATEWAY_SECRET = f"{GATEWAY}-tls"
ENGINE, ENGINE_SECRET, ENGINE_TRUSTED = "sealed-engine", "sealed-engine-tls", "sealed-engine-trusted"
REFRESH_S = 180
"""A kubelet takes a minute or two until a pod's files are those of a changed Secret; less if the pod
changes."""


def certificates():
    """Return a root that signs itself, and two certificates of the Gateway's owner."""
    return (
        cert_manager.issuer(ROOT, NAMESPACE, selfSigned={}),
        cert_manager.certificate(CA, NAMESPACE, ROOT, isCA=True, commonName=CA),
        cert_manager.issuer(CA, NAMESPACE, ca={"secretName": CA}),
        cert_manager.certificate(NEXT_CA, NAMESPACE, ROOT, isCA=True, commonName=NEXT_CA),
        cert_manager.issuer(NEXT_CA, NAMESPACE, ca={"secretName": NEXT_CA}),
        cert_manager.certificate(LISTENER, NAMESPACE, CA, dnsNames=[HOST]),
        cert_manager.certificate(CLIENT, NAMESPACE, CA, commonName="client", usages=["client auth"]),
    )


def gateway(kube):
    """Return a Gateway with TLS; its Envoy is as that of the Gateway `edge/edge`, and has a certificate."""
    proxy = kube.get("envoyproxy", "edge", "-n", "edge")["spec"]
    proxy["backendTLS"] = {"clientCertificateRef": {"kind": "Secret", "name": CLIENT}}
    meta = {"name": NAME, "namespace": NAMESPACE}
    parameters = {"group": "gateway.envoyproxy.io", "kind": "EnvoyProxy", "name": NAME}
    listener = {
        "name": "https",
        "port": 443,
        "protocol": "HTTPS",
        "tls": {"mode": "Terminate", "certificateRefs": [{"name": LISTENER}]},
    }
    return (
        {
            "apiVersion": "gateway.envoyproxy.io/v1alpha1",
            "kind": "EnvoyProxy",
            "metadata": meta,
            "spec": proxy,
        },
        {
            "apiVersion": "gateway.networking.k8s.io/v1",
            "kind": "Gateway",
            "metadata": meta,
            "spec": {
                "gatewayClassName": "envoy",
                "infrastructure": {"parametersRef": parameters},
                "listeners": [listener],
            },
        },
    )


@pytest.fixture(scope="module")
def sealed(cluster, kube, edge, operator):
    """Yield a pool behind that Gateway. Its failOpen is off: an answer is a decision."""
    with cert_manager.running(cluster):
        kube.apply(*certificates())
        for name in (CA, NEXT_CA, LISTENER, CLIENT):
            kube.wait("condition=Ready", f"certificate/{name}", "-n", NAMESPACE, timeout_s=90)
        kube.apply(*gateway(kube))
        kube.wait("condition=Programmed", f"gateway/{NAME}", "-n", NAMESPACE, timeout_s=120)
        pool = LivePool(kube, f"{service(kube)['spec']['clusterIP']}:443", NAME)
        pool.client.trust = ssl.create_default_context(
            cadata=cert_manager.issued(kube, LISTENER, NAMESPACE)["ca.crt"]
        )
        trust(kube, CA, secret=ENGINE_TRUSTED)
        pool.apply(
            replicas=2,
            engine={
                "kind": "simulated",
                "imagePullPolicy": "Never",
                "tls": {"issuer": CA, "caSecret": ENGINE_TRUSTED},
            },
            gateway={
                "parent": {"name": NAME},
                "hostnames": [HOST],
                "failOpen": False,
                "tls": {"issuer": CA},
            },
        )
        try:
            pool.becomes(2, timeout_s=180)
            eventually(pool.answers, timeout_s=90)
            yield pool
        finally:
            pool.delete()
            for kind in ("gateway", "envoyproxy"):
                kube.ctl("delete", f"{kind}/{NAME}", "-n", NAMESPACE, "--ignore-not-found")
            issued = (CA, NEXT_CA, LISTENER, CLIENT)
            kube.ctl("delete", "certificate", *issued, "-n", NAMESPACE, "--ignore-not-found")
            kube.ctl("delete", "issuer", ROOT, CA, NEXT_CA, "-n", NAMESPACE, "--ignore-not-found")
            secrets = (*issued, GATEWAY_SECRET, ENGINE_SECRET, TRUSTED, ENGINE_TRUSTED)
            kube.ctl("delete", "secret", *secrets, "-n", NAMESPACE, "--ignore-not-found")


def of_our_gateway():
    return ("-n", envoy_gateway.NAMESPACE, "-l", f"gateway.envoyproxy.io/owning-gateway-name={NAME}")


def service(kube):
    (found,) = kube.get("service", *of_our_gateway())
    return found


def presented(address, port, trust):
    """Return the certificate that a server presents."""
    with (
        socket.create_connection((address, port), 10) as plain,
        trust.wrap_socket(plain, server_hostname=HOST) as sealed,
    ):
        return sealed.getpeercert(binary_form=True)


def of_listener(pool):
    address, _, port = pool.client.address.rpartition(":")
    return presented(address, int(port), pool.client.trust)


def client_files(kube, folder):
    """Write a client's certificate and key, and return their files."""
    for name, content in cert_manager.issued(kube, CLIENT, NAMESPACE).items():
        (folder / name).write_text(content)
    return folder / "tls.crt", folder / "tls.key"


def of_gateway(pool, folder):
    """Return the certificate of our gateway, as it is shown to a client that has one itself."""
    (pod,) = pool.pods("gateway")
    return presented(pod["status"]["podIP"], 9002, client(folder, pool.kube))


def of_engines(pool):
    """Return the certificates of the engines, each by each."""
    return {presented(pod["status"]["podIP"], 8000, client(None, None)) for pod in pool.pods()}


def looked_at(pool):
    """Have kubelets look at the files of the pool's pods now, for which a changed pod is a reason."""
    pods = [pod["metadata"]["name"] for part in ("engine", "gateway") for pod in pool.pods(part)]
    look = f"{HOST}/look={time.monotonic_ns()}"
    pool.kube.ctl("annotate", "pod", *pods, "-n", NAMESPACE, "--overwrite", look)


def not_scraped(pool):
    """Return how often the gateway could not read an engine's metrics."""
    page = pool.kube.page(f"deployment/{GATEWAY}", NAMESPACE, "/metrics")
    lines = [line for line in page.splitlines() if line.startswith("perilune_scrape_errors_total")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def answers_a_preface(pod, trust):
    """Return whether the gateway speaks HTTP/2 with a client of that trust. With TLS 1.3 the handshake alone
    does not tell a client that it is refused."""
    try:
        address = (pod["status"]["podIP"], 9002)
        with socket.create_connection(address, 10) as plain, trust.wrap_socket(plain) as connection:
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5))
            return connection.recv(9) != b""
    except OSError:
        return False


def renewed(kube, name, secret=""):
    """Have it renewed, and return the new one."""
    secret = secret or name
    before = cert_manager.issued(kube, secret, NAMESPACE)["tls.crt"]
    cert_manager.renew(kube, name, NAMESPACE)

    def changed():
        assert cert_manager.issued(kube, secret, NAMESPACE)["tls.crt"] != before

    eventually(changed, timeout_s=60)
    return cert_manager.issued(kube, secret, NAMESPACE)["tls.crt"]


def assert_equal(found, wanted):
    assert found == wanted


def test_each_part_has_what_was_issued(sealed, kube, tmp_path):
    issued = {
        name: cert_manager.issued(kube, name, NAMESPACE)["tls.crt"]
        for name in (LISTENER, GATEWAY_SECRET, ENGINE_SECRET)
    }
    assert of_listener(sealed) == cert_manager.der(issued[LISTENER])
    assert of_gateway(sealed, tmp_path) == cert_manager.der(issued[GATEWAY_SECRET])
    assert of_engines(sealed) == {cert_manager.der(issued[ENGINE_SECRET])}


def test_engines_are_asked_over_tls_by_envoy_and_gateway(sealed):
    """They have no other port for requests, so an answer came over TLS; the second turn stays, and is
    cached, because the gateway reads what they cache."""
    turns = [sealed.client.complete("sealed " * 400, session="sealed") for _ in range(3)]
    assert [turn.status for turn in turns] == [200] * 3
    assert len({turn.served for turn in turns}) == 1
    assert turns[-1].json["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_nothing_drops_while_all_certificates_are_renewed(sealed, kube, tmp_path):
    """Short requests on connections of their own, and answers that are streamed while certificates change."""
    (pod,) = sealed.pods("gateway")
    engines, failed = {pod["metadata"]["uid"] for pod in sealed.pods()}, not_scraped(sealed)
    with (
        under_load(sealed.client, sessions=4) as short,
        under_load(sealed.client, sessions=2, stream=True, max_tokens=2_000, ignore_eos=True) as long,
    ):
        short.goes_on()
        new = cert_manager.der(renewed(kube, LISTENER))
        eventually(lambda: assert_equal(of_listener(sealed), new), REFRESH_S)
        short.goes_on()
        new = cert_manager.der(renewed(kube, GATEWAY, GATEWAY_SECRET))
        looked_at(sealed)
        eventually(lambda: assert_equal(of_gateway(sealed, tmp_path), new), REFRESH_S)
        short.goes_on()
        for _ in range(2):  # a kubelet's second change of a link has been overlooked before
            new = cert_manager.der(renewed(kube, ENGINE, ENGINE_SECRET))
            looked_at(sealed)
            eventually(lambda: assert_equal(of_engines(sealed), {new}), REFRESH_S)  # noqa: B023
            short.goes_on()
        long.goes_on(2)
    assert not_scraped(sealed) == failed
    assert engines == {pod["metadata"]["uid"] for pod in sealed.pods()}, "no engine was restarted"
    assert short.failures + long.failures == []
    (after,) = sealed.pods("gateway")
    assert after["metadata"]["uid"] == pod["metadata"]["uid"], "the gateway was not restarted"


def trust(kube, *authorities, secret=TRUSTED):
    """Write a Secret with the certificates of these CAs."""
    files = "".join(cert_manager.issued(kube, name, NAMESPACE)["tls.crt"] for name in authorities).strip()
    meta = {"name": secret, "namespace": NAMESPACE}
    kube.apply({"apiVersion": "v1", "kind": "Secret", "metadata": meta, "stringData": {"ca.crt": files}})
    return files


def trusted_of_engines(kube):
    """Return the CA certificates that the gateway sees."""
    file = f"{names.ENGINE_CA_FOLDER}/ca.crt"
    return kube.ctl("exec", f"deployment/{GATEWAY}", "-n", NAMESPACE, "--", "cat", file).strip()


def signed_by(kube, folder, name, secret):
    """Return whether this CA has signed the certificate in a Secret."""
    (folder / "signer.crt").write_text(cert_manager.issued(kube, name, NAMESPACE)["tls.crt"])
    (folder / "signed.crt").write_text(cert_manager.issued(kube, secret, NAMESPACE)["tls.crt"])
    return succeeds(["openssl", "verify", "-CAfile", folder / "signer.crt", folder / "signed.crt"])


def test_nothing_drops_while_another_ca_takes_the_place_of_the_old_one(sealed, kube, tmp_path):
    """As docs/security.md says: both are trusted, the new one signs, the old one is trusted no more. Envoys
    that start afterwards know nothing of the old one."""
    (pod,) = sealed.pods("gateway")
    failed = not_scraped(sealed)
    with under_load(sealed.client, sessions=4) as load:
        load.goes_on()
        both = trust(kube, CA, NEXT_CA, secret=ENGINE_TRUSTED)
        looked_at(sealed)
        eventually(lambda: assert_equal(trusted_of_engines(kube), both), REFRESH_S)
        sealed.client.trust = ssl.create_default_context(cadata=trust(kube, CA, NEXT_CA))
        sealed.patch(gateway={"tls": {"caSecret": TRUSTED}})
        load.goes_on()
        sealed.patch(gateway={"tls": {"issuer": NEXT_CA}}, engine={"tls": {"issuer": NEXT_CA}})
        kube.apply(cert_manager.certificate(LISTENER, NAMESPACE, NEXT_CA, dnsNames=[HOST]))
        for secret in (GATEWAY_SECRET, LISTENER, ENGINE_SECRET):
            eventually(lambda: assert_equal(signed_by(kube, tmp_path, NEXT_CA, secret), True), 60)  # noqa: B023
        new = {
            name: cert_manager.der(cert_manager.issued(kube, name, NAMESPACE)["tls.crt"])
            for name in (GATEWAY_SECRET, LISTENER, ENGINE_SECRET)
        }
        looked_at(sealed)
        eventually(lambda: assert_equal(of_listener(sealed), new[LISTENER]), REFRESH_S)
        eventually(lambda: assert_equal(of_gateway(sealed, tmp_path), new[GATEWAY_SECRET]), REFRESH_S)
        eventually(lambda: assert_equal(of_engines(sealed), {new[ENGINE_SECRET]}), REFRESH_S)
        load.goes_on()
        alone = trust(kube, NEXT_CA, secret=ENGINE_TRUSTED)
        looked_at(sealed)
        eventually(lambda: assert_equal(trusted_of_engines(kube), alone), REFRESH_S)
        sealed.client.trust = ssl.create_default_context(cadata=trust(kube, NEXT_CA))
        load.goes_on(20)
    assert load.failures == []
    assert not_scraped(sealed) == failed
    (after,) = sealed.pods("gateway")
    assert after["metadata"]["uid"] == pod["metadata"]["uid"], "the gateway was not restarted"
    kube.ctl("delete", "pod", *of_our_gateway())
    eventually(sealed.answers, timeout_s=90)
    trust(kube, CA, NEXT_CA)  # the other tests' client has a certificate of the old one


@pytest.mark.parametrize("renewals", [1, pytest.param(2, marks=pytest.mark.long)])
def test_envoy_shows_its_certificate_to_our_gateway_and_a_renewed_one(sealed, kube, tmp_path, renewals):
    """Envoy alone is answered, and who has no certificate is not. No request fails when our gateway begins to
    ask for it, nor when it is renewed; a new gateway, and so a new connection, is shown the renewed one."""
    (pod,) = sealed.pods("gateway")
    assert answers_a_preface(pod, client(tmp_path, None)), "before, it asks clients for no certificate"
    with under_load(sealed.client, sessions=4) as load:
        load.goes_on()
        sealed.patch(gateway={"tls": {"clientCertificates": True}})
        eventually(lambda: assert_equal([is_strict(pod) for pod in sealed.all_pods("gateway")], [True]), 120)
        load.goes_on()
        for _ in range(renewals):
            (pod,) = sealed.pods("gateway")
            strict = lambda: assert_equal(answers_a_preface(pod, client(tmp_path, kube)), True)  # noqa: B023, E731
            eventually(strict, timeout_s=60)
            assert not answers_a_preface(pod, client(tmp_path, None))
            new = cert_manager.serial(renewed(kube, CLIENT))
            eventually(lambda: assert_in(new, serials_of_envoy(kube)), timeout_s=60)  # noqa: B023
            load.goes_on()
            kube.ctl("rollout", "restart", f"deployment/{GATEWAY}", "-n", NAMESPACE)
            kube.ctl("rollout", "status", f"deployment/{GATEWAY}", "-n", NAMESPACE, timeout_s=120)
            eventually(lambda: assert_equal(len(sealed.all_pods("gateway")), 1), timeout_s=120)
            load.goes_on()
    assert load.failures == []
    sealed.answers()


def serials_of_envoy(kube):
    """Return the serial numbers of the certificates that Envoy has of its own."""
    (envoy,) = [pod for pod in kube.get("pod", *of_our_gateway()) if is_ready(pod)]
    said = kube.page(f"pod/{envoy['metadata']['name']}", envoy_gateway.NAMESPACE, "/certs", 19_000)
    page = json.loads(said)
    return {int(c["serial_number"], 16) for each in page["certificates"] for c in each.get("cert_chain", ())}


def assert_in(wanted, found):
    assert wanted in found


def is_strict(pod):
    return any(word.startswith("--tls-client-ca") for word in pod["spec"]["containers"][0]["args"])


def client(folder, kube):
    """Return what a client says that verifies nothing; with `kube` it has a certificate."""
    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
    trust.set_alpn_protocols(["h2"])
    if kube is not None:
        trust.load_cert_chain(*client_files(kube, folder))
    return trust
