"""Words of a command line."""

from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

import pytest

from perilune_api.pool import SpecError
from perilune_lab.terminal.arguments import assignments, count, figure, not_negative, output, positive, url


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (count, "12", 12),
        (positive, "0.5", 0.5),
        (not_negative, "0", 0.0),
        (not_negative, "0.00", 0.0),
        (url, "http://h:1/v1", "http://h:1"),
        (url, "https://h/", "https://h"),
    ],
)
def test_values_are_read(kind: Callable[[str], object], text: str, value: object):
    assert kind(text) == value


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *((count, text) for text in ("0", "-1", "1.5", "many", "", "²")),
        *((positive, text) for text in ("0", "-1", "nan", "inf", "fast", "")),
        *((not_negative, text) for text in ("-1", "nan", "inf", "soon")),
        *((url, text) for text in ("h:1", "ftp://h")),
    ],
)
def test_what_is_wrong_is_said_with_the_word(kind: Callable[[str], object], text: str):
    with pytest.raises(ArgumentTypeError, match=rf"must .*{text}"):
        kind(text)


def test_where_a_file_can_be_written(tmp_path: Path):
    (tmp_path / "there.svg").touch()
    for name in ("new.svg", "there.svg"):
        assert output(str(tmp_path / name)) == figure(str(tmp_path / name)) == tmp_path / name


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        (output, "absent/r.json", "there is no folder .*absent"),
        (output, ".", "is a folder"),
        (figure, "r.bmp", r"must end in \.png or \.svg or \.pdf"),
        (figure, "absent/r.png", "there is no folder"),
    ],
)
def test_what_cannot_be_written_is_known_before_the_work(
    kind: Callable[[str], object], name: str, says: str, tmp_path: Path
):
    with pytest.raises(ArgumentTypeError, match=says):
        kind(f"{tmp_path}/{name}")


def test_assignments_are_names_with_values():
    assert assignments(["a=1, b=x=y", "c="], "--params") == {"a": "1", "b": "x=y", "c": ""}
    with pytest.raises(SpecError, match="'a' is not NAME=VALUE - at `--params`"):
        assignments(["a"], "--params")
