"""The thin shell around the fold: one process of the grouping consumer group, a task for each partition it owns.

Delivery guarantee: exactly once. A task's batches, dead letters, journal and offset commit in one transaction; a crash
anywhere loses nothing and repeats nothing. Scaling is starting more processes; a restart under the same ordinal moves
nothing (static membership).
"""

import logging
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

from consumers.grouping.broker_clock import BrokerClock
from consumers.grouping.config import GrouperConfig, GroupingConfig, check_batch_bytes, largest_batch_bytes
from consumers.grouping.configuring import check_names
from consumers.grouping.figures import GroupingFigures
from consumers.grouping.makers import makers_of
from consumers.grouping.marks import MarkWriter
from consumers.grouping.parts import LEAST_RECORD_BYTES
from consumers.grouping.publisher import Part, TransactionPublisher
from consumers.grouping.restore import Restoration, records_of
from consumers.grouping.state import CommitMetadata
from consumers.grouping.task import GroupingTask
from consumers.transactions import OwnershipLost, fenced
from topics import clients
from topics.catalogue import topic_name
from topics.config import KafkaConfig
from topics.errors import ConfigurationError, StateRefused
from topics.following import TopicFollower
from topics.logs import event
from topics.metrics import MetricsWriter
from topics.records import PolicyManifest
from topics.skipped import SkippedRecords

logger = logging.getLogger(__name__)
_RESTORE_SLICE_S = 0.25
"""How long a restore goes on before the client is polled again; a member that does not poll loses its partitions."""


