"""Publisher of a component's metrics: a record on the topic `metrics` at regular intervals while the component runs.

Workers, evaluators, servers and gateways use it. A record holds totals since the start of the process and rates over
the time since the previous record, so each record can be read by itself. Publishing never disturbs the component.
"""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from rollstream.topics.config import KafkaConfig
from rollstream.topics.metrics.writer import MetricsWriter

TOTAL = "_total"
"""Suffix of metrics that only grow; the rate of `tokens_total` is published as `tokens_per_s`."""
RUNNING = "running"
"""1 while the component runs, 0 in its last record."""


def rates(before: Mapping[str, float], now: Mapping[str, float], elapsed_s: float) -> dict[str, float]:
    """Return the growth per second of each total from `before` to `now`, `elapsed_s` apart; 0 if no time has passed."""
    return {
        f"{name.removesuffix(TOTAL)}_per_s": max(value - before.get(name, 0.0), 0.0) / elapsed_s if elapsed_s else 0.0
        for name, value in now.items()
        if name.endswith(TOTAL)
    }


class MetricsPublisher:
    """Publishes what `read` returns every `interval_s` seconds and once at the end; an async context manager."""

    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        component: str,
        role: str,
        read: Callable[[], Mapping[str, float]],
        *,
        interval_s: float,
    ) -> None:
        """`role` is the command that runs the component, such as env or infer; with `interval_s` 0 nothing is written.

        `read` runs on the event loop and must not wait.
        """
        self._kafka, self._run, self._component = kafka, run, component
        self._role = role
        self._labels = {"role": role, "host": socket.gethostname(), "pid": str(os.getpid())}
        self._read = read
        self._interval_s = interval_s
        self._writer: MetricsWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._before: Mapping[str, float] = {}
        self._read_at_s = 0.0

    async def __aenter__(self) -> Self:
        if self._interval_s > 0:
            self._writer = MetricsWriter(self._kafka, self._run, self._component, self._role)
            self._before, self._read_at_s = dict(self._read()), time.monotonic()
            self._task = asyncio.create_task(self._publish(self._writer))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._task is None or self._writer is None:
            return
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._write(self._writer, running=False)
        await asyncio.to_thread(self._writer.close)

    async def _publish(self, writer: MetricsWriter) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            self._write(writer, running=True)

    def _write(self, writer: MetricsWriter, *, running: bool) -> None:
        values, now_s = dict(self._read()), time.monotonic()
        per_s = rates(self._before, values, now_s - self._read_at_s)
        self._before, self._read_at_s = values, now_s
        writer.write({**values, **per_s, RUNNING: float(running)}, self._labels)
