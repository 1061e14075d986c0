"""Perilune installed as a user installs it: Helm, our chart, then a pool."""

from pathlib import Path

from testbed.kube import Kube
from testbed.paths import CHECKOUT
from testbed.perilune_image import NAME

NAMESPACE = "perilune-system"
POOL = Path(__file__).resolve().parents[1] / "manifests" / "pool.yaml"


def install(kube: Kube, *settings: str) -> None:
    """Returns when the operator is ready. `settings`: `key=value` of the chart."""
    repository, tag = NAME.rsplit(":", 1)
    image = f"image.repository={repository},image.tag={tag},image.pullPolicy=Never"
    values = ["--set-string", image, *(word for setting in settings for word in ("--set", setting))]
    chart = CHECKOUT / "charts" / "perilune"
    # helm installs CRDs, and never touches them again
    kube.ctl("apply", "--server-side", "--force-conflicts", "-f", str(chart / "crds"))
    kube.install("perilune", chart, NAMESPACE, *values)


def apply_pool(kube: Kube, document: Path = POOL, timeout_s: float = 120) -> None:
    """Returns when the pool is Ready."""
    kube.ctl("apply", "-f", str(document))
    kube.wait("condition=Ready", "-f", str(document), timeout_s=timeout_s)
