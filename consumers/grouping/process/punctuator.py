"""Appends the marks that tasks ask for: for an overdue deadline, a new policy version or a higher generation.

Grouping continues if the host's clock is set back: the clock is read once, then a monotonic clock advances the estimate
of the broker's time, and append times correct it: a record that was read was appended earlier, and the append time of a
record just written is the present time.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core.grouping_task import GroupingTask
from rollstream.consumers.grouping.process.mark_writer import MarkWriter
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.follower import TopicFollower
from rollstream.topics.kafka.records import BEGINNING, KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.logs import event
from rollstream.topics.records import PolicyManifest
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.signatures import MarkSigner

logger = logging.getLogger(__name__)


class BrokerClock:
    """Estimate of the broker's clock in milliseconds."""

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._ahead_ms = int(wall() * 1000) - self._elapsed_ms

    @property
    def now_ms(self) -> int:
        """Present time. It only goes back after a response from the broker, never because the host's clock was set."""
        return self._elapsed_ms + self._ahead_ms

    def passed(self, append_ms: int) -> None:
        """Note that a record with this append time was read: the present time is not earlier."""
        self._ahead_ms = max(self._ahead_ms, append_ms - self._elapsed_ms)

    def told(self, append_ms: int) -> None:
        """Note that the broker appended a record just now with this time."""
        self._ahead_ms = append_ms - self._elapsed_ms

    @property
    def _elapsed_ms(self) -> int:
        return int(self._monotonic() * 1000)


_FLUSH_S = 5.0


class Punctuator:
    """Clock, newest policy version and configuration of one process, which tell its tasks which marks to ask for."""

    def __init__(
        self, kafka: KafkaConfig, run: str, grouping: GroupingConfig, signer: MarkSigner, skipped: SkippedRecords
    ) -> None:
        """`skipped` counts manifests that cannot be read. Raises TopicError if the topic `policies` is missing."""
        self._grouping, self._skipped = grouping, skipped
        self._clock = BrokerClock()
        self._failed: set[int] = set()
        """Partitions with a mark that was not delivered."""
        self._signer = signer
        self._marks = MarkWriter(kafka, run, signer, self._failed.add, self._clock.told)
        self._policies = TopicFollower(kafka, {(topic_name(run, "policies"), 0): BEGINNING})
        self._newest_version = -1
        self.ignored_settings: dict[str, str] = {}
        """Settings of this process that differ from those of the same generation in the log."""

    def passed(self, records: Sequence[KafkaRecord]) -> None:
        """Note that these records were read: the present time is not before their latest append time."""
        if records:
            self._clock.passed(max(record.timestamp_ms for record in records))

    def punctuate(self, tasks: Mapping[int, GroupingTask]) -> None:
        """Append the marks that these tasks ask for now. A mark that was not delivered is asked for again.

        Raises StateRefused if a task's configuration requires signatures that this process cannot make.
        """
        for task in tasks.values():
            self._signer.check(task.fold.config.mark_keys)
        self._follow_policies()
        self._compare_settings(tasks)
        now_ms = self._clock.now_ms
        for task in tasks.values():
            for mark in task.due_marks(now_ms, self._newest_version, self._grouping):
                self._marks.write(task.partition, mark)
        self._marks.poll()
        for partition in self._failed & tasks.keys():
            tasks[partition].mark_failed()
        self._failed.clear()

    def flush(self) -> None:
        """Wait a few seconds for the marks to be delivered."""
        self._marks.flush(_FLUSH_S)

    def close(self) -> None:
        """Stop following the policies."""
        self._policies.close()

    def _follow_policies(self) -> None:
        for _message, manifest in self._skipped.records(PolicyManifest, self._policies.poll(50, 0)):
            self._newest_version = max(self._newest_version, manifest.version)

    def _compare_settings(self, tasks: Mapping[int, GroupingTask]) -> None:
        """Log a warning if settings of this process are not in force. The settings in the log are in force instead, so
        that all processes cut the same batches, and this process can continue."""
        compared = [task.ignored_settings(self._grouping) for task in tasks.values()]
        ignored = next(filter(None, compared), {})
        if not compared or ignored == self.ignored_settings:
            return
        self.ignored_settings = ignored
        if ignored:
            event(
                logger,
                "settings_ignored",
                level=logging.WARNING,
                generation=self._grouping.generation,
                settings=ignored,
                remedy="raise grouping.generation to put them in force, or use the settings in the log",
            )
