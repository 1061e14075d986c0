"""The engine model predicts seconds for prefill, decode and transfer."""

import pytest

from perilune_gateway.model import H20_30B

MEASURED_PREFILL_S = [
    (1_024, 0.078),
    (2_048, 0.143),
    (8_192, 0.583),
    (32_768, 4.52),
    (65_536, 15.6),
    (131_072, 57.0),
]


@pytest.mark.parametrize(("tokens", "seconds"), MEASURED_PREFILL_S)
def test_prefill_meets_the_measured_h20_points(tokens: int, seconds: float) -> None:
    assert H20_30B.prefill_s(tokens) == pytest.approx(seconds, rel=0.06)


def test_decode_floor_and_batch_of_eight() -> None:
    assert H20_30B.decode_step_s(1, 1_000) == 0.0058
    assert H20_30B.decode_step_s(8, 8_000) == pytest.approx(0.0077, rel=0.05)


def test_cached_tokens_still_cost_attention() -> None:
    assert H20_30B.prefill_s(1_000, 30_000) > H20_30B.prefill_s(1_000)
    assert H20_30B.prefill_s(1_000, 30_000) < H20_30B.prefill_s(31_000) / 10


def test_nothing_new_costs_nothing() -> None:
    assert H20_30B.prefill_s(0, 10_000) == 0.0
    assert H20_30B.transfer_s(0, 1e9) == 0.0
    assert H20_30B.mixed_step_s([], 0, 0) == 0.0


def test_a_chunked_prefill_costs_as_much_as_a_whole_one_but_for_the_fixed_parts() -> None:
    chunks = [(8_192, 8_192 * i) for i in range(4)]
    chunked = sum(H20_30B.mixed_step_s([chunk]) for chunk in chunks)
    whole = H20_30B.prefill_s(32_768) - H20_30B.prefill_fixed_s
    assert chunked - 4 * H20_30B.step_fixed_s == pytest.approx(whole)


def test_a_slower_engine_is_slower_by_the_factor() -> None:
    assert H20_30B.scaled(2.0).prefill_s(8_192) == pytest.approx(2 * H20_30B.prefill_s(8_192))
