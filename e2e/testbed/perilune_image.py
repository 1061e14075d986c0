"""Our own images, built as they are released: the Dockerfile, by buildah, on a base image made here.

Steps: debootstrap's base becomes an image here, so nothing is pulled → `buildah bud`, without a daemon,
layers kept (a second build with the same lock file takes seconds) → an OCI archive. Package installs inside
trust what this machine trusts: its certificates are mounted, never copied in. Everything happens in a mount
namespace of its own, so an ended or killed build leaves no mount. `engine_archive` has the
simulated engine; `store_archive` adds real Mooncake to it, for the scenarios that have a KV store.
`state_archive` is Debian's Valkey, for several gateways.
"""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from testbed import images, releases
from testbed.paths import CHECKOUT, IMAGES, exclusive
from testbed.shell import run, step, succeeds

NAME = "perilune.test/perilune:1"
"""Operator and gateway."""
ENGINE_NAME = "perilune.test/perilune-engine:1"
"""The simulated engine, by the name that the chart expects."""
STORE_NAME = "perilune.test/perilune-store:1"
STATE_NAME = "perilune.test/valkey:1"
_BASE = f"perilune.test/debian:{images.SUITE}"
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
_STORAGE = IMAGES / "buildah"
_SOURCES = ("*.py", "*.toml", "*.lock", "*.json", "*.yaml", "Dockerfile", "README.md", "LICENSE")
_STORE_FOLDER = CHECKOUT / "e2e" / "images"
STORE_LOCK = _STORE_FOLDER / "mooncake.lock"


def perilune_archive() -> Path:
    """Return an OCI archive of operator and gateway, built again when a source changed."""
    arguments = ("--build-arg", f"BASE={_BASE}", str(CHECKOUT))
    return _archive(NAME, "perilune", _digest_of_sources(), "building our image", arguments)


def engine_archive() -> Path:
    """Return an OCI archive of the simulated engine, built again when a source changed."""
    arguments = ("--build-arg", f"BASE={_BASE}", "--target", "engine", str(CHECKOUT))
    title = "building the simulated engine's image"
    return _archive(ENGINE_NAME, "perilune-engine", _digest_of_sources(), title, arguments)


def release_name(version: str) -> str:
    """Return the name of a release's image."""
    return f"{NAME.rsplit(':', 1)[0]}:{version}"


def release_archive(version: str) -> Path:
    """Return an OCI archive of a release: operator and gateway; up to 0.1.0 the simulated engine, too."""
    name, arguments = release_name(version), ("--build-arg", f"BASE={_BASE}", str(releases.checkout(version)))
    made_of = releases.RELEASES[version]
    return _archive(name, f"perilune-{version}", made_of, f"building our image of {version}", arguments)


def store_archive() -> Path:
    """Return an image like the engine's, with Mooncake's master and client, and a program called vllm."""
    engine_archive()
    digest = hashlib.sha256(_digest_of_sources().encode())
    for file in sorted(_STORE_FOLDER.iterdir()):
        digest.update(file.read_bytes())
    arguments = ("--build-arg", f"BASE={_BASE}", "--build-arg", f"PERILUNE={ENGINE_NAME}")
    recipe = ("-f", str(_STORE_FOLDER / "store.Dockerfile"), str(_STORE_FOLDER))
    title = "building an image with Mooncake"
    return _archive(STORE_NAME, "perilune-store", digest.hexdigest(), title, (*arguments, *recipe))


def state_archive() -> Path:
    """Return an OCI archive of Valkey."""
    recipe = _STORE_FOLDER / "state.Dockerfile"
    arguments = ("--build-arg", f"BASE={_BASE}", "-f", str(recipe), str(_STORE_FOLDER))
    digest = hashlib.sha256(recipe.read_bytes()).hexdigest()
    return _archive(STATE_NAME, "valkey", digest, "building an image with Valkey", arguments)


def state_version() -> str:
    """Return which Valkey the image has, as its package database says; empty: it was not built here."""
    for database in (_STORAGE / "root").glob("overlay/*/diff/var/lib/dpkg/status"):
        found = re.search(
            r"^Package: valkey-server\n(?:.+\n)*?Version: (\d[\w.]*)", database.read_text(), re.M
        )
        if found:
            return found[1]
    return ""


def _archive(name: str, file: str, made_of: str, title: str, arguments: Sequence[str]) -> Path:
    archive = IMAGES / f"{file}.tar"
    recipe, made_of = archive.with_suffix(".recipe"), f"{_BASE} {made_of}"
    with exclusive(file):
        if archive.exists() and recipe.exists() and recipe.read_text() == made_of:
            return archive
        with step(title):
            _make_base()
            certificates = f"{_CERTIFICATES}:{_CERTIFICATES}:ro"
            build = ("bud", "--layers", "--isolation", "chroot", "--pull-never", "--volume", certificates)
            run(_buildah(*build, "--tag", name, *arguments), timeout_s=1800)
            archive.unlink(missing_ok=True)
            run(_buildah("push", "-q", name, f"oci-archive:{archive}:{name}"))
            recipe.write_text(made_of)
    return archive


def _make_base() -> None:
    if not succeeds(_buildah("inspect", "--type", "image", _BASE)):
        base = IMAGES / f"{images.SUITE}.oci.tar"
        images.write_archive(_BASE, base, [images.base()], ())
        run(_buildah("pull", "-q", f"oci-archive:{base}"))
        base.unlink()


def _buildah(*args: str) -> list[str]:
    places = ("--root", str(_STORAGE / "root"), "--runroot", str(_STORAGE / "run"))
    alone = ("unshare", "--mount", "--propagation", "private", "--")
    return [*alone, "buildah", *places, "--storage-driver", "overlay", *args]


def _digest_of_sources() -> str:
    files = run(["git", "-C", CHECKOUT, "ls-files", "-co", "--exclude-standard", "--", *_SOURCES])
    digest = hashlib.sha256()
    for name in sorted(set(files.splitlines())):
        file = CHECKOUT / name
        if file.is_file() and not name.startswith(("tests/", "e2e/", "docs/", "research/")):
            digest.update(f"{name}\0".encode() + file.read_bytes())
    return digest.hexdigest()
