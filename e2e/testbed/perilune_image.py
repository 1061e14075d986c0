"""Our own image, built as it is released: the Dockerfile by buildah, on a base image made here."""

from pathlib import Path

from testbed.paths import CHECKOUT, IMAGES
from testbed.shell import ClusterError

NAME = "perilune.test/perilune:1"


def perilune_archive() -> Path:
    """An OCI archive of the checkout."""
    archive = IMAGES / "perilune.tar"
    if not archive.exists():
        raise ClusterError(f"{CHECKOUT}: no image")
    return archive
