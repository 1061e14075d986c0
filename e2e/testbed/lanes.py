"""Scenarios side by side: lanes, each a pytest of its own, told in one session.

Steps: items of no lane run here first, alone; then every lane's items are run by a child, this file called as
a program, which sends its reports over a pipe; here they are told as if the items had run here. So there is
one progress, one list of failures with their output, one closing line. A child that ends before all its items
were told fails the rest of them, with its last words. Interrupted, or with failures enough, children are
asked to stop (SIGINT) and waited for: they take down what they brought up.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

IN_A_LANE = "PERILUNE_E2E_LANE"
"""Environment variable of a lane's own pytest."""
END_S = 180
"""How long a child that was asked to stop may take to clean up."""


@dataclass(frozen=True, slots=True)
class Lane:
    """`env` and `nice` are its child's."""

    name: str
    env: dict[str, str] = field(default_factory=dict)
    nice: int = 0


class SideBySide:
    """Plugin of the session that tells; `items` of each lane are known when its loop begins."""

    def __init__(self, lane_of: dict[str, Lane]) -> None:
        """`lane_of`: by node id; items without one run here. Raises RuntimeError in a lane's own pytest: it
        would start lanes without end."""
        if IN_A_LANE in os.environ:
            raise RuntimeError("a lane has no lanes")
        self._lane_of = lane_of

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        everything = session.items
        session.items = [item for item in everything if item.nodeid not in self._lane_of]
        done = yield
        lanes: dict[str, list[pytest.Item]] = {}
        for item in everything:
            if item.nodeid in self._lane_of:
                lanes.setdefault(self._lane_of[item.nodeid].name, []).append(item)
        children = [_Child(self._lane_of[items[0].nodeid], items, session.config) for items in lanes.values()]
        try:
            _tell(session, children)
        finally:
            for child in children:
                child.stop()
        return done


def _tell(session: pytest.Session, children: Sequence["_Child"]) -> None:
    """Tell all reports, each test's when it has ended, until every child has."""
    running = {child.reports: child for child in children}
    while running:
        for ready in wait(list(running)):
            child = running[ready]  # type: ignore[index]
            try:
                child.heard(child.reports.recv())
            except EOFError:
                del running[child.reports]
                child.ended()
            for reports in child.finished():
                _pass_on(session, reports)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)


def _pass_on(session: pytest.Session, reports: Sequence[pytest.TestReport]) -> None:
    tell, first = session.config.hook, reports[0]
    tell.pytest_runtest_logstart(nodeid=first.nodeid, location=first.location)
    for report in reports:
        tell.pytest_runtest_logreport(report=report)
    tell.pytest_runtest_logfinish(nodeid=first.nodeid, location=first.location)


class _Child:
    """The pytest of one lane."""

    def __init__(self, lane: Lane, items: Sequence[pytest.Item], config: pytest.Config) -> None:
        self.lane = lane
        self.reports, sends = Pipe(duplex=False)
        self._config = config
        self._left = {item.nodeid: item for item in items}
        self._told: list[pytest.TestReport] = []
        factory = config._tmp_path_factory  # type: ignore[attr-defined]  # noqa: SLF001  (no fixture is at hand here)
        self._log: Path = factory.mktemp("lane") / f"{lane.name}.log"
        command = [sys.executable, "-P", __file__, str(sends.fileno()), "-p", "no:cacheprovider", *self._left]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["nice", "-n", str(lane.nice), *command],
                cwd=config.rootpath,
                env={**os.environ, **lane.env, IN_A_LANE: lane.name},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[sends.fileno()],
                start_new_session=True,  # Ctrl-C is ours to pass on, once
            )
        sends.close()

    def heard(self, data: dict[str, Any]) -> None:
        report = self._config.hook.pytest_report_from_serializable(config=self._config, data=data)
        self._told.append(report)

    def finished(self) -> Iterable[list[pytest.TestReport]]:
        """Yield the reports of each test that has ended since."""
        while any(report.when == "teardown" for report in self._told):
            last = next(i for i, report in enumerate(self._told) if report.when == "teardown")
            reports, self._told = self._told[: last + 1], self._told[last + 1 :]
            self._left.pop(reports[0].nodeid, None)
            yield reports

    def ended(self) -> None:
        """Report every test that was not told as failed."""
        status = self._process.wait()
        said = self._log.read_text(errors="replace")[-5000:]
        for item in self._left.values():
            words = f"lane {self.lane.name!r} ended with status {status} before this was told:\n{said}"
            for when in ("setup", "teardown"):
                outcome, why = ("failed", words) if when == "setup" else ("passed", None)
                self._told.append(
                    pytest.TestReport(item.nodeid, item.location, {}, outcome, why, when)  # type: ignore[arg-type]
                )

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            self.reports.close()
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


class _Sender:
    """Plugin of a child."""

    def __init__(self, to: Connection) -> None:
        self._to = to
        os.set_inheritable(to.fileno(), False)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        try:
            self._to.send(data)
        except OSError:
            pytest.exit("nobody listens any more")

    def pytest_configure(self, config: pytest.Config) -> None:
        self._config = config


if __name__ == "__main__":
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # in the background it is ignored, by inheritance
    sys.exit(pytest.main(sys.argv[2:], plugins=[_Sender(Connection(int(sys.argv[1])))]))
