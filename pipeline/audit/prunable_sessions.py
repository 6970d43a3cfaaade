"""Reads from `calls` which groups of sessions have finished, so that their calls may be deleted."""

import time
from dataclasses import dataclass, field

from rollstream.pipeline.audit.pruning_plan import CALLS, PrunableSessions
from rollstream.producers.gateway.session_names import episode_of
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import SessionEvent
from rollstream.topics.wire import codec
from rollstream.topics.wire.catalogue import topic_name

GIVEN_UP_MS = 86_400_000
"""Time without a record after which a group no longer waits for members that were never started; otherwise it would
keep all later calls from being deleted."""


@dataclass
class _Group:
    partition: int
    offset: int
    size: int
    last_ms: int
    started: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)


class SessionGroups:
    """Groups of sessions of all partitions. Performs no I/O."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, str], _Group] = {}
        self._group_of: dict[str, _Group] = {}

    def add(self, partition: int, offset: int, append_ms: int, record: SessionEvent) -> None:
        """Add the next event of a partition."""
        if record.kind == "start":
            group = self._groups.setdefault(
                (partition, record.group_id), _Group(partition, offset, record.group_size, append_ms)
            )
            group.started.add(record.session)
            self._group_of[record.session] = group
        known = self._group_of.get(record.session)
        if known is None:
            return  # The start of the session was already deleted.
        known.last_ms = append_ms
        if record.kind == "finished":
            known.finished.add(record.session)

    def prunable(self, now_ms: int) -> tuple[PrunableSessions, ...]:
        """Return all groups, in the order of their first starts on each partition."""
        return tuple(
            PrunableSessions(
                partition=group.partition,
                offset=group.offset,
                last_ms=group.last_ms,
                finished=group.started == group.finished
                and (len({*map(episode_of, group.started)}) >= group.size or group.last_ms < now_ms - GIVEN_UP_MS),
            )
            for group in self._groups.values()
        )


def read_session_groups(kafka: KafkaConfig, run: str, skipped: SkippedRecords) -> tuple[PrunableSessions, ...]:
    """Read the groups of a run's sessions. Raises TopicError or BrokerUnavailable."""
    groups = SessionGroups()
    messages = read_to_end(kafka, topic_name(run, CALLS))
    events = (message for message in messages if codec.kind_of(message.value) != "ModelCall")
    for message, record in skipped.records(SessionEvent, events):
        groups.add(message.partition, message.offset, message.timestamp_ms, record)
    return groups.prunable(int(time.time() * 1000))
