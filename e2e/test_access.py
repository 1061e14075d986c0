"""Each part's own token suffices for what it does, and reads no Secret.

That it suffices is seen in every other scenario: the operators and gateways there have no other. Here is what
the tokens cannot do, asked of the API server by the tokens themselves.
"""

import http.client
import json
import ssl

import pytest

from perilune_api import names
from testbed import network, perilune
from testbed.control_plane import PORT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SECRET = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "private"}, "stringData": {"a": "b"}}
LEASES = f"/apis/coordination.k8s.io/v1/namespaces/{perilune.NAMESPACE}/leases"
RBAC = "/apis/rbac.authorization.k8s.io/v1/namespaces/default"


class Token:
    """Asks the API server as one service account."""

    def __init__(self, cluster, account, namespace):
        create = ("create", "token", account, "-n", namespace, "--duration=1h")
        self._token = cluster.kube.ctl(*create).strip()
        self._trust = ssl.create_default_context(cafile=cluster.control.pki.path("ca.crt"))

    def ask(self, method, path, body=None):
        server = http.client.HTTPSConnection(network.CONTROL, PORT, context=self._trust, timeout=10)
        headers = {"authorization": f"Bearer {self._token}", "content-type": "application/json"}
        try:
            server.request(method, path, json.dumps(body) if body else None, headers)
            answer = server.getresponse()
            first = answer.read().partition(b"\n")[0]  # a watch answers in lines
            return answer.status, json.loads(first or b"{}")
        finally:
            server.close()

    def may(self, method, path, body=None):
        status, said = self.ask(method, path, body)
        assert status in (200, 403), said
        return status != 403

    def rules(self, namespace):
        """Everything that it may do there, in its own words."""
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectRulesReview",
            "spec": {"namespace": namespace},
        }
        _, said = self.ask("POST", "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", review)
        return said["status"]["resourceRules"]


@pytest.fixture(scope="module")
def operator_token(cluster, operator):
    return Token(cluster, "perilune-operator", perilune.NAMESPACE)


@pytest.fixture(scope="module")
def gateway_token(cluster, pool):
    return Token(cluster, names.gateway_name("sim"), "default")


@pytest.fixture(scope="module", autouse=True)
def secrets(kube, operator):
    """One in every namespace that has something of ours."""
    namespaces = ("default", perilune.NAMESPACE)
    for namespace in namespaces:
        kube.apply({**SECRET, "metadata": {"name": "private", "namespace": namespace}})
    yield
    for namespace in namespaces:
        kube.ctl("delete", "secret", "private", "-n", namespace)


@pytest.mark.parametrize("whose", ["operator", "gateway"])
@pytest.mark.parametrize("namespace", ["default", perilune.NAMESPACE, "kube-system"])
def test_no_secret_can_be_read(operator_token, gateway_token, whose, namespace):
    token = {"operator": operator_token, "gateway": gateway_token}[whose]
    where = f"/api/v1/namespaces/{namespace}/secrets"
    assert not token.may("GET", where)
    assert not token.may("GET", f"{where}?watch=1&timeoutSeconds=1")
    assert not token.may("GET", f"{where}/private")
    assert not token.may("GET", "/api/v1/secrets")
    for rule in token.rules(namespace):
        assert "*" not in rule["resources"] + rule["verbs"], rule
        if "secrets" in rule["resources"]:  # the operator makes a pool's, and never reads it
            assert (whose, rule["verbs"]) == ("operator", ["create"]), rule


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/apis/perilune.dev/v1alpha1/inferencepools", True),
        ("GET", "/api/v1/nodes", True),
        ("GET", "/api/v1/pods", True),
        ("GET", f"{LEASES}/perilune-operator", True),
        ("GET", f"{LEASES}/another", False),
        ("DELETE", "/api/v1/nodes/node-7", False),
        ("DELETE", "/apis/perilune.dev/v1alpha1/namespaces/default/inferencepools/sim", False),
        ("POST", "/api/v1/namespaces/default/pods", False),
        ("GET", "/api/v1/namespaces/default/pods/any/log", False),
        ("POST", "/api/v1/namespaces/default/pods/any/exec?command=id", False),
        ("POST", "/api/v1/namespaces/default/serviceaccounts/default/token", False),
    ],
)
def test_what_an_operator_may_do(operator_token, method, path, allowed):
    assert operator_token.may(method, path) is allowed


def test_an_operator_cannot_give_what_it_has_not(operator_token):
    """It makes Roles, but none that reads Secrets: the API server refuses escalation."""
    reader = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": "reader"},
        "rules": [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}],
    }
    status, said = operator_token.ask("POST", f"{RBAC}/roles", reader)
    assert (status, "attempting to grant RBAC permissions" in said["message"]) == (403, True)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/api/v1/namespaces/default/configmaps/sim-gateway", True),
        ("GET", "/api/v1/namespaces/default/pods?watch=1&timeoutSeconds=1&limit=1", True),
        ("GET", "/api/v1/namespaces/default/configmaps", False),
        ("GET", "/api/v1/namespaces/default/configmaps/kube-root-ca.crt", False),
        ("GET", f"/api/v1/namespaces/{perilune.NAMESPACE}/pods", False),
        ("GET", "/api/v1/pods", False),
        ("GET", "/api/v1/nodes", False),
        ("DELETE", "/api/v1/namespaces/default/pods/any", False),
        ("PATCH", "/api/v1/namespaces/default/pods/any/status", False),
        ("GET", "/apis/perilune.dev/v1alpha1/namespaces/default/inferencepools/sim", False),
    ],
)
def test_what_a_gateway_may_do(gateway_token, method, path, allowed):
    assert gateway_token.may(method, path) is allowed


def test_engines_have_no_token_at_all(pool):
    def mounts(pod):
        return [m["mountPath"] for c in pod["spec"]["containers"] for m in c.get("volumeMounts", ())]

    for pod in pool.pods("engine"):
        assert not any("serviceaccount" in path for path in mounts(pod))
    for pod in pool.pods("gateway"):
        assert any("serviceaccount" in path for path in mounts(pod))


def test_every_pod_of_ours_is_locked_down(pool, kube):
    """Not root, nothing to write to but what is mounted, no capability, the default seccomp profile."""
    ours = [
        *pool.pods("engine"),
        *pool.pods("gateway"),
        *kube.get("pod", "-n", perilune.NAMESPACE),
    ]
    for pod in ours:
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
