"""The chart: what it gives the operator, and what Helm makes of it where Helm is."""

import json
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fast_yaml
import pytest
from api_server import ApiServer
from charts import alerts
from charts.dashboards import DASHBOARDS
from document_tables import rows

from perilune_api import names
from perilune_api.inference_pool.checks import convert
from perilune_gateway.config import arguments as gateway_arguments
from perilune_gateway.feeds.pool_origin import PICKERS, pickers_routing
from perilune_gateway.main import ENGINE_API_KEY
from perilune_operator.extension_server import main as extension_server
from perilune_operator.extension_server import statuses
from perilune_operator.kinds import KINDS
from perilune_operator.lease import NAME
from perilune_operator.main import arguments
from perilune_operator.observe.facts import Observed
from perilune_operator.plan import plan
from perilune_operator.render.objects import Defaults

CHART = Path(__file__).parents[2] / "charts/perilune"
RULES: list[dict[str, Any]] = fast_yaml.load((CHART / "files/operator-rules.yaml").read_text())
CLUSTER_RULES: list[dict[str, Any]] = fast_yaml.load((CHART / "files/cluster-rules.yaml").read_text())


def may(group: str, resource: str) -> set[str]:
    return {
        verb
        for rule in RULES
        if group in rule["apiGroups"] and resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_the_operator_may_make_every_kind_that_it_renders_and_no_more() -> None:
    made = {(kind.api.rpartition("/")[0], kind.plural) for kind in KINDS.values()}
    for group, plural in made:
        assert may(group, plural) == {"get", "list", "watch", "create", "patch", "delete"}, plural
    granted = {
        (g, r)
        for rule in RULES
        if "delete" in rule["verbs"]
        for g in rule["apiGroups"]
        for r in rule["resources"]
    }
    assert granted == made


def test_no_rule_is_about_everything_and_secrets_are_only_made() -> None:
    for rule in [*RULES, *CLUSTER_RULES]:
        assert "*" not in {*rule["resources"], *rule["verbs"], *rule["apiGroups"]}
        if "secrets" in rule["resources"]:
            assert (rule["resources"], rule["verbs"]) == (["secrets"], ["create"])


def test_the_lease_of_the_role_is_the_operators() -> None:
    rules = fast_yaml.load((CHART / "files/lease-rules.yaml").read_text())
    assert [rule.get("resourceNames") for rule in rules] == [None, [NAME]]


FIRST_VALUES = """\
image: {repository: ghcr.io/perilune/perilune, tag: "", pullPolicy: IfNotPresent}
imagePullSecrets: []
engineImage: vllm/vllm-openai:v0.33.0
masterImage: ""
replicas: 2
restrictGateways: false
leaseSeconds: 10
watchNamespace: ""
logLevel: info
resources: {requests: {cpu: 100m, memory: 192Mi}, limits: {memory: 512Mi}}
nodeSelector: {}
tolerations: []
affinity: {}
dashboard: {enabled: true, labels: {grafana_dashboard: "1"}}
"""
"""Of the first chart: all that a release made with it has after `helm upgrade --reuse-values`."""


@pytest.fixture
def template(helm: Path) -> Callable[..., dict[str, dict[str, Any]]]:
    """Return rendered objects by kind/name, for some --set."""

    def render(*values: str, apis: str = "v1") -> dict[str, dict[str, Any]]:
        sets = [part for value in values for part in ("--set", value)]
        cluster = ("--kube-version=1.36", f"--api-versions={apis}")
        command = [helm, "template", "r", CHART, "--namespace=sys", *cluster, *sets]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(done.stderr)
        return {f"{o['kind']}/{o['metadata']['name']}": o for o in fast_yaml.load_all(done.stdout) if o}

    return render


def test_the_deployment_starts_an_operator(template: Callable[..., dict[str, Any]]) -> None:
    made = template("image.tag=v7", "watchNamespace=team", "masterImage=m:1")
    (container,) = made["Deployment/perilune-operator"]["spec"]["template"]["spec"]["containers"]
    args = arguments(container["args"])
    assert (args.namespace, args.image, args.master_image) == ("team", "ghcr.io/perilune/perilune:v7", "m:1")
    assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_the_image_of_the_server_of_shared_state_is_the_users(
    template: Callable[..., dict[str, Any]],
) -> None:
    def image(*values: str) -> str:
        pod = template(*values)["Deployment/perilune-operator"]["spec"]["template"]["spec"]
        return arguments(pod["containers"][0]["args"]).state_image

    pinned = "mirror/valkey@sha256:" + "a" * 64
    assert (image(), image(f"stateImage={pinned}")) == (Defaults().state_image, pinned)


def test_production_values_keep_the_operators_pods(template: Callable[..., dict[str, Any]]) -> None:
    values = fast_yaml.load((CHART / "values-production.yaml").read_text())
    made = template(*(f"{name}={value}" for name, value in values.items()))
    pod = made["Deployment/perilune-operator"]["spec"]["template"]["spec"]
    assert pod["priorityClassName"] == "system-cluster-critical"
    assert arguments(pod["containers"][0]["args"]).gateway_replicas == 2


@pytest.mark.parametrize("name", ["", "gatewayReplicas=2"])
def test_a_pool_has_two_gateways_on_different_nodes_rolled_one_at_a_time(
    template: Callable[..., dict[str, Any]], name: str
) -> None:
    made = template(*filter(None, [name]))
    pod = made["Deployment/perilune-operator"]["spec"]["template"]["spec"]
    given = arguments(pod["containers"][0]["args"]).gateway_replicas

    def gateway(replicas: int, spec: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
        asked = convert({"model": {"name": "m"}, "gateway": spec})
        planned = plan("p", "ns", asked, Observed(uid="uid", generation=1), 0.0, Defaults(gateways=replicas))
        return {(obj["kind"], obj["metadata"]["name"]): obj for obj in planned.objects or ()}

    two = gateway(given, {})
    deployment = two["Deployment", "p-gateway"]["spec"]
    assert deployment["replicas"] == 2
    assert deployment["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    spread = deployment["template"]["spec"]["topologySpreadConstraints"]
    assert "kubernetes.io/hostname" in {constraint["topologyKey"] for constraint in spread}
    assert ("Deployment", "p-state") in two
    assert ("PodDisruptionBudget", "p-gateway") in two
    assert gateway(given, {"replicas": 1})["Deployment", "p-gateway"]["spec"]["replicas"] == 1
    assert given == Defaults().gateways
    one = gateway(1, {})
    assert ("Deployment", "p-state") not in one
    assert ("PodDisruptionBudget", "p-gateway") not in one


def test_pods_get_the_users_labels_annotations_and_priority(template: Callable[..., dict[str, Any]]) -> None:
    named = ("podLabels.team=llm", "podAnnotations.note=yes", "priorityClassName=system-cluster-critical")
    deployment = template(*named)["Deployment/perilune-operator"]["spec"]
    pods = deployment["template"]
    assert (
        pods["metadata"]["labels"].items() >= {**deployment["selector"]["matchLabels"], "team": "llm"}.items()
    )
    assert pods["metadata"]["annotations"].items() >= {"note": "yes", "prometheus.io/port": "8080"}.items()
    assert pods["spec"]["priorityClassName"] == "system-cluster-critical"
    assert "priorityClassName" not in template()["Deployment/perilune-operator"]["spec"]["template"]["spec"]


def test_a_digest_counts_more_than_a_tag(template: Callable[..., dict[str, Any]]) -> None:
    digest = "sha256:" + "a" * 64
    made = template("image.tag=v7", f"image.digest={digest}")
    (container,) = made["Deployment/perilune-operator"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"ghcr.io/perilune/perilune@{digest}"
    assert arguments(container["args"]).image == container["image"]


def test_the_readme_has_every_value() -> None:
    values = fast_yaml.load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    told = [row[0] for row in rows((CHART / "README.md").read_text(), "value")]
    current = {name for name, field in schema.items() if not field.get("deprecated")}
    assert {name.partition(".")[0] for name in told} == {*values} == current - {"global"}
    assert set(told) >= {f"image.{name}" for name in values["image"]}


def test_an_operator_of_one_namespace_has_its_rights_there_only(
    template: Callable[..., dict[str, Any]],
) -> None:
    made = template("watchNamespace=team")
    assert made["ClusterRole/perilune-operator-sys"]["rules"] == CLUSTER_RULES
    assert made["ClusterRoleBinding/perilune-operator-sys"]["roleRef"]["name"] == "perilune-operator-sys"
    role = made["Role/perilune-operator-pools"]
    assert (role["metadata"]["namespace"], role["rules"]) == ("team", RULES)
    binding = made["RoleBinding/perilune-operator-pools"]
    assert binding["subjects"][0]["namespace"] == "sys"
    everywhere = template()
    assert everywhere["ClusterRole/perilune-operator"]["rules"] == CLUSTER_RULES + RULES
    assert "Role/perilune-operator-pools" not in everywhere


def test_the_operator_is_scraped_where_prometheus_operator_is(
    template: Callable[..., dict[str, Any]],
) -> None:
    assert "PodMonitor/perilune-operator" not in template()
    made = template(apis="monitoring.coreos.com/v1")
    pods = made["Deployment/perilune-operator"]["spec"]["template"]["metadata"]["labels"]
    wanted = made["PodMonitor/perilune-operator"]["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= pods.items()


def test_an_uninstalled_chart_leaves_nothing_that_waits_for_it(
    template: Callable[..., dict[str, Any]],
) -> None:
    """No finalizer, no webhook that the API server asks, no hook of Helm's; nor may the operator set any."""
    crd = fast_yaml.load((CHART / "crds/inferencepools.perilune.dev.yaml").read_text())
    assert crd["spec"].get("conversion", {}).get("strategy", "None") == "None"
    charted = template("extensionServer.enabled=true", apis="monitoring.coreos.com/v1").values()
    for obj in (crd, *charted):
        assert "finalizers" not in obj["metadata"]
        assert not [name for name in obj["metadata"].get("annotations") or () if name.startswith("helm.sh")]
        assert not obj["kind"].endswith(("WebhookConfiguration", "APIService"))
    for rule in [*RULES, *CLUSTER_RULES]:
        assert not any(resource.endswith("/finalizers") for resource in rule["resources"])


def test_the_operators_own_user_can_be_left_to_the_platform(template: Callable[..., dict[str, Any]]) -> None:
    for value, user, told in (("false", 65532, False), ("true", None, True)):
        made = template(f"platformUser={value}")["Deployment/perilune-operator"]["spec"]["template"]["spec"]
        assert made["securityContext"].get("runAsUser") == user
        assert made["securityContext"].get("runAsGroup") == user
        (container,) = made["containers"]
        assert arguments(container["args"]).platform_user is told


def test_envoys_namespaces_reach_the_operator(template: Callable[..., dict[str, Any]]) -> None:
    made = template("envoyNamespaces={edge,other}")["Deployment/perilune-operator"]["spec"]["template"][
        "spec"
    ]
    assert arguments(made["containers"][0]["args"]).envoy_namespace == ["edge", "other"]


def test_monitors_get_the_labels_that_a_prometheus_goes_by(template: Callable[..., dict[str, Any]]) -> None:
    made = template("monitors.labels.release=kps", apis="monitoring.coreos.com/v1")
    assert made["PodMonitor/perilune-operator"]["metadata"]["labels"]["release"] == "kps"
    (container,) = made["Deployment/perilune-operator"]["spec"]["template"]["spec"]["containers"]
    assert arguments(container["args"]).monitor_label == [("release", "kps")]


def test_the_dashboards_are_json(template: Callable[..., dict[str, Any]]) -> None:
    data = template()["ConfigMap/perilune-dashboard"]["data"]
    titles = {name: json.loads(text)["title"] for name, text in data.items()}
    assert titles == {f"{shown.uid}.json": shown.title for shown in DASHBOARDS}
    assert "ConfigMap/perilune-dashboard" not in template("dashboard.enabled=false")
    assert "ConfigMap/perilune-dashboard" in template("dashboard.labels=null")


def test_the_alerts_are_there_where_prometheus_operator_is(template: Callable[..., dict[str, Any]]) -> None:
    monitoring = "monitoring.coreos.com/v1"
    made = template("monitors.labels.release=kps", apis=monitoring)["PrometheusRule/perilune"]
    assert made["metadata"]["labels"]["release"] == "kps"
    assert made["spec"] == fast_yaml.load(alerts.document())
    assert "PrometheusRule/perilune" not in template()
    assert "PrometheusRule/perilune" not in template("alerts.enabled=false", apis=monitoring)


@pytest.mark.parametrize("apis", ["v1", "monitoring.coreos.com/v1"])
def test_a_release_of_the_first_chart_can_be_upgraded_with_its_own_values(
    helm: Path, tmp_path: Path, apis: str
) -> None:
    """Helm then asks the new chart's schema and templates, and takes none of its values."""
    chart = shutil.copytree(CHART, tmp_path / "perilune")
    command = [str(helm), "template", "r", str(chart), "--kube-version=1.36", f"--api-versions={apis}"]
    of_now = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (chart / "values.yaml").write_text(FIRST_VALUES)
    upgraded = subprocess.run(command, capture_output=True, text=True, check=False)
    assert upgraded.stderr == ""
    assert list(fast_yaml.load_all(upgraded.stdout)) == list(fast_yaml.load_all(of_now))


def test_reuse_values_of_the_first_chart(helm: Path, tmp_path: Path, api_server: ApiServer) -> None:
    """Helm itself: a release of the first values, upgraded with `--reuse-values`."""
    old = shutil.copytree(CHART, tmp_path / "old")
    (old / "values.yaml").write_text(FIRST_VALUES)
    namespace = f"h{time.monotonic_ns()}"
    access = (f"--kubeconfig={api_server.kubeconfig()}", f"--namespace={namespace}")

    def run(*words: str) -> str:
        done = subprocess.run([helm, *words, *access], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    given = f"--set=watchNamespace={namespace},leaseSeconds=7"
    run("install", "r", str(old), given, "--skip-crds", "--create-namespace")
    try:
        run("upgrade", "r", str(CHART), "--reuse-values", "--set=logLevel=debug", "--skip-crds")
        objects = fast_yaml.load_all(run("get", "manifest", "r"))
        (made,) = [o for o in objects if o and o["kind"] == "Deployment"]
        args = arguments(made["spec"]["template"]["spec"]["containers"][0]["args"])
        assert (args.namespace, args.lease_seconds, args.log_level) == (namespace, 7, "debug")
    finally:
        run("uninstall", "r", "--ignore-not-found")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        pytest.param("replicas=0", "minimum", id="no replica"),
        pytest.param("replica=1", "additional", id="typo"),
        pytest.param("image.digest=latest", "digest", id="no digest"),
        pytest.param("logLevel=loud", "logLevel", id="enum"),
        pytest.param("watchNamespace=Team_A", "watchNamespace", id="no namespace"),
        pytest.param("nodeSelector.disks=2", "nodeSelector", id="a number for a label"),
        pytest.param("tolerations[0]=gpu", "tolerations", id="a word for a toleration"),
        pytest.param("imagePullSecrets[0].nam=s", "imagePullSecrets", id="typo in a list"),
        pytest.param("replicas=null", "missing", id="nothing for a number"),
        pytest.param("image=null", "missing", id="nothing for fields"),
    ],
)
def test_wrong_values_are_refused(template: Callable[..., Any], value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        template(value)


def test_the_extension_server_is_where_envoy_gateways_values_say(
    template: Callable[..., dict[str, Any]],
) -> None:
    assert [name for name in template() if "extension-server" in name] == []
    made = template("extensionServer.enabled=true")
    values = fast_yaml.load((CHART / "envoy-gateway-values.yaml").read_text())
    manager = values["config"]["envoyGateway"]["extensionManager"]
    where = manager["service"]["fqdn"]
    service = made["Service/perilune-extension-server"]["spec"]
    assert where["hostname"].split(".")[0] == "perilune-extension-server"
    assert [port["port"] for port in service["ports"]] == [where["port"]]
    pod = made["Deployment/perilune-extension-server"]["spec"]["template"]
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["perilune-extension-server"]
    assert extension_server.arguments(container["args"]).listen == f"[::]:{where['port']}"
    (rule,) = made["ClusterRole/perilune-extension-server-inferencepools"]["rules"]
    (watched,) = manager["backendResources"]
    assert (rule["apiGroups"], watched["kind"]) == ([watched["group"]], "InferencePool")
    assert set(rule["verbs"]) == {"get", "list", "watch"}
    assert pod["spec"]["serviceAccountName"] == "perilune-extension-server"
    rights = made["ClusterRole/perilune-extension-server"]["rules"]
    writes = [rule for rule in rights if not {"get", "list", "watch"} >= set(rule["verbs"])]
    assert [(rule["resources"], rule["verbs"]) for rule in writes] == [(["inferencepools/status"], ["patch"])]
    asked = extension_server.arguments(container["args"])
    assert (asked.write_status, asked.controller) == (True, statuses.ENVOY_GATEWAY)


def test_a_picker_alone_is_all_that_is_installed_for_an_inference_pool(
    template: Callable[..., dict[str, Any]],
) -> None:
    made = template("picker.pool=qwen", "image.tag=v7")
    assert {name.partition("/")[0] for name in made} == {
        *("ServiceAccount", "Role", "RoleBinding", "ConfigMap", "Secret", "Service", "Deployment")
    }
    assert {obj["metadata"]["name"] for obj in made.values()} == {names.picker_name("qwen")}
    (container,) = made["Deployment/qwen-perilune"]["spec"]["template"]["spec"]["containers"]
    args = gateway_arguments([arg for arg in container["args"] if not arg.startswith("--tls")])
    assert args.inference_pool == ("sys", "qwen")
    assert container["image"] == "ghcr.io/perilune/perilune:v7"
    take = json.loads(made["ConfigMap/qwen-perilune"]["data"]["take"])
    assert take["spec"]["endpointPickerRef"]["name"] == "qwen-perilune"
    assert take["spec"]["endpointPickerRef"]["port"] == {"number": 9002}


def test_a_picker_routes_and_knows_the_engines_key_as_its_values_say(
    template: Callable[..., dict[str, Any]],
) -> None:
    plain = template("picker.pool=qwen")
    assert pickers_routing(plain["ConfigMap/qwen-perilune"]["data"]["routing.yaml"]) == PICKERS
    values = ("picker.routing.policy.name=llm_d", "picker.routing.fallbacks=2")
    made = template("picker.pool=qwen", *values, "picker.apiKey.name=s", "picker.apiKey.key=k")
    routing = pickers_routing(made["ConfigMap/qwen-perilune"]["data"]["routing.yaml"])
    assert (routing.policy.name, routing.fallbacks) == ("llm_d", 2)
    pods = [rendered["Deployment/qwen-perilune"]["spec"]["template"] for rendered in (plain, made)]
    marks = {pod["metadata"]["annotations"]["perilune.dev/routing"] for pod in pods}
    assert len(marks) == 2, "another routing is another pod"
    (container,) = pods[1]["spec"]["containers"]
    (variable,) = container["env"]
    assert variable["name"] == ENGINE_API_KEY
    assert variable["valueFrom"]["secretKeyRef"] == {"name": "s", "key": "k"}
    assert "env" not in pods[0]["spec"]["containers"][0]
    assert gateway_arguments(
        [arg for arg in container["args"] if not arg.startswith("--tls")]
    ).routing == Path("/routing/routing.yaml")


def test_a_picker_trusts_engines_that_speak_https_as_its_values_say(
    template: Callable[..., dict[str, Any]],
) -> None:
    values = ("picker.engineTls.caSecret=s", "picker.engineTls.key=tls.crt", "picker.engineTls.hostname=e")
    pod = template("picker.pool=qwen", *values)["Deployment/qwen-perilune"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    args = gateway_arguments([arg for arg in container["args"] if not arg.startswith("--tls")])
    assert (str(args.engine_ca), args.engine_hostname) == ("/engine-ca/ca.crt", "e")
    assert {"name": "engine-ca", "mountPath": "/engine-ca", "readOnly": True} in container["volumeMounts"]
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "engine-ca"]
    assert volume["secret"]["secretName"] == "s"
    assert volume["secret"]["items"] == [{"key": "tls.crt", "path": "ca.crt"}]


def test_a_picker_has_the_rights_of_the_example(template: Callable[..., dict[str, Any]]) -> None:
    example = list(fast_yaml.load_all((CHART.parents[1] / "examples/picker.yaml").read_text()))
    (role,) = [obj for obj in example if obj["kind"] == "Role"]
    assert template("picker.pool=qwen")["Role/qwen-perilune"]["rules"] == role["rules"]
