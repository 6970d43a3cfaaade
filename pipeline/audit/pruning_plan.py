"""Plans which records of a run may be deleted: computes each deletion from positions, and why it goes no further.

The plan keeps the records that recovery reads, the records that the verification window needs, and the records that
learners have yet to read. It also keeps the batches and index entries that the kept journal names, so that the ledger
balances and every index entry has its batch. Trajectories, labeled or not, may be deleted below the lowest position of
their readers. Labeled records stay if they are needed to recover lost positions of labeling. Samples of a TransferQueue
may be deleted below what a checkpoint of the queue needs, if one is named.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollstream.producers.gateway.sessions import episode_of
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import SessionEvent
from rollstream.topics.wire import codec
from rollstream.topics.wire.catalogue import PRUNED, topic_name

CALLS = "calls"
CONTROL_TOPICS = ("unlabelled", "trajectories")
"""Topics of labeling and of control tasks."""
RECOVERY, WINDOW, ACCOUNT, SESSIONS = "recovery", "verification window", "ledger", "open sessions"
NO_LABELER, NO_FILLER = "no labeler on record", "no filler on record"
SAMPLES = "samples"
QUEUE, NO_QUEUE = "checkpoint of the queue", "no checkpoint of the queue"
TopicAndPartition = tuple[str, int]
"""Topic and partition."""


@dataclass(frozen=True, kw_only=True)
class JournalSnapshot:
    """A complete snapshot in the journal of one partition."""

    offset: int
    """Offset of its first record in the journal."""
    watermark: int
    """First offset of rollouts that a fold from this snapshot reads."""
    batch_number: int
    """Number of the first batch cut after this snapshot."""
    journal_from: int | None
    """First offset of the journal that a fold from this snapshot needs; None if the log lacks something it needs."""


@dataclass(frozen=True, kw_only=True)
class CommittedTask:
    """State of one partition as its grouping process committed it."""

    watermark: int
    """First offset of rollouts that a restore reads."""
    journal_from: int
    """First offset of the journal that a restore reads."""
    snapshots: tuple[JournalSnapshot, ...]
    """Complete snapshots in the journal, oldest first."""


@dataclass(frozen=True, kw_only=True)
class PrunableBatch:
    """A batch, according to its entry in the index."""

    partition: int
    number: int
    offset: int
    """Offset of the batch in its partition of `batches`."""
    index_offset: int
    time_ms: int = 0


@dataclass(frozen=True, kw_only=True)
class PrunableSessions:
    """The sessions of one group, according to their records on `calls`."""

    partition: int
    offset: int
    """Offset of the first session start of the group."""
    last_ms: int
    """Append time of the last record of the group."""
    finished: bool
    """Whether the rollouts or the cancellation of every session are written, and no further session is expected."""


@dataclass(frozen=True, kw_only=True)
class LastStep:
    """The newest step of a learner, and the name of another learner that has replaced this learner, if any."""

    step: int
    time: float
    run: str
    """Run to which the learner writes steps and weights."""
    replaced_by: str = ""
    """Learner that has published to that run after this step; "" if none has."""


@dataclass(frozen=True, kw_only=True)
class Positions:
    """Positions of every task, learner and consumer group of a run."""

    tasks: Mapping[int, CommittedTask]
    batches: tuple[PrunableBatch, ...]
    """Batches in the order of the index."""
    learners: Mapping[str, int]
    """Offset of the index from which each learner may have to read again, by the learner's name in reports."""
    begins: Mapping[TopicAndPartition, int]
    """First offset of each partition of each topic of `PRUNED`."""
    groups: Mapping[str, Mapping[TopicAndPartition, int]] = field(default_factory=dict)
    """Offsets that consumer groups other than grouping's committed, by group."""
    labeling_group: str = ""
    """Name of the group of the labeling processes."""
    fillers: frozenset[str] = frozenset()
    """Names in `groups` that belong to fillers."""
    last_steps: Mapping[str, LastStep] = field(default_factory=dict)
    """Newest step of each learner, by the names in `learners`."""
    sessions: tuple[PrunableSessions, ...] = ()
    """Groups of sessions in the order of their first starts."""
    calls_read: Mapping[int, int] = field(default_factory=dict)
    """Offset up to which the sessions in each partition of calls were read."""
    samples_needed: Mapping[int, int] = field(default_factory=dict)
    """First offset of each partition of samples that the queue's checkpoint needs; empty if none is named."""
    skipped: tuple[str, ...] = ()
    """Lines of text about records that could not be read."""


