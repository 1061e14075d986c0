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
