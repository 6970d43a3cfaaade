"""An endless iterator of batches, half from replay and half from demonstrations; a thread can draw them in advance.

It waits until both buffers have enough trajectories. An error in the thread is raised when the next batch is requested.
"""

import queue
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from rollstream.topics.closing import Closing
from rollstream.topics.errors import ConfigurationError, DeadlineExceeded, RecordError

_LOOK_S = 0.02


class SampleSource(Protocol):
    """A buffer to draw batches from, such as a TrajectoryReplayBuffer."""

    def is_ready(self, min_size: int) -> bool:
        """Whether at least `min_size` trajectories are held."""

    def sample(self, num_chunks: int, /) -> dict[str, Any]:
        """Draw rows as nested arrays."""


class MixedDataset(Closing):
    """Endless batches of `batch_size` rows. With demonstrations, half of the rows are from each buffer, replayed rows
    first, and a batch has one row fewer if the size is odd.

    `prefetch_size` batches are drawn in advance; 0 draws each on request. A draw counts when it is made, so the
    checkpoint of a buffer also counts draws of batches that were not requested yet. With `ready_timeout_s` None the
    iterator waits without limit.
    """

    def __init__(
        self,
        replay_buffer: SampleSource,
        demo_buffer: SampleSource | None = None,
        *,
        batch_size: int,
        min_replay_buffer_size: int = 1,
        min_demo_buffer_size: int = 1,
        prefetch_size: int = 0,
        ready_timeout_s: float | None = None,
    ) -> None:
        """Set up the iterator. Raises ConfigurationError for invalid settings."""
        if batch_size < (1 if demo_buffer is None else 2) or prefetch_size < 0:
            raise ConfigurationError(
                f"batch_size is {batch_size} and prefetch_size is {prefetch_size}; give at least one row for each "
                "buffer, and a prefetch_size of 0 or more"
            )
        self._replay, self._demo = replay_buffer, demo_buffer
        self._batch_size = batch_size
        self._least = (min_replay_buffer_size, min_demo_buffer_size)
        self._ready_timeout_s = ready_timeout_s
        self._closing = threading.Event()
        self._waiting: queue.Queue[dict[str, Any] | Exception] = queue.Queue(prefetch_size)
        self._thread: threading.Thread | None = None
        self._prefetch = prefetch_size > 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield batches until `close`. Raises DeadlineExceeded if the buffers are not filled in time, RecordError if
        their arrays differ, and the errors of drawing."""
        if not self._prefetch:
            while self._wait():
                yield self._draw()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._prefetch_batches, name="trajectory-prefetch", daemon=True)
            self._thread.start()
        while not self._closing.is_set():
            try:
                batch = self._waiting.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            if isinstance(batch, Exception):
                self.close()
                raise batch
            yield batch

    def close(self) -> None:
        """End iterators and the thread; the buffers stay open."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _prefetch_batches(self) -> None:
        drawn: dict[str, Any] | Exception | None = None
        while not isinstance(drawn, Exception) and not self._closing.is_set():
            try:
                drawn = self._draw() if self._wait() else None
            except Exception as error:  # The iterator raises the error.
                drawn = error
            while drawn is not None and not self._closing.is_set():
                try:
                    self._waiting.put(drawn, timeout=_LOOK_S)
                    break
                except queue.Full:
                    continue

    def _wait(self) -> bool:
        """Wait until the buffers have enough trajectories; return False if the dataset is closed first."""
        deadline = None if self._ready_timeout_s is None else time.monotonic() + self._ready_timeout_s
        while not self._closing.is_set():
            if self._replay.is_ready(self._least[0]) and (self._demo is None or self._demo.is_ready(self._least[1])):
                return True
            if deadline is not None and time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"the buffers did not reach {self._least[0]} replayed trajectories and {self._least[1]} "
                    f"demonstrations within {self._ready_timeout_s:g} s; check that they are being filled"
                )
            self._closing.wait(_LOOK_S)
        return False

    def _draw(self) -> dict[str, Any]:
        if self._demo is None:
            return self._replay.sample(self._batch_size)
        half = self._batch_size // 2
        return join_batches(self._replay.sample(half), self._demo.sample(half))


def join_batches(first: Mapping[str, Any], second: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Join two nested batches, rows of the first before those of the second. Raises RecordError naming arrays that
    only one batch has, or that differ in dtype or shape."""
    if set(first) != set(second):
        lone = sorted(f"{above}{name}" for name in set(first) ^ set(second))
        raise RecordError(f"only one of the two buffers has {', '.join(lone)}; give both the same arrays")
    batch: dict[str, Any] = {}
    for name, ours in first.items():
        theirs, path = second[name], f"{above}{name}"
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            batch[name] = join_batches(ours, theirs, f"{path}/")
            continue
        if isinstance(ours, Mapping) or isinstance(theirs, Mapping):
            raise RecordError(f"{path} is an array in one of the two buffers, and several arrays in the other")
        if ours.dtype != theirs.dtype or ours.shape[1:] != theirs.shape[1:]:
            raise RecordError(
                f"{path} is {ours.dtype} {list(ours.shape[1:])} in one of the two buffers and {theirs.dtype} "
                f"{list(theirs.shape[1:])} in the other; give both the same arrays"
            )
        batch[name] = np.concatenate([ours, theirs])
    return batch
