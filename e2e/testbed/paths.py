"""Where everything lies. Nothing is in the checkout.

CACHE keeps what is slow to make: programs, Go modules, images. A cluster's own files are in `state(name)`,
on the same file system, so that its nodes can share image files by hard links; `down` removes them.
"""

import os
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "perilune"
BIN = CACHE / "bin"
GO_MODULES = CACHE / "go" / "mod"
GO_BUILD = CACHE / "go" / "build"
IMAGES = CACHE / "images"
TOOLS = CHECKOUT / "e2e" / "tools"


def state(cluster: str) -> Path:
    return CACHE / "clusters" / cluster
