"""The compact JSON of an evaluation."""

import json
from math import inf

import pytest

from perilune_research import data


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        pytest.param(1.0207478111813133, 1.021, id="four significant digits"),
        pytest.param(123456.0, 123500.0, id="of large numbers too"),
        pytest.param(123456, 123456, id="whole numbers stay"),
        pytest.param(inf, None, id="infinity is null"),
        pytest.param({"a": [0.00012345, "text", True]}, {"a": [0.0001234, "text", True]}, id="nested"),
    ],
)
def test_values_are_rounded(value: object, kept: object):
    assert json.loads(data.encode(value)) == kept


def test_more_digits_can_be_kept():
    assert json.loads(data.encode(1.0207478111813133, digits=7)) == 1.020748


def test_each_row_of_a_table_is_one_line():
    rows = [{"policy": f"policy {i}", "ttft_p90_s": [1.0, 0.9, 1.1]} for i in range(10)]
    lines = data.encode({"figure": "f1", "rows": rows}).decode().splitlines()
    assert [json.loads(line.strip().rstrip(",")) for line in lines if "policy" in line] == rows


def test_a_long_list_of_numbers_is_one_line():
    written = data.encode({"at": list(range(100))}).decode()
    assert written.splitlines()[0] == "{"
    assert len(written.splitlines()) == 3
