"""Sends spans to an OpenTelemetry collector by OTLP over HTTP, from a thread of the SDK.

The only module that knows opentelemetry; main imports it when traces are asked for. At most QUEUE spans wait.
While the collector does not take them they are dropped and counted, and one line is logged. The SDK's own
messages are left out, unless `--log-level opentelemetry=…` asks for them. Headers, certificates, timeout,
compression and batches are those of the standard's OTEL_* variables.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from threading import Thread

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from perilune_gateway.model.tracing import Trace
from perilune_gateway.observe.spans import Sent, Span

log = logging.getLogger(__name__)

QUEUE = 2048
"""Spans that may wait for the collector; about 4 KB each."""
CLOSE_S = 2.0
"""Seconds for the last spans when the gateway stops."""


class Collector:
    """One collector. `count` is called with the fates of spans, also from the SDK's thread."""

    def __init__(self, url: str, pool: str, count: Callable[[Sent, int], None]) -> None:
        """`url`: the base, to which OTLP's path is added. `pool`: namespace and name."""
        sdk = logging.getLogger("opentelemetry")
        if sdk.level == logging.NOTSET:
            sdk.setLevel(logging.CRITICAL)
        self._count = count
        self._ids = _Ids()
        self._counting = _Counting(url, count)
        self._sent = 0
        name = os.environ.get("OTEL_SERVICE_NAME", "perilune-gateway")
        self._provider = TracerProvider(
            ALWAYS_ON,
            Resource.create({SERVICE_NAME: name, "perilune.pool": pool}),
            shutdown_on_exit=False,
            id_generator=self._ids,
        )
        self._provider.add_span_processor(BatchSpanProcessor(self._counting, QUEUE))
        self._tracer = self._provider.get_tracer("perilune_gateway")

    def send(self, span: Span) -> None:
        """Hand a span to the SDK's thread."""
        if self._sent - self._counting.settled >= QUEUE:
            self._count(Sent.DROPPED, 1)
            return
        self._sent += 1
        self._ids.trace = trace = span.trace
        parent = SpanContext(trace.trace_id, trace.parent_id, True, TraceFlags(trace.flags))
        made = self._tracer.start_span(
            span.name,
            set_span_in_context(NonRecordingSpan(parent)) if trace.parent_id else None,
            SpanKind.CLIENT,
            span.attributes,
            start_time=_nanoseconds(trace.started_at),
        )
        for name, at in span.events:
            made.add_event(name, timestamp=_nanoseconds(at))
        if span.failed:
            made.set_status(Status(StatusCode.ERROR))
        made.end(_nanoseconds(span.ended_at))

    def close(self) -> None:
        """Send the last spans, for at most CLOSE_S."""
        closing = Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)


class _Ids(IdGenerator):
    """Gives the SDK the identifiers that the engine was told."""

    trace: Trace

    def generate_span_id(self) -> int:
        return self.trace.span_id

    def generate_trace_id(self) -> int:
        return self.trace.trace_id


class _Counting(SpanExporter):
    """OTLP's exporter; counts what it sends, and logs when the collector begins or ceases to take spans."""

    def __init__(self, url: str, count: Callable[[Sent, int], None]) -> None:
        self._otlp = OTLPSpanExporter(url.rstrip("/") + "/v1/traces")
        self._url = url
        self._count = count
        self._takes = True
        self.settled = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._otlp.export(spans)
        except Exception:  # for the SDK's thread, which would log every batch
            result = SpanExportResult.FAILURE
        takes = result is SpanExportResult.SUCCESS
        self.settled += len(spans)
        self._count(Sent.EXPORTED if takes else Sent.FAILED, len(spans))
        if takes != self._takes:
            self._takes = takes
            say = log.info if takes else log.warning
            say("traces collector=%s %s", self._url, "takes spans" if takes else "does not take spans")
        return result

    def shutdown(self) -> None:
        self._otlp.shutdown()  # type: ignore[no-untyped-call]


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
