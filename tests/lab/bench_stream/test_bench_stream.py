"""`perilune bench-stream`: bursts against simulated engines; and what batching a burst's misses is worth."""

import json
from collections import Counter

import pytest
from msgspec import UNSET
from ports import free_port
from stepped_engine import SteppedEngine

from perilune_lab.bench_stream import cli
from perilune_lab.bench_stream.burst import NOTHING, Burst, NoEngine, measure, summarize
from perilune_lab.bench_stream.histograms import Histogram, Scrape
from perilune_lab.bench_stream.text import PUBLISHED
from perilune_lab.engine.scheduler import Limits
from perilune_lab.load.client import TargetError
from perilune_lab.load.result import Result
from perilune_lab.processes.stack import EngineOptions, Stack
from perilune_lab.report import Quantiles

TTFT, LATENCY = "vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds"
GAPS = "vllm:inter_token_latency_seconds"


def result(**times: object) -> Result:
    return Result(
        session="s",
        turn=0,
        request_id="r",
        submitted_at_s=1.0,
        finished_at_s=3.0,
        due_at_s=1.0,
        status=200,
        **times,
    )  # type: ignore[arg-type]


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
    def test_client_and_engine_side_are_measured(self):
        results = [
            result(accepted_s=0.1, ttft_s=0.5, tpot_s=0.2, itl_s=(0.2, 0.2), e2e_s=0.9, output_tokens=3),
            result(accepted_s=0.1, ttft_s=1.5, e2e_s=1.5, output_tokens=1),
            result(error="broken"),
        ]
        grown = Scrape({"vllm:time_to_first_token_seconds": Histogram({1.0: 2.0, 3.0: 4.0}, 6.0, 4.0)})
        found = summarize("x", results, grown, time_scale=2.0)
        assert (found.requests, found.succeeded, found.output_tokens) == (3, 2, 4)
        assert (found.counted, found.cached_tokens) == (0, UNSET)
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
        assert found.no_engine is UNSET

    @pytest.mark.parametrize("count", [-3.0, 0.0, float("nan"), float("inf")])
    def test_an_engine_that_began_anew_meanwhile_says_nothing(self, count):
        grown = Scrape({TTFT: Histogram({1.0: count}, count, count)})
        found = summarize("x", [result(error="no")], grown, 1.0)
        assert found.engine == NOTHING
        assert found.no_engine is not UNSET

    @pytest.mark.parametrize(
        ("grown", "why"),
        [
            pytest.param({TTFT: Histogram({1.0: 2.0}, -6.0, 3.0)}, NoEngine.FALLEN, id="a sum falls"),
            pytest.param({TTFT: Histogram({}, 6.0, -3.0)}, NoEngine.FALLEN, id="a count falls"),
            pytest.param({TTFT: Histogram({1.0: -1.0, 3.0: 3.0}, 6.0, 3.0)}, NoEngine.FALLEN, id="a bucket"),
            pytest.param(
                {TTFT: Histogram({1.0: 3.0, 3.0: 2.0, 9.0: 3.0}, 6.0, 3.0)},
                NoEngine.FALLEN,
                id="what lies between two bounds falls",
            ),
            pytest.param(
                {TTFT: Histogram({1.0: 1.0}, 1.0, 1.0)}, NoEngine.TOO_FEW, id="too few first tokens"
            ),
            pytest.param({LATENCY: Histogram({1.0: 0.0}, 0.0, 0.0)}, NoEngine.TOO_FEW, id="none ended there"),
            pytest.param(
                {TTFT: Histogram({1.0: 2.0}, 1.0, 2.0), GAPS: Histogram({1.0: -9.0}, -9.0, -9.0)},
                NoEngine.FALLEN,
                id="one histogram tells of all",
            ),
            pytest.param({}, NoEngine.NO_HISTOGRAMS, id="no histograms"),
        ],
    )
    def test_pages_that_contradict_the_burst_give_no_engine_side(self, grown, why):
        found = summarize("x", [result(), result()], Scrape(grown), 1.0)
        assert (found.engine, found.no_engine) == (NOTHING, why)

    def test_answers_of_one_token_have_no_gaps_to_count(self):
        grown = {TTFT: Histogram({1.0: 2.0}, 1.0, 2.0), GAPS: Histogram({1.0: 0.0}, 0.0, 0.0)}
        found = summarize("x", [result(), result()], Scrape(grown), 1.0)
        assert isinstance(found.engine.ttft_s, Quantiles)
        assert (found.engine.itl_s, found.no_engine) == (UNSET, UNSET)

    def test_engines_that_are_named_need_not_have_served_all(self):
        grown = Scrape({TTFT: Histogram({1.0: 1.0}, 1.0, 1.0)})
        found = summarize("x", [result(), result()], grown, 1.0, counts_all=False)
        assert isinstance(found.engine.ttft_s, Quantiles)
        assert found.no_engine is UNSET

    def test_a_burst_without_success_has_no_times(self):
        found = summarize("x", [result(error="no")], Scrape(), 1.0)
        assert found.no_engine is NoEngine.NO_HISTOGRAMS
        assert (found.succeeded, found.seconds, found.client.ttft_s, found.tokens_per_s) == (
            0,
            0.0,
            UNSET,
            0.0,
        )


