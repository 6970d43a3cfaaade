"""Approach of a restored task to the offsets that it must leave out, before its group member seeks past them.

Records before such an offset are read here and applied like any other; the offset itself is never fetched.
"""

import time
from collections.abc import Generator

from rollstream.consumers.grouping.core.grouping_task import GroupingTask
from rollstream.consumers.grouping.process.restoration import records_of
from rollstream.topics.catalogue import topic_name
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.skipping_reader import records_between


class Approach:
    """Reads a task's partition up to the last offset that must be left out, without fetching those offsets."""

    def __init__(self, kafka: KafkaConfig, run: str, task: GroupingTask) -> None:
        self._kafka, self._topic, self._task = kafka, topic_name(run, "rollouts"), task
        self._reading = self._read()

    def step(self, for_s: float) -> bool:
        """Continue for about `for_s` seconds; return whether it is done. Raises the errors of GroupingTask.apply."""
        until = time.monotonic() + for_s
        return all(time.monotonic() < until for _ in self._reading)

    def close(self) -> None:
        """Stop the approach if it is not done."""
        self._reading.close()

    def _read(self) -> Generator[None]:
        task, left_out = self._task, self._task.fold.hops_ahead()
        stop = left_out[-1] + 1
        for message in records_between(self._kafka, self._topic, task.partition, task.fold.position, stop, left_out):
            if message is not None:
                task.apply(records_of(message), message.leader_epoch)
            yield
        task.hop(stop)
