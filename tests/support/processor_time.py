"""Measures what code costs, to compare costs: no other thread or process counts, nor the garbage of other tests."""

import gc
import time


class ProcessorTime:
    """Processor seconds of this thread within the context, in which the garbage collector is off.

    A collection visits every object of the process, and earlier tests have left many.
    """

    seconds: float = 0.0

    def __enter__(self) -> "ProcessorTime":
        gc.collect()
        gc.disable()
        self._began = time.thread_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.thread_time() - self._began
        gc.enable()
