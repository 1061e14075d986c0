"""Parsers of command-line values for argparse's `type=`. Their error messages say what is expected."""

import os
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from perilune_api.pool import SpecError

E = TypeVar("E", bound=StrEnum)

DRAWN = (".png", ".svg", ".pdf")


def count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ArgumentTypeError(f"must be a whole number above 0, got {text}")
    return int(text)


def whole(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ArgumentTypeError(f"must be 0 or a whole number above it, got {text}")
    return int(text)


def positive(text: str) -> float:
    if not is_positive(text):
        raise ArgumentTypeError(f"must be a number above 0, got {text}")
    return float(text)


def not_negative(text: str) -> float:
    if (value := _number(text)) is None or not 0 <= value < inf:
        raise ArgumentTypeError(f"must be 0 or a number above it, got {text}")
    return value


def is_positive(text: str) -> bool:
    return (value := _number(text)) is not None and 0 < value < inf


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def one_of(kind: type[E]) -> Callable[[str], E]:
    """Return a parser of the values of an enum."""

    def convert(text: str) -> E:
        try:
            return kind(text)
        except ValueError:
            raise ArgumentTypeError(f"must be one of {', '.join(kind)}, got {text}") from None

    return convert


def url(text: str) -> str:
    """Return a URL, without a slash or `/v1` at its end."""
    if not text.startswith(("http://", "https://")):
        raise ArgumentTypeError(f"must begin with http:// or https://, got {text}")
    try:
        parts = urlsplit(text)
        named = parts.hostname and parts.port != 0  # reading the port raises ValueError for 99999
    except ValueError:
        named = False
    if not named:
        raise ArgumentTypeError(f"must name a host and a port of 1 to 65535: http://HOST:PORT, got {text}")
    return text.rstrip("/").removesuffix("/v1")


def output(text: str) -> Path:
    """Return a file that can be written. Check it before the work, so that a long run does not end without
    its report."""
    path = Path(text)
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ArgumentTypeError(f"{text}: there is no folder {folder}")
    if path.is_dir():
        raise ArgumentTypeError(f"{text} is a folder")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ArgumentTypeError(f"{text} cannot be written")
    return path


def figure(text: str) -> Path:
    """Return an `output` whose suffix names a format of figures."""
    if not text.endswith(DRAWN):
        raise ArgumentTypeError(f"{text} must end in {' or '.join(DRAWN)}")
    return output(text)


def assignments(texts: Sequence[str], option: str) -> Mapping[str, str]:
    """Parse `NAME=VALUE,…`, given once or several times. Raises SpecError."""
    found = {}
    for pair in (pair for text in texts for pair in text.split(",")):
        name, equals, value = pair.partition("=")
        if not equals:
            raise SpecError(f"{pair!r} is not NAME=VALUE - at `{option}`")
        found[name.strip()] = value.strip()
    return found
