"""A receiver of OTLP over HTTP, as any collector is, that keeps the spans it is sent."""

import gzip
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from rollstream.topics.closing import Closing


@dataclass(frozen=True)
class ReceivedSpan:
    """One span, as it came over the wire."""

    service: str
    name: str
    trace: int
    span: int
    parent: int
    kind: int
    begin_ns: int
    end_ns: int
    attributes: dict[str, Any]
    links: tuple[tuple[int, int], ...]


class OtlpCollector(Closing):
    """Listens on a free port of this machine."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.spans += received(body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                """Stay silent."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in list(self.spans) if span.name == name]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def received(body: bytes) -> list[ReceivedSpan]:
    """Spans of a request."""
    request = ExportTraceServiceRequest.FromString(body)
    return [
        ReceivedSpan(
            service=values(of_resource.resource.attributes)["service.name"],
            name=span.name,
            trace=int.from_bytes(span.trace_id, "big"),
            span=int.from_bytes(span.span_id, "big"),
            parent=int.from_bytes(span.parent_span_id, "big"),
            kind=span.kind,
            begin_ns=span.start_time_unix_nano,
            end_ns=span.end_time_unix_nano,
            attributes=values(span.attributes),
            links=tuple((int.from_bytes(k.trace_id, "big"), int.from_bytes(k.span_id, "big")) for k in span.links),
        )
        for of_resource in request.resource_spans
        for of_scope in of_resource.scope_spans
        for span in of_scope.spans
    ]


def values(attributes: Any) -> dict[str, Any]:
    collected: dict[str, Any] = {}
    for attribute in attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        collected[attribute.key] = [item.int_value for item in value.values] if kind == "array_value" else value
    return collected
