"""A run as lineage, `show` and the page see it: its index has the places, so only single records are read.

Each topic is shown as it was when it was indexed. A live run goes on, so missing records may still appear.
"""

import itertools
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import NamedTuple

from rollstream.consumers.archive.log_source import PLACES, LogSource, TopicSource
from rollstream.consumers.models.tokenizer_log import newest_tokenizer
from rollstream.pipeline.audit.configuration_history import ConfigurationSummary, summary
from rollstream.pipeline.audit.topic_reading import batch_at
from rollstream.pipeline.command_line.progress_bar import progress
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.index import schema, sqlite_files
from rollstream.pipeline.index.fates import IN_FLIGHT, SETTLED, UNREAD
from rollstream.pipeline.index.places import history_of, uid_key
from rollstream.pipeline.index.writer import IndexWriter, index_file
from rollstream.topics.errors import RecordError, StateRefused, TopicError
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.kafka.skipped_records import Skipped, SkippedRecords
from rollstream.topics.records import (
    BatchIndexEntry,
    BatchUse,
    Drop,
    JournalRecord,
    LearnerStep,
    PolicyManifest,
    Rollout,
    TrainingBatch,
)
from rollstream.topics.records.fates import BATCHED, DROPPED
from rollstream.topics.records.journal import from_ranges
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import decode_as
from rollstream.topics.wire.validation import decode_journal


class RolloutPlace(NamedTuple):
    """Partition and offset of a record of `rollouts`."""

    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.partition}:{self.offset}"


class Fate(NamedTuple):
    """Fate of a record of `rollouts`."""

    name: str
    """batched, dropped, dead_lettered, control, settled, in_flight or unread."""
    drop: Drop | None = None
    batch_ids: tuple[str, ...] = ()
    """Batches of the transaction that finished the record, if it was batched: it is in one of these, or in an older
    batch."""
    generation: int = -1
    """Generation of the grouping configuration that dropped the record; for a batched record, the batch names it."""


class StepUse(NamedTuple):
    """Use of a batch by a learner's step."""

    step: LearnerStep
    use: BatchUse


class IndexedEntry(NamedTuple):
    """The index entry of a batch."""

    offset: int
    """Offset of the entry in the index, whose order learners follow."""
    entry: BatchIndexEntry


@contextmanager
def indexed_run(config: RunConfig) -> Iterator["IndexedRun"]:
    """Add the new places of a run's topics to its index, and yield the run.

    Raises TopicError if the run does not exist, ConfigurationError if the index cannot be written, and StateRefused if
    the journal cannot be read.
    """
    path = index_file(config)
    with closing(TopicSource(config.kafka, config.run, PLACES)) as source:
        with IndexWriter(path, source, schema.PLACES) as writer, progress("records") as show:
            writer.catch_up(show)
        with closing(sqlite_files.reader(path)) as db:
            for (refused,) in db.execute("select error from refused"):
                raise StateRefused(refused)
            yield IndexedRun(db, source)


class TokenizerOfSource:
    """The tokenizer of a run, which is read when a token is asked for that is not known."""

    def __init__(self, source: LogSource) -> None:
        self._source = source
        self._texts: Sequence[str] = ()

    def texts_of(self, ids: Sequence[int]) -> list[str] | None:
        """Return the text of each token; None if there is none of some."""
        if max(ids, default=-1) >= len(self._texts):
            with suppress(TopicError):  # Other programs need not create the topic.
                tokenizer = newest_tokenizer(self._source.messages("tokenizers", 0, 0))
                self._texts = tokenizer.texts if tokenizer else ()
        known = range(len(self._texts))
        return [self._texts[each] for each in ids] if all(each in known for each in ids) else None


