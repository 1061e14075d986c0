"""vLLM's Prometheus page: its names, labels and types, rendered by hand (0.1 ms; the library takes 10).

Gauges are read from the scheduler when the page is requested; counters and histograms are updated at the end
of each step. All times are engine seconds. Histogram buckets are vLLM's.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from perilune_lab.engine.request import Finish, Request
from perilune_lab.engine.scheduler import EngineStep, Scheduler

_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_PER_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Histogram:
    """Counts of observations by upper bound."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


def _one_two_five(limit: int) -> tuple[int, ...]:
    """Return the bucket bounds 1, 2, 5, 10 … up to `limit`."""
    bounds: list[int] = []
    power = 1
    while True:
        for digit in (1, 2, 5):
            if digit * power > limit:
                return tuple(bounds)
            bounds.append(digit * power)
        power *= 10


class Metrics:
    """All metrics of one engine. `info`: labels of vllm:cache_config_info."""

    def __init__(
        self,
        model: str,
        max_model_len: int,
        info: Mapping[str, str],
        adapters: Sequence[str],
        started: float,
        rank: int = 0,
    ) -> None:
        """Begin empty. `started`: Unix seconds, for the `_created` series. `rank` is the label `engine`."""
        self._labels = f'engine="{rank}",model_name="{model}"'
        self._info = {**info, "engine": str(rank)}
        self._adapters = adapters
        self._started = started
        self.asleep = False
        """Whether the engine sleeps (`/sleep`)."""
        self.lora_active: dict[str, int] = {}
        """Running requests by adapter."""
        self.prefix_queries = self.prefix_hits = 0
        self.external_queries = self.external_hits = 0
        self.host_hits = self.peer_hits = 0
        """Those of the external hits that came from this engine's and from other engines' host memory."""
        self.prompt_tokens = self.generation_tokens = 0
        self.preemptions = self.rejections = 0
        self.prefill_forwards = 0
        self.finished = dict.fromkeys((*Finish, "error"), 0)
        self.ttft_s = Histogram(_TTFT)
        self.itl_s = Histogram(_PER_TOKEN)
        self.tpot_s = Histogram(_PER_TOKEN)
        self.e2e_s, self.queue_s = Histogram(_REQUEST), Histogram(_REQUEST)
        self.prefill_s, self.decode_s = Histogram(_REQUEST), Histogram(_REQUEST)
        self.inference_s = Histogram(_REQUEST)
        self.request_prompt = Histogram(_one_two_five(max_model_len))
        self.request_generation = Histogram(_one_two_five(max_model_len))
        self.step_tokens = Histogram(_STEP_TOKENS)
        self._last_token: dict[Request, float] = {}

    def step_ended(self, step: EngineStep) -> None:
        self.preemptions += step.preempted
        self.prefill_forwards += step.prefill_forwards
        self.step_tokens.observe(step.tokens)
        for request in step.admitted:
            from_peer = request.pulled_tokens if request.host_tokens else 0
            external = request.store_tokens + (request.host_tokens or request.pulled_tokens)
            self.host_hits += request.host_tokens - from_peer
            self.peer_hits += from_peer
            local = request.cached_tokens - external
            self.prompt_tokens += request.prompt_tokens
            self.prefix_queries += request.prompt_tokens
            self.prefix_hits += local
            self.external_queries += request.prompt_tokens - local
            self.external_hits += external
        self.generation_tokens += len(step.emitted)
        now, last = step.ends_s, self._last_token
        previous, times = -1.0, 0
        for request in step.emitted:
            before = last.get(request)
            last[request] = now
            if before is None:
                self.ttft_s.observe(now - request.arrived_s)
            elif before == previous:
                times += 1
            else:
                if times:
                    self.itl_s.observe(now - previous, times)
                previous, times = before, 1
        if times:
            self.itl_s.observe(now - previous, times)

    def request_ended(self, request: Request) -> None:
        """Count an ended request, also an aborted one."""
        self._last_token.pop(request, None)
        self.finished[request.finish or "error"] += 1
        if request.finish is Finish.ABORT or not request.produced:
            return
        decode_s = request.last_token_s - request.first_token_s
        self.e2e_s.observe(request.last_token_s - request.arrived_s)
        self.queue_s.observe(request.scheduled_s - request.arrived_s)
        self.prefill_s.observe(request.first_token_s - request.scheduled_s)
        self.decode_s.observe(decode_s)
        self.inference_s.observe(request.last_token_s - request.scheduled_s)
        self.request_prompt.observe(request.prompt_tokens)
        self.request_generation.observe(request.produced)
        if request.produced > 1:
            self.tpot_s.observe(decode_s / (request.produced - 1))

    def write(self, page: "Page", scheduler: Scheduler) -> None:
        """Add the series of this engine to a page."""
        page.begin(self._labels, self._started)
        waiting = scheduler.waiting_count
        page.gauge("num_requests_running", "Requests in execution batches.", len(scheduler.running))
        page.gauge("num_requests_waiting", "Requests waiting to be processed.", waiting)
        page.gauge(
            "num_requests_waiting_by_reason",
            "Requests waiting, by reason.",
            {
                'reason="capacity"': waiting - len(scheduler.loading),
                'reason="deferred"': len(scheduler.loading),
            },
        )
        page.gauge("kv_cache_usage_perc", "KV-cache usage, 1 means 100 percent.", scheduler.cache.usage)
        state_now = "weights_offloaded" if self.asleep else "awake"
        states = {f'sleep_state="{state}"': int(state == state_now) for state in _SLEEP_STATES}
        page.gauge("engine_sleep_state", "Engine sleep state.", states)
        page.counter("prefix_cache_queries", "Prefix cache queries, in tokens.", self.prefix_queries)
        page.counter("prefix_cache_hits", "Prefix cache hits, in tokens.", self.prefix_hits)
        page.counter(
            "external_prefix_cache_queries", "Queries beyond the device, in tokens.", self.external_queries
        )
        page.counter("external_prefix_cache_hits", "Hits beyond the device, in tokens.", self.external_hits)
        computed = self.prompt_tokens - self.prefix_hits - self.external_hits
        page.counter(
            "prompt_tokens_by_source",
            "Prompt tokens by source.",
            {
                'source="local_compute"': computed,
                'source="local_cache_hit"': self.prefix_hits,
                'source="external_kv_transfer"': self.external_hits,
            },
        )
        cached = dict.fromkeys((f'source="{source}"' for source in _CACHED_SOURCES), 0)
        cached['source="device"'] = self.prefix_hits
        cached['source="host"'], cached['source="p2p"'] = self.host_hits, self.peer_hits
        cached['source="external_unspecified"'] = self.external_hits - self.host_hits - self.peer_hits
        page.counter("prompt_tokens_cached_by_source", "Cached prompt tokens by source.", cached)
        page.counter("prompt_tokens", "Prompt tokens processed.", self.prompt_tokens)
        page.counter("generation_tokens", "Generated tokens.", self.generation_tokens)
        page.counter("num_preemptions", "Preemptions.", self.preemptions)
        page.counter("admission_rejections", "Requests refused at admission.", self.rejections)
        page.counter(
            "request_success",
            "Requests that ended.",
            {f'finished_reason="{reason}"': n for reason, n in self.finished.items()},
        )
        page.histogram("time_to_first_token_seconds", "Time to first token.", self.ttft_s)
        page.histogram("inter_token_latency_seconds", "Inter-token latency.", self.itl_s)
        page.histogram("request_time_per_output_token_seconds", "Time per output token.", self.tpot_s)
        page.histogram("e2e_request_latency_seconds", "End-to-end latency.", self.e2e_s)
        page.histogram("request_queue_time_seconds", "Time waiting.", self.queue_s)
        page.histogram("request_prefill_time_seconds", "Time in prefill.", self.prefill_s)
        page.histogram("request_decode_time_seconds", "Time in decode.", self.decode_s)
        page.histogram("request_inference_time_seconds", "Time running.", self.inference_s)
        page.histogram("request_prompt_tokens", "Prompt tokens per request.", self.request_prompt)
        page.histogram("request_generation_tokens", "Generated tokens per request.", self.request_generation)
        page.histogram("iteration_tokens_total", "Tokens per engine step.", self.step_tokens)
        page.info("cache_config_info", "Information of the cache config.", self._info)
        if self._adapters:
            running = {r.table.namespace.lora_name for r in scheduler.running} - {""}
            waiting_for = {r.table.namespace.lora_name for r in scheduler.waiting} - {""}
            labels = {
                "max_lora": str(len(self._adapters)),
                "running_lora_adapters": ",".join(sorted(running)),
                "waiting_lora_adapters": ",".join(sorted(waiting_for)),
            }
            page.plain("lora_requests_info", "Running stats on LoRA requests.", labels, self._started)