@pytest.mark.processes
class TestOverHttp:
    async def test_equal_prompts_are_prefilled_once_and_unique_ones_never_shared(self):
        options = EngineOptions(time_scale=5.0)
        async with Stack(engines=1, options=options, with_gateway=False, with_envoy=False) as stack:
            target = f"http://{stack.endpoints[0]}"
            unique, errors = await measure("", target, [target], Burst(12, name="u"), time_scale=5.0)
            same, _ = await measure("", target, [target], Burst(12, same=True, name="s"), time_scale=5.0)
        assert not errors
        assert (unique.succeeded, unique.cached_tokens, unique.output_tokens) == (12, 0, 96)
        assert (unique.counted, unique.prompt_tokens) == (12, 12 * 384)
        assert same.cached_tokens == 11 * (384 - options.block_size)
        for found in (unique, same):
            assert isinstance(found.client.ttft_s, Quantiles)
            assert isinstance(found.engine.latency_s, Quantiles)
            assert isinstance(found.engine.itl_s, Quantiles)
            assert isinstance(found.client.latency_s, Quantiles)
            assert (
                found.client.ttft_s.p50 <= found.client.latency_s.p50
            )  # equal where an answer comes at once

    async def test_a_target_that_does_not_answer_is_named(self):
        target = f"http://127.0.0.1:{free_port()}"
        with pytest.raises(TargetError, match="cannot connect"):
            await measure("", target, [target], Burst(1))

    @pytest.mark.parametrize("judged", [False, pytest.param(True, marks=pytest.mark.heavy)])
    def test_both_modes_side_by_side(self, tmp_path, capsys, judged):
        """And `judged`, on a machine that has time for it, batched misses are the better in everything of
        which a figure is published."""
        out = tmp_path / "burst.json"
        scale = [] if judged else ["--time-scale", "20"]
        assert cli.main(["--simulated", "--json", str(out), *scale]) == 0
        printed = capsys.readouterr().out
        assert "serial client" in printed
        assert "simulated engine (H20 model)" in printed
        assert "2.92" in printed, "the published ratio of TTFT p50"
        found = json.loads(out.read_bytes())
        assert [burst["succeeded"] for burst in found["bursts"]] == [32, 32]
        if not judged:
            return
        serial, batched = (burst["client"] for burst in found["bursts"])
        for name, at in (
            ("ttft", "p50"),
            ("ttft", "p95"),
            ("tpot", "p50"),
            ("itl", "p99"),
            ("latency", "p50"),
        ):
            assert serial[f"{name}_s"][at] > batched[f"{name}_s"][at], (name, at)

    def test_the_time_scale_is_that_of_simulated_engines_and_of_what_is_measured(self, monkeypatch):
        scales = []

        async def measured(*_, time_scale, **__):
            scales.append(time_scale)
            return summarize("x", [], Scrape(), time_scale), Counter()

        class NoStack(Stack):
            async def __aenter__(self):
                scales.append(self.options.time_scale)
                self.endpoints = ("127.0.0.1:1",)
                return self

            async def __aexit__(self, *_):
                pass

        monkeypatch.setattr(cli, "Stack", NoStack)
        monkeypatch.setattr(cli, "measure", measured)
        cli.main(["--simulated", "--time-scale", "20"])
        assert scales == [20.0] * 4

    async def test_a_target_with_several_engines_has_no_engine_side(self):
        """The gateway does not pass on a request for /metrics, which would reach one engine by chance."""
        options = EngineOptions(time_scale=20.0)
        async with Stack(engines=2, options=options) as stack:
            engines = [f"http://{address}" for address in stack.endpoints]
            of_target, _ = await measure("", stack.url, (), Burst(6, name="t"), time_scale=20.0)
            of_both, _ = await measure("", stack.url, engines, Burst(6, name="b"), time_scale=20.0)
        assert of_target.engine == NOTHING
        assert of_target.no_engine is NoEngine.NO_HISTOGRAMS
        assert isinstance(of_both.engine.latency_s, Quantiles)

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
    def test_a_wrong_call_ends_with_2(self, arguments):
        with pytest.raises(SystemExit) as end:
            cli.main(arguments)
        assert end.value.code == 2

    @pytest.mark.parametrize("option", [("--engine", "http://a:1"), ("--model", "x")], ids=lambda o: o[0])
    def test_what_has_no_meaning_with_a_simulated_engine(self, option, capsys):
        with pytest.raises(SystemExit) as end:
            cli.main(["--simulated", *option])
        assert end.value.code == 2
        assert f"{option[0]} has no meaning with --simulated: leave it out" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("no_engine", "engines", "said"),
        [
            pytest.param(
                NoEngine.TOO_FEW,
                [],
                "/metrics of http://t counted fewer requests than succeeded: several engines seem to answer"
                " there, name each with --engine",
                id="several engines",
            ),
            pytest.param(
                NoEngine.FALLEN,
                ["http://e"],
                "/metrics of http://e has counts that fell: an engine was restarted meanwhile, or"
                " several answer there",
                id="named already",
            ),
            pytest.param(
                NoEngine.NO_HISTOGRAMS,
                [],
                "http://t has no histograms of vLLM on /metrics",
                id="another engine",
            ),
        ],
    )
    def test_why_there_is_no_engine_side(self, no_engine, engines, said):
        args = cli.parse(["--target", "http://t", *(word for url in engines for word in ("--engine", url))])
        assert cli.why(no_engine, args, "") == said


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
