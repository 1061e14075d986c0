"""`--write`: benchmarks that document their result write it to docs/benchmarks.md. `--strict-bars`: those
whose tables say that a bar is missed fail."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # benchmarks share modules: bars, decision_rig


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write", action="store_true", help="write results to docs/benchmarks.md")
    parser.addoption("--strict-bars", action="store_true", help="a missed bar fails the benchmark")
    parser.addoption("--rounds", type=int, default=3, help="of which one counts (default %(default)s)")
    parser.addoption(
        "--against",
        default="",
        metavar="PYTHON",
        help="interpreter of another checkout's virtual environment, whose gateway is measured in turn with"
        " this one's",
    )
    parser.addoption("--transport", default="h2", help="the gateway's, h2 or grpc (default %(default)s)")
