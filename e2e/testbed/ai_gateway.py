"""Envoy AI Gateway together with Envoy Gateway, which then takes InferencePools as backends.

Its charts, and the values that Envoy Gateway needs for it, lie in its Go module. For each InferencePool it
makes Envoy ask the pool's endpoint picker, always over TLS and without verifying the certificate, and send
the request to the address that the picker's header names: exactly one, since Envoy reads no list there
(cluster type ORIGINAL_DST).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testbed import envoy_gateway, images, programs
from testbed.kube import Kube

NAMESPACE = "envoy-ai-gateway-system"
"""Where the values of Envoy Gateway expect it."""
IMAGE = "perilune.test/ai-gateway:1"
_CHARTS = programs.AI_GATEWAY_FOLDER / "manifests" / "charts"
_RELEASES = {"aieg-crd": _CHARTS / "ai-gateway-crds-helm", "aieg": _CHARTS / "ai-gateway-helm"}
_VALUES = (
    programs.AI_GATEWAY_FOLDER / "manifests" / "envoy-gateway-values.yaml",
    programs.AI_GATEWAY_FOLDER / "examples" / "inference-pool" / "envoy-gateway-values-addon.yaml",
)


def archive() -> Path:
    """Return an OCI archive of its controller. Build the archive if it is missing, which takes ten minutes on
    two cores, once."""
    programs.module(*programs.AI_GATEWAY)
    programs.ensure(("ai-gateway",))
    return images.archive(IMAGE, programs.path("ai-gateway"), "ai-gateway")


@contextmanager
def running(kube: Kube, folder: Path) -> Iterator[None]:
    """Inside, Envoy Gateway takes InferencePools, whose CRDs have to be there before; afterwards it is as it
    was. `folder`: where a copy of Envoy Gateway's chart may be written."""
    repository, tag = IMAGE.rsplit(":", 1)
    image = f"controller.image.repository={repository},controller.image.tag={tag}"
    for release, chart in _RELEASES.items():
        kube.install(release, chart, NAMESPACE, "--set", f"{image},controller.imagePullPolicy=Never")
    try:
        _configure_envoy_gateway(kube, folder, *_VALUES)
        yield
    finally:
        _configure_envoy_gateway(kube, folder)
        for release in reversed(_RELEASES):
            kube.helm("uninstall", release, "-n", NAMESPACE, "--wait")


def _configure_envoy_gateway(kube: Kube, folder: Path, *values: Path) -> None:
    envoy_gateway.install(kube, folder, *values)
    envoy_gateway.restart(kube)
