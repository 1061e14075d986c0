"""Engines' metrics: the hand parser against prometheus_client's, the feed against real servers."""

import asyncio
import contextlib
import logging
import socket
from dataclasses import astuple
from random import Random
from time import thread_time

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from waiting import HANG, until

from perilune_gateway.feeds import engine_metrics
from perilune_gateway.feeds.engine_metrics import MOST_SERIES, interval_s, parse, run
from perilune_gateway.model import EngineMetrics

LABELS = ("engine", "model_name")
HISTOGRAMS = [
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "iteration_tokens_total",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "prefix_cache_hits_length",
    "num_requests_running_seconds",
]
BUCKETS = [0.001 * 2**i for i in range(24)]
NEEDED_COUNTERS = ("prefix_cache_queries", "prefix_cache_hits")
OTHER_COUNTERS = ("external_prefix_cache_queries", "external_prefix_cache_hits", "num_preemptions")


def exposition(ranks: int = 1, model: str = "qwen3", seed: int = 1) -> bytes:
    """Return a page of a vLLM server: the needed series, others whose names begin alike, and its
    histograms."""
    rng, registry = Random(seed), CollectorRegistry()

    def of(kind, name: str, *labels: str, **options: object):
        return kind(f"vllm:{name}", f"Help of {name}, with vllm:{name} in it.", [*LABELS, *labels],
                    registry=registry, **options)  # fmt: skip

    running, waiting = of(Gauge, "num_requests_running"), of(Gauge, "num_requests_waiting")
    by_reason = of(Gauge, "num_requests_waiting_by_reason", "reason")
    usage = of(Gauge, "kv_cache_usage_perc")
    counters = [of(Counter, name) for name in (*NEEDED_COUNTERS, *OTHER_COUNTERS)]
    success = of(Counter, "request_success", "finished_reason")
    sources = of(Counter, "prompt_tokens_by_source", "source")
    config = Gauge(
        "vllm:cache_config_info",
        "Information of the LLMEngine CacheConfig",
        ["block_size", "cache_dtype", "engine", "num_gpu_blocks", "num_cpu_blocks", "hash_algo"],
        registry=registry,
    )  # fmt: skip
    histograms = [of(Histogram, name, buckets=BUCKETS) for name in HISTOGRAMS]
    for rank in range(ranks):
        at = (str(rank), model)
        running.labels(*at).set(rng.randrange(200))
        waiting.labels(*at).set(rng.randrange(50))
        by_reason.labels(*at, "capacity").set(7)
        usage.labels(*at).set(rng.random())
        for counter in counters:
            counter.labels(*at).inc(rng.choice([0, 17, 1e6 + 0.5, 3.2e17]))
        for reason in ("stop", "length", "abort"):
            success.labels(*at, reason).inc(rng.randrange(1000))
        sources.labels(*at, "local_cache_hit").inc(99)
        config.labels("16", "auto", str(rank), "6280", "None", "sha256").set(1)
        for histogram in histograms:
            for _ in range(20):
                histogram.labels(*at).observe(rng.expovariate(0.1))
    python = Gauge("python_gc_objects", "Others.", ["generation"], registry=registry)
    python.labels("0").set(1)
    return generate_latest(registry)


def oracle(text: bytes) -> EngineMetrics:
    """Parse the same with prometheus_client."""
    samples = [s for family in text_string_to_metric_families(text.decode()) for s in family.samples]

    def values(name: str) -> list[float]:
        return [s.value for s in samples if s.name == f"vllm:{name}" and 0 <= s.value < 1e300]

    def total(name: str) -> float:
        return sum(values(f"{name}_total"))

    usage = values("kv_cache_usage_perc")
    config = [s.labels for s in samples if s.name == "vllm:cache_config_info"]

    def number(text: str) -> int:
        return int(text) if text.isdigit() else 0

    return EngineMetrics(
        running=int(sum(values("num_requests_running"))),
        waiting=int(sum(values("num_requests_waiting"))),
        kv_usage=min(sum(usage) / len(usage), 1.0) if usage else 0.0,
        prefix_queries_tokens=total(NEEDED_COUNTERS[0]),
        prefix_hits_tokens=total(NEEDED_COUNTERS[1]),
        block_size=max((number(labels.get("block_size", "")) for labels in config), default=0),
        gpu_blocks=sum(number(labels.get("num_gpu_blocks", "")) for labels in config),
    )


