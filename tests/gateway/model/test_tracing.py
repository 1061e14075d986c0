"""The header `traceparent`: which trace a request belongs to, and whether its span is recorded."""

from random import Random

import pytest

from perilune_gateway.model.tracing import Trace, begin

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    ("header", "flags"),
    [
        pytest.param(f"00-{TRACE}-{SPAN}-01", "01", id="sampled"),
        pytest.param(f"00-{TRACE}-{SPAN}-03", "03", id="sampled, with a random id"),
        pytest.param(f"00-{TRACE}-{SPAN}-ff", "03", id="flags that are not known yet are dropped"),
        pytest.param(f" 00-{TRACE}-{SPAN}-01\t", "01", id="blanks around"),
        pytest.param(f"cc-{TRACE}-{SPAN}-01-what-comes-later", "01", id="a later version"),
    ],
)
def test_a_sampled_clients_span_is_the_parent_of_ours_in_the_same_trace(header: str, flags: str) -> None:
    found = begin(header, 0.0, Random(1), 5.0, "chat")
    assert found is not None
    assert (found.trace_id, found.parent_id, found.started_at) == (int(TRACE, 16), int(SPAN, 16), 5.0)
    assert found.sampled
    assert found.traceparent == f"00-{TRACE}-{found.span_id:016x}-{flags}"
    assert found.span_id not in (0, found.parent_id)


@pytest.mark.parametrize("flags", ["00", "02", "fe"])
def test_an_unsampled_clients_header_stays_as_it_is(flags: str) -> None:
    assert begin(f"00-{TRACE}-{SPAN}-{flags}", 1.0, Random(1), 5.0, "chat") is None


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01x",
        f"cc-{TRACE}-{SPAN}-01x",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-01, 00-{TRACE}-{SPAN}-01",
        "\u0664" * 55,
    ],
)
def test_without_a_valid_header_a_new_trace_begins(header: str) -> None:
    found = begin(header, 1.0, Random(1), 5.0, "chat")
    assert found is not None
    assert found.parent_id == 0
    assert found.sampled
    assert found.trace_id != int(TRACE, 16)
    assert begin(found.traceparent, 0.0, Random(2), 6.0, "chat") is not None, "others can read our header"


def test_a_share_of_new_traces_is_recorded_and_engines_are_told_of_the_others() -> None:
    dice = Random(1)
    found = [begin("", 0.25, dice, 5.0, "chat") for _ in range(4_000)]
    traces = [trace for trace in found if trace is not None]
    assert len(traces) == 4_000
    assert 900 < sum(trace.sampled for trace in traces) < 1_100
    assert {trace.traceparent[-2:] for trace in traces} == {"02", "03"}
    assert len({trace.trace_id for trace in traces}) == 4_000


def test_identifiers_have_all_their_digits() -> None:
    ours = Trace(trace_id=1, span_id=2, parent_id=0, flags=1, started_at=5.0, operation="chat")
    assert ours.traceparent == f"00-{'1':0>32}-{'2':0>16}-01"
