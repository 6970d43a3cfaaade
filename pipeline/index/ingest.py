"""Writes the rows of records into an index. Each record is written whole or, if it is invalid, skipped.

The result depends on the records of each partition and their order, not on the portions in which they arrive.
"""

import json
import math
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from rollstream.pipeline.index import fates
from rollstream.pipeline.index.fates import IN_FLIGHT, UNREAD
from rollstream.pipeline.index.rollout_rows import (
    Clock,
    RolloutValues,
    finite,
    group_name,
    row_of,
    values_of,
)
from rollstream.pipeline.index.rollout_table import NewRow, RolloutTable, RowNames, update_groups, update_uses
from rollstream.producers.worker.evaluation_figures import prompts_named
from rollstream.topics.errors import RecordError
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.metrics.catalogue import SUBJECTS
from rollstream.topics.records import JournalRecord, LearnerStep, Metrics, Rollout, TrainingBatch
from rollstream.topics.records.fates import DROPPED
from rollstream.topics.records.journal import spans_of
from rollstream.topics.wire.catalogue import name_in_run
from rollstream.topics.wire.validation import batch_problems

BUCKET_MS = 10_000
"""Length of a time bucket. Only the last value of each component's metric within a bucket is kept."""
COMPONENT_SERIES = {
    "env": ("rollouts_per_s", "tokens_per_s", "cancelled_per_s", "capacity_wait_seconds_per_s"),
    "infer": ("completion_tokens_per_s", "requests_per_s", "decoding_rows", "waiting_requests", "errors_per_s"),
    "serve-weights": ("serving_replicas",),
    "gateway": ("calls_per_s", "open_sessions"),
    "group": ("lag", "in_flight", "open_groups"),
}
"""Metrics of components that become series, by role."""
_WITH_ROWS = ("journal", "batches", "steps", "metrics", "evals")
"""Topics with rows, besides `rollouts`."""
_ADD_PRODUCED = """insert into produced values (?, ?, ?, 1, ?, ?, ?, ?, ?) on conflict do update set
    rollouts = rollouts + 1, reward = reward + excluded.reward, successes = successes + excluded.successes,
    length = length + excluded.length, sampled = sampled + excluded.sampled, truncated = truncated + excluded.truncated
"""


