"""Tables that scenarios write into the page that AGENTS names (docs/real-engines.md), between its marks."""

import os
from collections.abc import Sequence
from pathlib import Path


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of the page."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(name: str, written: str) -> None:
    """Put a table between its marks, if there is such a page."""
    print(f"\n{written}")
    if not os.environ.get("AGENTS"):
        return
    page = Path(os.environ["AGENTS"])
    text, begin, end = page.read_text(), f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, after = text.partition(begin)[0], text.partition(end)[2]
    page.write_text(f"{before}{begin}{written}\n{end}{after}")
