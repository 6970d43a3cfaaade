"""The inference engine: one thread that decodes rows of many requests, which join and leave while others are decoded.

Rows start in the order in which requests arrived. Newer weights are loaded between two calls of the generator, without
ending any row, so each sequence records which version sampled which of its tokens.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from rollstream.producers.config import InferenceConfig
from rollstream.producers.inference.decoding import (
    DecodedTokens,
    DecodeRequest,
    DecodeResult,
    DecodeRow,
    FinishReason,
    Generator,
    NotReady,
    PolicySpan,
    SampledSequence,
)
from rollstream.topics.heartbeats import beat

_ABANDON_S = 5.0
"""Longest wait for the generator's last call when the engine closes."""
_STOPPED = "the inference engine has stopped"


@dataclass
class EngineStatistics:
    """Counters since the start of the engine."""

    requests: int = 0
    """Requests answered."""
    rows: int = 0
    """Rows of these requests."""
    prompt_tokens: int = 0
    tokens: int = 0
    """Tokens sampled, including the tokens of cancelled rows."""
    decode_calls: int = 0
    generate_s: float = 0.0
    swaps: int = 0


class _Sequence:
    """The tokens of one row so far."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[PolicySpan] = []
        self.routed_experts: NDArray[Any] | None = None
        self.kept: list[Sequence[int]] = []
        self.finish_reason: FinishReason | None = None

    def extend(self, decoded: DecodedTokens, version: int) -> None:
        start = len(self.tokens)
        self.tokens += decoded.tokens
        self.logprobs += decoded.logprobs
        self.kept += decoded.kept
        self.finish_reason = decoded.finish_reason
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.spans.append(PolicySpan(version, start, len(self.tokens)))


@dataclass
class _Pending:
    """A request that is not yet answered."""

    request: DecodeRequest
    future: "Future[DecodeResult]" = field(default_factory=Future)
    started: int = 0
    """Rows that were given a slot."""
    unfinished: int = 0
    """Rows that have not ended."""
    sequences: list[_Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.unfinished = len(self.request.prompts)
        self.sequences = [_Sequence() for _ in self.request.prompts]

    def fail(self, error: Exception) -> None:
        if not self.future.done() and self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)

    def result(self) -> DecodeResult:
        rows = [
            SampledSequence(
                tokens=each.tokens,
                logprobs=each.logprobs,
                finish_reason=each.finish_reason or "length",
                spans=each.spans,
                routed_experts=each.routed_experts,
                kept=each.kept,
            )
            for each in self.sequences
        ]
        return DecodeResult(min(span.version for row in rows for span in row.spans), rows)


class Engine:
    """Runs a Generator. An error of `refresh` stops it for good, so that it never serves stale weights unnoticed."""

    def __init__(
        self, generator: Generator, config: InferenceConfig, *, on_failure: Callable[[], None] = lambda: None
    ) -> None:
        """`on_failure` is called in the engine's thread when an error stops it; `error` then holds that error."""
        self.generator = generator
        self.statistics = EngineStatistics()
        self.version = -1
        self.error: Exception | None = None
        self._config = config
        self._on_failure = on_failure
        self._arrivals: queue.Queue[_Pending] = queue.Queue()
        self._waiting: deque[_Pending] = deque()
        """Requests with rows that have no slot yet."""
        self._in_slots: dict[int, tuple[_Pending, int]] = {}
        """The request and the index of the row in each slot."""
        self._stop = threading.Event()
        self._abandon = threading.Event()
        self._thread = threading.Thread(target=self._run, name="inference-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self, timeout_s: float = 30.0) -> None:
        """Refuse requests that have not started, finish started requests, and stop; after `timeout_s`, refuse all."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
            self._abandon.set()
            self._thread.join(_ABANDON_S)

    @property
    def alive(self) -> bool:
        """Whether the engine accepts requests."""
        return self._thread.is_alive() and not self._stop.is_set()

    @property
    def waiting(self) -> int:
        """Requests with rows that have no slot yet."""
        return self._arrivals.qsize() + len(self._waiting)

    @property
    def decoding(self) -> int:
        """Rows in slots."""
        return len(self._in_slots)

    def submit(self, request: DecodeRequest) -> "Future[DecodeResult]":
        """Queue a request. Cancelling its future ends its rows.

        The future raises NotReady if the engine stops first, or the generator's error.
        """
        pending = _Pending(request)
        self._arrivals.put(pending)
        if not self.alive:
            self._refuse_arrivals()
        return pending.future

    def _run(self) -> None:
        try:
            while not self._abandon.is_set():
                beat("decoding")
                if self._stop.is_set():
                    self._refuse_not_started()
                    if not self._in_slots and not self._waiting:
                        break
                else:
                    self._receive()
                self._end_cancelled()
                self._swap()
                try:
                    self._start_rows()
                    self._decode()
                except Exception as error:  # only these requests fail, and the engine continues with others
                    self._fail_started(error)
                    self.generator.reset()
        except Exception as error:  # ends the thread; `InferenceServer.serve_until` raises it
            self.error = error
            self._on_failure()
        finally:
            self._stop.set()
            self._fail_started(NotReady(_STOPPED))
            self._refuse_not_started()

    def _receive(self) -> None:
        """Receive requests that have arrived. If there is no work, wait for a request, then gather_ms for more."""
        timeout_s = 0.0 if self._in_slots or self._waiting else self._config.refresh_ms / 1000
        deadline = time.monotonic() + timeout_s
        rows = 0
        while rows < self.generator.free or timeout_s == 0:
            left_s = deadline - time.monotonic()
            try:
                pending = self._arrivals.get(timeout=left_s) if left_s > 0 else self._arrivals.get_nowait()
            except queue.Empty:
                return
            if rows == 0 and timeout_s > 0:
                deadline = time.monotonic() + self._config.gather_ms / 1000
            self._waiting.append(pending)
            rows += len(pending.request.prompts)

    def _swap(self) -> None:
        """Load newer weights; if swap is between_requests, only while no started request is unfinished."""
        started = self._in_slots or any(pending.started for pending in self._waiting)
        if self._config.swap == "between_requests" and started:
            return
        version = self.generator.refresh()
        if version != self.version:
            self.version = version
            self.statistics.swaps += 1

    def _start_rows(self) -> None:
        """Give free slots to waiting rows, in the order of arrival."""
        if self.version < 0:
            while self._waiting:
                self._waiting.popleft().fail(NotReady("no weights have arrived yet; try again"))
            return
        hold = self._config.swap == "between_requests" and self._in_slots and self.generator.behind
        free = self.generator.free
        rows: list[tuple[_Pending, int]] = []
        while self._waiting and len(rows) < free:
            pending = self._waiting[0]
            if hold and not pending.started:
                break
            stop = min(len(pending.request.prompts), pending.started + free - len(rows))
            rows += [(pending, index) for index in range(pending.started, stop)]
            pending.started = stop
            if stop == len(pending.request.prompts):
                self._waiting.popleft()
        if not rows:
            return
        began = time.monotonic()
        try:
            slots = self.generator.start([DecodeRow(pending.request, index) for pending, index in rows])
        except Exception as error:
            for pending in {id(pending): pending for pending, _ in rows}.values():
                pending.fail(error)
            raise
        self._in_slots.update(zip(slots, rows, strict=True))
        self.statistics.generate_s += time.monotonic() - began

    def _decode(self) -> None:
        if not self._in_slots:
            return
        began = time.monotonic()
        decoded = self.generator.decode()
        self.statistics.generate_s += time.monotonic() - began
        self.statistics.decode_calls += 1
        finished = []
        for tokens in decoded:
            pending, index = self._in_slots[tokens.slot]
            self.statistics.tokens += len(tokens.tokens)
            if self._deliver(pending, index, tokens):
                del self._in_slots[tokens.slot]
                pending.unfinished -= 1
                if not pending.unfinished:
                    finished.append(pending)
        for pending in finished:
            # Count before setting results, so that a client that has a result finds it in the statistics.
            request = pending.request
            self.statistics.requests += 1
            self.statistics.rows += len(request.prompts)
            self.statistics.prompt_tokens += sum(map(len, request.prompts))
            if not pending.future.done() and pending.future.set_running_or_notify_cancel():
                pending.future.set_result(pending.result())

    def _deliver(self, pending: _Pending, index: int, decoded: DecodedTokens) -> bool:
        """Add tokens to a row and pass them to `on_tokens`; return whether the row has ended and left its slot."""
        request, sequence = pending.request, pending.sequences[index]
        sequence.extend(decoded, self.version)
        if pending.future.done():
            return sequence.finish_reason is not None
        try:
            if request.on_tokens:
                request.on_tokens(index, decoded.tokens, decoded.logprobs)
            if decoded.finish_reason is None and request.ends and request.ends(sequence.tokens, len(decoded.tokens)):
                sequence.finish_reason = "stop"
                self.generator.end(decoded.slot)
        except Exception as error:  # raised by the request's own callback: only this request fails
            pending.fail(error)
        if sequence.finish_reason is not None and request.routed_experts:
            # No other row takes the slot before the next call of `start`.
            computed = len(request.prompts[index]) + len(sequence.tokens) - 1
            sequence.routed_experts = self.generator.routed_experts(decoded.slot, computed)
        return sequence.finish_reason is not None

    def _end_cancelled(self) -> None:
        """Free the slots of requests that were cancelled or have failed."""
        self._waiting = deque(pending for pending in self._waiting if not pending.future.done())
        for slot in [slot for slot, (pending, _) in self._in_slots.items() if pending.future.done()]:
            self.generator.end(slot)
            del self._in_slots[slot]

    def _fail_started(self, error: Exception) -> None:
        """Fail every request that has started, because an error of the generator may have lost its rows."""
        started = [pending for pending, _ in self._in_slots.values()]
        started += [pending for pending in self._waiting if pending.started]
        self._in_slots.clear()
        for pending in {id(pending): pending for pending in started}.values():
            pending.fail(error)
        self._waiting = deque(pending for pending in self._waiting if not pending.started)

    def _refuse_not_started(self) -> None:
        self._refuse_arrivals()
        for pending in self._waiting:
            if not pending.started:
                pending.fail(NotReady(_STOPPED))
        self._waiting = deque(pending for pending in self._waiting if pending.started)

    def _refuse_arrivals(self) -> None:
        while True:
            try:
                self._arrivals.get_nowait().fail(NotReady(_STOPPED))
            except queue.Empty:
                return
