"""TLS to the engines (`engine.tls`): where it is refused, and for which name certificates are."""

from typing import Any

import pytest
from plans import made

from perilune_api.inference_pool.checks import convert
from perilune_api.pool import EngineTls, SpecError, parse_known
from perilune_operator.observe.facts import Observed

Object = dict[str, Any]
ENVOY_GATEWAY = {"gateway.networking.k8s.io/HTTPRoute", "gateway.envoyproxy.io/EnvoyExtensionPolicy"}


@pytest.mark.parametrize(
    ("kinds", "gateway", "words"),
    [
        pytest.param(
            ENVOY_GATEWAY,
            {},
            "The cluster has no cert-manager: install it, or give a Secret - at `$.spec.engine.tls.issuer`",
            id="no cert-manager",
        ),
        pytest.param(
            {"gateway.networking.k8s.io/HTTPRoute", "inference.networking.k8s.io/InferencePool"},
            {},
            "Implementations of the inference extension ask engines in plain text: leave it out"
            " - at `$.spec.engine.tls`",
            id="the inference extension",
        ),
        pytest.param(
            ENVOY_GATEWAY | {"cert-manager.io/Certificate"},
            {"parent": {"name": "g"}},
            "The cluster has no BackendTLSPolicy, by which Envoy would ask engines over TLS"
            " - at `$.spec.engine.tls`",
            id="no BackendTLSPolicy",
        ),
    ],
)
def test_tls_to_engines_is_refused_where_the_cluster_lacks_what_it_needs(
    kinds: set[str], gateway: Object, words: str
) -> None:
    spec = {"model": {"name": "m"}, "engine": {"tls": {"issuer": "ca"}}, "gateway": gateway}
    planned = made(spec, Observed(uid="u", generation=1, kinds=frozenset(kinds)))
    assert planned.objects is None
    assert planned.status.conditions[0].message == words


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        pytest.param(
            {"engine": {"tls": {"caSecret": "ca"}}},
            "The engines need a certificate: give a secret, or an issuer that writes one"
            " - at `$.spec.engine.tls`",
            id="only trust",
        ),
        pytest.param(
            {"engine": {"selector": {"labels": {"a": "b"}}, "tls": {"secret": "s", "caSecret": "ca"}}},
            "engine.tls.secret has no effect with engine.selector: leave it out, whoever runs the engines"
            " decides it - at `$.spec.engine.tls.secret`",
            id="a certificate of selected engines",
        ),
        pytest.param(
            {"engine": {"args": ["--ssl-keyfile=/k"]}},
            "--ssl-keyfile is not possible: set engine.tls, of which Envoy, gateways and probes know too"
            " - at `$.spec.engine.args[0]`",
            id="by arguments",
        ),
        pytest.param(
            {
                "engine": {"tls": {"secret": "s"}},
                "gateway": {"mode": "inferenceExtension", "parent": {"name": "g"}},
            },
            "Implementations of the inference extension ask engines in plain text: leave it out"
            " - at `$.spec.engine.tls`",
            id="the inference extension, by name",
        ),
    ],
)
def test_tls_to_engines_that_cannot_be_is_refused(spec: Object, words: str) -> None:
    with pytest.raises(SpecError) as refused:
        convert({"model": {"name": "m"}, **spec})
    assert str(refused.value) == words


def test_pools_behind_one_gateway_have_engines_of_one_name() -> None:
    """Envoy reaches all of them through the Service of the pool that serves, and verifies one name."""
    engine = {"tls": {"issuer": "ca", "caSecret": "trusted"}}
    kinds = frozenset(
        {
            *ENVOY_GATEWAY,
            "cert-manager.io/Certificate",
            "gateway.networking.k8s.io/BackendTLSPolicy",
        }
    )
    observed = Observed(uid="u", generation=1, kinds=kinds)
    found = {}
    for gateway in ({"serves": ["q"], "failOpen": False}, {"servedBy": "p"}):
        objects = made({"model": {"name": "m"}, "engine": engine, "gateway": gateway}, observed).objects
        for o in objects or ():
            if o["kind"] in ("Certificate", "BackendTLSPolicy"):
                found[o["kind"], "serves" in gateway] = o["spec"]
    assert [found["Certificate", serves]["dnsNames"] for serves in (True, False)] == [["p.ns.svc"]] * 2
    targets = [target["name"] for target in found["BackendTLSPolicy", True]["targetRefs"]]
    assert targets == ["p", "p-models"]
    assert found["BackendTLSPolicy", False]["validation"]["hostname"] == "p.ns.svc"


def test_engines_that_others_run_are_asked_by_their_own_name_and_ca() -> None:
    selector = {"labels": {"app": "vllm"}, "port": 8443}
    engine = {"selector": selector, "tls": {"caSecret": "theirs", "hostname": "vllm.example"}}
    kinds = ENVOY_GATEWAY | {"gateway.networking.k8s.io/BackendTLSPolicy"}
    observed = Observed(uid="u", generation=1, kinds=frozenset(kinds))
    objects = made({"engine": engine, "gateway": {"parent": {"name": "g"}}}, observed).objects or ()
    (policy,) = [o["spec"] for o in objects if o["kind"] == "BackendTLSPolicy"]
    assert policy["validation"] == {
        "caCertificateRefs": [{"group": "", "kind": "Secret", "name": "theirs"}],
        "hostname": "vllm.example",
    }
    (gateway,) = [o for o in objects if o["kind"] == "Deployment" and o["metadata"]["name"] == "p-gateway"]
    volumes = {v["name"]: v for v in gateway["spec"]["template"]["spec"]["volumes"]}
    assert volumes["engine-ca"]["secret"]["secretName"] == "theirs"
    (document,) = [
        o["data"]["pool.yaml"] for o in objects if o["metadata"]["name"] == "p-gateway" and "data" in o
    ]
    assert parse_known(document)[0].spec.engine.tls == EngineTls(
        "/etc/perilune/engine-ca/ca.crt", "vllm.example"
    )
    assert not [o for o in objects if o["kind"] == "Certificate"]
