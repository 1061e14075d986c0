"""Words of a command line → checked values: argparse `type=`s whose messages say what is wanted."""

from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from math import inf

from perilune_api.pool import SpecError


def count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ArgumentTypeError(f"must be a whole number above 0, got {text}")
    return int(text)


def positive(text: str) -> float:
    if not is_positive(text):
        raise ArgumentTypeError(f"must be a number above 0, got {text}")
    return float(text)


def not_negative(text: str) -> float:
    if not (is_positive(text) or text in ("0", "0.0")):
        raise ArgumentTypeError(f"must be 0 or a number above it, got {text}")
    return float(text)


def is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < inf
    except ValueError:
        return False


def url(text: str) -> str:
    """Without a slash or `/v1` at the end."""
    if not text.startswith(("http://", "https://")):
        raise ArgumentTypeError(f"must begin with http:// or https://, got {text}")
    return text.rstrip("/").removesuffix("/v1")


def assignments(texts: Sequence[str], option: str) -> Mapping[str, str]:
    """`NAME=VALUE,…`, given once or several times. Raises SpecError."""
    found = {}
    for pair in (pair for text in texts for pair in text.split(",")):
        name, equals, value = pair.partition("=")
        if not equals:
            raise SpecError(f"{pair!r} is not NAME=VALUE - at `{option}`")
        found[name.strip()] = value.strip()
    return found