@dataclass(frozen=True, kw_only=True)
class Deletion:
    """Offsets to delete at the start of one partition; empty if `to` equals `begin`."""

    topic: str
    partition: int
    begin: int
    to: int
    """First offset that is kept."""
    why: str
    """Reason for keeping it, such as the reader that needs it."""

    @property
    def offsets(self) -> int:
        """Number of offsets deleted; some may be transaction markers instead of records."""
        return self.to - self.begin


def plan(positions: Positions, *, keep_batches: int, keep_from_ms: int | None = None) -> list[Deletion]:
    """Plan deletions after which the newest `keep_batches` batches, and all from `keep_from_ms` on, can be verified.

    Returns one deletion for each partition of each topic, in the order of `PRUNED`, empty ones included.
    """
    window = _window_begin(positions.batches, keep_batches, keep_from_ms)
    rollouts, journal, wanted = {}, {}, [(window, WINDOW)]
    for partition, task in positions.tasks.items():
        places = ("rollouts", partition), ("journal", partition)
        begin_of_rollouts, begin_of_journal = (positions.begins[place] for place in places)
        chosen = _before_window(task, partition, positions.batches, window)
        if chosen is None or chosen.journal_from is None:
            rollouts[partition], journal[partition] = (begin_of_rollouts, WINDOW), (begin_of_journal, WINDOW)
        else:
            rollouts[partition] = _least((task.watermark, RECOVERY), (chosen.watermark, WINDOW))
            journal[partition] = _least((task.journal_from, RECOVERY), (chosen.journal_from, WINDOW))
        needs = (*_group_needs(positions, *places[0]), *_lost_labeling(positions, partition))
        rollouts[partition] = _least(rollouts[partition], *needs)
        journal[partition] = _least(journal[partition], *_group_needs(positions, *places[1]))
        account = next((s for s in task.snapshots if s.offset >= max(journal[partition][0], begin_of_journal)), None)
        number = 0 if account is None else account.batch_number
        entry = next((b for b in positions.batches if b.partition == partition and b.number >= number), None)
        if entry is not None:
            wanted.append((entry.index_offset, ACCOUNT))
        for offset, group in _group_needs(positions, "batches", partition)[:-1]:
            unread = (b for b in positions.batches if b.partition == partition and b.offset >= offset)
            wanted += [(b.index_offset, group) for b in list(unread)[:1]]
    learners = ((position, learner) for learner, position in sorted(positions.learners.items()))
    kept, why = _least(*learners, *_group_needs(positions, "batch-index", 0), *wanted)
    stops: dict[TopicAndPartition, tuple[int, str]] = {("batch-index", 0): (_index_stop(positions.batches, kept), why)}
    for partition in positions.tasks:
        stops["rollouts", partition], stops["journal", partition] = rollouts[partition], journal[partition]
        stop = (_batches_stop(positions.batches, partition, kept), why)
        stops["batches", partition] = _least(stop, *_group_needs(positions, "batches", partition))
    stops |= _control_stops(positions)
    stops |= _calls_stops(positions, window, keep_from_ms)
    for place in positions.begins:
        if place[0] == SAMPLES:
            need = (positions.samples_needed.get(place[1], 0), QUEUE if positions.samples_needed else NO_QUEUE)
            stops[place] = _least(need, *_group_needs(positions, *place))
    return [
        Deletion(topic=topic, partition=p, begin=begin, to=max(begin, stops[topic, p][0]), why=stops[topic, p][1])
        for (topic, p), begin in sorted(
            positions.begins.items(), key=lambda item: (PRUNED.index(item[0][0]), item[0][1])
        )
    ]


_END = 2**63 - 1


def _least(*needs: tuple[int, str]) -> tuple[int, str]:
    """Return the lowest offset with the reader that needs it; of equal offsets, the first."""
    return min(needs, key=lambda item: item[0])


