"""The spans of this process. Any thread may add spans; another thread sends them. Spans added too fast are lost.

There is one object per process, as with logs. Without `start` it accepts no spans, and OpenTelemetry is not imported.

A trace follows a group of rollouts on its way to a step, or a step on its way to the servers. Ids are hashes, so a span
that is written twice is the same span, and every role takes the same sample.
"""

import hashlib
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from rollstream.topics.config import TracesConfig
from rollstream.topics.logs import event
from rollstream.topics.metrics.values import VALUES
from rollstream.topics.records import BatchGroup, Rollout, SessionEvent

logger = logging.getLogger(__name__)

_LOW = (1 << 64) - 1


class SpanPlace(NamedTuple):
    """A span: its trace and its own number."""

    trace: int
    """128 bits."""
    span: int
    """64 bits."""


def trace_of_group(run: str, group: Rollout | BatchGroup | SessionEvent) -> int:
    """Return the trace of a group, from any of its rollouts, its entry in a batch, or the start of a session."""
    return _number(16, "group", run, group.environment, group.example_id, group.policy_version, group.group_id)


def trace_of_step(run: str, learner: str, step: int) -> int:
    """Return the trace of a learner's step, and of the policy version that it publishes."""
    return _number(16, "step", run, learner, step)


def span_of(trace: int, operation: str, *which: str | int) -> SpanPlace:
    """Return the place of an operation's span in a trace; `which` distinguishes several spans of one operation."""
    return SpanPlace(trace, _number(8, trace, operation, *which))


def is_sampled(trace: int, share: float) -> bool:
    """Whether a trace is in a sample with this share of all traces, as OpenTelemetry's TraceIdRatioBased decides."""
    return trace & _LOW < round(share * (_LOW + 1))


def _number(size: int, *words: str | int) -> int:
    digest = hashlib.sha256(json.dumps(words).encode()).digest()
    return int.from_bytes(digest[:size], "big") or 1


Attribute = str | int | float | bool | Sequence[int] | Sequence[str]
MOST_WAITING = 4096
"""Largest number of spans that wait to be sent; further spans are lost."""
MOST_SENT = 512
"""Largest number of spans in one request."""
_EVERY_S = 1.0
_CLOSE_S = 3.0
_LOG_EVERY_S = 60.0


@dataclass(frozen=True, kw_only=True)
class TraceSpan:
    """An operation that has ended."""

    name: str
    place: SpanPlace
    parent: SpanPlace | None = None
    kind: Literal["producer", "consumer", "client", "internal"] = "internal"
    begin_ns: int
    end_ns: int
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    links: tuple[SpanPlace, ...] = ()


class SpanExporter(Protocol):
    """Sends spans to a collector."""

    def export(self, spans: Sequence[TraceSpan]) -> bool:
        """Send spans; return whether the collector accepted them. This may take some seconds, and raises nothing."""

    def give_up(self) -> None:
        """End an `export` that waits."""


class TraceSpans:
    """Spans that wait for the collector."""

    def __init__(self) -> None:
        self._share = 0.0
        self._exporter: SpanExporter | None = None
        self._thread: threading.Thread | None = None
        self._waiting: deque[TraceSpan] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._logged_s = -_LOG_EVERY_S

    @property
    def enabled(self) -> bool:
        """Whether spans are accepted."""
        return self._thread is not None

    def start(self, share: float, exporter: SpanExporter) -> None:
        """Accept spans of a share of all traces from now on, and send them with `exporter`."""
        self._share, self._exporter, self._stopping = share, exporter, False
        for name in ("rollstream_traces_spans_total", "rollstream_traces_lost_total"):
            VALUES.count(name, 0)
        self._thread = threading.Thread(target=self._send, args=(exporter,), name="traces", daemon=True)
        self._thread.start()

    def wants(self, trace: int) -> bool:
        """Whether a trace is in the sample."""
        return self._thread is not None and is_sampled(trace, self._share)

    def add(self, span: TraceSpan) -> None:
        """Queue a span for sending. Never waits: if the queue is full, the span is lost and counted."""
        with self._changed:
            full = len(self._waiting) >= MOST_WAITING
            if not full:
                self._waiting.append(span)
                if len(self._waiting) >= MOST_SENT:
                    self._changed.notify()
        if full:
            self._lose(1, "spans arrive faster than the collector accepts them")

    def close(self, for_s: float = _CLOSE_S) -> None:
        """Send the waiting spans for a short time, and accept no more."""
        thread, self._thread = self._thread, None
        if thread is None or self._exporter is None:
            return
        with self._changed:
            self._stopping = True
            self._changed.notify()
        thread.join(for_s)
        if thread.is_alive():
            self._exporter.give_up()

    def _send(self, exporter: SpanExporter) -> None:
        stopping = False
        while not stopping:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or len(self._waiting) >= MOST_SENT, _EVERY_S)
                stopping = self._stopping
            while spans := self._taken():
                if exporter.export(spans):
                    VALUES.count("rollstream_traces_spans_total", len(spans))
                else:
                    self._lose(len(spans), "the collector does not accept the spans")

    def _taken(self) -> list[TraceSpan]:
        with self._changed:
            return [self._waiting.popleft() for _ in range(min(len(self._waiting), MOST_SENT))]

    def _lose(self, count: int, reason: str) -> None:
        VALUES.count("rollstream_traces_lost_total", count)
        now = time.monotonic()
        if now - self._logged_s >= _LOG_EVERY_S:
            self._logged_s = now
            event(logger, "spans_lost", level=logging.WARNING, spans=count, reason=reason)


SPANS = TraceSpans()
"""The spans of this process."""


def start(config: TracesConfig, run: str, process: str) -> Callable[[], None]:
    """Accept and send spans if the settings have an endpoint; return the function that stops this.

    Raises ConfigurationError if the packages of the extra `traces` are missing.
    """
    if config.endpoint:
        from rollstream.topics.traces.otlp import OtlpExporter

        SPANS.start(config.sample, OtlpExporter(config.endpoint, run, process))
    return SPANS.close
