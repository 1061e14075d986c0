"""What the documents consist of: their links, headings, code blocks, and the commands in those."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("e2e/**/*.md"), *ROOT.glob("examples/*.md")]
)
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

RUN = ("<!-- run by tests/docs -->", "<!-- run by tests/operator -->")
"""Stand before a block whose commands a test runs: of this folder, or of tests/operator, on a real API
server."""


class Block(NamedTuple):
    """A fenced block of code."""

    language: str
    text: str
    run: bool = False


def blocks(markdown: str) -> Iterator[Block]:
    fence = re.compile(r"^( *)```([\w-]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
    for found in fence.finditer(markdown):
        before = markdown[: found.start()].rstrip().rpartition("\n")[2].strip()
        text = "".join(line.removeprefix(found[1]) for line in found[3].splitlines(keepends=True))
        yield Block(found[2], text, before in RUN)


def prose(markdown: str) -> str:
    """All but the fenced blocks."""
    return re.sub(r"^( *)```.*?^\1```$", "", markdown, flags=re.MULTILINE | re.DOTALL)


def links(markdown: str) -> list[str]:
    """Targets of links, pictures and reference definitions, but not those in code."""
    text = re.sub(r"(`+).+?\1", "", prose(markdown))
    inline = re.findall(r"\]\(([^()\s]+(?:\([^()\s]*\))?)(?: \"[^\"]*\")?\)", text)
    return inline + re.findall(r"^\[[^\]]+\]: (\S+)$", text, re.MULTILINE)


def anchors(markdown: str) -> set[str]:
    """Of headings, by GitHub's rule; the second of two equal ones ends in -1, the third in -2."""
    found: set[str] = set()
    for title in re.findall(r"^#+ (.+?)\s*$", prose(markdown), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = 0
        while (name := f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(name)
    return found


def commands(block: Block) -> Iterator[list[str]]:
    """Words of each command of a shell block; what a console prints is left out."""
    text = block.text.replace("\\\n", " ")
    if block.language == "console":
        text = "\n".join(line[2:] for line in text.splitlines() if line.startswith("$ "))
    for part in _joined(text.splitlines()):
        words = shlex.split(part, comments=True)
        for command in _split(words, {"&&", "||", "|", ";"}):
            while command and re.fullmatch(r"[A-Za-z_]\w*=.*", command[0]):
                command = command[1:]  # a variable for this command
            if command:
                yield command


def _joined(lines: list[str]) -> Iterator[str]:
    """Lines, together where a quote goes on."""
    text = ""
    for line in lines:
        text = f"{text}\n{line}" if text else line
        try:
            shlex.split(text, comments=True)
        except ValueError:
            continue
        yield text
        text = ""
    assert not text, f"a quote is never closed: {text}"


def _split(words: list[str], by: set[str]) -> Iterator[list[str]]:
    part: list[str] = []
    for word in words:
        if word in by:
            yield part
            part = []
        else:
            part.append(word)
    yield part


def inline_code(markdown: str) -> list[str]:
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose(markdown))
