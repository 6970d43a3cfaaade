"""Base class for followers of a run in a separate thread; an error that ends it is raised when their state is read."""

import threading
from typing import Self

from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig


class Tailer(Closing):
    """Runs `_follow` in a thread between `start` and `close`; use it as a context manager."""

    def __init__(self, kafka: KafkaConfig, name: str) -> None:
        self._kafka = kafka
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(self._kafka.patience_s)

    def __enter__(self) -> Self:
        self.start()
        return self

    def _check(self) -> None:
        """Raise the error that stopped the thread, if any."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._follow()
        except Exception as error:  # `_check` raises it in the caller's thread
            self._error = error

    def _follow(self) -> None:
        """Follow until `_stop` is set; subclasses define it."""
        raise NotImplementedError