class IndexedRun:
    """One run, whose entries, steps, uses of batches and manifests are in the tables of places."""

    def __init__(self, db: sqlite3.Connection, source: LogSource, tokenizer: "TokenizerOfSource | None" = None) -> None:
        """`source` has single records, and the tokenizer unless it was read from it before."""
        self.run = source.run
        self._db, self._source = db, source
        self._tokenizer = tokenizer or TokenizerOfSource(source)

    @property
    def skipped(self) -> SkippedRecords:
        """Records of all topics except `rollouts` that could not be read."""
        skipped = SkippedRecords(logged=False)
        for topic, partition, count, offset, error in self._db.execute("select * from skipped"):
            skipped.add(count, Skipped(topic_name(self.run, topic), partition, offset, error))
        return skipped

    def record(self, name: str, partition: int, offset: int) -> KafkaRecord:
        """Fetch one record. Raises TopicError if it does not exist."""
        return self._source.record(name, partition, offset)

    def token_texts(self, ids: Sequence[int]) -> list[str] | None:
        """Return the text of each token; None if the run's tokenizer is not on its log, or lacks one of them, because
        then another one made them."""
        return self._tokenizer.texts_of(ids)

    def places_of(self, uid: str) -> list[RolloutPlace]:
        """Places of the rollouts with a uid, in order; several if the rollout was sent repeatedly."""
        rows = self._db.execute(
            "select partition, offset from places where uid = ? order by partition, offset", (uid_key(uid.encode()),)
        ).fetchall()
        places = []
        for place in (RolloutPlace(*row) for row in rows):
            with suppress(TopicError, RecordError):  # The record was pruned after the index was updated.
                if decode_as(Rollout, self.record("rollouts", *place).value).uid == uid:
                    places.append(place)
        return places

    def fate(self, place: RolloutPlace) -> Fate:
        """Return the fate of a record of `rollouts`."""
        partition, offset = place
        row = self._db.execute("select begin, position from journals where partition = ?", (partition,)).fetchone()
        read = range(*row) if row else range(0)
        finished = self._db.execute(
            "select last, journal from finished where partition = ? and first <= ? order by first desc limit 1", place
        ).fetchone()
        if finished is None or finished[0] < offset:
            earlier = self._journal_from(partition, 0) if offset < read.start else ()
            return fates_in((), read, {offset}, oldest_snapshot(earlier))[offset]
        try:
            return fates_in(self._transaction_from(partition, finished[1]), read, {offset})[offset]
        except TopicError:  # The record was pruned after it was indexed.
            return Fate(SETTLED)

    def _transaction_from(self, partition: int, offset: int) -> Iterator[JournalRecord]:
        """Yield the journal record at an offset and the later parts of its transaction."""
        record = decode_journal(self.record("journal", partition, offset).value)
        yield record
        for part in self._journal_from(partition, offset + 1) if record.part + 1 < record.parts else ():
            yield part
            if part.part + 1 == part.parts:
                return

    def _journal_from(self, partition: int, start: int) -> Iterator[JournalRecord]:
        messages = self._source.messages("journal", partition, start)
        return (record for _message, record in SkippedRecords(logged=False).records(JournalRecord, messages))

    def configuration(self, partition: int, generation: int) -> ConfigurationSummary:
        """Return a summary of a grouping configuration from the journal of a partition."""
        return summary([(partition, history_of(self._db, partition))], generation)

    def batch_of(self, place: RolloutPlace, fate: Fate) -> TrainingBatch | None:
        """Find the batch that carries a batched record: one of the record's transaction, or an older one of its
        partition. None for a record with another fate, and if the log or the index no longer has the batch."""
        if fate.name != BATCHED:
            return None
        older = self._db.execute(
            "select batch from entries where partition = ? order by offset desc", (place.partition,)
        )
        for batch_id in itertools.chain(fate.batch_ids, (name for (name,) in older if name not in fate.batch_ids)):
            batch = self.batch_on_log(batch_id)
            if batch is not None and place.offset in batch.source_offsets:
                return batch
        return None

    # ------------------------------------------------------------------ batches, steps, versions

    def entry(self, batch_id: str) -> IndexedEntry | None:
        """Entry of a batch; None if the index does not name it."""
        row = self._db.execute("select offset, value from entries where batch = ?", (batch_id,)).fetchone()
        return None if row is None else IndexedEntry(row[0], decode_as(BatchIndexEntry, row[1]))

    def entries_with(self, version: int) -> list[BatchIndexEntry]:
        """Entries of the batches that may hold rollouts of a policy version, in the order that learners follow."""
        answer = self._db.execute(
            "select value from entries where highest >= ? and lowest <= ? order by offset", (version, version)
        )
        return [decode_as(BatchIndexEntry, value) for (value,) in answer]

    def batch(self, batch_id: str) -> TrainingBatch:
        """Fetch a batch. Raises TopicError if the index does not name it, or if it is no longer on the log."""
        indexed = self.entry(batch_id)
        if indexed is None:
            raise TopicError(f"run {self.run} has no batch {batch_id}; `rollstream cat batch-index` lists them")
        return batch_at(self.record("batches", indexed.entry.partition, indexed.entry.offset))

    def batch_on_log(self, batch_id: str) -> TrainingBatch | None:
        """Fetch a batch; None if the index does not name it, if it was pruned or lost, or if the record at the entry's
        offset is not this batch."""
        try:
            batch = self.batch(batch_id)
        except (TopicError, RecordError):
            return None
        return batch if batch.batch_id == batch_id else None

    def uses_of(self, batch_id: str) -> list[StepUse]:
        """Steps that used or skipped a batch, in order."""
        steps = self._steps("(learner, step) in (select learner, step from uses where batch = ?)", batch_id)
        return [StepUse(step, use) for step in steps for use in step.uses if use.batch_id == batch_id]

    def steps_numbered(self, number: int) -> list[LearnerStep]:
        """Steps with this number, one for each learner that has such a step, in order."""
        return self._steps("step = ?", number)

    def steps_before(self, manifest: PolicyManifest) -> list[LearnerStep]:
        """Steps that made the parameters of a policy version, in order; for a rollback, the step of its source."""
        condition = "version = ? or (learner = ? and step = ?)"
        return self._steps(condition, manifest.version, manifest.learner, manifest.step)

    def steps(self) -> list[LearnerStep]:
        """The newest record of each step of each learner, in order."""
        return self._steps("1")

    def _steps(self, condition: str, *values: str | int) -> list[LearnerStep]:
        answer: Iterable[tuple[bytes]] = self._db.execute(
            f"select value from steps where {condition} order by learner, step", values
        )
        return [decode_as(LearnerStep, value) for (value,) in answer]

    def policy(self, version: int) -> PolicyManifest | None:
        """Manifest of a policy version; None if it is not on record."""
        row = self._db.execute("select value from policies where version = ?", (version,)).fetchone()
        return None if row is None else decode_as(PolicyManifest, row[0])

    def first_version_after(self, learner: str, step: int) -> int | None:
        """Lowest version with the parameters of a learner's step or of a later one; None if there is none."""
        answer = self._db.execute("select min(version) from policies where learner = ? and step >= ?", (learner, step))
        version: int | None = answer.fetchone()[0]
        return version


