"""Tables and headings of a Markdown page, as values."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def page(name: str) -> str:
    return (DOCS / name).read_text()


def section(markdown: str, heading: str) -> str:
    """Return what follows the heading, up to the next one of its level or above. Raises ValueError without
    it."""
    lines = markdown.splitlines()
    at = lines.index(heading)
    level = heading.index(" ")
    ends = (i for i in range(at + 1, len(lines)) if re.match(rf"#{{1,{level}}} ", lines[i]))
    return "\n".join(lines[at + 1 : next(ends, len(lines))])


def rows(markdown: str, first: str) -> list[list[str]]:
    """Return the cells of every table whose first column is called `first`, without code marks."""
    found: list[list[str]] = []
    inside = False
    for line in markdown.splitlines():
        cells = [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            inside = False
        elif cells[0] == first:
            inside = True
        elif inside and not set(cells[0]) <= set("-: "):
            found.append(cells)
    return found


def headings(markdown: str) -> list[str]:
    return re.findall(r"^#+ (.+?)\s*$", markdown, re.MULTILINE)
