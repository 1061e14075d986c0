"""Our own image, built as it is released: the Dockerfile, by buildah, on a base image made here.

Steps: debootstrap's base becomes an image here, so nothing is pulled → `buildah bud`, without a daemon,
layers kept (a second build with the same lock file takes seconds) → an OCI archive. Package installs inside
trust what this machine trusts: its certificates are mounted, never copied in. Everything happens in a mount
namespace of its own, so an ended or killed build leaves no mount.
"""

import hashlib
from pathlib import Path

from testbed import images
from testbed.paths import CHECKOUT, IMAGES
from testbed.shell import run, step, succeeds

NAME = "perilune.test/perilune:1"
_BASE = "perilune.test/debian:1"
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
_STORAGE = IMAGES / "buildah"
_SOURCES = ("*.py", "*.toml", "*.lock", "*.json", "*.yaml", "Dockerfile", "README.md", "LICENSE")


def perilune_archive() -> Path:
    """An OCI archive of the checkout, built again when a source changed."""
    archive = IMAGES / "perilune.tar"
    recipe = archive.with_suffix(".recipe")
    made_of = _digest_of_sources()
    if archive.exists() and recipe.exists() and recipe.read_text() == made_of:
        return archive
    with step("building our image"):
        if not succeeds(_buildah("inspect", "--type", "image", _BASE)):
            base = IMAGES / "base.oci.tar"
            images.write_archive(_BASE, base, [images.base()], ())
            run(_buildah("pull", "-q", f"oci-archive:{base}"))
            base.unlink()
        certificates = f"{_CERTIFICATES}:{_CERTIFICATES}:ro"
        build = ("bud", "--layers", "--isolation", "chroot", "--pull-never", "--volume", certificates)
        run(_buildah(*build, "--build-arg", f"BASE={_BASE}", "--tag", NAME, str(CHECKOUT)), timeout_s=1800)
        archive.unlink(missing_ok=True)
        run(_buildah("push", "-q", NAME, f"oci-archive:{archive}:{NAME}"))
        recipe.write_text(made_of)
    return archive


def _buildah(*args: str) -> list[str]:
    places = ("--root", str(_STORAGE / "root"), "--runroot", str(_STORAGE / "run"))
    alone = ("unshare", "--mount", "--propagation", "private", "--")
    return [*alone, "buildah", *places, "--storage-driver", "overlay", *args]


def _digest_of_sources() -> str:
    files = run(["git", "-C", CHECKOUT, "ls-files", "-co", "--exclude-standard", "--", *_SOURCES])
    digest = hashlib.sha256()
    for name in sorted(set(files.splitlines())):
        file = CHECKOUT / name
        if file.is_file() and not name.startswith(("tests/", "e2e/", "docs/")):
            digest.update(f"{name}\0".encode() + file.read_bytes())
    return digest.hexdigest()
