"""Perilune installed as a user installs it: Helm, our chart, then a pool."""

from pathlib import Path
from typing import Any

import yaml

from testbed import releases
from testbed.kube import Kube
from testbed.paths import CHECKOUT
from testbed.perilune_image import NAME, STATE_NAME, release_name

NAMESPACE = "perilune-system"
OPERATOR = "perilune-operator"
CHART = CHECKOUT / "charts" / "perilune"
POOL = Path(__file__).resolve().parents[1] / "manifests" / "pool.yaml"


def install(kube: Kube, *settings: str) -> None:
    """Install the operator, and wait until it is ready. `settings`: `key=value` of the chart. Pools of
    scenarios that need no second gateway do without one, because nodes are small."""
    values = (f"--set={made}" for made in ("gatewayReplicas=1", *settings))
    _install(kube, CHART, NAME, f"--set-string=stateImage={STATE_NAME}", *values)


def install_release(kube: Kube, version: str) -> None:
    """Install the operator of a release in place of what there is, its CRD first."""
    _install(kube, releases.chart(version), release_name(version))


def uninstall(kube: Kube) -> None:
    kube.helm("uninstall", "perilune", "-n", NAMESPACE, "--wait", "--ignore-not-found")


def _install(kube: Kube, chart: Path, image: str, *values: str) -> None:
    repository, tag = image.rsplit(":", 1)
    ours = f"--set-string=image.repository={repository},image.tag={tag},image.pullPolicy=Never"
    # helm installs CRDs, and never touches them again
    kube.ctl("apply", "--server-side", "--force-conflicts", "-f", str(chart / "crds"))
    kube.install("perilune", chart, NAMESPACE, ours, *values)


def apply_pool(kube: Kube, document: Path = POOL, timeout_s: float = 120) -> None:
    """Apply the pool, and wait until it is Ready."""
    kube.ctl("apply", "-f", str(document))
    kube.wait("condition=Ready", "-f", str(document), timeout_s=timeout_s)


def lease_rules() -> list[dict[str, Any]]:
    """Return what the chart allows an operator in the namespace of its Lease."""
    rules: list[dict[str, Any]] = yaml.safe_load((CHART / "files" / "lease-rules.yaml").read_text())
    return rules
