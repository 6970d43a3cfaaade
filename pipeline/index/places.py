"""The places of an index: where the topics hold each rollout, the record of its fate, its batch, step and version.

An index holds no fates and no batches, only the places of the records that have them.
"""

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from rollstream.consumers.grouping.process.bootstrap import journal_record
from rollstream.pipeline.audit.configuration_history import ConfigurationHistory
from rollstream.pipeline.index.rollout_rows import finite
from rollstream.topics.errors import RecordError, StateRefused
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import BatchIndexEntry, FinishedOffsets, JournalRecord, LearnerStep, PolicyManifest
from rollstream.topics.records.journal import spans_of
from rollstream.topics.wire.catalogue import name_in_run
from rollstream.topics.wire.codec import kind_of, leading_text
from rollstream.topics.wire.validation import entry_problems


def uid_key(uid: bytes) -> int:
    """Return the key of a uid in the index. Two uids may share a key, so callers compare the uid in the record."""
    return int.from_bytes(hashlib.blake2b(uid, digest_size=8).digest(), "little", signed=True)


class PlaceTables:
    """Writes the places of records; the owner of the connection begins and commits the transactions."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._rollouts: list[tuple[int, int, int]] = []
        self._histories: dict[int, ConfigurationHistory] = {}
        self._skipped: dict[tuple[str, int], SkippedRecords] = {}
        """Records skipped in the open transaction, by topic and partition."""
        self._partitions = 0
        self._tables: dict[str, Callable[[KafkaRecord, Any], None]] = {
            "journal": self._journal,
            "batch-index": self._entry,
            "steps": self._step,
            "policies": self._policy,
        }

    def forget(self) -> None:
        """Forget the changes of a transaction that ended."""
        self._rollouts.clear()
        self._histories.clear()
        self._skipped.clear()

    def rollouts(self, messages: Iterable[KafkaRecord]) -> None:
        """Note records of `rollouts`."""
        for message in messages:
            if message.value is not None and kind_of(message.value) == "Rollout":
                with suppress(RecordError):  # A record that does not decode is not a rollout.
                    self._rollouts.append((uid_key(leading_text(message.value)), message.partition, message.offset))

    def take(self, message: KafkaRecord, partitions: int) -> object:
        """Write the place of a record of another topic, in a run of so many partitions.

        Returns the record, or None if it cannot be read; it is then counted as skipped.
        """
        name = name_in_run(message.topic)
        skipped = self._skipped.setdefault((name, message.partition), SkippedRecords(logged=False))
        record: object = None
        self._partitions = partitions
        with skipped.passing(message):
            try:
                record = journal_record(message, skipped) if name == "journal" else skipped.record(message)
            except StateRefused as error:
                self._db.execute("insert or ignore into refused values (?)", (str(error),))
            if record is not None:
                self._tables[name](message, record)
        return record

    def finish(self) -> None:
        """Write what was collected, before the transaction commits."""
        # Insert in the order of the table, so that each of its pages is changed once.
        self._db.executemany("insert or ignore into places values (?, ?, ?)", sorted(self._rollouts))
        states = [(json.dumps(history.state()), partition) for partition, history in self._histories.items()]
        self._db.executemany("update journals set history = ? where partition = ?", states)
        rows = [
            (name, partition, row["records"], row["offset"], row["error"])
            for (name, partition), skipped in self._skipped.items()
            for row in skipped.as_dict().values()
        ]
        self._db.executemany(
            "insert into skipped values (?, ?, ?, ?, ?) on conflict do update set records = records + excluded.records",
            rows,
        )
        self.forget()

    def _journal(self, message: KafkaRecord, record: JournalRecord) -> None:
        partition = message.partition
        if partition not in self._histories:
            self._histories[partition] = history_of(self._db, partition)
        self._histories[partition].read(record)
        self._db.execute(
            # Part of the journal was pruned before it was indexed if numbers are missing.
            "insert into journals values (?, ?, ?, ?, '') on conflict do update set position = excluded.position,"
            " begin = iif(excluded.sequence > sequence + 1, excluded.begin, begin), sequence = excluded.sequence",
            (partition, record.begin, record.position, record.sequence),
        )
        self._db.executemany(
            "insert or replace into finished values (?, ?, ?, ?)",
            [(partition, first, last, message.offset) for first, last in finished_spans(record.finished)],
        )

    def _entry(self, message: KafkaRecord, entry: BatchIndexEntry) -> None:
        if problems := entry_problems(entry):
            raise RecordError(problems[0])
        if entry.partition >= self._partitions:
            raise RecordError(f"batch {entry.batch_id} is of a partition that the run does not have")
        versions = entry.lowest_version, entry.highest_version
        row = (entry.batch_id, entry.partition, message.offset, *versions, message.value)
        if not self._db.execute("insert or ignore into entries values (?, ?, ?, ?, ?, ?)", row).rowcount:
            raise RecordError(f"batch {entry.batch_id} has an entry already")

    def _step(self, message: KafkaRecord, step: LearnerStep) -> None:
        key = (step.learner, step.step)
        self._db.execute("delete from uses where learner = ? and step = ?", key)
        time_ms = int(step.timestamp * 1000) if abs(step.timestamp) < 1e12 else message.timestamp_ms
        row = (*key, step.policy_version, time_ms, message.value)
        self._db.execute("insert or replace into steps values (?, ?, ?, ?, ?)", row)
        self._db.executemany(
            "insert into uses values (?, ?, ?, ?, ?, ?, ?)",
            [
                (use.batch_id, *key, part, use.use == "trained", use.code or use.reason, json.dumps(use.row_numbers))
                for part, use in enumerate(step.uses if step.input_run == message.topic.rpartition(".")[0] else ())
            ],
        )

    def _policy(self, message: KafkaRecord, manifest: PolicyManifest) -> None:
        size = sum(chunk.size_bytes for chunk in manifest.chunks)
        if not 0 <= size < 1 << 63:
            raise RecordError(f"the chunks of a manifest have {size} bytes in total, which is impossible")
        stages = [seconds for name, seconds in manifest.figures.items() if name.endswith("_s")]
        seconds = finite(sum(stages)) if stages else None
        created_ms = int(manifest.created * 1000) if 0 < manifest.created < 1e12 else message.timestamp_ms
        about = (manifest.version, manifest.learner, manifest.step, manifest.kind, size, created_ms, manifest.digest)
        row = (*about, seconds, message.value)
        self._db.execute("insert or replace into policies values (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)


def history_of(db: sqlite3.Connection, partition: int) -> ConfigurationHistory:
    """Return the grouping configurations that the journal of a partition names."""
    row = db.execute("select history from journals where partition = ?", (partition,)).fetchone()
    return ConfigurationHistory.of(json.loads(row[0])) if row else ConfigurationHistory()


def finished_spans(finished: Iterable[FinishedOffsets]) -> list[tuple[int, int]]:
    """Return the first and last of each range of offsets that a journal record finishes, whatever their fates."""
    spans: list[tuple[int, int]] = []
    for first, last in sorted(span for each in finished for span in spans_of(each.runs)):
        if spans and spans[-1][1] + 1 == first:
            spans[-1] = spans[-1][0], last
        else:
            spans.append((first, last))
    return spans
