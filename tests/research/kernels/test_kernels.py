"""The engine model's shape on the recorded steps of a GPU, and the command that prints it."""

import msgspec
import pytest

from perilune_research.kernels import cli
from perilune_research.kernels.fit import Measured, decode, line, mixed, prefill

MEASURED = msgspec.json.decode(cli.RECORDED.read_bytes(), type=Measured)


def test_prefill_grows_as_the_model_says():
    """From 256 new tokens to 8,192 behind 122,880, one fixed cost and one rate explain 97-fold times."""
    found = prefill(MEASURED)
    assert found.median_error < 0.03
    assert found.worst_error < 0.16


def test_decode_grows_as_the_model_says():
    """From 1 sequence of 1,024 tokens to a million tokens of context."""
    found = decode(MEASURED)
    assert found.median_error < 0.06
    assert found.worst_error < 0.16


def test_a_mixed_step_is_its_prefill_and_the_reading_of_the_contexts():
    found = mixed(MEASURED)
    assert found.median_error < 0.04
    assert found.worst_error < 0.10


def test_a_line_is_found():
    found = line([1e12, 2e12, 5e12], [1.5, 2.5, 5.5])
    assert found.fixed_s == pytest.approx(0.5)
    assert found.per_s == pytest.approx(1e12)


def test_equal_work_gives_no_line():
    with pytest.raises(ValueError, match="different work"):
        line([1.0, 1.0], [1.0, 2.0])


def test_the_command_prints_the_fits(capsys):
    assert cli.main([]) == 0
    assert "| prefill | 30 |" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, b"{", b'{"gpu": "x"}'])
def test_a_bad_file_is_a_wrong_call(tmp_path, capsys, content):
    file = tmp_path / "steps.json"
    if content is not None:
        file.write_bytes(content)
    assert cli.main([str(file)]) == 2
    assert "steps.json" in capsys.readouterr().err
