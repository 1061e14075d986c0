"""Logging set-up."""

import json
import logging
import sys

import pytest

from perilune_api.pool import SpecError
from perilune_gateway.observe.logs import (
    MOST_CHARACTERS,
    MOST_LINES,
    WINDOW_S,
    JsonFormatter,
    Limited,
    TextFormatter,
    configure,
    levels,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("", {"": logging.INFO}, id="nothing"),
        pytest.param("debug", {"": logging.DEBUG}, id="everybody"),
        pytest.param("a.b=debug", {"": logging.INFO, "a.b": logging.DEBUG}, id="one module"),
        pytest.param(
            " warning , a=Error,a.b=debug,",
            {"": logging.WARNING, "a": logging.ERROR, "a.b": logging.DEBUG},
            id="mixed, with blanks and capitals",
        ),
    ],
)
def test_levels_are_given_for_all_or_by_logger(text, expected):
    assert levels(text) == expected


@pytest.mark.parametrize("text", ["loud", "a=loud", "a=", "info,=x"])
def test_an_unknown_level_is_named(text):
    with pytest.raises(SpecError, match=r"Unknown log level .* known are debug, info, warning, error"):
        levels(text)


def made(message: str, *args: object, error: BaseException | None = None) -> logging.LogRecord:
    info = (type(error), error, None) if error else None
    record = logging.LogRecord("perilune_gateway.x", logging.WARNING, "x.py", 1, message, args, info)
    record.created, record.msecs = 0.25, 250.0
    return record


def test_text_is_one_line():
    line = TextFormatter().format(made("decided target=%s", "10.0.0.1:8000"))
    assert line == "1970-01-01T00:00:00.250Z warning perilune_gateway.x decided target=10.0.0.1:8000"


def test_text_never_breaks_out_of_its_line():
    line = TextFormatter().format(made("path=%s", "/a\nfaked\r\x1b[2J"))
    assert line.endswith(r"path=/a\nfaked\r\x1b[2J")


def test_an_exception_does_not_begin_a_record_of_its_own():
    fake = "it\n1970-01-01T00:00:00.250Z info perilune_gateway.x all is well\x1b[2J"
    first, *rest = TextFormatter().format(made("failed", error=ValueError(fake))).split("\n")
    assert first.endswith("perilune_gateway.x failed")
    assert rest[-1] == r"    1970-01-01T00:00:00.250Z info perilune_gateway.x all is well\x1b[2J"
    assert all(line.startswith("    ") for line in rest)


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_what_is_no_text_is_logged_all_the_same(formatter):
    """A file's name may be any bytes."""
    line = formatter.format(made("path=%s", b"/a\xff".decode(errors="surrogateescape")))
    assert "\\udcff" in line.encode("ascii", "backslashreplace").decode()


def test_json_is_one_object_a_line():
    line = JsonFormatter().format(made("path=%s", '/a\n"b"'))
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:00.250Z",
        "level": "warning",
        "module": "perilune_gateway.x",
        "message": 'path=/a\n"b"',
    }


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
def test_exceptions_are_kept(formatter):
    assert "ValueError: why" in formatter.format(made("failed", error=ValueError("why")))


@pytest.fixture
def _restored():
    """Restore logging as pytest had it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in ("t_logs", "t_logs.loud"):
        logging.getLogger(name).setLevel(logging.NOTSET)


@pytest.mark.usefixtures("_restored")
def test_configure_sets_a_level_per_module(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    configure("warning,t_logs.loud=debug")
    logging.getLogger("t_logs").info("not said")
    logging.getLogger("t_logs.loud.below").debug("said n=%d", 3)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == ["debug t_logs.loud.below said n=3"]


@pytest.mark.usefixtures("_restored")
def test_a_wrong_level_changes_nothing():
    before = logging.getLogger().handlers[:]
    with pytest.raises(SpecError):
        configure("loud")
    assert logging.getLogger().handlers == before


def test_what_a_client_can_cause_is_logged_a_few_times_and_counted():
    limited = Limited()

    def passes(number: int, at: float, level: int = logging.WARNING) -> str:
        record = made("late_tokens body_bytes=%d", number)
        record.created, record.levelno = at, level
        return TextFormatter().format(record) if limited.filter(record) else ""

    written = [passes(number, 100.0) for number in range(1_000)]
    assert sum(map(bool, written)) == MOST_LINES
    assert limited.filter(made("another message")), "others are not kept back"
    assert passes(7, 100.0 + WINDOW_S).endswith(f"late_tokens body_bytes=7 left_out={1_000 - MOST_LINES}")
    assert passes(8, 100.0 + WINDOW_S).endswith("late_tokens body_bytes=8")
    assert all(passes(n, 200.0, logging.DEBUG) for n in range(1_000)), "debug is asked for"


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()], ids=["text", "json"])
def test_a_line_has_an_end(formatter: logging.Formatter):
    assert len(formatter.format(made("path=%s", "x" * 100_000))) < MOST_CHARACTERS + 200
