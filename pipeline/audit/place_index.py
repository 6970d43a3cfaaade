"""An index of places: where a run's topics hold each rollout, the record of its fate, its batch, step and version.

It is one SQLite file, which can be deleted at any time; each query adds the new records first. The index holds no
answers, only the places of the records that have them: the caller reads these records, and checks that they are the
right ones.

Rows and positions commit in one transaction, so a process continues after a kill where it last committed. A partition
that was pruned or truncated is read again from its present beginning, so that the index matches its topic.
"""

import fcntl
import hashlib
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rollstream.consumers.grouping.process.bootstrap import journal_record
from rollstream.pipeline import sqlite_files
from rollstream.pipeline.audit.configuration_history import ConfigurationHistory
from rollstream.pipeline.progress_bar import ProgressCallback
from rollstream.topics.catalogue import topic_name
from rollstream.topics.closing import Closing
from rollstream.topics.codec import kind_of, leading_text
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError, RecordError
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.client_errors import OffsetGone
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.kafka.skipped_records import Skipped, SkippedRecords
from rollstream.topics.records import BatchIndexEntry, FinishedOffsets, LearnerStep, PolicyManifest
from rollstream.topics.validation import entry_problems

VERSION = 2
"""Version of the tables and of their contents, raised with every change of either."""
TOPICS = ("rollouts", "journal", "batch-index", "steps", "policies")
"""Topics in the order in which the index reads them: a record is read before the records that name it."""
_COMMITTED = 50_000
"""Most records that are read in one transaction."""
_HELD_BYTES = 64 * 1024 * 1024
"""Bytes of records after which a transaction commits, because they are held in memory until it does."""
_TABLES = """
create table positions (
    topic text, partition integer, first integer not null, position integer not null, primary key (topic, partition)
) without rowid;
create table rollouts (
    uid integer, partition integer, offset integer, primary key (uid, partition, offset)
) without rowid;
create table finished (
    partition integer, first integer, last integer not null, journal integer not null, primary key (partition, first)
) without rowid;
create table journals (
    partition integer primary key, begin integer not null, position integer not null, history text not null
);
create table entries (
    batch text primary key, partition integer not null, offset integer not null, lowest integer not null,
    highest integer not null, value blob not null
) without rowid;
create index entries_by_partition on entries (partition, offset);
create index entries_by_version on entries (highest, lowest);
create table steps (
    learner text, step integer, version integer not null, value blob not null, primary key (learner, step)
);
create index steps_by_number on steps (step);
create index steps_by_version on steps (version);
create table uses (batch text, learner text, step integer, primary key (batch, learner, step)) without rowid;
create index uses_by_step on uses (learner, step);
create table policies (version integer primary key, partition integer not null, offset integer not null);
create table skipped (
    topic text, partition integer, records integer not null, offset integer not null, error text not null,
    primary key (topic, partition)
) without rowid;
"""


def uid_key(uid: bytes) -> int:
    """Return the key of a uid in the index. Two uids may share a key, so callers compare the uid in the record."""
    return int.from_bytes(hashlib.blake2b(uid, digest_size=8).digest(), "little", signed=True)


