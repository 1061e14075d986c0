"""Histograms of metrics pages: values reckoned by hand."""

from math import inf

import pytest

from perilune_lab.bench_stream.histograms import EMPTY, Histogram, Scrape, parse

PAGE = """\
# HELP vllm:ttft_seconds x
# TYPE vllm:ttft_seconds histogram
vllm:ttft_seconds_bucket{engine="0",le="0.1"} 2.0
vllm:ttft_seconds_bucket{engine="0",le="0.5"} 6.0
vllm:ttft_seconds_bucket{engine="0",le="+Inf"} 8.0
vllm:ttft_seconds_count{engine="0"} 8.0
vllm:ttft_seconds_sum{engine="0"} 3.5
vllm:ttft_seconds_bucket{engine="1",le="0.1"} 1.0
vllm:ttft_seconds_bucket{engine="1",le="0.5"} 1.0
vllm:ttft_seconds_bucket{engine="1",le="+Inf"} 1.0
vllm:ttft_seconds_count{engine="1"} 1.0
vllm:ttft_seconds_sum{engine="1"} 0.05
# HELP vllm:running x
# TYPE vllm:running gauge
vllm:running 3.0
"""
ONE = Histogram({0.1: 2.0, 0.5: 6.0, inf: 8.0}, 3.5, 8.0)


def test_series_of_one_name_are_summed_and_other_families_left_out():
    assert parse(PAGE).histograms == {
        "vllm:ttft_seconds": Histogram({0.1: 3.0, 0.5: 7.0, inf: 9.0}, 3.55, 9.0)
    }


def test_a_difference_is_what_happened_between():
    later = Histogram({0.1: 2.0, 0.5: 9.0, inf: 12.0}, 5.0, 12.0)
    grown = Scrape({"x": later, "new": ONE}).since(Scrape({"x": ONE, "gone": ONE})).histograms
    assert grown == {"x": Histogram({0.1: 0.0, 0.5: 3.0, inf: 4.0}, 1.5, 4.0), "new": ONE}


@pytest.mark.parametrize(
    ("q", "value"),
    [
        pytest.param(0.125, 0.05, id="inside the first bucket, from 0"),
        pytest.param(0.25, 0.1, id="at a bound"),
        pytest.param(0.5, 0.3, id="inside a bucket"),
        pytest.param(0.99, 0.5, id="the open bucket says its lower bound"),
    ],
)
def test_quantiles_are_interpolated(q, value):
    assert ONE.quantile(q) == pytest.approx(value)


def test_an_empty_one_has_no_quantiles():
    with pytest.raises(ValueError, match="no observations"):
        EMPTY.quantile(0.5)


def test_empty_buckets_are_stepped_over():
    assert Histogram({0.1: 0.0, 0.2: 0.0, 0.4: 4.0, inf: 4.0}, 1.0, 4.0).quantile(0.5) == pytest.approx(0.3)


@pytest.mark.parametrize(
    "text",
    [
        "hello, world {\n",
        PAGE.replace('le="0.1"', 'le="some"'),
        PAGE.replace(',le="0.1"', ""),
    ],
    ids=["prose", "a bound that is no number", "a bucket without a bound"],
)
def test_another_text_is_no_page(text):
    with pytest.raises(ValueError, match=r"[Ii]nvalid|could not|line"):
        parse(text)