_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
_CACHED_SOURCES = ("device", "host", "p2p", "disk", "external_unspecified")
_Values = float | Mapping[str, float]


class Page:
    """Writes Prometheus text format 0.0.4 as prometheus_client does: families one after the other, each with
    the series of all engines."""

    def __init__(self) -> None:
        self._labels = ""
        self._started = 0.0
        self._families: dict[str, list[str]] = {}

    def begin(self, labels: str, started: float) -> None:
        """Begin the series of the engine with these labels."""
        self._labels, self._started = labels, started

    def gauge(self, name: str, help_text: str, values: _Values) -> None:
        self._series(self._family(name, help_text, "gauge"), name, values)

    def counter(self, name: str, help_text: str, values: _Values) -> None:
        self._series(self._family(f"{name}_total", help_text, "counter"), f"{name}_total", values)
        by_label = dict.fromkeys(values, self._started) if isinstance(values, Mapping) else self._started
        self._series(self._family(f"{name}_created", help_text, "gauge"), f"{name}_created", by_label)

    def histogram(self, name: str, help_text: str, histogram: Histogram) -> None:
        lines = self._family(name, help_text, "histogram")
        total = 0
        bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
        for le, n in zip(bounds, histogram.counts, strict=True):
            total += n
            lines.append(f'vllm:{name}_bucket{{{self._labels},le="{le}"}} {float(total)}')
        self._series(lines, f"{name}_count", total)
        self._series(lines, f"{name}_sum", histogram.sum)
        self._series(self._family(f"{name}_created", help_text, "gauge"), f"{name}_created", self._started)

    def info(self, name: str, help_text: str, labels: Mapping[str, str]) -> None:
        self.plain(name, help_text, labels, 1.0)

    def plain(self, name: str, help_text: str, labels: Mapping[str, str], value: float) -> None:
        """Write a gauge with its own labels."""
        inner = ",".join(f'{key}="{text}"' for key, text in sorted(labels.items()))
        self._family(name, help_text, "gauge").append(f"vllm:{name}{{{inner}}} {float(value)}")

    def text(self) -> str:
        return "".join(f"{line}\n" for family in self._families.values() for line in family)

    def _family(self, name: str, help_text: str, kind: str) -> list[str]:
        head = [f"# HELP vllm:{name} {help_text}", f"# TYPE vllm:{name} {kind}"]
        return self._families.setdefault(name, head)

    def _series(self, lines: list[str], name: str, values: _Values) -> None:
        if not isinstance(values, Mapping):
            lines.append(f"vllm:{name}{{{self._labels}}} {float(values)}")
            return
        for label, value in values.items():
            lines.append(f"vllm:{name}{{{self._labels},{label}}} {float(value)}")
