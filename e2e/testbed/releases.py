"""Releases of Perilune, each from this repository's own history: its chart with the CRD, and its image.

The released line is this list of commits until releases have tags.
"""

import shutil
from pathlib import Path

from testbed.paths import CACHE, CHECKOUT
from testbed.shell import run, succeeds

RELEASES = {"0.1.0": "d4b3815fa8b5eced4dc23e34323da313a6389fd0"}
"""Version → the commit that dated it in CHANGELOG.md, oldest first."""
LAST = list(RELEASES)[-1]


def is_here(version: str) -> bool:
    """Return whether the checkout has the release in its history."""
    return succeeds(["git", "-C", CHECKOUT, "cat-file", "-e", RELEASES[version]])


def checkout(version: str) -> Path:
    """Return a folder with the files of a release. Raises ClusterError where the history lacks it."""
    commit = RELEASES[version]
    folder = CACHE / "releases" / f"{version}-{commit[:12]}"
    if not folder.exists():
        made = folder.with_suffix(".new")
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        files = made.with_suffix(".tar")
        run(["git", "-C", CHECKOUT, "archive", f"--output={files}", commit])
        run(["tar", "-xf", files, "-C", made])
        files.unlink()
        made.rename(folder)
    return folder


def chart(version: str) -> Path:
    return checkout(version) / "charts" / "perilune"