class Ingest:
    """Writes records into an index through one connection, whose owner begins and commits the transactions."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.db = connection
        self._names: dict[tuple[str, str], int] = {}
        self._groups: dict[str, int] = {}
        self._clocks: dict[int, Clock] = {}
        self._table = RolloutTable(connection)
        rows = self._journal, self._batch, self._step, self._metrics, self._evaluated
        self._rows: dict[str, Callable[[KafkaRecord, Any], None]] = dict(zip(_WITH_ROWS, rows, strict=True))
        self._used: set[str] = set()
        """Batches whose rows, or uses by steps, changed in this transaction."""

    def forget(self) -> None:
        """Forget the writes of a transaction that was rolled back."""
        self._names.clear()
        self._groups.clear()
        self._clocks.clear()
        self._table.forget()
        self._used.clear()

    def finish(self) -> None:
        """Write values that depend on several records, and the state of each partition's `Clock`, before the commit."""
        self._table.write()
        touched = self._table.touched
        for name in sorted(self._used):
            touched |= update_uses(self.db, name, self._name)
        update_groups(self.db, touched)
        self.db.executemany(
            "update positions set last_ms = ?, repeated = ?"
            " where layer = 'rows' and topic = 'rollouts' and partition = ?",
            [(clock.last_ms, clock.repeated, partition) for partition, clock in self._clocks.items()],
        )
        self._table.write_texts()
        self._table.forget()
        self._used.clear()
        if len(self._groups) > 200_000:
            self._groups.clear()

    # ------------------------------------------------------------------ rollouts

    def rollouts(self, messages: Sequence[KafkaRecord]) -> None:
        """Write records of `rollouts`."""
        produced = []
        for message in messages:
            answer = row_of(message)
            rollout = answer.rollout
            row = NewRow(
                self._clock(message.partition).next(message.timestamp_ms),
                message.partition,
                message.offset,
                message.timestamp_ms,
                version=answer.version,
            )
            if answer.environment is not None:
                row.environment = self._name("environment", answer.environment)
            episode = uid = branches = None
            if rollout is not None:
                values = values_of(rollout)
                row.version, row.lowest, row.highest, row.reward, row.length, row.sampled, row.truncated = values
                row.worker = self._name("worker", rollout.metadata.worker_id)
                row.grp = self._group(rollout, row.environment)
                produced.append(_produced(message.partition, rollout, row.environment, values))
                uid, branches = rollout.uid, rollout.branches
                episode = rollout.episode_uid if branches > 1 else None
            names = RowNames(row.id, uid, answer.example, answer.preview, episode, branches)
            self._table.add(row, names, answer.text)
        self.db.executemany(_ADD_PRODUCED, produced)

    def _clock(self, partition: int) -> Clock:
        if partition not in self._clocks:
            answer = self.db.execute(
                "select last_ms, repeated from positions where layer = 'rows' and topic = 'rollouts' and partition = ?",
                (partition,),
            ).fetchone()
            self._clocks[partition] = Clock(partition, *(answer or ()))
        return self._clocks[partition]

    def _name(self, kind: str, name: str) -> int:
        key = (kind, name)
        if key not in self._names:
            self.db.execute("insert or ignore into names (kind, name) values (?, ?)", key)
            answer = self.db.execute("select id from names where kind = ? and name = ?", key).fetchone()
            self._names[key] = answer[0]
        return self._names[key]

    def _group(self, rollout: Rollout, environment: int | None) -> int:
        name = group_name(rollout)
        if name not in self._groups:
            about = (name, environment, rollout.example_id, rollout.policy_version, rollout.group_size)
            self.db.execute(
                "insert or ignore into groups (name, environment, example, version, declared) values (?, ?, ?, ?, ?)",
                about,
            )
            self._groups[name] = self.db.execute("select id from groups where name = ?", (name,)).fetchone()[0]
        return self._groups[name]

    # ------------------------------------------------------------------ the other topics

    def other(self, message: KafkaRecord, record: object = None) -> None:
        """Write a record of another topic; `record` is the decoded record if it was decoded already."""
        write, record = self._rows.get(name_in_run(message.topic)), decoded(message) if record is None else record
        if write is not None and record is not None:
            with suppress(RecordError):
                write(message, record)

    def _journal(self, _message: KafkaRecord, record: JournalRecord) -> None:
        partition = record.partition
        before = self.db.execute("select position, sequence from settled where partition = ?", (partition,)).fetchone()
        read, sequence = before or (record.begin, -1)
        if record.sequence > sequence + 1:
            self._before(record)
        self._settle(partition, [(read, record.position - 1)], IN_FLIGHT, among=UNREAD)
        if record.snapshot:
            self._settle(partition, spans_of(record.unfinished), IN_FLIGHT)
        for finished in record.finished:
            self._settle(partition, spans_of(finished.runs), finished.fate)
        for drop in record.drops:
            self._settle(partition, [(drop.offset, drop.offset)], DROPPED, drop.reason, among=DROPPED)
        self.db.execute(
            "insert or replace into settled values (?, ?, ?)", (partition, record.position, record.sequence)
        )

    def _before(self, record: JournalRecord) -> None:
        """Mark rollouts as settled if their fate was in a pruned part of the journal.

        The record after that part is a snapshot, which names the rollouts that are still in flight.
        """
        self._settle(record.partition, [(0, record.position - 1)], fates.SETTLED, among=IN_FLIGHT)

    def _settle(
        self, partition: int, ranges: Iterable[tuple[int, int]], fate: str, reason: str = "", among: str = fates.SETTLED
    ) -> None:
        """Set the fate of these offsets, except where the current fate comes after `among` in `fates.NAMES`."""
        known = self._name("reason", reason) if reason else None
        self._table.settle(partition, ranges, fates.CODES[fate], known, fates.CODES[among])

    def _batch(self, message: KafkaRecord, batch: TrainingBatch) -> None:
        if problems := batch_problems(batch):
            raise RecordError(problems[0])
        number = self._batch_id(batch.batch_id)
        self.db.execute(
            "update batches set partition = ?, offset = ?, rollouts = ?, cut_ms = ? where id = ?",
            (message.partition, message.offset, len(batch), batch.cut_ms, number),
        )
        starts = batch.splits.tolist()
        advantages = []
        for row, offset in enumerate(batch.source_offsets.tolist()):
            span = slice(starts[row], starts[row + 1])
            sampled = batch.advantages[span][batch.loss_mask[span]]
            advantages.append((offset, finite(float(sampled[0])) if len(sampled) else None))
        self._table.assign(number, message.partition, advantages)
        self._used.add(batch.batch_id)

    def _batch_id(self, name: str) -> int:
        self.db.execute("insert or ignore into batches (name) values (?)", (name,))
        return int(self.db.execute("select id from batches where name = ?", (name,)).fetchone()[0])

    def _step(self, _message: KafkaRecord, step: LearnerStep) -> None:
        self.db.execute("delete from step_metrics where learner = ? and step = ?", (step.learner, step.step))
        self.db.executemany(
            "insert or replace into step_metrics values (?, ?, ?, ?)",
            [(step.learner, name, step.step, finite(value)) for name, value in step.metrics.items()],
        )
        # An earlier record of this step may have used other batches.
        before = self.db.execute(
            "select distinct b.name from rollouts r join batches b on b.id = r.batch where r.step = ?", (step.step,)
        )
        self._used.update(name for (name,) in before)
        self._used.update(use.batch_id for use in step.uses)

    def _metrics(self, message: KafkaRecord, record: Metrics) -> None:
        role = record.labels.get("role", "")
        values = {name: value for name, value in record.values.items() if math.isfinite(value)}
        time_ms = int(record.timestamp * 1000) if 0 < record.timestamp < 1e12 else max(message.timestamp_ms, 0)
        self.db.execute(
            "insert or replace into components values (?, ?, ?, ?)",
            (record.component, role, time_ms, json.dumps(values)),
        )
        wanted = COMPONENT_SERIES.get(role, ())
        self.db.executemany(
            "insert or replace into component_series values (?, ?, ?, ?, ?)",
            [(role, name, time_ms // BUCKET_MS, _subject(record), values[name]) for name in wanted if name in values],
        )

    def _evaluated(self, _message: KafkaRecord, rollout: Rollout) -> None:
        # Branches of an episode have the same score. If an evaluation was repeated, the newer answers count.
        self.db.execute(
            "insert or replace into evaluated values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                rollout.policy_version,
                self._name("environment", rollout.environment),
                rollout.episode_uid or rollout.uid,
                values_of(rollout).reward or 0.0,
                int(rollout.success),
                rollout.extra.get("phase", ""),
                rollout.example_id,
                rollout.group_size,
                prompts_named(rollout),
                rollout.extra.get("suites", "[]"),
            ),
        )


def decoded(message: KafkaRecord) -> object:
    """Decode a record of another topic than `rollouts`; None for topics without rows, and for invalid records."""
    rows = name_in_run(message.topic) in _WITH_ROWS
    return SkippedRecords(logged=False).record(message) if rows else None


def _subject(record: Metrics) -> str:
    """Return the name of a component, followed by the subjects of its record."""
    about = [record.labels[name] for name in SUBJECTS if name in record.labels]
    return "/".join([record.component, *about])


def _produced(partition: int, rollout: Rollout, environment: int | None, values: RolloutValues) -> tuple[Any, ...]:
    figures = (values.reward or 0.0, int(rollout.success), values.length, values.sampled, values.truncated)
    return (partition, values.version, environment, *figures)