class TestParse:
    @pytest.mark.parametrize(
        ("ranks", "model"),
        [
            pytest.param(1, "qwen3", id="one rank"),
            pytest.param(8, "qwen3", id="eight ranks"),
            pytest.param(2, 'a{b}"c\\', id="a model's name with braces, quote and backslash"),
            pytest.param(2, "{", id="an opening brace for a name"),
            pytest.param(2, '}"} 5', id="a name like the end of labels"),
            pytest.param(2, "ü\nvllm:num_requests_running 3", id="a name like another line"),
        ],
    )
    def test_equals_the_oracle(self, ranks, model):
        text = exposition(ranks, model, seed=ranks)
        assert parse(text) == oracle(text)
        assert parse(text).gpu_blocks == 6280 * ranks

    def test_a_page_of_real_size_takes_a_small_part_of_what_prometheus_client_takes(self):
        """About 0.2 ms instead of 30."""
        text = exposition(ranks=2)
        assert 90_000 < len(text) < 200_000
        assert 15 * _seconds(lambda: parse(text)) < _seconds(lambda: oracle(text))

    @pytest.mark.parametrize(
        ("text", "running"),
        [
            pytest.param(b"", 0, id="empty"),
            pytest.param(b"vllm:num_requests_running 3", 3, id="no labels, no line end"),
            pytest.param(b"vllm:num_requests_running\t3\n", 3, id="tab"),
            pytest.param(b"vllm:num_requests_running{} 3\n", 3, id="empty labels"),
            pytest.param(b'vllm:num_requests_running{engine="0"} 3 1700000000000\n', 3, id="time stamp"),
            pytest.param(b'vllm:num_requests_running{engine="0",} 3.0\r\n', 3, id="trailing comma, CR"),
            pytest.param(b'vllm:num_requests_running{engine="0"}3\n', 0, id="no blank before the number"),
            pytest.param(b'vllm:num_requests_running{engine="0" 3\n', 0, id="brace never closed"),
            pytest.param(b'vllm:num_requests_running{engine="0}" 3\n', 0, id="brace only inside quotes"),
            pytest.param(b'vllm:num_requests_running{engine="0"}\n', 0, id="cut before the number"),
            pytest.param(b"vllm:num_requests_running NaN\n", 0, id="NaN"),
            pytest.param(b"vllm:num_requests_running +Inf\n", 0, id="Inf"),
            pytest.param(b"vllm:num_requests_running three\n", 0, id="not a number"),
            pytest.param(b"vllm:num_requests_running -3\n", 0, id="fewer than none"),
            pytest.param(b"# vllm:num_requests_running 3\n", 0, id="comment"),
            pytest.param(b"vllm:num_requests_running_max 3\n", 0, id="longer name"),
            pytest.param(b"x_vllm:num_requests_running 3\n", 0, id="longer name in front"),
            pytest.param(b"\xff\xfe\x00\nvllm:num_requests_running 3\n", 3, id="garbage around"),
        ],
    )
    def test_a_line_at_the_edge_of_what_prometheus_allows_is_read(self, text, running):
        assert parse(text) == EngineMetrics(running=running)

    def test_usage_is_the_mean_of_the_ranks_and_all_else_their_sum(self):
        text = b'vllm:kv_cache_usage_perc{engine="0"} 0.2\nvllm:kv_cache_usage_perc{engine="1"} 0.6\n'
        text += b'vllm:num_requests_waiting{engine="0"} 1\nvllm:num_requests_waiting{engine="1"} 2\n'
        assert parse(text) == EngineMetrics(waiting=3, kv_usage=pytest.approx(0.4))

    def test_a_page_of_nothing_but_needed_series_is_read_in_part(self):
        """Four megabytes of them would hold the loop that routes for a tenth of a second."""
        text = b"vllm:num_requests_running 1\n" * (MOST_SERIES + 1)
        assert parse(text).running == MOST_SERIES

    def test_blocks_that_are_not_known_yet(self):
        text = b'vllm:cache_config_info{block_size="32",num_gpu_blocks="None"} 1.0\n'
        assert parse(text) == EngineMetrics(block_size=32)
        assert parse(text).kv_tokens == 0

    @pytest.mark.parametrize(("said", "usage"), [("57", 1.0), ("-0.1", 0.0), ("1.0000000002", 1.0)])
    def test_usage_is_a_share(self, said, usage):
        assert parse(f"vllm:kv_cache_usage_perc {said}\n".encode()).kv_usage == usage

    @pytest.mark.parametrize(
        ("begin", "again", "end"),
        [
            pytest.param(b'{a="', b"}", b"", id="braces in a value without an end"),
            pytest.param(b'{a="', b'\\"', b"", id="escapes without an end"),
            pytest.param(b"{", b"aa", b"", id="a name without an end"),
            pytest.param(b"{", b"aa", b"} 1", id="a name without a value"),
            pytest.param(b"{", b'"",', b"", id="quotes without an end"),
            pytest.param(b"{", b'a="",', b"} 1", id="many labels"),
            pytest.param(b"{", b"a =", b"} 1", id="many names without a value"),
        ],
    )
    def test_a_line_takes_its_length(self, begin, again, end):
        """Found by reading: some of these would have held the loop that routes for minutes. With the square
        of its length, eight times as much would take 64 times as long."""

        def parsing_s(times: int) -> float:
            line = begin + again * times + end
            text = b"vllm:cache_config_info" + line + b"\nvllm:num_requests_running" + line
            return _seconds(lambda: parse(text))

        assert parsing_s(80_000) < 30 * parsing_s(10_000)

    @pytest.mark.parametrize(
        ("awake", "asleep"), [(b"1", False), (b"0", True), (b"0.0", True), (b"NaN", False), (b"x", False)]
    )
    def test_an_engine_says_whether_it_sleeps(self, awake, asleep):
        lines = [
            b'vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="awake"} ' + awake,
            b'vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="weights_offloaded"} 0',
        ]
        assert parse(b"\n".join(lines)).asleep is asleep

    def test_a_label_that_only_looks_like_block_size(self):
        text = b'vllm:cache_config_info{hash_block_size="64",note="block_size=\\"8\\"",block_size="16"} 1\n'
        assert parse(text).block_size == 16

    @given(
        rows=st.lists(
            st.tuples(
                st.lists(
                    st.tuples(
                        st.sampled_from(["engine", "model_name", "x"]),
                        st.text(st.sampled_from('ab{}",=\\\n #ü'), max_size=6),
                    ),
                    unique_by=lambda pair: pair[0],
                    max_size=3,
                ),
                st.one_of(
                    st.integers(-5, 10**9).map(str),
                    st.floats(allow_nan=True, allow_infinity=True).map(str),
                    st.sampled_from(["1e3", "1E+3", "2.5e-7", "NaN", "+Inf", "-Inf", "Inf"]),
                ),
            ),
            max_size=4,
        )
    )
    def test_any_labels_in_any_order_and_any_number(self, rows):
        lines = ["# TYPE vllm:prefix_cache_hits counter"]
        for labels, number in rows:
            inside = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels)
            lines.append(f"vllm:prefix_cache_hits_total{{{inside}}} {number}")
        text = ("\n".join(lines) + "\n").encode()
        assert parse(text) == oracle(text)

    @given(st.binary(max_size=200), st.integers(0, 5000))
    def test_garbage_and_cuts_never_raise(self, junk, cut):
        parse(junk)
        parse(b"vllm:num_requests_running{" + junk)
        assert all(value >= 0 for value in astuple(parse(EXPOSITION[:cut])))


