"""Where everything lies. Nothing is in the checkout.

CACHE keeps what is slow to make: programs, Go modules, images. A cluster's own files are in `state(name)`,
on the same file system, so that its nodes can share image files by hard links; `down` removes them.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "perilune"
BIN = CACHE / "bin"
GO_MODULES = CACHE / "go" / "mod"
GO_BUILD = CACHE / "go" / "build"
IMAGES = CACHE / "images"
TOOLS = CHECKOUT / "e2e" / "tools"
COLLECTOR = CHECKOUT / "e2e" / "collector"
CERT_MANAGER = CHECKOUT / "e2e" / "certmanager"
CONFORMANCE = CHECKOUT / "e2e" / "conformance"


def state(cluster: str) -> Path:
    return CACHE / "clusters" / cluster


@contextmanager
def exclusive(what: str) -> Iterator[None]:
    """Nobody else on this machine makes or takes this image meanwhile; waits for its turn."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    with (IMAGES / f"{what}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
