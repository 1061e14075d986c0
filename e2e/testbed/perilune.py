"""Perilune installed as a user installs it: Helm, our chart, then a pool."""

from pathlib import Path
from typing import Any

import yaml

from testbed.kube import Kube
from testbed.paths import CHECKOUT
from testbed.perilune_image import NAME, STATE_NAME

NAMESPACE = "perilune-system"
OPERATOR = "perilune-operator"
CHART = CHECKOUT / "charts" / "perilune"
POOL = Path(__file__).resolve().parents[1] / "manifests" / "pool.yaml"


def install(kube: Kube, *settings: str) -> None:
    """Install the operator, and wait until it is ready. `settings`: `key=value` of the chart."""
    repository, tag = NAME.rsplit(":", 1)
    image = f"image.repository={repository},image.tag={tag},image.pullPolicy=Never,stateImage={STATE_NAME}"
    values = ["--set-string", image, *(f"--set={made}" for made in settings)]
    # helm installs CRDs, and never touches them again
    kube.ctl("apply", "--server-side", "--force-conflicts", "-f", str(CHART / "crds"))
    kube.install("perilune", CHART, NAMESPACE, *values)


def apply_pool(kube: Kube, document: Path = POOL, timeout_s: float = 120) -> None:
    """Apply the pool, and wait until it is Ready."""
    kube.ctl("apply", "-f", str(document))
    kube.wait("condition=Ready", "-f", str(document), timeout_s=timeout_s)


def lease_rules() -> list[dict[str, Any]]:
    """Return what the chart allows an operator in the namespace of its Lease."""
    rules: list[dict[str, Any]] = yaml.safe_load((CHART / "files" / "lease-rules.yaml").read_text())
    return rules
