"""The conservation proof: every record of `rollouts` is in exactly one place, read from the topics alone.

The cut: steps first, then the journal, then batches, dead letters and rollouts. What lies beyond the positions the
journal names is unread; whatever does not add up is a problem, named with its partition and offset.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from consumers.grouping.changes import BATCHED, CONTROL, DEAD_LETTERED, DROPPED
from consumers.grouping.runs import from_runs
from consumers.grouping.selection import Selection, selections
from topics import clients, codec
from topics.catalogue import topic_name
from topics.codec import decode_as
from topics.config import KafkaConfig
from topics.records import FateCount, JournalRecord, LearnerStep, TrainingBatch

_UNFINISHED = "in_flight"
_FATES = (_UNFINISHED, BATCHED, DROPPED, DEAD_LETTERED, CONTROL)
_MOST_PROBLEMS = 20
REDRIVEN = "rollstream.redriven"
"""Header of a note in dead-letters: the offset there of the letter that was sent again."""


@dataclass
class Ledger:
    """Where every record of a run is."""

    produced: int = 0
    """Records of rollouts."""
    rollouts: int = 0
    """Rollouts among them."""
    batched: int = 0
    batches: int = 0
    trained: int = 0
    skipped: int = 0
    steps: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    dead_lettered: int = 0
    control: int = 0
    in_flight: int = 0
    unread: int = 0
    evals: int = 0
    selection: dict[str, Selection] = field(default_factory=dict)
    """Lengths and rewards by environment, of what was batched and of what was not."""
    problems: list[str] = field(default_factory=list)
    """What does not add up; the first twenty."""

    @property
    def balanced(self) -> bool:
        """Whether every record is in exactly one place and every place agrees with the others."""
        placed = self.batched + sum(self.dropped.values()) + self.dead_lettered + self.control
        return not self.problems and self.produced == placed + self.in_flight + self.unread

    def as_dict(self) -> dict[str, Any]:
        """The ledger as programs read it."""
        return {
            "balanced": self.balanced,
            "produced": self.produced,
            "rollouts": self.rollouts,
            "batched": self.batched,
            "batches": self.batches,
            "trained": self.trained,
            "skipped": self.skipped,
            "steps": self.steps,
            "dropped": dict(sorted(self.dropped.items())),
            "dead_lettered": self.dead_lettered,
            "control": self.control,
            "in_flight": self.in_flight,
            "unread": self.unread,
            "evals": self.evals,
            "selection": {environment: found.as_dict() for environment, found in self.selection.items()},
            "problems": self.problems,
        }

    def problem(self, text: str) -> None:
        """Note something that does not add up."""
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(text)


class _Partition:
    """What the journal says of one partition: for each offset below the position a code in `_FATES`, -1 for none."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.sequence = -1
        self.position = 0
        self.fates = np.full(1024, -1, "<i1")
        self.reasons: dict[int, str] = {}
        self.batch_ids: list[str] = []
        self.counts: tuple[FateCount, ...] = ()

    def read(self, record: JournalRecord, ledger: Ledger) -> None:
        """Take in the next journal record."""
        where = f"journal[{self.number}] sequence {record.sequence}"
        if record.sequence != self.sequence + 1 or record.begin != self.position:
            ledger.problem(
                f"{where} begins at offset {record.begin}; sequence {self.sequence + 1} at {self.position} was expected"
            )
        self.sequence, self.position = record.sequence, record.position
        while len(self.fates) < record.position:
            self.fates = np.concatenate((self.fates, np.full(len(self.fates), -1, "<i1")))
        for offset in from_runs(record.admitted):
            self._set(offset, _UNFINISHED, ledger)
        for finished in record.finished:
            for offset in from_runs(finished.runs):
                self._set(offset, finished.fate, ledger)
        for drop in record.drops:
            self.reasons[drop.offset] = drop.reason
        self.batch_ids += record.batch_ids
        self.counts = record.counts

    def _set(self, offset: int, fate: str, ledger: Ledger) -> None:
        now = self.fates[offset]
        if now > 0 or (now == 0 and fate == _UNFINISHED):
            ledger.problem(f"rollouts[{self.number}] offset {offset} is {_FATES[now]} and then {fate}")
        self.fates[offset] = _FATES.index(fate)

    def offsets(self, fate: str) -> set[int]:
        """Offsets with a fate."""
        return set(np.flatnonzero(self.fates[: self.position] == _FATES.index(fate)).tolist())


def ledger(kafka: KafkaConfig, run: str) -> Ledger:
    """Read a run's topics and prove, or disprove, that every record is in one place."""
    clients.check_broker(kafka)
    result = Ledger()
    steps = _read_steps(kafka, run)
    partitions = {p: _Partition(p) for p in range(clients.partitions_of(kafka, topic_name(run, "rollouts")))}
    for message in clients.read_to_end(kafka, topic_name(run, "journal")):
        record = decode_as(JournalRecord, message.value())
        partitions[record.partition].read(record, result)
    result.selection = selections(count for partition in partitions.values() for count in partition.counts)
    rows = _check_batches(kafka, run, partitions, result)
    _check_dead_letters(kafka, run, partitions, result)
    _check_records(kafka, run, partitions, result)
    _check_steps(steps, rows, result)
    result.evals = sum(1 for _ in clients.read_to_end(kafka, topic_name(run, "evals")))
    return result