class PlaceIndex(Closing):
    """The index of one run. `update` fills it; other modules query `db`."""

    def __init__(self, kafka: KafkaConfig, run: str, path: Path, *, commit_records: int = _COMMITTED) -> None:
        """Open or create the file.

        Raises TopicError if the run does not exist, ConfigurationError if the file cannot be written.
        """
        self.run = run
        self._kafka, self._path, self._commit_records = kafka, path, commit_records
        self._partitions = topic_admin.partitions_of(kafka, topic_name(run, "batches"))
        ids = topic_admin.topic_ids(kafka, [topic_name(run, name) for name in TOPICS])
        self._identity = {"version": str(VERSION), "run": run, **ids}
        self._skipped: dict[int, SkippedRecords] = {}
        """By partition, records skipped in the open transaction."""
        self._histories: dict[int, ConfigurationHistory] = {}
        try:
            with self._writing():
                self.db = sqlite_files.create(path, self._identity, _TABLES)
        except (OSError, sqlite3.OperationalError) as error:
            raise ConfigurationError(
                f"the index of places cannot be written to {path} ({error}); give a writable directory with "
                f"--set data_dir=DIRECTORY, or use --without-index"
            ) from error

    def close(self) -> None:
        """Close the file."""
        self.db.close()

    def update(self, show: ProgressCallback = lambda _done, _total: None) -> int:
        """Read the new records of the topics, and return their number.

        Only one process at a time reads; all others wait. Raises StateRefused if the journal cannot be read.
        """
        with self._writing():
            while True:
                try:
                    return self._update(show)
                except OffsetGone:
                    continue  # Records were pruned while they were read.
                except sqlite3.OperationalError:
                    raise
                except sqlite3.DatabaseError:  # The file is damaged.
                    self.db.close()
                    sqlite_files.remove(self._path)
                    self.db = sqlite_files.create(self._path, self._identity, _TABLES)

    def skipped(self) -> SkippedRecords:
        """Return the records of all topics except `rollouts` that could not be read."""
        skipped = SkippedRecords(logged=False)
        for topic, partition, count, offset, error in self.db.execute("select * from skipped"):
            skipped.add(count, Skipped(topic_name(self.run, topic), partition, offset, error))
        return skipped

    # ------------------------------------------------------------------ filling

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Hold the lock under which the file is written and replaced."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(self._path.with_name(f"{self._path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _update(self, show: ProgressCallback) -> int:
        starts = {name: self._starts(name) for name in TOPICS}
        total = sum(end - start for bounds in starts.values() for start, end in bounds.values())
        done = 0
        for name, bounds in starts.items():
            new = {partition: start for partition, (start, end) in bounds.items() if start < end}
            if not new:
                continue
            messages = read_to_end(self._kafka, topic_name(self.run, name), partitions=new, start=new)
            for portion in portions(messages, self._commit_records):
                self._write(name, portion)
                done += len(portion)
                show(done, total)
        return done

    def _starts(self, name: str) -> dict[int, tuple[int, int]]:
        """Return where to continue reading each partition, and where it ends; forget partitions that lost records."""
        answer = self.db.execute("select partition, first, position from positions where topic = ?", (name,))
        known = {partition: (first, position) for partition, first, position in answer}
        starts = {}
        for partition, (low, end) in topic_admin.bounds(self._kafka, topic_name(self.run, name)).items():
            first, position = known.get(partition, (-1, -1))
            if first != low or position > end:
                self._forget(name, partition, low)
                position = low
            starts[partition] = position, end
        return starts

    def _forget(self, name: str, partition: int, low: int) -> None:
        """Forget a partition, and set its position to its present beginning."""
        with self._transaction():
            self.db.execute("delete from skipped where topic = ? and partition = ?", (name, partition))
            if name == "rollouts":
                self.db.execute("delete from rollouts where partition = ?", (partition,))
            elif name == "journal":
                self.db.execute("delete from finished where partition = ?", (partition,))
                self.db.execute("delete from journals where partition = ?", (partition,))
            else:
                for table in {"batch-index": ("entries",), "steps": ("steps", "uses")}.get(name, (name,)):
                    self.db.execute(f"delete from {table}")
            self.db.execute("insert or replace into positions values (?, ?, ?, ?)", (name, partition, low, low))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self.db.execute("begin immediate")
        try:
            yield
            self.db.execute("commit")
        except BaseException:
            self.db.execute("rollback")
            raise

    def _write(self, name: str, messages: list[KafkaRecord]) -> None:
        """Write the rows of records of a topic, and the positions after them."""
        self._skipped.clear()
        self._histories.clear()
        with self._transaction():
            if name == "rollouts":
                self._rollouts(messages)
            else:
                write = {
                    "journal": self._journal,
                    "batch-index": self._entry,
                    "steps": self._step,
                    "policies": self._policy,
                }[name]
                for message in messages:
                    write(message)
            self._write_histories()
            positions = {message.partition: message.offset + 1 for message in messages}
            self.db.executemany(
                "update positions set position = ? where topic = ? and partition = ?",
                [(position, name, partition) for partition, position in positions.items()],
            )
            self._write_skipped(name)

    def _rollouts(self, messages: list[KafkaRecord]) -> None:
        rows = []
        for message in messages:
            if message.value is not None and kind_of(message.value) == "Rollout":
                with suppress(RecordError):  # A record that does not decode is not a rollout.
                    rows.append((uid_key(leading_text(message.value)), message.partition, message.offset))
        # Insert in the order of the table, so that each of its pages is changed once.
        self.db.executemany("insert or ignore into rollouts values (?, ?, ?)", sorted(rows))

    def _journal(self, message: KafkaRecord) -> None:
        record = journal_record(message, self._skipped_of(message))
        if record is None:
            return
        partition = message.partition
        self._history(partition).read(record)
        self.db.execute(
            "insert into journals values (?, ?, ?, '') on conflict do update set position = excluded.position",
            (partition, record.begin, record.position),
        )
        self.db.executemany(
            "insert or replace into finished values (?, ?, ?, ?)",
            [(partition, first, last, message.offset) for first, last in finished_spans(record.finished)],
        )

    def _history(self, partition: int) -> ConfigurationHistory:
        if partition not in self._histories:
            row = self.db.execute("select history from journals where partition = ?", (partition,)).fetchone()
            self._histories[partition] = ConfigurationHistory.of(json.loads(row[0])) if row else ConfigurationHistory()
        return self._histories[partition]

    def _write_histories(self) -> None:
        states = [(json.dumps(history.state()), partition) for partition, history in self._histories.items()]
        self.db.executemany("update journals set history = ? where partition = ?", states)

    def _write_skipped(self, name: str) -> None:
        rows = [
            (name, partition, row["records"], row["offset"], row["error"])
            for partition, skipped in self._skipped.items()
            for row in skipped.as_dict().values()
        ]
        self.db.executemany(
            "insert into skipped values (?, ?, ?, ?, ?) on conflict do update set records = records + excluded.records",
            rows,
        )

    def _skipped_of(self, message: KafkaRecord) -> SkippedRecords:
        return self._skipped.setdefault(message.partition, SkippedRecords(logged=False))

    def _entry(self, message: KafkaRecord) -> None:
        entry = self._skipped_of(message).decode(BatchIndexEntry, message)
        if entry is None:
            return
        problems = entry_problems(entry)
        if entry.partition >= self._partitions:
            problems = [*problems, f"batch {entry.batch_id} is of a partition that the run does not have"]
        if problems:
            self._skipped_of(message).skip(message, problems[0])
            return
        versions = entry.lowest_version, entry.highest_version
        row = (entry.batch_id, entry.partition, message.offset, *versions, message.value)
        if not self.db.execute("insert or ignore into entries values (?, ?, ?, ?, ?, ?)", row).rowcount:
            self._skipped_of(message).skip(message, f"batch {entry.batch_id} has an entry already")

    def _step(self, message: KafkaRecord) -> None:
        step = self._skipped_of(message).decode(LearnerStep, message)
        if step is None:
            return
        key = (step.learner, step.step)
        self.db.execute("delete from uses where learner = ? and step = ?", key)
        self.db.execute("insert or replace into steps values (?, ?, ?, ?)", (*key, step.policy_version, message.value))
        self.db.executemany("insert or ignore into uses values (?, ?, ?)", [(use.batch_id, *key) for use in step.uses])

    def _policy(self, message: KafkaRecord) -> None:
        manifest = self._skipped_of(message).decode(PolicyManifest, message)
        if manifest is not None:
            row = (manifest.version, message.partition, message.offset)
            self.db.execute("insert or replace into policies values (?, ?, ?)", row)


def portions(messages: Iterable[KafkaRecord], most: int) -> Iterator[list[KafkaRecord]]:
    """Yield records in portions of at most `most` records and little more than `_HELD_BYTES`."""
    portion: list[KafkaRecord] = []
    held = 0
    for message in messages:
        portion.append(message)
        held += message.size_bytes
        if len(portion) == most or held > _HELD_BYTES:
            yield portion
            portion, held = [], 0
    if portion:
        yield portion


def finished_spans(finished: Iterable[FinishedOffsets]) -> list[tuple[int, int]]:
    """Return the first and last of each range of offsets that a journal record finishes, whatever their fates."""
    pairs = sorted(pair for each in finished for pair in _pairs(each.runs.tolist()))
    spans: list[tuple[int, int]] = []
    for first, count in pairs:
        if spans and spans[-1][1] + 1 == first:
            spans[-1] = spans[-1][0], first + count - 1
        else:
            spans.append((first, first + count - 1))
    return spans


def _pairs(runs: list[int]) -> Iterator[tuple[int, int]]:
    return zip(runs[::2], runs[1::2], strict=True)