def run_grouping(
    kafka: KafkaConfig,
    run: str,
    grouping: GroupingConfig,
    grouper: GrouperConfig,
    ordinal: int,
    stop: threading.Event,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Group rollouts until `stop` is set; `on_ready` is called at the first assignment.

    Raises Fenced when another process runs under the same ordinal, StateRefused when stored state and log disagree,
    TopicError when a topic is missing, ConfigurationError for an estimator or maker that does not exist.
    """
    check_names(grouping, makers_of(grouper.makers))
    check_batch_bytes(grouping, kafka.max_record_bytes)
    if kafka.max_record_bytes < LEAST_RECORD_BYTES:
        raise ConfigurationError(
            f"kafka.max_record_bytes {kafka.max_record_bytes} leaves no room for the journal; it must be at least "
            f"{LEAST_RECORD_BYTES}"
        )
    clients.check_broker(kafka)
    GroupingProcess(kafka, run, grouping, grouper, ordinal, on_ready).run(stop)


class GroupingProcess:
    """Consumer, tasks and the publisher of one process."""

    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        grouping: GroupingConfig,
        grouper: GrouperConfig,
        ordinal: int,
        on_ready: Callable[[], None],
    ) -> None:
        self._kafka, self._run, self._grouping, self._grouper = kafka, run, grouping, grouper
        self._name = f"grouper-{run}-{ordinal}"
        self._topic = topic_name(run, "rollouts")
        self._partitions = clients.partitions_of(kafka, self._topic)
        self._topic_id = clients.topic_ids(kafka, [self._topic])[self._topic]
        self._group = grouper.group_id(run)
        self._consumer: Consumer = clients.group_member(kafka, self._group, self._name)
        self._publisher = TransactionPublisher(kafka, run, self._group, ordinal, self._consumer)
        self._clock = BrokerClock()
        self._marks = MarkWriter(kafka, run, self._mark_failed, self._clock.told)
        policies = TopicPartition(topic_name(run, "policies"), 0, OFFSET_BEGINNING)
        self._policies = TopicFollower(kafka, [policies])
        self._skipped = SkippedRecords(self._name)
        """Records of policies and journal that could not be read."""
        self._publishing: list[Part] = []
        """What the transaction that was begun consists of."""
        self._tasks: dict[int, GroupingTask] = {}
        self._suspended: dict[int, GroupingTask] = {}
        """Tasks whose partition was taken away, kept in case it comes back unchanged."""
        self._to_restore: set[int] = set()
        self._restoration: Restoration | None = None
        """The restore that is going on, of one of them."""
        self._to_seek: set[int] = set()
        """Partitions whose task is restored while the client is not yet sent to its position: nothing is taken from
        them until it is."""
        self._seek_put_off: set[int] = set()
        """Those of them of which that was said."""
        self._newest_version = -1
        self._ignored_settings: dict[str, str] = {}
        """How settings given here differ from those of the same generation in the log."""
        self._figures = GroupingFigures(
            MetricsWriter(kafka, run, self._name), self._group, self._topic, grouper.metrics_interval_s
        )
        self._on_ready: Callable[[], None] | None = on_ready

    def run(self, stop: threading.Event) -> None:
        """Run until `stop` is set, then commit and leave."""
        self._publisher.start()
        self._join()
        try:
            while not stop.is_set():
                messages = self._consume()
                self._restore_assigned()
                self._take_in(messages)
                self._seek_restored()
                self._follow_policies()
                self._write_marks()
                self._commit()
                self._write_figures()
            self._close()
        except BaseException:
            # Closing the consumer revokes its partitions; a fold that failed half-way must not be committed then.
            self._tasks.clear()
            raise
        finally:
            self._stop_restoring()
            self._figures.close()
            self._policies.close()
            self._consumer.close()

    # ------------------------------------------------------------------ records

    def _consume(self) -> list[Message]:
        try:
            # What is to be restored does not wait for records.
            timeout_s = 0.0 if self._to_restore else self._grouper.commit_interval_s
            return list(self._consumer.consume(self._grouper.max_poll_records, timeout_s))
        except KafkaException as exception:
            # A fatal error is raised, or comes as a message, as the client happens to learn of it.
            error: KafkaError = exception.args[0]
            if not fenced(error):
                clients.raise_for(error, f"reading {self._topic}")
                return []
            self._join_anew(error.str())
        except SystemError as error:
            # The client lost the exception on its way; what it was matters less than that this consumer is done.
            self._join_anew(str(error))
        return []

    def _take_in(self, messages: list[Message]) -> None:
        position = {task.partition: task.fold.position for task in self._tasks.values()}
        for message in clients.with_unreadable(self._consumer, messages, position):
            partition = -1 if (number := message.partition()) is None else number
            task = None if partition in self._to_seek else self._tasks.get(partition)
            error = message.error()
            if error is None:
                self._clock.passed(message.timestamp()[1])
                if task is not None:
                    task.apply(records_of(message), message.leader_epoch())
            elif error.code() == KafkaError._PARTITION_EOF:
                if task is not None:
                    task.at_end = True
            elif fenced(error):
                self._join_anew(error.str())
                return
            elif error.code() == KafkaError._MAX_POLL_EXCEEDED:
                event(logger, "max_poll_exceeded", level=logging.WARNING, error=error.str())
            else:
                clients.raise_for(error, f"reading {self._topic}")

    def _join(self) -> None:
        self._consumer.subscribe(
            [self._topic], on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
        )

    def _join_anew(self, reason: str) -> None:
        """Another consumer joined under our name: a rival's, or a zombie's, or our own, whose session ended while no
        broker answered. The transactional id tells who is to stay. Raises Fenced where that is not us.
        """
        event(logger, "member_fenced", level=logging.WARNING, error=reason)
        with suppress(OwnershipLost):
            self._settle()
        self._stop_restoring()
        self._tasks.clear()
        self._suspended.clear()
        self._to_restore.clear()
        self._to_seek.clear()
        self._consumer.close()
        self._consumer = clients.group_member(self._kafka, self._group, self._name)
        self._publisher.assert_ours(self._consumer)
        self._join()

    def _follow_policies(self) -> None:
        for _message, manifest in self._skipped.records(PolicyManifest, self._policies.poll(50, 0)):
            self._newest_version = max(self._newest_version, manifest.version)

    def _write_marks(self) -> None:
        self._compare_settings()
        now_ms = self._clock.now_ms
        for task in self._tasks.values():
            for mark in task.due_marks(now_ms, self._newest_version, self._grouping):
                self._marks.write(task.partition, mark)
        self._marks.poll()

    def _compare_settings(self) -> None:
        """Say where this process was given settings that are not in force. The log's are: whatever processes were
        given, they cut the same batches, so that a refusal would end for nothing what goes on as before."""
        compared = [task.ignored_settings(self._grouping) for task in self._tasks.values()]
        ignored = next(filter(None, compared), {})
        if not compared or ignored == self._ignored_settings:
            return
        self._ignored_settings = ignored
        if ignored:
            event(
                logger,
                "settings_ignored",
                level=logging.WARNING,
                generation=self._grouping.generation,
                settings=ignored,
                remedy="raise grouping.generation for them to be in force, or take those in the log",
            )

    def _write_figures(self) -> None:
        if self._grouper.metrics_interval_s <= 0 or not self._figures.due:
            return
        ends = {}
        for partition in self._tasks:
            with suppress(KafkaException):  # of a partition just taken away
                _, end = self._consumer.get_watermark_offsets(TopicPartition(self._topic, partition), cached=True)
                if end >= 0:
                    ends[partition] = end
        restoring = {} if self._restoration is None else {self._restoration.partition: self._restoration.progress}
        folds = (task.fold for task in self._tasks.values())
        more = {"records_skipped_total": self._skipped.total, "settings_ignored": len(self._ignored_settings)}
        self._figures.write(folds, ends, restoring, more)

    def _mark_failed(self, partition: int) -> None:
        if partition in self._tasks:
            self._tasks[partition].mark_failed()

    # ------------------------------------------------------------------ commits

    def _commit(self, *, closing: bool = False) -> None:
        """Begin a transaction with what has changed; one at a time, and records are read on meanwhile."""
        changed = closing or any(task.fold.changed for task in self._tasks.values())
        if not changed and not self._publisher.done:
            return
        try:
            self._settle()
            self._begin([task.take(closing=closing) for task in self._tasks.values() if task.fold.changed or closing])
            if closing:
                self._settle()
        except OwnershipLost as error:
            self._ownership_lost(error)

    def _begin(self, parts: list[Part]) -> None:
        if parts:
            self._publishing = parts
            self._publisher.begin(parts)

    def _settle(self) -> None:
        """Wait for the transaction that was begun. Raises OwnershipLost or Fenced as publishing does."""
        parts, self._publishing = self._publishing, []
        self._publisher.settle()
        if parts:
            self._figures.committed([part.output for part in parts], self._publisher.latest_s)
        for part in parts:
            output = part.output
            for batch in output.batches:
                event(logger, "batch", batch=batch.batch_id, rollouts=len(batch), cut=batch.cut)
            for letter in output.dead_letters:
                event(
                    logger,
                    "dead_letter",
                    level=logging.WARNING,
                    partition=output.journal.partition,
                    offset=letter.record.offset,
                    error=letter.error,
                )

    def _ownership_lost(self, error: OwnershipLost) -> None:
        """What was begun came to nothing: every task starts again from what is committed."""
        event(logger, "ownership_lost", level=logging.WARNING, error=str(error))
        self._tasks.clear()
        self._suspended.clear()
        self._to_restore.update(tp.partition for tp in self._consumer.assignment())

    def _close(self) -> None:
        self._commit(closing=True)
        self._marks.flush(5.0)
        event(logger, "closed", partitions=sorted(self._tasks))

    # ------------------------------------------------------------------ assignment

    def _on_assign(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        event(logger, "assigned", partitions=[tp.partition for tp in partitions])
        self._to_restore.update(tp.partition for tp in partitions)
        if self._on_ready is not None and not partitions:
            self._ready()

    def _on_revoke(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        numbers = [tp.partition for tp in partitions]
        event(logger, "revoked", partitions=numbers)
        try:
            self._settle()
            self._begin([self._tasks[p].take() for p in numbers if p in self._tasks and self._tasks[p].fold.changed])
            self._settle()
        except OwnershipLost as error:
            self._ownership_lost(error)
        self._suspended = {p: self._tasks.pop(p) for p in numbers if p in self._tasks}
        self._to_restore.difference_update(numbers)
        self._to_seek.difference_update(numbers)
        self._stop_restoring(numbers)

    def _on_lost(self, _consumer: Consumer, partitions: list[TopicPartition]) -> None:
        event(logger, "lost", level=logging.WARNING, partitions=[tp.partition for tp in partitions])
        for tp in partitions:
            self._to_restore.discard(tp.partition)
            self._to_seek.discard(tp.partition)
            self._tasks.pop(tp.partition, None)
        self._stop_restoring([tp.partition for tp in partitions])

    def _restore_assigned(self) -> None:
        """Restore what was assigned, one partition after the other, for a while: then the client is polled again, and
        tasks that run go on. Nothing is fetched of a partition meanwhile.
        """
        until = time.monotonic() + _RESTORE_SLICE_S
        while self._to_restore:
            if self._restoration is None:
                self._begin_restoring()
            elif self._restoration.step(max(0.0, until - time.monotonic())):
                assert self._restoration.restored is not None
                room = largest_batch_bytes(self._kafka.max_record_bytes)
                task = GroupingTask(*self._restoration.restored, self._grouper, self._name, room)
                self._restoration = None
                self._restored(task)
            if time.monotonic() >= until:
                break
        else:
            if self._tasks:
                self._ready()

    def _begin_restoring(self) -> None:
        if max(self._to_restore) >= self._partitions:
            raise StateRefused(
                f"{self._topic} has {clients.partitions_of(self._kafka, self._topic)} partitions, and had "
                f"{self._partitions} when this process started; keys have moved, and the new partitions have no "
                f"journal: start a run of another name"
            )
        try:
            self._settle()
        except OwnershipLost as error:
            self._ownership_lost(error)
        for partition in sorted(self._to_restore & self._suspended.keys()):
            if self._last_journal(partition) == self._suspended[partition].journal_offset:
                # Nobody committed in between, so the fold is still what the log says.
                self._restored(self._suspended[partition])
        self._suspended.clear()
        if self._to_restore:
            self._consumer.pause([TopicPartition(self._topic, partition) for partition in self._to_restore])
            self._restoration = Restoration(
                self._kafka,
                self._run,
                min(self._to_restore),
                self._partitions,
                self._topic_id,
                self._grouper,
                self._skipped,
            )

    def _restored(self, task: GroupingTask) -> None:
        self._tasks[task.partition] = task
        self._to_restore.discard(task.partition)
        self._to_seek.add(task.partition)
        self._consumer.resume([TopicPartition(self._topic, task.partition)])

    def _stop_restoring(self, partitions: Collection[int] | None = None) -> None:
        """Give up the restore that is going on, where it is of one of these partitions; None stands for all."""
        if self._restoration is not None and (partitions is None or self._restoration.partition in partitions):
            self._restoration.close()
            self._restoration = None

    def _seek_restored(self) -> None:
        """Have the client read on where the folds are, whatever it thought the position was."""
        for partition in sorted(self._to_seek):
            task = self._tasks.get(partition)
            try:
                if task is not None:
                    self._consumer.seek(TopicPartition(self._topic, partition, task.fold.position))
                self._to_seek.discard(partition)
                self._seek_put_off.discard(partition)
            except KafkaException as error:
                # It has not begun to fetch, or has lost the partition, whose revocation is on its way.
                if partition not in self._seek_put_off:
                    self._seek_put_off.add(partition)
                    event(logger, "seek_put_off", partition=partition, error=str(error))

    def _last_journal(self, partition: int) -> int:
        wanted = [TopicPartition(self._topic, partition)]
        committed = clients.committed(self._kafka, self._consumer, wanted, "reading committed offsets")[0]
        return CommitMetadata.decode(committed.metadata, f"{self._topic}[{partition}]").journal

    def _ready(self) -> None:
        if self._on_ready is not None:
            self._on_ready()
            self._on_ready = None
