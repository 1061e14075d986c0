"""`perilune bench-stream`: bursts against simulated engines; and what batching a burst's misses is worth."""

import json
import socket

import pytest
from msgspec import UNSET
from stepped_engine import SteppedEngine

from perilune_lab.bench_stream import cli
from perilune_lab.bench_stream.burst import Burst, measure, summarize
from perilune_lab.bench_stream.histograms import Histogram, Scrape
from perilune_lab.bench_stream.text import PUBLISHED
from perilune_lab.client import TargetError
from perilune_lab.engine.scheduler import Limits
from perilune_lab.report import Quantiles
from perilune_lab.result import Result
from perilune_lab.stack import EngineOptions, Stack


def result(**times: object) -> Result:
    return Result("s", 0, "r", submitted_at_s=1.0, finished_at_s=3.0, due_at_s=1.0, status=200, **times)  # type: ignore[arg-type]


class TestBurst:
    def test_unique_prompts_share_nothing_and_equal_ones_everything(self):
        unique, same = Burst(3, name="x").sessions(), Burst(3, same=True, name="x").sessions()
        assert len({s.turns[0].prompt for s in unique}) == 3
        assert len({s.turns[0].prompt for s in same}) == 1
        assert len({s.session_id for s in same}) == 3

    def test_another_name_gives_other_prompts(self):
        a, b = (Burst(1, name=name).sessions()[0].turns[0].prompt for name in "ab")
        assert a != b


class TestSummary:
    def test_both_sides(self):
        results = [
            result(accepted_s=0.1, ttft_s=0.5, tpot_s=0.2, itl_s=(0.2, 0.2), e2e_s=0.9, output_tokens=3),
            result(accepted_s=0.1, ttft_s=1.5, e2e_s=1.5, output_tokens=1),
            result(error="broken"),
        ]
        grown = Scrape({"vllm:time_to_first_token_seconds": Histogram({1.0: 2.0, 3.0: 4.0}, 6.0, 4.0)})
        found = summarize("x", results, grown, time_scale=2.0)
        assert (found.requests, found.succeeded, found.output_tokens) == (3, 2, 4)
        assert found.seconds == 3.0
        assert found.tokens_per_s == pytest.approx(4 / 3)
        assert isinstance(found.submit_s, Quantiles)
        assert found.submit_s.p50 == pytest.approx(0.2)
        assert isinstance(found.client.ttft_s, Quantiles)
        assert (found.client.ttft_s.mean, found.client.ttft_s.p50) == (2.0, 2.0)
        assert isinstance(found.client.itl_s, Quantiles)
        assert found.client.itl_s.p99 == 0.4
        assert isinstance(found.engine.ttft_s, Quantiles), "engine seconds are not scaled"
        assert (found.engine.ttft_s.mean, found.engine.ttft_s.p50) == (1.5, 1.0)
        assert found.engine.tpot_s is UNSET
        assert found.engine_said

    @pytest.mark.parametrize("count", [-3.0, 0.0, float("nan"), float("inf")])
    def test_an_engine_that_began_anew_meanwhile_says_nothing(self, count):
        grown = Scrape({"vllm:time_to_first_token_seconds": Histogram({1.0: count}, count, count)})
        assert not summarize("x", [result(error="no")], grown, 1.0).engine_said

    def test_nothing_succeeded(self):
        found = summarize("x", [result(error="no")], Scrape(), 1.0)
        assert not found.engine_said
        assert (found.succeeded, found.seconds, found.client.ttft_s, found.tokens_per_s) == (
            0,
            0.0,
            UNSET,
            0.0,
        )