EXPOSITION = exposition()


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _seconds(call) -> float:
    """Return the least CPU time of three calls."""

    def once() -> float:
        start = thread_time()
        call()
        return thread_time() - start

    return min(once() for _ in range(3))


@pytest.mark.parametrize(
    ("endpoints", "expected"), [(0, 1.0), (1, 1.0), (50, 1.0), (100, 2.0), (400, 8.0), (5_000, 10.0)]
)
def test_interval_grows_with_the_fleet(endpoints, expected):
    assert interval_s(endpoints) == expected


class Engine:
    """A server whose /metrics does what the test says."""

    def __init__(self) -> None:
        self.body = b"vllm:num_requests_running 1\n"
        self.status = 200
        self.hang = False
        self.scrapes = 0
        self.waiting = 0
        self.encoding = ""
        self.headers: dict[str, str] = {}

    async def metrics(self, request: web.Request) -> web.Response:
        self.scrapes += 1
        self.encoding = request.headers["Accept-Encoding"]
        if self.hang:
            self.waiting += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.waiting -= 1
        return web.Response(body=self.body, status=self.status, headers=self.headers)

    @contextlib.asynccontextmanager
    async def serving(self):
        """`async with engine.serving() as address`"""
        app = web.Application()
        app.add_routes([web.get("/metrics", self.metrics)])
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


