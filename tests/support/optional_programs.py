"""Says before `make test` begins which tests will be skipped here, and which command gets what they need.

python tests/support/optional_programs.py
"""

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "e2e"))

from testbed import programs  # noqa: E402 - the folder is not a package that is installed


@dataclass(frozen=True, slots=True)
class Needed:
    what: str
    tests: str
    target: str
    takes: str
    found: Callable[[], bool]


def _in_path(*names: str) -> bool:
    return any(shutil.which(name) for name in names)


def _built(*names: str) -> bool:
    return not programs.missing(names)


NEEDED = (
    Needed(
        "Kubernetes' API server",
        "the operator's tests",
        "api-server",
        "Go, 6 minutes, once",
        lambda: _built(*programs.API_SERVER),
    ),
    Needed(
        "an OpenTelemetry collector",
        "the tests of traces",
        "collector",
        "Go, 2 minutes, once",
        lambda: _built("otel-collector"),
    ),
    Needed("Chromium", "the console's tests", "browser", "root, Debian", lambda: _in_path("chromium")),
    Needed(
        "Prometheus",
        "the tests of dashboards and alerts",
        "prometheus",
        "root, Debian",
        lambda: _in_path("prometheus"),
    ),
    Needed(
        "Valkey or Redis",
        "the tests of shared state",
        "state-server",
        "root, Debian",
        lambda: _in_path("valkey-server", "redis-server"),
    ),
)


def skipped() -> list[str]:
    """Return a sentence for each program that is missing."""
    return [
        f"skipped: {each.tests}, which need {each.what}; `make {each.target}` gets it ({each.takes})"
        for each in NEEDED
        if not each.found()
    ]


if __name__ == "__main__":
    print("\n".join(skipped() or ["All programs that tests need are here: nothing is skipped."]), flush=True)
    if skipped():
        print("`make test-programs` gets all of them.", flush=True)
    print(
        "Left out: tests marked heavy, e2e or bench: `make test-heavy`, `make e2e`, `make bench`.", flush=True
    )