class TestOverHttp:
    async def test_equal_prompts_are_prefilled_once_and_unique_ones_never_shared(self):
        options = EngineOptions(time_scale=5.0)
        async with Stack(engines=1, options=options, with_gateway=False, with_envoy=False) as stack:
            target = f"http://{stack.endpoints[0]}"
            unique, errors = await measure("", target, [target], Burst(12, name="u"), time_scale=5.0)
            same, _ = await measure("", target, [target], Burst(12, same=True, name="s"), time_scale=5.0)
        assert not errors
        assert (unique.succeeded, unique.cached_tokens, unique.output_tokens) == (12, 0, 96)
        assert same.cached_tokens == 11 * (384 - options.block_size)
        for found in (unique, same):
            assert isinstance(found.client.ttft_s, Quantiles)
            assert isinstance(found.engine.latency_s, Quantiles)
            assert isinstance(found.engine.itl_s, Quantiles)
            assert isinstance(found.client.latency_s, Quantiles)
            assert found.client.ttft_s.p50 < found.client.latency_s.p50

    async def test_nobody_there(self):
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            target = f"http://127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(TargetError, match="cannot connect"):
            await measure("", target, [target], Burst(1))

    def test_both_modes_side_by_side(self, tmp_path, capsys):
        """And batched misses are the better in everything of which a figure is published."""
        out = tmp_path / "burst.json"
        assert cli.main(["--simulated", "--json", str(out)]) == 0
        printed = capsys.readouterr().out
        assert "serial client" in printed
        assert "simulated engine (H20 model)" in printed
        assert "2.92" in printed, "the published ratio of TTFT p50"
        found = json.loads(out.read_bytes())
        assert [burst["succeeded"] for burst in found["bursts"]] == [32, 32]
        serial, batched = (burst["client"] for burst in found["bursts"])
        for name, at in (
            ("ttft", "p50"),
            ("ttft", "p95"),
            ("tpot", "p50"),
            ("itl", "p99"),
            ("latency", "p50"),
        ):
            assert serial[f"{name}_s"][at] > batched[f"{name}_s"][at], (name, at)

    @pytest.mark.parametrize(
        "arguments",
        [
            [],
            ["--target", "x"],
            ["--simulated", "--target", "http://a"],
            ["--simulated", "--num-requests", "0"],
            ["--simulated", "--json", "/nowhere/x.json"],
            ["--simulated", "--json", "/"],
        ],
        ids=["neither", "no URL", "both", "no requests", "no such folder", "a folder"],
    )
    def test_a_wrong_call(self, arguments):
        with pytest.raises(SystemExit) as end:
            cli.main(arguments)
        assert end.value.code == 2


# one admission, in virtual time


def answers(prompts: list[list[int]], *, serial: bool) -> tuple[int, list[tuple[object, ...]]]:
    """Prompts that arrive together, run to their ends → (prefill forwards, what each answered and when in the
    order)."""
    engine = SteppedEngine(limits=Limits(serial_misses=serial))
    requests = [engine.add(ids, [sum(ids) % 1000 + k for k in range(4)]) for ids in prompts]
    first, *_ = engine.run()
    assert len(first.admitted) == len(prompts)
    said = [(r.output[: r.produced], r.finish, r.cached_tokens, r.ordinal) for r in requests]
    return first.prefill_forwards, said


DISTINCT = [[1000 * key + i for i in range(320)] for key in range(3)]
EQUAL = [DISTINCT[0]] * 3


@pytest.mark.parametrize(
    ("prompts", "serial", "forwards"),
    [
        pytest.param(DISTINCT, False, 1, id="distinct, batched"),
        pytest.param(EQUAL, False, 1, id="equal, batched"),
        pytest.param(DISTINCT, True, 3, id="distinct, serial"),
        pytest.param(EQUAL, True, 1, id="equal, serial"),
    ],
)
def test_three_prompts_in_one_admission(prompts, serial, forwards):
    counted, said = answers(prompts, serial=serial)
    assert counted == forwards
    assert said == answers(prompts, serial=not serial)[1], "results depend on how the batch is split"


def test_the_published_ratios_are_those_of_the_published_figures():
    assert {name: round(ratio, 2) for name, ratio in PUBLISHED.items()} == {
        "TTFT p50": 2.92,
        "TTFT p95": 3.07,
        "TPOT p50": 1.41,
        "ITL p99": 2.67,
        "latency p50": 1.64,
        "tokens/s": 0.65,
    }