def _read_steps(kafka: KafkaConfig, run: str) -> list[LearnerStep]:
    """The newest record of each step."""
    newest: dict[tuple[str, int], LearnerStep] = {}
    for message in clients.read_to_end(kafka, topic_name(run, "steps")):
        step = decode_as(LearnerStep, message.value())
        newest[step.learner, step.step] = step
    return list(newest.values())


def _check_batches(kafka: KafkaConfig, run: str, partitions: dict[int, _Partition], result: Ledger) -> dict[str, int]:
    """Batches against the journal: the same batches, made of exactly the offsets it calls batched. Rows by batch id."""
    carried: dict[int, Counter[int]] = {p: Counter() for p in partitions}
    rows: dict[str, int] = {}
    expected = {batch_id for p in partitions.values() for batch_id in p.batch_ids}
    for message in clients.read_to_end(kafka, topic_name(run, "batches")):
        batch = decode_as(TrainingBatch, message.value())
        if batch.batch_id not in expected:
            continue  # Committed after the cut.
        if batch.batch_id in rows:
            result.problem(f"batch {batch.batch_id} is in batches twice")
        rows[batch.batch_id] = len(batch)
        carried[batch.partition].update(batch.source_offsets.tolist())
    for batch_id in sorted(expected - set(rows)):
        result.problem(f"batch {batch_id} is in the journal and not in batches")
    for partition in partitions.values():
        journal, batches = partition.offsets(BATCHED), carried[partition.number]
        for offset in sorted(journal.symmetric_difference(batches)):
            place = "journal and no batch" if offset in journal else "a batch and not the journal"
            result.problem(f"rollouts[{partition.number}] offset {offset} is batched in {place}")
        for offset, times in batches.items():
            if times > 1:
                result.problem(f"rollouts[{partition.number}] offset {offset} is in {times} batches")
        result.batched += len(journal)
    result.batches = len(rows)
    return rows


def _check_dead_letters(kafka: KafkaConfig, run: str, partitions: dict[int, _Partition], result: Ledger) -> None:
    found: dict[int, Counter[int]] = {p: Counter() for p in partitions}
    for message in clients.read_to_end(kafka, topic_name(run, "dead-letters")):
        headers: dict[str, Any] = dict(message.headers() or [])
        if REDRIVEN in headers:
            continue  # A note that a letter was sent again, which is another record of rollouts.
        try:
            number = int(headers["__streams.errors.partition"])
            offset = int(headers["__streams.errors.offset"])
            position = partitions[number].position
        except (KeyError, ValueError, TypeError):
            result.problem(f"dead-letters offset {message.offset()} names no partition and offset of rollouts")
            continue
        if offset < position:
            found[number][offset] += 1
    for partition in partitions.values():
        journal = partition.offsets(DEAD_LETTERED)
        for offset in sorted(journal.symmetric_difference(found[partition.number])):
            place = "the journal alone" if offset in journal else "the topic alone"
            result.problem(f"rollouts[{partition.number}] offset {offset} is dead-lettered in {place}")
        for offset, times in found[partition.number].items():
            if times > 1:
                result.problem(f"rollouts[{partition.number}] offset {offset} is dead-lettered {times} times")
        result.dead_lettered += len(journal)


def _check_records(kafka: KafkaConfig, run: str, partitions: dict[int, _Partition], result: Ledger) -> None:
    """Rollouts against the journal: below the position every record has a place, and every place a record."""
    frames = tuple(codec.MAGIC + schema.fingerprint for schema in codec.schemas()["Rollout"])
    seen = {p: np.zeros(len(partition.fates), bool) for p, partition in partitions.items()}
    dropped: Counter[str] = Counter()
    for message in clients.read_to_end(kafka, topic_name(run, "rollouts")):
        number, offset = message.partition() or 0, message.offset() or 0
        partition = partitions[number]
        result.produced += 1
        result.rollouts += (message.value() or b"").startswith(frames)
        if offset >= partition.position:
            result.unread += 1
            continue
        seen[number][offset] = True
        code = partition.fates[offset]
        if code < 0:
            result.problem(f"rollouts[{number}] offset {offset} was read and is nowhere")
        elif _FATES[code] == DROPPED:
            dropped[partition.reasons.get(offset, "without a reason")] += 1
        elif _FATES[code] == CONTROL:
            result.control += 1
        elif _FATES[code] == _UNFINISHED:
            result.in_flight += 1
    for number, partition in partitions.items():
        placed = partition.fates[: partition.position] >= 0
        for offset in np.flatnonzero(placed & ~seen[number][: partition.position]).tolist():
            result.problem(
                f"rollouts[{number}] offset {offset} is {_FATES[partition.fates[offset]]} and holds no record"
            )
    if dropped.pop("without a reason", 0):
        result.problem("records are dropped without a reason")
    result.dropped = dict(dropped)


def _check_steps(steps: list[LearnerStep], rows: dict[str, int], result: Ledger) -> None:
    """Uses against batches: each batch at most once a learner, and never one that does not exist."""
    used: set[tuple[str, str]] = set()
    for step in sorted(steps, key=lambda s: (s.learner, s.step)):
        result.steps += step.step > 0
        for use in step.uses:
            if (step.learner, use.batch_id) in used:
                result.problem(f"step {step.step} of learner {step.learner} uses batch {use.batch_id} a second time")
            used.add((step.learner, use.batch_id))
            if rows.get(use.batch_id) != use.rows:
                result.problem(
                    f"step {step.step} of learner {step.learner} used {use.rows} rows of batch {use.batch_id}, which "
                    f"has {rows.get(use.batch_id, 'none')}"
                )
            if use.use == "trained":
                result.trained += use.rows
            else:
                result.skipped += use.rows
