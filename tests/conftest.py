"""Workers, settings of properties, the order of tests; ends a run that skipped some with what was missing and
how to get it."""

import gc
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.terminal import TerminalReporter
from hypothesis import settings
from property_examples import examples
from second_chance import SecondChance, plain
from xdist.remote import Producer
from xdist.scheduler import LoadGroupScheduling

HERE = Path(__file__).parent
WAITING = ("integration", "lab", "docs")
"""Folders of tests that wait for processes more than they compute."""

# A busy machine is no failure. The examples are the same every time, so many of them add little.
settings.register_profile("all", deadline=None, derandomize=True, max_examples=examples(50))
settings.load_profile("all")

os.environ["SSL_CERT_FILE"] = os.devnull
"""No test leaves this machine, and aiohttp reads certificates at each start: a fifth of what it costs."""


class FilesAndGroups(LoadGroupScheduling):
    """The tests of a file run on one worker, and so do those of an `xdist_group`, of whichever file."""

    def _split_scope(self, nodeid: str) -> str:
        return str(super()._split_scope(nodeid)).split("::", 1)[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--second-chance",
        action="store_true",
        help="tests with real processes that fail run once more, alone",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.second_chance and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SecondChance())


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadGroupScheduling | None:
    """For `--dist loadgroup`."""
    return FilesAndGroups(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collect without the garbage collector, which looks at thousands of tests again and again and finds
    nothing; and on each worker from another folder on: what one has compiled the others only read."""
    session.config.args = rotated(session.config)
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def rotated(config: pytest.Config) -> list[str]:
    """Return what a worker collects: what it was told to, and the whole folder by its parts, in an order of
    its own."""
    number = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if not number.isdigit():
        return config.args
    parts = config.args
    if parts == [HERE.name] and config.rootpath == HERE.parent:
        inside = [part for part in HERE.iterdir() if part.name[0] not in "._"]
        parts = sorted(
            f"{HERE.name}/{part.name}" for part in inside if part.is_dir() or part.match("test_*.py")
        )
    first = int(number) * len(parts) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    return parts[first:] + parts[:first]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Put the groups first. Spread the files whose tests wait over the first four fifths of those that
    compute, so that the cores are busy all the time; at the end, short files fill the workers. All workers
    have one order, wherever they began."""
    items.sort(key=lambda item: item.path.parts)
    yield
    paths = dict.fromkeys(item.path for item in items if item.path.is_relative_to(HERE))
    waiting = [path for path in paths if path.relative_to(HERE).parts[0] in WAITING]
    computing = [path for path in reversed(paths) if path not in waiting]  # simulations first, API last
    place = {path: 0.8 * at / len(waiting) for at, path in enumerate(waiting)}
    place |= {path: at / len(computing) for at, path in enumerate(computing)}
    # Those of groups, and those of other folders, stay in the order that their folder has given them.
    items.sort(key=lambda item: -1.0 if item.get_closest_marker("xdist_group") else place.get(item.path, 1.0))
    for item in items:
        if "PYTEST_XDIST_WORKER" in os.environ and (group := item.get_closest_marker("xdist_group")):
            # xdist 3.8 writes it into `_nodeid`, which pytest 9.2 does not read.
            item._id = item.id.parse(f"{plain(item.nodeid)}@{group.args[0]}")  # noqa: SLF001


def pytest_collection_finish() -> None:
    """Keep the garbage collector from what was collected, and let it look seldom: a seventh of all CPU time
    of the unit tests was its."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: TerminalReporter) -> Iterator[None]:
    """Print after pytest's own summary, before its closing line. The reason of a skip says what helps."""
    yield
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    if reasons:
        terminalreporter.section("skipped tests, and what they need")
        for reason, tests in reasons.most_common():
            terminalreporter.write_line(f"{tests} × {reason}")