def oldest_snapshot(journal: Iterable[JournalRecord]) -> list[JournalRecord]:
    """Return the parts of the first complete snapshot of a journal, reading no further; empty if there is none."""
    parts: list[JournalRecord] = []
    for record in journal:
        follows = record.snapshot and record.part == (len(parts) if record.part else 0)
        parts = [*(parts if record.part else ()), record] if follows else []
        if parts and len(parts) == record.parts:
            return parts
    return []


def fates_in(
    journal: Iterable[JournalRecord], read: range, offsets: set[int], snapshot: Iterable[JournalRecord] = ()
) -> dict[int, Fate]:
    """Return the fates of offsets from their partition's journal.

    `read` holds the offsets that grouping has read according to the journal. If the journal was pruned, they do not
    begin with 0; `snapshot`, the parts of its oldest snapshot, names the earlier offsets that were still in flight.
    """
    journal = list(journal)
    # A large transaction is split into records, and the drops and batches of an offset may follow in a later one.
    drops = {drop.offset: drop for record in journal for drop in record.drops if drop.offset in offsets}
    batches: dict[int, tuple[str, ...]] = {}
    for record in journal:
        batches[_transaction(record)] = batches.get(_transaction(record), ()) + record.batch_ids
    waiting = {offset for part in snapshot for offset in offsets.intersection(from_ranges(part.unfinished))}
    fates = {offset: Fate(_unfinished(offset, read, waiting)) for offset in offsets}
    for record in journal:
        for finished in record.finished:
            for offset in offsets.intersection(from_ranges(finished.runs)):
                batch_ids = batches[_transaction(record)] if finished.fate == BATCHED else ()
                drop = drops.get(offset) if finished.fate == DROPPED else None
                generation = record.generation if drop else -1
                fates[offset] = Fate(finished.fate, drop, batch_ids, generation)
    return fates


def _unfinished(offset: int, read: range, waiting: set[int]) -> str:
    """Return the fate of an offset that no record of the journal finishes."""
    if offset >= read.stop:
        return UNREAD
    return IN_FLIGHT if offset >= read.start or offset in waiting else SETTLED


def _transaction(record: JournalRecord) -> int:
    """Return the sequence of the first record of a record's transaction."""
    return record.sequence - record.part