class Sink:
    """Remembers what it was told, and lets a test wait for it."""

    def __init__(self) -> None:
        self.told: list[tuple[str, EngineMetrics | None]] = []

    def __call__(self, address: str, metrics: EngineMetrics | None, now: float) -> None:
        assert now == 42.0
        self.told.append((address, metrics))


class Unreached:
    """Remembers which engines were given up."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __call__(self, address: str, now: float) -> None:
        assert now == 42.0
        self.told.append(address)


@contextlib.asynccontextmanager
async def scraping(addresses, sink: Sink, **options):
    task = asyncio.create_task(
        run(addresses, sink, lambda: 42.0, Random(1), interval=lambda n: 0.01, **options)
    )
    try:
        yield task
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


class TestFeed:
    async def test_every_endpoint_is_read_again_and_again(self):
        a, b, sink = Engine(), Engine(), Sink()
        b.body = b"vllm:num_requests_running 2\n"
        async with a.serving() as at_a, b.serving() as at_b, scraping(lambda: [at_a, at_b], sink):
            await until(lambda: sink.told.count((at_a, EngineMetrics(running=1))) >= 3)
            await until(lambda: sink.told.count((at_b, EngineMetrics(running=2))) >= 3)
        assert a.encoding == "identity"

    async def test_a_rank_has_the_series_of_its_number_in_the_engine(self):
        """A server with ranks 4 and 5 of its engine; its addresses count them from 0."""
        engine, sink = Engine(), Sink()
        engine.body = b"".join(b'vllm:num_requests_running{engine="%d"} %d\n' % (n, n) for n in (4, 5))
        async with engine.serving() as at:
            numbers = {f"{at}#0": 4, f"{at}#1": 5}
            async with scraping(lambda: [*numbers], sink, engine_rank=numbers.get):
                await until(lambda: len(sink.told) >= 2)
        assert dict(sink.told) == {a: EngineMetrics(running=n) for a, n in numbers.items()}

    async def test_a_failure_is_told_each_time_and_logged_once(self, caplog):
        caplog.set_level(logging.INFO, "perilune_gateway.feeds.engine_metrics")
        engine, sink = Engine(), Sink()
        engine.status = 503
        async with engine.serving() as at, scraping(lambda: [at], sink):
            await until(lambda: sink.told.count((at, None)) >= 3)
            engine.status = 200
            await until(lambda: (at, EngineMetrics(running=1)) in sink.told)
        levels = [record.levelname for record in caplog.records]
        assert levels == ["WARNING", "INFO"]
        assert at in caplog.text

    async def test_a_server_without_metrics_is_alive(self):
        engine, sink = Engine(), Sink()
        engine.status = 404
        async with engine.serving() as at, scraping(lambda: [at], sink):
            await until(lambda: sink.told.count((at, EngineMetrics())) >= 2)

    async def test_an_engine_does_not_choose_whom_the_gateway_asks(self):
        engine, other, sink = Engine(), Engine(), Sink()
        engine.status = 302
        async with engine.serving() as at, other.serving() as at_other, scraping(lambda: [at], sink):
            engine.headers = {"location": f"http://{at_other}/metrics"}
            await until(lambda: sink.told.count((at, None)) >= 3)
        assert other.scrapes == 0

    async def test_nobody_listens(self):
        async with Engine().serving() as gone:
            pass
        sink = Sink()
        async with scraping(lambda: [gone], sink):
            await until(lambda: (gone, None) in sink.told)

    async def test_a_slow_endpoint_delays_only_itself(self):
        slow, quick, sink = Engine(), Engine(), Sink()
        slow.hang = True
        async with (
            slow.serving() as at_slow,
            quick.serving() as at_quick,
            scraping(lambda: [at_slow, at_quick], sink, timeout_s=HANG),
        ):
            await until(lambda: sink.told.count((at_quick, EngineMetrics(running=1))) >= 3 and slow.waiting)
            assert {address for address, _ in sink.told} == {at_quick}

    async def test_an_engine_that_takes_no_connections_is_given_up_at_once(self, monkeypatch):
        monkeypatch.setattr(engine_metrics, "CONNECT_S", 0.01)
        sink, unreached = Sink(), Unreached()
        with socket.create_server(("127.0.0.1", 0), backlog=0) as full:  # its queue has room for one
            at = f"127.0.0.1:{full.getsockname()[1]}"
            with socket.create_connection(full.getsockname()):
                async with scraping(lambda: [at], sink, timeout_s=HANG, unreached=unreached):
                    await until(lambda: unreached.told)
        assert set(unreached.told) == {at}
        assert set(sink.told) == {(at, None)}

    async def test_an_engine_that_is_only_slow_can_be_reached(self, monkeypatch):
        monkeypatch.setattr(engine_metrics, "LATE_S", 0.01)
        engine, sink, unreached = Engine(), Sink(), Unreached()
        engine.hang = True
        async with (
            engine.serving() as at,
            scraping(lambda: [at], sink, timeout_s=0.1, unreached=unreached),
        ):
            await until(lambda: sink.told.count((at, None)) >= 2)
        assert unreached.told == []

    async def test_a_fleet_that_hangs_takes_few_connections_and_starves_nobody(self, monkeypatch):
        monkeypatch.setattr("perilune_gateway.feeds.engine_metrics.MOST_SCRAPES", 4)
        engines, sink = [Engine() for _ in range(14)], Sink()
        async with contextlib.AsyncExitStack() as servers:
            addresses = [await servers.enter_async_context(engine.serving()) for engine in engines]
            hanging, quick = engines[:12], addresses[12:]
            for engine in hanging:
                engine.hang = True
            most = 0

            def asked(*told: object) -> None:
                nonlocal most
                most = max(most, sum(engine.waiting for engine in hanging))
                sink(*told)

            async with scraping(lambda: addresses, asked, timeout_s=0.1):
                await until(lambda: all((at, None) in sink.told for at in addresses[:12]))
                await until(lambda: all(sink.told.count((at, EngineMetrics(running=1))) >= 3 for at in quick))
        assert 1 <= most <= 4

    async def test_endpoints_come_and_go(self):
        a, b, sink = Engine(), Engine(), Sink()
        async with a.serving() as at_a, b.serving() as at_b:
            present = [at_a]
            async with scraping(lambda: present, sink):
                await until(lambda: any(address == at_a for address, _ in sink.told))
                present[:] = [at_b]
                await until(lambda: any(address == at_b for address, _ in sink.told))
                seen = a.scrapes
                target = b.scrapes + 5
                await until(lambda: b.scrapes >= target)
                assert a.scrapes <= seen + 1

    async def test_an_endless_body_counts_as_unreadable(self, monkeypatch):
        monkeypatch.setattr("perilune_gateway.feeds.engine_metrics.MAX_BYTES", 100)
        engine, sink = Engine(), Sink()
        engine.body = b"#" * 101
        async with engine.serving() as at, scraping(lambda: [at], sink):
            await until(lambda: (at, None) in sink.told)

    async def test_another_block_size_is_logged_once_and_told(self, caplog):
        engine, sink = Engine(), Sink()
        engine.body = b'vllm:cache_config_info{block_size="24",num_gpu_blocks="10"} 1\n'
        async with engine.serving() as at, scraping(lambda: [at], sink, block_size=lambda: 16):
            await until(lambda: len(sink.told) >= 3)
        assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == [
            f"block size differs from the pool's: no prefix will match endpoint={at} engine=24 pool=16"
        ]
        assert sink.told[0] == (at, EngineMetrics(block_size=24, gpu_blocks=10))
        assert EngineMetrics(block_size=24, gpu_blocks=10).kv_tokens == 240

    async def test_a_bug_in_the_sink_ends_the_feed(self):
        def broken(*_: object) -> None:
            raise RuntimeError("a bug")

        async with Engine().serving() as at:
            with pytest.raises(ExceptionGroup) as caught:
                await run(lambda: [at], broken, lambda: 0.0, Random(1))
        assert caught.group_contains(RuntimeError, match="a bug")
