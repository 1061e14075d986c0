"""Lets tests with real processes that failed run once more, alone, after all others, and names them.

Real processes share the machine with whatever else runs there, so one of them may fail where the code is
right. Such a test is a defect to look into, but no reason to throw a whole run away: one that passes alone
counts as `flaky`. The run prints its failure, names it in its last lines, and fails if more than two are
flaky. A unit test never runs twice.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from _pytest.reports import TestReport
from _pytest.terminal import TerminalReporter

REAL_PROCESSES = ("integration", "api_server", "processes")
"""Folder or markers of the tests that start programs."""
MOST_FLAKY = 2
MOST_AGAIN = 6
"""If more fail than this, the machine is not what made them fail."""


def plain(nodeid: str) -> str:
    """Return the name of a test without the group that xdist appends to it (`…@group`)."""
    name, _, group = nodeid.rpartition("@")
    return name if name and "]" not in group else nodeid


def run_alone(config: pytest.Config, nodeid: str) -> bool:
    """Run the test in a process of its own, while nothing else runs. Return whether it passes."""
    alone = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", nodeid]
    return subprocess.run(alone, cwd=config.rootpath, check=False).returncode == 0


class SecondChance:
    """A plugin of the process that shares tests out, or of the only one."""

    def __init__(self, passes_alone: Callable[[pytest.Config, str], bool] = run_alone) -> None:
        self._passes_alone = passes_alone
        self._flaky: dict[str, list[TestReport]] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Run failed tests again, and decides whether the run has passed all the same."""
        config = session.config
        terminal = config.pluginmanager.get_plugin("terminalreporter")
        if session.exitstatus != pytest.ExitCode.TESTS_FAILED or not isinstance(terminal, TerminalReporter):
            return
        failed = [
            report
            for kind in ("failed", "error")
            for report in terminal.stats.get(kind, [])
            if isinstance(report, TestReport)
        ]
        names = sorted({plain(report.nodeid) for report in failed})
        if not 0 < len(names) <= MOST_AGAIN or not all(map(_has_processes, failed)):
            return
        for name in names:
            terminal.write_line(f"\nonce more, alone: {name}")
            if self._passes_alone(config, name):
                self._flaky[name] = [report for report in failed if plain(report.nodeid) == name]
        for kind in ("failed", "error"):
            left = [
                one
                for one in terminal.stats.pop(kind, [])
                if plain(getattr(one, "nodeid", "")) not in self._flaky
            ]
            if left:
                terminal.stats[kind] = left
        if self._flaky:
            terminal.stats["flaky"] = [reports[0] for reports in self._flaky.values()]
        if len(self._flaky) == len(names) <= MOST_FLAKY:
            session.exitstatus = pytest.ExitCode.OK

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: TerminalReporter) -> Iterator[None]:
        yield
        if not self._flaky:
            return
        for name, reports in self._flaky.items():
            terminalreporter.section(f"how {name} failed before it passed alone")
            for report in reports:
                terminalreporter.write_line(report.longreprtext)
        terminalreporter.section("flaky: failed, then passed alone")
        for name in self._flaky:
            terminalreporter.write_line(f"FLAKY {name}")
        if len(self._flaky) > MOST_FLAKY:
            terminalreporter.write_line(f"More than {MOST_FLAKY} flaky tests fail the run.")


def _has_processes(report: TestReport) -> bool:
    return any(name in report.keywords for name in REAL_PROCESSES)
