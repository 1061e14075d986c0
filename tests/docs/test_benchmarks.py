"""docs/benchmarks.md keeps the marks between which benchmarks write their tables."""

import re
from pathlib import Path

from document_tables import page

BENCHES = Path(__file__).parents[1] / "bench"
DOCUMENT = page("benchmarks.md")


def test_every_section_that_a_benchmark_writes_is_there_once():
    sources = "".join(path.read_text() for path in BENCHES.glob("bench_*.py"))
    written = set(re.findall(r"publish\(\s*request,\s*\"([\w-]+)\"", sources))
    assert written
    assert [name for name in written if DOCUMENT.count(f"<!-- {name} -->") != 1] == []


def test_every_section_ends():
    begun = re.findall(r"<!-- ([\w-]+) -->", DOCUMENT)
    assert [f"<!-- /{name} -->" in DOCUMENT for name in begun] == [True] * len(begun)


def figure(row: str) -> str:
    """Return the number in the second column of a row of the tables."""
    (found,) = re.findall(rf"^\| {re.escape(row)} \| ([\d.]+) ", DOCUMENT, re.MULTILINE)
    return str(found)


def test_figures_in_prose_are_those_of_the_tables():
    """Of a block's memory, of a decision, and of a request's CPU time."""
    operations, sizing = page("operations.md"), page("sizing.md")
    block = figure("bytes per block, index and names, 500,000 blocks")
    assert f"The index takes {block} bytes per known KV block" in operations
    assert f"| {block} bytes: {block} MB per million |" in sizing
    assert f", and {block} MB per million blocks" in sizing
    assert f"[a decision](#decision) takes {figure('decision, p50')} ms" in DOCUMENT
    rows = re.findall(r"^\| (\d+ KB)[^|]*\| (headers|body) \| (\d+) ", DOCUMENT, re.MULTILINE)
    by_headers = [int(micros) for _, on, micros in rows if on == "headers"]
    by_body = {size: int(micros) for size, on, micros in rows if on == "body"}
    assert f"between {min(by_headers)} µs (decided by headers)" in operations
    assert f"{by_body['220 KB']} µs (a body" in operations
    assert f"| {min(by_headers)}–{max(by_headers)} µs of CPU |" in sizing
    fewest, most = (round(1e6 / micros, -2) for micros in (max(by_body.values()), min(by_headers)))
    assert f"a core is busy with {fewest:,.0f} to {most:,.0f} requests/s" in sizing
    assert f"requests/s divided by {fewest / 2:,.0f} to {most / 2:,.0f}, and one more" in sizing
    assert f"| {' / '.join(str(by_body[size]) for size in ('1 KB', '64 KB', '220 KB'))} µs of CPU |" in sizing


def test_what_is_said_of_kv_events_is_what_the_fleet_showed():
    micros, core, blocks, engines = re.findall(
        r"A block that is stored or removed costs ([\d.]+) µs, so a core takes in ([\d,]+) per second: "
        r".*? engines that store and remove (\d+) blocks per second each\. "
        r"Half a core, which health\nallows, follows ([\d,]+) of them",
        DOCUMENT,
        re.DOTALL,
    )[0]
    limits, sizing = " ".join(page("limits.md").split()), page("sizing.md")
    half = f"{round(int(core.replace(',', '')) / 2, -3):,.0f}"
    costs = f"costs about {micros} µs, so half a core takes in {half} changes per second"
    assert f"{costs}: about {engines} engines" in limits
    assert f"(KV event) | {micros} µs of CPU" in sizing
    percent = 100 * 2 * int(blocks) * float(micros) * 1e-6
    assert f"| engine that stores and removes {blocks} blocks per second each | {percent:.1f} % in" in sizing
    assert f"about {engines} that store and remove" in sizing


def test_what_is_said_of_memory_and_of_http2_is_what_was_measured():
    after = re.findall(r"h2: resident MB .*: (\d+) → flat", DOCUMENT)[0]
    assert f"after 200,000 requests | {after} MB |" in page("sizing.md")
    assert f"| memory of a gateway | {after} MB, " in page("sizing.md")
    table = DOCUMENT.partition("| whole request | **h2 / own server**")[2].partition("<!--")[0]
    ratios = [float(ratio) for ratio in re.findall(r"\*\*([\d.]+)\*\*", table)]
    assert f"takes {min(ratios):.1f} to {max(ratios):.1f} times the" in page("architecture.md")


def test_what_is_said_of_a_gateways_start_is_what_it_took():
    took = dict(re.findall(r"^\| (?:\*\*)?([^|]+?)(?:\*\*)? \| ([\d.]+) \|$", DOCUMENT, re.MULTILINE))
    ready, more = took["until it is ready"], took["in Kubernetes, more"]
    assert f"after {ready} s of CPU to start, {more} s more for the Kubernetes client" in page(
        "operations.md"
    )
