"""Compares the recorded steps of learners with the batches and the batch index.

A learner may train on a rollout for the first time, or skip it, only once. Its steps must name every batch before its
position.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from rollstream.pipeline.audit.ledger.batch_table import BatchTable
from rollstream.pipeline.audit.ledger.book import Ledger
from rollstream.pipeline.audit.ledger.index import Entries
from rollstream.pipeline.audit.ledger.topic_tail import TopicTail
from rollstream.pipeline.audit.partition_journal import PartitionJournal
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RecordError
from rollstream.topics.records import BatchUse, LearnerStep, batch_numbers
from rollstream.topics.records.fates import OTHER

Use = Literal["trained", "skipped"]
USES: tuple[Use, ...] = ("trained", "skipped")
_MOST_BATCHES = 1 << 28


class UsedRows:
    """The rows that one learner trained on or skipped, by batch."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, set[int]]] = {}
        self._whole: dict[int, np.ndarray[Any, np.dtype[np.int32]]] = {}
        """By partition, the number of rows of each batch that was used as a whole, negative if they were skipped."""

    def of_batch(self, batch_id: str) -> dict[str, set[int]]:
        """Return the rows of a batch that were trained on, and the rows that were skipped."""
        rows = self._rows.get(batch_id)
        if rows is not None:
            return rows
        partition, number = batch_numbers(batch_id)
        whole = self._whole.get(partition)
        count = int(whole[number]) if whole is not None and number < len(whole) else 0
        return {"trained": set(range(max(count, 0))), "skipped": set(range(max(-count, 0)))}

    def add(self, batch_id: str, use: str, rows: set[int]) -> None:
        """Add rows of a batch."""
        used = self.of_batch(batch_id)
        used[use] |= rows
        self._rows[batch_id] = used

    def fold(self, batch_id: str, held: int) -> None:
        """Store a batch with `held` rows as a whole, if all of its rows had the same use."""
        rows = self._rows.get(batch_id)
        partition, number = batch_numbers(batch_id)
        if rows is None or not held or number >= _MOST_BATCHES:
            return
        counts = {use: len(rows[use]) for use in USES}
        alike = sum(counts.values()) == max(counts.values()) == held
        if alike and max(rows["trained"] | rows["skipped"]) == held - 1:
            whole = self._whole.get(partition, np.zeros(0, np.int32))
            if number >= len(whole):
                whole = np.concatenate((whole, np.zeros(max(number + 1 - len(whole), len(whole), 64), np.int32)))
            whole[number] = held if counts["trained"] else -held
            self._whole[partition] = whole
            del self._rows[batch_id]

    def skipping(self) -> Iterator[str]:
        """Yield the batches with skipped rows."""
        yield from (batch_id for batch_id, rows in self._rows.items() if rows["skipped"])
        for partition, whole in self._whole.items():
            yield from (f"{partition}-{number}" for number in np.flatnonzero(whole < 0))


_MOST_ROWS = 2**24
_MOST_NAMED = 20
UseRows = tuple[int, int, str, int, tuple[int, ...]]
"""The rows of a use: step, index among the step's uses, batch, number of rows, and row numbers (empty: all rows)."""


@dataclass
class _Learner:
    """The record of one learner."""

    steps: int = 0
    step: int = -1
    """The learner's newest step."""
    input_run: str = ""
    position: int = -1
    stood: int = -1
    """Position after the learner's last compared step on batches of this run; -1 before the first such step."""
    trained: int = 0
    skipped: int = 0
    skipped_as: dict[str, int] = field(default_factory=dict)
    used: UsedRows = field(default_factory=UsedRows)
    unverified: list[UseRows] = field(default_factory=list)
    """Uses whose rows have not been found in a batch yet."""
    beyond: list[tuple[int, int]] = field(default_factory=list)
    """Steps whose positions were beyond the end of the index when they were read, with these positions."""
    problems: list[tuple[int, int, str]] = field(default_factory=list)
    """Problems with uses: step, index among the step's uses, and description."""
    passed: list[tuple[int, int, str]] = field(default_factory=list)
    """Problems with positions: step, order, and description."""


