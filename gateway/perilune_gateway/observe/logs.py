"""Logging set-up: a level per module, one line per record, text or JSON.

    levels("info,perilune_gateway.observe=debug")  →  {"": INFO, "perilune_gateway.observe": DEBUG}

A level alone applies to all modules; `module=level` applies to that module and those below it. A line is
`time level module message key=value…` or one JSON object; in text, an exception follows in indented lines.
Clients and engines can cause lines, so a message is written at most MOST_LINES times in WINDOW_S seconds, and
a line has at most MOST_CHARACTERS of it. Lines at debug are not limited.
`main` calls `configure` once.
"""

import json
import logging
import sys
import time
from typing import Literal

from perilune_api.pool import SpecError

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
Format = Literal["text", "json"]


def levels(text: str) -> dict[str, int]:
    """Parse a list of levels; the key "" is the root logger. Raises SpecError."""
    found = {"": logging.INFO}
    for item in filter(None, (part.strip() for part in text.split(","))):
        module, _, level = item.rpartition("=")
        if level.lower() not in LEVELS:
            raise SpecError(f"Unknown log level {level!r} in {item!r}, known are {', '.join(LEVELS)}")
        found[module.strip()] = LEVELS[level.lower()]
    return found


MOST_LINES = 20
WINDOW_S = 10.0
MOST_CHARACTERS = 4_000
_MOST_MESSAGES = 1_000
"""The most different messages that are counted."""


class Limited(logging.Filter):
    """Drops lines of a message that was written too often. The first line after that says how many."""

    def __init__(self) -> None:
        super().__init__()
        self._written: dict[tuple[str, str], tuple[float, int]] = {}
        """(module, message without its values) → (begin of its window, lines in it)."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno <= logging.DEBUG:
            return True
        key = record.name, str(record.msg)[:MOST_CHARACTERS]
        since, lines = self._written.get(key, (record.created, 0))
        if record.created - since >= WINDOW_S:
            if lines > MOST_LINES:
                left_out = lines - MOST_LINES
                record.msg, record.args = "%s left_out=%d", (record.getMessage(), left_out)
            since, lines = record.created, 0
        if len(self._written) >= _MOST_MESSAGES:
            self._written.clear()
        self._written[key] = since, lines + 1
        return lines < MOST_LINES


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.000Z info perilune_gateway.main draining in_flight=3`"""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()[:MOST_CHARACTERS].translate(_ESCAPES)
        line = f"{_time(record)} {record.levelname.lower()} {record.name} {message}"
        if record.exc_info:
            lines = self.formatException(record.exc_info).split("\n")
            line += "".join(f"\n    {part.translate(_ESCAPES)}" for part in lines)
        return line


class JsonFormatter(logging.Formatter):
    """The same fields as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "module": record.name,
            "message": record.getMessage()[:MOST_CHARACTERS],
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, separators=(",", ":"))


_ESCAPES = {code: repr(chr(code))[1:-1] for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)}
"""Control characters, escaped so that text from a client cannot start a new line or control a terminal."""


def _time(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def configure(wanted: str = "info", form: Format = "text") -> None:
    """Log to standard error. For an unknown level it raises SpecError and changes nothing."""
    by_module = levels(wanted)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter() if form == "text" else JsonFormatter())
    handler.addFilter(Limited())
    logging.basicConfig(handlers=[handler], force=True)
    for module, level in by_module.items():
        logging.getLogger(module).setLevel(level)
