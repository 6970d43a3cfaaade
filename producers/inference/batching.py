"""The engine: one thread that decodes the rows of many requests together and swaps weights between batches only.

A request is answered whole by one policy version, whoever else is in the batch; first come, first served.
"""

import hashlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from producers.config import InferenceConfig
from topics.errors import RollstreamError


class Generated(NamedTuple):
    """What was sampled after one prompt."""

    tokens: Sequence[int]
    """Token ids, the end token included when there was one."""
    logprobs: Sequence[float]
    """Their log-probabilities under the distribution sampled from."""
    finish_reason: Literal["stop", "length"]


class Generator(Protocol):
    """A model and its weights. Called from the engine's thread alone."""

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt it takes."""

    @property
    def max_new_tokens(self) -> int:
        """Most tokens it samples after a prompt."""

    def refresh(self) -> int:
        """Take newer weights if there are any; returns the policy version now in place, -1 before the first."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        temperatures: Sequence[float],
        max_tokens: Sequence[int],
    ) -> Sequence[Generated]:
        """Sample after each prompt; the other arguments hold one entry per prompt, seeds below 2**64."""


class NotReady(RollstreamError):
    """No weights have arrived yet, or the engine has stopped."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Rows to decode together under one version."""

    prompts: Sequence[Sequence[int]]
    seeds: Sequence[int]
    temperature: float
    max_tokens: int


@dataclass(frozen=True)
class Answer:
    """The rows of a request, in order, and the version that sampled all of them."""

    version: int
    rows: Sequence[Generated]


@dataclass
class EngineStatistics:
    """Counters since the start."""

    requests: int = 0
    batches: int = 0
    rows: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    generate_s: float = 0.0
    swaps: int = 0


@dataclass
class _Pending:
    request: Request
    future: "Future[Answer]" = field(default_factory=Future)


def row_seed(*parts: int | str) -> int:
    """A 64-bit seed for one row, e.g. of (request seed, sample index): rows of a request are independent."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class Engine:
    """Runs a Generator. An error of `refresh` stops it for good: stale weights must not be served unnoticed."""

    def __init__(
        self, generator: Generator, config: InferenceConfig, *, on_failure: Callable[[], None] = lambda: None
    ) -> None:
        """`on_failure` is called, in the engine's thread, when it stops by an error; `error` then holds it."""
        self.generator = generator
        self.statistics = EngineStatistics()
        self.version = -1
        self.error: Exception | None = None
        self._config = config
        self._on_failure = on_failure
        self._queue: queue.Queue[_Pending] = queue.Queue()
        self._left_over: _Pending | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="inference-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self, timeout_s: float = 30.0) -> None:
        """Finish the batch under way, refuse the rest, and stop."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    @property
    def alive(self) -> bool:
        """Whether requests will be answered."""
        return self._thread.is_alive() and not self._stop.is_set()

    @property
    def waiting(self) -> int:
        """Requests not yet in a batch."""
        return self._queue.qsize() + (self._left_over is not None)

    def submit(self, request: Request) -> "Future[Answer]":
        """Queue a request. Its future raises NotReady when the engine stops first, or what the generator raised."""
        pending = _Pending(request)
        self._queue.put(pending)
        if not self.alive:
            self._refuse_waiting()
        return pending.future

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                first = self._next(self._config.refresh_ms / 1000)
                batch = self._gather(first) if first else []
                version = self.generator.refresh()
                if version != self.version:
                    self.version = version
                    self.statistics.swaps += 1
                if batch:
                    self._decode(batch)
        except Exception as error:  # ends the thread; whoever runs the server raises it
            self.error = error
            self._on_failure()
        finally:
            self._stop.set()
            if self._left_over:
                self._queue.put(self._left_over)
            self._refuse_waiting()

    def _next(self, timeout_s: float) -> _Pending | None:
        if self._left_over:
            pending, self._left_over = self._left_over, None
            return pending
        try:
            return self._queue.get(timeout=max(timeout_s, 0.0))
        except queue.Empty:
            return None

    def _gather(self, first: _Pending) -> list[_Pending]:
        """Whole requests up to max_rows, waiting for more no longer than gather_ms."""
        batch, rows = [first], len(first.request.prompts)
        deadline = time.monotonic() + self._config.gather_ms / 1000
        while rows < self._config.max_rows:
            pending = self._next(deadline - time.monotonic()) if self._queue.empty() else self._next(0)
            if pending is None:
                break
            if rows + len(pending.request.prompts) > self._config.max_rows:
                self._left_over = pending
                break
            batch.append(pending)
            rows += len(pending.request.prompts)
        return batch

    def _decode(self, batch: list[_Pending]) -> None:
        batch = [pending for pending in batch if pending.future.set_running_or_notify_cancel()]
        if not batch:
            return
        if self.version < 0:
            for pending in batch:
                pending.future.set_exception(NotReady("no weights have arrived yet; try again"))
            return
        requests = [pending.request for pending in batch]
        began = time.monotonic()
        try:
            rows = self.generator.generate(
                [prompt for request in requests for prompt in request.prompts],
                [seed for request in requests for seed in request.seeds],
                [request.temperature for request in requests for _ in request.prompts],
                [request.max_tokens for request in requests for _ in request.prompts],
            )
        except Exception as error:  # the batch fails, the engine goes on: the next batch may be sound
            for pending in batch:
                pending.future.set_exception(error)
            return
        # Before the answers: whoever has one finds it in the statistics.
        self._count(requests, rows, time.monotonic() - began)
        start = 0
        for pending in batch:
            stop = start + len(pending.request.prompts)
            pending.future.set_result(Answer(self.version, rows[start:stop]))
            start = stop

    def _count(self, requests: list[Request], rows: Sequence[Generated], elapsed_s: float) -> None:
        self.statistics.requests += len(requests)
        self.statistics.batches += 1
        self.statistics.rows += len(rows)
        self.statistics.prompt_tokens += sum(len(prompt) for request in requests for prompt in request.prompts)
        self.statistics.tokens += sum(len(row.tokens) for row in rows)
        self.statistics.generate_s += elapsed_s

    def _refuse_waiting(self) -> None:
        while True:
            try:
                pending = self._queue.get_nowait()
            except queue.Empty:
                return
            if pending.future.set_running_or_notify_cancel():
                pending.future.set_exception(NotReady("the inference engine has stopped"))
