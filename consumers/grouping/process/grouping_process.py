"""A process of the grouping consumer group, with a task for each partition that it owns.

Delivery guarantee: exactly once. A task's batches, dead letters, journal and offset are committed in one transaction; a
crash anywhere loses nothing and repeats nothing. The group scales with the number of processes. Under the classic
protocol, a restart under the same ordinal within kafka.session_timeout_s moves no partition (static membership).
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from rollstream.consumers.grouping.config import GrouperConfig, GroupingConfig, check_batch_bytes
from rollstream.consumers.grouping.core.configuration_marks import check_names
from rollstream.consumers.grouping.core.plug_ins import load_plug_ins
from rollstream.consumers.grouping.core.task_journal import LEAST_RECORD_BYTES
from rollstream.consumers.grouping.process.committer import GATHER_S, CommitPace, Committer, TransactionPublisher
from rollstream.consumers.grouping.process.grouping_metrics import GroupingFigures
from rollstream.consumers.grouping.process.punctuator import Punctuator
from rollstream.consumers.grouping.process.restorer import Restorer
from rollstream.consumers.grouping.process.task_manager import TaskManager
from rollstream.consumers.transactions import OwnershipLost
from rollstream.topics.config import KafkaConfig
from rollstream.topics.control.named_records import PAUSED, ControlWatch
from rollstream.topics.errors import ConfigurationError, Fenced
from rollstream.topics.heartbeats import beat
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.groups import GroupMember, MembershipLost
from rollstream.topics.kafka.reader import Polled
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.kafka.topic_admin import TopicWatch
from rollstream.topics.logs import event
from rollstream.topics.metrics.writer import MetricsWriter
from rollstream.topics.records import PausedPartition
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.signatures import MarkSigner

logger = logging.getLogger(__name__)


class ReadingPace:
    """Says how many records the next poll may return, and waits until at least one may be read."""

    def __init__(
        self,
        records_per_s: float,
        turn_s: float,
        clock: Callable[[], float] | None = None,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        """A `records_per_s` of 0 sets no limit. Unused allowance accumulates for at most `turn_s`, so that no burst
        follows idle time."""
        self._rate, self._clock, self._sleep = records_per_s, clock or time.monotonic, sleep or time.sleep
        self._room = max(1.0, records_per_s * turn_s)
        self._left = self._room
        self._at = self._clock()

    def most(self, limit: int) -> int:
        """Return how many records may be read now, at least 1 and at most `limit`.

        Waits until half of a turn's records may be read, because many polls of a few records each would cost more time.
        """
        if not self._rate:
            return limit
        self._refill()
        if (lacking := max(1.0, self._room / 2) - self._left) > 0:
            self._sleep(lacking / self._rate)
            self._refill()
        return max(1, min(limit, math.floor(self._left)))

    def passed(self, records: int) -> None:
        """Count records that were read."""
        self._left -= records

    def _refill(self) -> None:
        now = self._clock()
        self._left = min(self._room, self._left + (now - self._at) * self._rate)
        self._at = now


_REPORT_EVERY_S = 5.0


def run_grouping(
    kafka: KafkaConfig,
    run: str,
    grouping: GroupingConfig,
    grouper: GrouperConfig,
    ordinal: int,
    stop: threading.Event,
    on_ready: Callable[[], None] = lambda: None,
    on_progress: Callable[[str], object] = lambda _progress: None,
) -> None:
    """Group rollouts until `stop` is set; `on_ready` is called once the tasks of the first assignment are restored, and
    before that `on_progress` receives the progress of the restores every few seconds.

    Raises Fenced if another process runs under the same ordinal, StateRefused if stored state and log disagree,
    TopicError if a topic is missing, BrokerUnavailable if no broker answers, and ConfigurationError for an estimator or
    maker that does not exist.
    """
    check_names(grouping, load_plug_ins(grouper))
    check_batch_bytes(grouping, kafka.max_record_bytes)
    if kafka.max_record_bytes < LEAST_RECORD_BYTES:
        raise ConfigurationError(
            f"kafka.max_record_bytes {kafka.max_record_bytes} leaves no room for the journal; it must be at least "
            f"{LEAST_RECORD_BYTES}"
        )
    clients.check_broker(kafka)
    GroupingProcess(kafka, run, grouping, grouper, ordinal, on_ready, on_progress).run(stop)


class GroupingProcess:
    """Group member, tasks and publisher of one process."""

    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        grouping: GroupingConfig,
        grouper: GrouperConfig,
        ordinal: int,
        on_ready: Callable[[], None],
        on_progress: Callable[[str], object] = lambda _progress: None,
    ) -> None:
        self._kafka, self._run, self._grouper = kafka, run, grouper
        self._name = grouper.member(run, ordinal)
        self._pace = ReadingPace(grouper.records_per_s, grouper.commit_interval_s)
        self._topic = topic_name(run, "rollouts")
        self._group = grouper.group_id(run)
        self._skipped = SkippedRecords(self._name)
        """Records of `policies` and `journal` that could not be read."""
        self._restorer = Restorer(kafka, run, grouper, self._name, self._skipped)
        self._member = self._new_member()
        self._publisher = TransactionPublisher(kafka, run, self._group, ordinal, self._member)
        self._punctuator = Punctuator(kafka, run, grouping, MarkSigner(grouper.signing_key), self._skipped)
        self._pauses = ControlWatch(kafka, run, PAUSED, PausedPartition, required=False)
        self._figures = GroupingFigures(
            MetricsWriter(kafka, run, self._name, "group"),
            self._group,
            self._topic,
            grouper.metrics_interval_s,
        )
        self._topic_watch = TopicWatch(kafka, self._topic)
        self._committer = Committer(run, self._group, self._publisher, self._figures)
        self._manager = self._new_manager()
        self._on_ready: Callable[[], None] | None = on_ready
        self._on_progress, self._report_at = on_progress, 0.0

    def run(self, stop: threading.Event) -> None:
        """Run until `stop` is set, then commit and close the consumer."""
        self._publisher.start()
        self._join()
        try:
            while not stop.is_set():
                beat("grouping")
                self._pauses.poll()
                self._topic_watch.poll()
                self._restorer.check_partitions(self._topic_watch.partitions)
                self._manager.pause({each.partition for each in self._pauses.records.values()})
                polled = self._poll()
                if self._manager.restore():
                    self._ready()
                self._report()
                self._punctuator.passed(polled.records)
                self._manager.take_in(polled)
                self._manager.seek()
                self._punctuator.punctuate(self._manager.running)
                self._manager.commit()
                self._write_figures()
            self._close()
        except BaseException:
            # Closing the consumer revokes its partitions; a fold that failed half-way must not be committed then.
            self._manager.abandon()
            raise
        finally:
            self._manager.close()
            self._figures.close()
            self._punctuator.close()
            self._pauses.close()
            self._member.close()

    def _poll(self) -> Polled:
        try:
            polled = self._member.poll(self._pace.most(self._grouper.max_poll_records), self._manager.wait_s)
            self._pace.passed(len(polled.records))
            return polled
        except MembershipLost as lost:
            self._join_anew(str(lost))
            return Polled([], {})

    def _close(self) -> None:
        try:
            self._manager.commit(closing=True)
        except Fenced as fenced:
            # Without a rival, nothing is lost: the next process continues from the committed state.
            if self._publisher.has_rival:
                raise
            event(logger, "closed_without_commit", level=logging.WARNING, error=str(fenced))
            self._manager.abandon()
            return
        self._punctuator.flush()
        event(logger, "closed", partitions=sorted(self._manager.tasks))

    def _write_figures(self) -> None:
        if self._grouper.metrics_interval_s <= 0 or not self._figures.due:
            return
        ends = {}
        for partition in self._manager.running:
            end = self._member.known_end(partition)
            if end is not None:
                ends[partition] = end
        # Nothing is fetched from paused partitions, so the client does not learn their ends.
        paused = self._manager.paused
        ends |= {partition: end for partition, end in self._member.ends(paused).items() if end >= 0}
        lags = {partition: self._manager.tasks[partition].lag(end) for partition, end in ends.items()}
        folds = (task.fold for task in self._manager.tasks.values())
        ignored = len(self._punctuator.ignored_settings)
        more = {"records_skipped_total": self._skipped.total, "settings_ignored": ignored}
        retention_s = self._topic_watch.retention_s
        self._figures.write(folds, lags, self._restorer.progress, more, paused=paused, retention_s=retention_s)

    # ------------------------------------------------------------------ membership

    def _new_member(self) -> GroupMember:
        return GroupMember(self._kafka, self._group, self._name, self._topic, gather_s=GATHER_S)

    def _new_manager(self) -> TaskManager:
        pace = CommitPace(self._grouper.commit_interval_s, self._grouper.max_poll_records)
        return TaskManager(self._kafka, self._run, self._member, self._restorer, self._committer, pace)

    def _join(self) -> None:
        self._member.join(self._on_assign, self._manager.revoke, self._manager.lose)

    def _on_assign(self, partitions: list[int]) -> dict[int, int]:
        self._manager.assign(partitions)
        if not partitions:
            self._ready()
        # After a restore, the client seeks to the task's position, and records that it fetched before are thrown away.
        return self._member.ends(partitions)

    def _join_anew(self, reason: str) -> None:
        """Join again after this process lost its membership.

        Another consumer may have joined under the same name, from a rival or a zombie process; or this consumer's own
        session ended while no broker answered. The transactional id decides which process stays. Raises Fenced if
        this process may not stay.
        """
        event(logger, "member_fenced", level=logging.WARNING, error=reason)
        with suppress(OwnershipLost):
            self._committer.settle()
        self._manager.abandon()
        self._member.close()
        self._member = self._new_member()
        self._manager = self._new_manager()
        self._publisher.assert_ours(self._member)
        self._join()

    def _report(self) -> None:
        """Report the restore in progress before this process is ready; a restore that stands still ends by itself."""
        now = time.monotonic()
        if self._on_ready is None or now < self._report_at:
            return
        for partition, done in self._restorer.progress.items():
            self._report_at = now + _REPORT_EVERY_S
            self._on_progress(
                f"restoring partition {partition}, one of {len(self._restorer.waiting)} to restore: "
                f"{done.journal_read} of {done.journal_to_read} records of the journal, "
                f"{done.records_read} of {done.records_to_read} rollouts"
            )

    def _ready(self) -> None:
        if self._on_ready is not None:
            self._on_ready()
            self._on_ready = None
