"""Sends spans to a collector by OTLP over HTTP, with OpenTelemetry's SDK, which no other module imports.

OpenTelemetry's variables OTEL_EXPORTER_OTLP_* set headers, certificates and compression.
"""

import logging
from collections.abc import Sequence

from rollstream.topics.errors import ConfigurationError
from rollstream.topics.traces.spans import SpanPlace, TraceSpan

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.sdk.trace.id_generator import IdGenerator
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON
    from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, TraceFlags, set_span_in_context
except ImportError as missing:
    raise ConfigurationError(
        f"traces.endpoint is set, but {missing.name} is not installed; pip install 'rollstream[traces]'"
    ) from missing

TIMEOUT_S = 5.0
"""Longest time that a request takes, including its retries."""
_KINDS = {
    "producer": SpanKind.PRODUCER,
    "consumer": SpanKind.CONSUMER,
    "client": SpanKind.CLIENT,
    "internal": SpanKind.INTERNAL,
}


class _PlannedIds(IdGenerator):
    """Gives each span the ids that were computed from its records."""

    def __init__(self) -> None:
        self.place = SpanPlace(1, 1)

    def generate_trace_id(self) -> int:
        return self.place.trace

    def generate_span_id(self) -> int:
        return self.place.span


class _Ended(SpanProcessor):
    """Keeps the spans that have ended."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


class OtlpExporter:
    """Sends spans from one thread."""

    def __init__(self, endpoint: str, run: str, process: str) -> None:
        # Failures are counted and logged by our own code.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._ids, self._ended = _PlannedIds(), _Ended()
        role = process.rstrip("0123456789").rstrip("-")
        resource = Resource(
            {"service.name": f"rollstream-{role}", "service.namespace": run, "service.instance.id": process}
        )
        provider = TracerProvider(sampler=ALWAYS_ON, id_generator=self._ids, resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(self._ended)
        self._tracer = provider.get_tracer("rollstream")
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=TIMEOUT_S)

    def export(self, spans: Sequence[TraceSpan]) -> bool:
        """Send spans; return whether the collector accepted them."""
        self._ended.spans.clear()
        for span in spans:
            self._ids.place = span.place
            parent = None if span.parent is None else NonRecordingSpan(_context(span.parent))
            made = self._tracer.start_span(
                span.name,
                context=set_span_in_context(parent) if parent else {},  # type: ignore[arg-type]  # no other context
                kind=_KINDS[span.kind],
                attributes=dict(span.attributes),
                links=[Link(_context(place)) for place in span.links],
                start_time=span.begin_ns,
            )
            made.end(max(span.begin_ns, span.end_ns))
        try:
            return self._exporter.export(self._ended.spans) == SpanExportResult.SUCCESS
        except Exception:  # No error of the client or the collector may end a role.
            return False

    def give_up(self) -> None:
        """End a request that waits for a retry."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


def _context(place: SpanPlace) -> SpanContext:
    return SpanContext(place.trace, place.span, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
