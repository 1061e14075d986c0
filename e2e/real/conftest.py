"""Genuine vLLM engines for the scenarios of this folder; `enginebed` has the parts.

VLLM=0.23 takes the older engine, DEVICE=cuda GPUs. REQUESTS says how many requests the longest phases have,
RESULTS in which page to write the table; with another engine or device than usual, in a page next to it. What
one machine may lack (root, namespaces) skips all, with the reason; what is not installed yet is installed
first.
"""

import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from enginebed import install, judged, models, rendered
from enginebed.rig import Rig
from testbed.shell import succeeds

REPORT = pytest.StashKey["Report"]()


class Report:
    """The phases of this run; their table is printed at its end."""

    def __init__(self) -> None:
        self.phases: list[judged.Phase] = []

    def phase(self, name: str) -> judged.Phase:
        self.phases.append(judged.Phase(name))
        return self.phases[-1]


@pytest.fixture(scope="session")
def report(pytestconfig: pytest.Config) -> Report:
    made = pytestconfig.stash[REPORT] = Report()
    return made


def write_results(page: Path, table: str) -> None:
    """Put the table between the page's two marks. The page of an unusual engine or device has a name of its
    own, and begins empty."""
    environment = install.chosen(os.environ.get("VLLM", ""), os.environ.get("DEVICE", ""))
    begin, end = "<!-- results -->\n", "<!-- end of results -->"
    if environment != install.chosen("", ""):
        page = page.with_stem(f"{page.stem}-vllm-{environment.version}-{environment.device}")
    text = page.read_text() if page.exists() else f"# Real engines: another run\n\n{begin}{end}\n"
    before, after = text.partition(begin)[0], text.partition(end)[2]
    made = f"vLLM {environment.version} on {environment.device}:\n\n```text\n{table}\n```\n"
    page.write_text(f"{before}{begin}{made}{end}{after}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if (made := config.stash.get(REPORT, None)) is not None and made.phases:
        terminalreporter.section("predicted and counted cached tokens")
        table = judged.table(made.phases, block=32)
        terminalreporter.write_line(table)
        if page := os.environ.get("RESULTS"):
            write_results(Path(page), table)


def impossible() -> str:
    """Return why no engines can run here; empty if they can."""
    if sys.platform != "linux":
        return "pods' namespaces are Linux's"
    if os.geteuid() != 0:
        return "pods' namespaces need root"
    if not succeeds(["unshare", "--net", "--mount", "--pid", "--fork", "true"]):
        return "this root may make no namespaces (a container without privileges?)"
    return ""


@pytest.fixture(scope="session")
def environment(pytestconfig: pytest.Config) -> install.Environment:
    """vLLM is installed. Skips, with the reason, where no engine can run."""
    if reason := impossible():
        pytest.skip(reason)
    chosen = install.chosen(os.environ.get("VLLM", ""), os.environ.get("DEVICE", ""))
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(
            f"\nvLLM {chosen.version} on {chosen.device}; engines differ from a cluster's in:",
            file=sys.stderr,
        )
        print(rendered.table(chosen), file=sys.stderr)
        install.ensure(chosen)
    return chosen


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of the tiny models, by name."""
    folder = tmp_path_factory.mktemp("models")
    return {name: models.write(kind, folder / name) for name, kind in models.TINY.items()}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def rig(
    environment: install.Environment, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> AsyncIterator[Rig]:
    """No process yet. All of them end with the module."""
    async with Rig(tmp_path_factory.mktemp(request.module.__name__.rpartition(".")[2]), environment) as rig:
        yield rig