def _control_stops(positions: Positions) -> dict[TopicAndPartition, tuple[int, str]]:
    """Return the offset at which deletions of control topics stop: the lowest position of a reader, or 0 if all
    records must be kept."""
    stops: dict[TopicAndPartition, tuple[int, str]] = {}
    labeled = positions.groups.get(positions.labeling_group, {})
    for place in positions.begins:
        topic, partition = place
        if topic == "unlabelled":
            stops[place] = _least(*_group_needs(positions, *place)) if place in labeled else (0, NO_LABELER)
        if topic == "trajectories":
            filled = any(place in positions.groups.get(filler, {}) for filler in positions.fillers)
            needs = _group_needs(positions, *place) if filled else [(0, NO_FILLER)]
            stops[place] = _least(*_lost_labeling(positions, partition), *needs)
            # If the positions are lost later, they are recovered from the trajectories of all sources that are kept.
            source = ("unlabelled", partition)
            if source in stops and stops[source][0] < labeled.get(source, 0):
                stops[place] = (0, stops[source][1])
    return stops


def _lost_labeling(positions: Positions, partition: int) -> list[tuple[int, str]]:
    """Return a need for all trajectories and rollouts of a partition if `unlabelled` has held records but labeling has
    no position there, because lost positions are recovered from them."""
    source = ("unlabelled", partition)
    labeled = positions.groups.get(positions.labeling_group, {})
    return [(0, NO_LABELER)] if source in positions.begins and source not in labeled else []


def _calls_stops(
    positions: Positions, window: int, keep_from_ms: int | None
) -> dict[TopicAndPartition, tuple[int, str]]:
    """Return the offset of each partition of calls at which its deletion stops.

    This keeps groups with an unfinished session, groups with a record since the verification window began, and all
    later records.
    """
    first = next((b.time_ms for b in positions.batches if b.index_offset >= window), None if positions.batches else 0)
    times = [time_ms for time_ms in (first, keep_from_ms) if time_ms is not None]
    since_ms = min(times) if times else _END
    stops = {}
    for partition in (partition for topic, partition in positions.begins if topic == CALLS):
        end = positions.calls_read.get(partition, 0)
        mine = [group for group in positions.sessions if group.partition == partition]
        unfinished = [(group.offset, SESSIONS) for group in mine if not group.finished]
        recent = [(group.offset, WINDOW) for group in mine if group.last_ms >= since_ms]
        needs = _group_needs(positions, CALLS, partition)
        stops[CALLS, partition] = _least(*unfinished, *recent, *needs, (end, SESSIONS))
    return stops


def _window_begin(batches: Sequence[PrunableBatch], keep_batches: int, keep_from_ms: int | None) -> int:
    """Return the index offset at which the verification window begins; after the last entry if the window is empty."""
    after = batches[-1].index_offset + 1 if batches else 0
    newest = batches[-keep_batches].index_offset if 0 < keep_batches <= len(batches) else after
    if keep_batches > len(batches):
        newest = 0
    if keep_from_ms is None:
        return newest
    return min(newest, next((b.index_offset for b in batches if b.time_ms >= keep_from_ms), after))


def _before_window(
    task: CommittedTask, partition: int, batches: Sequence[PrunableBatch], window: int
) -> JournalSnapshot | None:
    """Return the newest snapshot from which every batch of the partition within the window can be folded again."""
    first = next((b.number for b in batches if b.partition == partition and b.index_offset >= window), _END)
    usable = [s for s in task.snapshots if s.journal_from is not None and s.batch_number <= first]
    return usable[-1] if usable else None


def _group_needs(positions: Positions, topic: str, partition: int) -> list[tuple[int, str]]:
    """Return the positions of `positions.groups` in a partition, and last a sentinel that is never the minimum."""
    place = (topic, partition)
    needs = [(offsets[place], f"group {group}") for group, offsets in positions.groups.items() if place in offsets]
    return [*needs, (_END, "")]


def _index_stop(batches: Sequence[PrunableBatch], kept: int) -> int:
    """Return the offset at which the index's deletion ends: `kept`, but at most the offset after the last entry."""
    return min(kept, batches[-1].index_offset + 1 if batches else 0)


def _batches_stop(batches: Sequence[PrunableBatch], partition: int, kept: int) -> int:
    """Return the offset of the first batch of a partition that the kept index names, or else after its last batch."""
    mine = [b for b in batches if b.partition == partition]
    after = mine[-1].offset + 1 if mine else 0
    return next((b.offset for b in mine if b.index_offset >= kept), after)


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
