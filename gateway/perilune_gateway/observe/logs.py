"""Logging set-up: a level per module, one line per record, text or JSON.

    levels("info,perilune_gateway.observe=debug")  →  {"": INFO, "perilune_gateway.observe": DEBUG}

A level alone applies to all modules; `module=level` applies to that module and those below it. A line is
`time level module message key=value…` or one JSON object; in text, an exception follows in indented lines.
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
    """Parses a list of levels; the key "" is the root logger. Raises SpecError."""
    found = {"": logging.INFO}
    for item in filter(None, (part.strip() for part in text.split(","))):
        module, _, level = item.rpartition("=")
        if level.lower() not in LEVELS:
            raise SpecError(f"Unknown log level {level!r} in {item!r}, known are {', '.join(LEVELS)}")
        found[module.strip()] = LEVELS[level.lower()]
    return found


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.000Z info perilune_gateway.main draining in_flight=3`"""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage().translate(_ESCAPES)
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
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, separators=(",", ":"))


_ESCAPES = {code: repr(chr(code))[1:-1] for code in (*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029)}
"""Control characters, escaped so that text from a client cannot start a new line or control a terminal."""


def _time(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def configure(wanted: str = "info", form: Format = "text") -> None:
    """Logs to standard error. For an unknown level it raises SpecError and changes nothing."""
    by_module = levels(wanted)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter() if form == "text" else JsonFormatter())
    logging.basicConfig(handlers=[handler], force=True)
    for module, level in by_module.items():
        logging.getLogger(module).setLevel(level)
