"""Targets that give hostile records to the decoder, the fold and the other pure readers of topics."""

from collections import Counter
from pathlib import Path

import numpy as np

from rollstream.consumers.grouping.core import task_state
from rollstream.pipeline.audit.partition_journal import PartitionJournal
from rollstream.producers.flow.rollout_counts import LearnerConsumption
from rollstream.producers.gateway.sessions import PartitionSessions
from rollstream.topics.control.steering import DesiredState
from rollstream.topics.errors import RecordError, StateRefused
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import (
    BatchIndexEntry,
    GroupCancelled,
    JournalRecord,
    LearnerStep,
    ModelCall,
    Rollout,
    SessionEvent,
    TrainingBatch,
    TrajectoryRecord,
)
from rollstream.topics.records.journal import JournalCounts
from rollstream.topics.wire.catalogue import CATALOGUE, topic_name
from rollstream.topics.wire.codec import RECORD_TYPES, decode, encode
from rollstream.topics.wire.rl_examples import batch_digest, examples_of
from rollstream.topics.wire.trajectory_arrays import from_record
from rollstream.topics.wire.validation import batch_problems, cancellation_problems, entry_problems, problems
from tests.hostile.flood_targets import Fates, Target
from tests.hostile.folded_flood import FoldedFlood
from tests.support.flood import Flood
from tests.support.hostile_input import HostileInput

KINDS = tuple(sorted({kind for spec in CATALOGUE for kind in spec.values} | {t.__name__ for t in RECORD_TYPES}))
_AFRESH = 2_000
"""Records after which a fold without an end begins again."""


def decoded(hostile: HostileInput, count: int, folder: Path) -> Fates:
    """Decode values of every topic, check what decodes as its readers do, and encode it again."""
    del folder
    fates: Fates = Counter()
    for _ in range(count):
        value = hostile.value(hostile.random.choice(CATALOGUE).values)
        try:
            record = decode(value)
        except RecordError:
            fates["refused"] += 1
            continue
        again = encode(record)
        assert encode(decode(again)) == again
        fates["invalid" if _problems(record) else "sound"] += 1
    return fates


def _problems(record: object) -> list[str]:
    """Problems that the readers of a record find in it."""
    match record:
        case Rollout():
            return problems(record)
        case GroupCancelled():
            return cancellation_problems(record)
        case BatchIndexEntry():
            return entry_problems(record)
        case TrainingBatch():
            if issues := batch_problems(record):
                return issues
            assert batch_digest(record)
            assert len(examples_of(record)) == len(record)
            return []
        case TrajectoryRecord():
            try:
                from_record(record)
            except RecordError as error:
                return [str(error)]
    return []


def folded(hostile: HostileInput, count: int, folder: Path) -> Fates:
    """Give the fold of grouping a flood of `rollouts`; each record has one place, and no honest group is harmed."""
    del folder
    piece = FoldedFlood(Flood(hostile.random.randrange(2**32), count)).fold()
    piece.check()
    # Honest groups are whole at the end, so that a flood has a few records more.
    fates = Counter({"undecodable": piece.undecodable, "honest": len(piece.flood.honest)})
    fates["hostile"] = count - fates.total()
    return fates


def captured(hostile: HostileInput, count: int, folder: Path) -> Fates:
    """Give the fold of sessions records of `calls`; what does not fit a session is a problem of that session."""
    del folder
    fates: Fates = Counter()
    sessions = PartitionSessions(keep_finished=100)
    for offset in range(count):
        if offset % _AFRESH == 0:
            sessions = PartitionSessions(keep_finished=100)
        try:
            record = decode(hostile.value(("ModelCall", "SessionEvent")))
        except RecordError:
            fates["refused"] += 1
            continue
        if not isinstance(record, ModelCall | SessionEvent):
            fates["foreign"] += 1
            continue
        session = sessions.apply(offset, hostile.time_ms(), record)
        fates["of no session" if session is None else "closed" if session.closed else "open"] += 1
    return fates


def journalled(hostile: HostileInput, count: int, folder: Path) -> Fates:
    """Give the readers of `journal` its records: the books note what contradicts, and a task refuses to begin."""
    del folder
    fates: Fates = Counter()
    counts, journal = JournalCounts(), PartitionJournal(0)
    skipped = SkippedRecords(logged=False)
    for offset in range(count):
        if offset % _AFRESH == 0:
            counts, journal = JournalCounts(), PartitionJournal(0)
        message = KafkaRecord(topic_name("main", "journal"), 0, offset, 0, None, hostile.value(("JournalRecord",)))
        record = skipped.decode(JournalRecord, message)
        if record is None:
            fates["refused"] += 1
            continue
        counts.add(record)
        journal.read(record)
        assert journal.known().total >= 0
        try:
            task_state.restored_state([record])
        except StateRefused:
            fates["no state"] += 1
        else:
            fates["state"] += 1
    return fates


def followed(hostile: HostileInput, count: int, folder: Path) -> Fates:
    """Give what workers follow, `batch-index`, `steps` and `control`, to the functions that fold it."""
    del folder
    fates: Fates = Counter()
    consumption, desired = LearnerConsumption("main", pruned=True), DesiredState()
    skipped = SkippedRecords(logged=False)
    control = next(spec.values for spec in CATALOGUE if spec.name == "control")
    for offset in range(count):
        if offset % _AFRESH == 0:
            consumption, desired = LearnerConsumption("main", pruned=True), DesiredState()
        topic, kinds = hostile.random.choice(
            (("batch-index", ("BatchIndexEntry",)), ("steps", ("LearnerStep",)), ("control", control))
        )
        key = hostile.key(hostile.random.choice(("processes", "paused", "weight", "stop", "drain", "evaluate")), "env")
        message = KafkaRecord(topic_name("main", topic), 0, offset, 0, key, hostile.value(kinds))
        before = skipped.total
        if topic == "control":
            desired.note(message, skipped)
            assert all(number >= 0 for number in desired.numbers.values())
            assert np.isfinite(list(desired.weights.values())).all()
        elif topic == "steps":
            step = skipped.decode(LearnerStep, message)
            if step is not None:
                consumption.add_step(step)
        else:
            entry = skipped.decode(BatchIndexEntry, message)
            if entry is not None:
                with skipped.passing(message):
                    consumption.add_entry(offset, entry)
        assert isinstance(consumption.consumed, int)
        fates["skipped" if skipped.total > before else "taken"] += 1
    return fates


TARGETS = (
    Target("decode", decoded, 10_000, 5200),
    Target("fold", folded, 20_000, 1500),
    Target("calls", captured, 8_000, 800),
    Target("journal", journalled, 3_000, 150),
    Target("followed topics", followed, 5_000, 550),
)