class LearnerUses:
    """The uses of batches by all learners of a run, from steps given in order."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._learners: dict[str, _Learner] = {}
        self._new: list[LearnerStep] = []
        """Steps whose positions have not been compared with the index yet."""

    def take(self, steps: Iterable[LearnerStep]) -> None:
        """Count the uses of further steps, given in order."""
        for step in steps:
            learner = self._learners.setdefault(step.learner, _Learner())
            own = step.input_run == self._run
            learner.steps += step.step > 0
            learner.step, learner.position = step.step, step.position
            learner.input_run = "" if own else step.input_run
            for at, use in enumerate(step.uses if own else ()):
                _take_use(learner, step, at, use)
            self._new.append(step)

    def untrained(self, batch_id: str) -> set[int]:
        """Return the rows of a batch that a learner skipped and no learner trained on."""
        trained, skipped = set[int](), set[int]()
        for learner in self._learners.values():
            used = learner.used.of_batch(batch_id)
            trained |= used["trained"]
            skipped |= used["skipped"]
        return skipped - trained

    def check(
        self,
        table: BatchTable,
        hidden_rows: Mapping[str, int],
        journals: Mapping[int, PartitionJournal],
        entries: Entries,
        end: int,
        result: Ledger,
    ) -> None:
        """Compare steps with batches and with the index, and count them by learner.

        `hidden_rows` has the number of rows of each batch that is not in the table because a transaction hides it.
        `end` is the end of the index, determined before the index was read.

        Each learner trains on a rollout for the first time, or skips it, at most once; it uses only rows that exist,
        and uses again only rows that it has trained on. The steps up to its position name every entry of the index
        before that position, each at its offset. Steps that draw from a rollout buffer are exempt: they name a batch
        only when they use it, which may be long after it was read.
        """
        for taken in self._new:
            if taken.input_run == self._run:
                _compare_position(self._learners[taken.learner], taken, entries, end)
        self._new = []
        kept = {partition: journal.batches for partition, journal in journals.items()} | dict(table.lowest())
        for name, learner in sorted(self._learners.items()):
            learner.unverified = [use for use in learner.unverified if not _verified(learner, use, table)]
            problems = [*learner.problems]
            for step, at, batch_id, rows, numbers in learner.unverified:
                partition, number = batch_numbers(batch_id)
                deleted = result.pruned and number < kept.get(partition, 0)
                # An open transaction hides the journal of batches committed after the cut.
                later = partition in journals and journals[partition].hidden and number >= journals[partition].batches
                held = hidden_rows.get(batch_id, table.rows(batch_id))
                if not deleted and not later and not _are_rows(rows, numbers, held):
                    text = f"used {rows} rows of batch {batch_id}, which has {'none' if held is None else held}"
                    problems.append((step, at, text))
            _report(name, problems, result)
            self._add_row(name, learner, result)
        for name, learner in sorted(self._learners.items()):
            learner.beyond = [(step, position) for step, position in learner.beyond if position > end]
            beyond = [
                (step, -1, f"is at index offset {position}, but batch-index ends at {end}")
                for step, position in learner.beyond
            ]
            _report(name, [*beyond, *learner.passed], result)
            if not learner.input_run:
                result.learners[name]["waiting"] = entries.from_offset(learner.position)
        result.trained = sum(row["trained"] for row in result.learners.values())
        result.skipped = sum(row["skipped"] for row in result.learners.values())

    def _add_row(self, name: str, learner: _Learner, result: Ledger) -> None:
        result.steps += learner.steps
        names = ("steps", "trained", "skipped", "step", "input_run", "position")
        row: dict[str, Any] = {name: getattr(learner, name) for name in names}
        result.learners[name] = {**row, "skipped_as": dict(learner.skipped_as)}
        for code, count in learner.skipped_as.items():
            result.skipped_as[code] = result.skipped_as.get(code, 0) + count


class Learners(LearnerUses):
    """The steps of all learners that have been read."""

    def __init__(self, kafka: KafkaConfig, run: str) -> None:
        super().__init__(run)
        self.tail = TopicTail(kafka, run, "steps")
        self._kafka = kafka

    def read(self) -> set[str]:
        """Read new steps; return the batches that they name."""
        steps = self._read()
        if any(name in self._learners and number <= self._learners[name].step for name, number in steps):
            # A step that was executed again replaces its first record, including the uses in it, so read all again.
            self.tail, before = TopicTail(self._kafka, self._run, "steps"), self._learners
            self._learners, self._new = {}, []
            steps = self._read()
            named = {batch_id for learner in before.values() for batch_id in learner.used.skipping()}
        else:
            named = set()
        self.take(steps[key] for key in sorted(steps))
        return named | {use.batch_id for step in steps.values() for use in step.uses}

    def _read(self) -> dict[tuple[str, int], LearnerStep]:
        """Return the newest record of each new step."""
        newest: dict[tuple[str, int], LearnerStep] = {}
        for message, step in self.tail.skipped.records(LearnerStep, self.tail.messages()):
            with self.tail.skipped.passing(message):
                check_uses(step)
                newest[step.learner, step.step] = step
        return newest


def check_uses(step: LearnerStep) -> None:
    """Raise RecordError for an invalid batch id or number of rows, because each row will be looked up."""
    for use in step.uses:
        batch_numbers(use.batch_id)
        _check_rows(use)


def _check_rows(use: BatchUse) -> None:
    if not 0 <= use.rows <= _MOST_ROWS or any(row < 0 for row in use.row_numbers):
        raise RecordError(
            f"uses {use.rows} rows of batch {use.batch_id}; the number of rows must be from 0 to {_MOST_ROWS}, and no "
            "row number may be negative"
        )


def _take_use(learner: _Learner, step: LearnerStep, at: int, use: BatchUse) -> None:
    """Count the rows of a use, and report rows used a second time."""
    rows, used = set(use.row_numbers or range(use.rows)), learner.used.of_batch(use.batch_id)
    if use.again and not rows <= used["trained"]:
        _note(
            learner.problems, step.step, at, f"uses rollouts of batch {use.batch_id} again that it had not trained on"
        )
    elif not use.again and rows & (used["trained"] | used["skipped"]):
        _note(learner.problems, step.step, at, f"uses batch {use.batch_id} a second time")
    learner.used.add(use.batch_id, use.use, rows)
    learner.unverified.append((step.step, at, use.batch_id, use.rows, tuple(use.row_numbers)))
    if not use.again and use.use == "trained":
        learner.trained += use.rows
    elif not use.again:
        learner.skipped += use.rows
        code = use.code or OTHER
        learner.skipped_as[code] = learner.skipped_as.get(code, 0) + use.rows


def _verified(learner: _Learner, use: UseRows, table: BatchTable) -> bool:
    """Whether a batch has the rows of a use."""
    _step, _at, batch_id, rows, numbers = use
    held = table.rows(batch_id)
    if held is None or not _are_rows(rows, numbers, held):
        return False
    learner.used.fold(batch_id, held)
    return True


def _are_rows(rows: int, numbers: tuple[int, ...], held: int | None) -> bool:
    """Whether a batch with `held` rows has the rows of a use: all rows, or the rows with the given numbers."""
    if not numbers:
        return held == rows
    return held is not None and len(set(numbers)) == rows and max(numbers) < held


def _compare_position(learner: _Learner, step: LearnerStep, entries: Entries, end: int) -> None:
    """Compare the position of a step, given in order, with the index entries that its uses name."""
    named = {use.index_offset: use.batch_id for use in step.uses}
    if step.position > end:
        learner.beyond.append((step.step, step.position))
    for at, (offset, batch_id) in enumerate(named.items()):
        there = entries.batch_at(offset)
        if there is not None and there != batch_id:
            text = f"names batch {batch_id} at index offset {offset}, which names batch {there}"
            _note(learner.passed, step.step, at, text)
    begin = learner.stood if learner.stood >= 0 else min(named, default=step.position)
    past = [entry for entry in entries.between(begin, step.position) if entry[0] not in named]
    if past and step.stream_time_ms < 0:
        offset, batch_id = past[0]
        text = f"moved past {len(past)} batches that no step names; the first is {batch_id} at index offset {offset}"
        _note(learner.passed, step.step, len(named), text)
    learner.stood = step.position


def _report(learner: str, problems: Iterable[tuple[int, int, str]], result: Ledger) -> None:
    for step, _at, text in sorted(problems):
        result.problem(f"step {step} of learner {learner} {text}")


def _note(problems: list[tuple[int, int, str]], step: int, at: int, text: str) -> None:
    if len(problems) < _MOST_NAMED:
        problems.append((step, at, text))
