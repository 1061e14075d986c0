"""Ends a run that skipped tests with a list of what was missing and how to get it."""

from collections import Counter
from collections.abc import Iterator

import pytest
from _pytest.terminal import TerminalReporter


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: TerminalReporter) -> Iterator[None]:
    """Prints after pytest's own summary, before its closing line. The reason of a skip says what helps."""
    yield
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    if reasons:
        terminalreporter.section("skipped tests, and what they need")
        for reason, tests in reasons.most_common():
            terminalreporter.write_line(f"{tests} × {reason}")
