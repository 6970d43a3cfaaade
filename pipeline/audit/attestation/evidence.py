"""Evidence of a run in its archive: the trees of a statement, its counts, and every contradiction in the records.

Everything that can be computed is computed again: grouping is folded from the rollouts, and the resulting batches and
drops are compared with the recorded ones. No broker is contacted.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from rollstream.consumers.grouping.core import task_state
from rollstream.consumers.grouping.core.effects import CORE_VERSION, InputRecord
from rollstream.consumers.grouping.core.plug_ins import BUILT_IN, PlugIns
from rollstream.consumers.grouping.process.bootstrap import journal_record
from rollstream.consumers.grouping.process.restoration import records_of
from rollstream.pipeline.audit.attestation.archive_cut import ArchiveCut
from rollstream.pipeline.audit.attestation.trees import (
    TREES,
    Leaf,
    MerkleTree,
    TreeName,
    batch_leaf,
    canonical,
    digest_of,
    rollout_leaf,
    step_leaf,
    version_leaf,
)
from rollstream.pipeline.audit.ledger.batch_table import BatchTable
from rollstream.pipeline.audit.ledger.book import Ledger
from rollstream.pipeline.audit.ledger.index import Entries
from rollstream.pipeline.audit.ledger.learners import LearnerUses, check_uses
from rollstream.pipeline.audit.partition_journal import CODES, DELIVERED, SEEN, PartitionJournal
from rollstream.pipeline.audit.refold import ends_snapshot, fold_again, skips_in
from rollstream.pipeline.audit.topic_reading import Index, valid_records
from rollstream.topics.errors import StateRefused
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.records import (
    BatchIndexEntry,
    JournalRecord,
    LearnerStep,
    PolicyManifest,
    Rollout,
    TrainingBatch,
    batch_numbers,
)
from rollstream.topics.records.fates import BATCHED
from rollstream.topics.wire import codec
from rollstream.topics.wire.codec import decode_as
from rollstream.topics.wire.rl_examples import batch_digest

_MOST_NAMED = 20
_NO_BATCH = -1


@dataclass
class Evidence:
    """Everything that a statement says about a run, and the contradictions that forbid a statement."""

    ends: dict[str, dict[int, int]]
    """By topic and partition, the offset after the last record read; for `rollouts`, the position of grouping."""
    trees: dict[TreeName, MerkleTree] = field(default_factory=lambda: {name: MerkleTree() for name in TREES})
    batches: list[Leaf] = field(default_factory=list)
    steps: list[Leaf] = field(default_factory=list)
    versions: list[Leaf] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Number of records of `rollouts` by fate, including records in flight; drops are counted by reason."""
    configurations: dict[int, str] = field(default_factory=dict)
    """The digest of each grouping configuration, by generation."""
    folded: int = 0
    """Batches computed again."""
    problems: list[str] = field(default_factory=list)
    """The first contradictions."""

    def problem(self, text: str) -> None:
        """Note a contradiction."""
        if len(self.problems) < _MOST_NAMED:
            self.problems.append(text)

    def add(self, name: TreeName, leaf: Leaf) -> None:
        """Append an entry to a tree."""
        self.trees[name].add(canonical(leaf))
        if name != "rollouts":
            getattr(self, name).append(leaf)


RolloutCallback = Callable[[int, Leaf], None]
"""Called with the index of each entry in the tree of rollouts, and the entry."""


def evidence_of(
    cut: ArchiveCut, plug_ins: PlugIns = BUILT_IN, on_rollout: RolloutCallback = lambda _index, _leaf: None
) -> Evidence:
    """Read an archive and check it. Raises StateRefused if it cannot be read, or if a newer release wrote it."""
    return _Reading(cut, plug_ins, on_rollout).evidence()


@dataclass
class _Partition:
    """One partition of `rollouts`, according to its journal and its batches."""

    journal: PartitionJournal
    head: list[JournalRecord] = field(default_factory=list)
    """Records of the journal up to its first snapshot."""
    records: list[JournalRecord] = field(default_factory=list)
    """Records of the journal that name drops or skips."""
    named: set[str] = field(default_factory=set)
    """Batches that the journal names."""
    batch_of: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """By offset, the number of the batch that carries the record, or -1."""
    row_of: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))


class _Reading:
    """One pass over an archive, topic by topic."""

    def __init__(self, cut: ArchiveCut, plug_ins: PlugIns, on_rollout: RolloutCallback) -> None:
        self._cut, self._plug_ins, self._on_rollout = cut, plug_ins, on_rollout
        self._result = Evidence({name: dict(ends) for name, ends in cut.ends.items()})
        self._partitions = {p: _Partition(PartitionJournal(p)) for p in cut.partitions}
        self._digests: dict[str, str] = {}
        """Digest of each batch, computed from its content."""
        self._table, self._entries = BatchTable(), Entries()
        self._index: Index = {}

    def evidence(self) -> Evidence:
        for number in self._partitions:
            self._read_journal(number)
        self._read_index()
        self._read_batches()
        self._read_steps()
        self._read_versions()
        for number in self._partitions:
            self._read_rollouts(number)
        return self._result

    def _read_journal(self, number: int) -> None:
        part = self._partitions[number]
        journal, configurations = part.journal, self._result.configurations
        whole = False
        for message in self._cut.messages("journal", number):
            record = journal_record(message, self._cut.skipped)
            if record is None:
                continue
            if record.core_version > CORE_VERSION:
                raise StateRefused(
                    f"batches of run {self._cut.run} were cut by core version {record.core_version}, but this release "
                    f"knows only versions up to {CORE_VERSION}; use the release that cut them"
                )
            if not _is_within(record, self._result.ends["rollouts"][number]) or (record.sequence and not part.head):
                raise StateRefused(
                    f"journal[{number}] offset {message.offset} is not about the archived records of rollouts from "
                    f"their beginning; run `rollstream archive` to complete the archive"
                )
            journal.read(record)
            if not whole:
                part.head.append(record)
                whole = ends_snapshot(part.head, len(part.head) - 1)
            if record.drops or record.skipped:
                part.records.append(record)
            part.named.update(record.batch_ids)
            configurations.setdefault(record.watermark_generation, digest_of(record.watermark_configuration.encode()))
        journal.batch_ids.clear()
        if not whole:
            raise StateRefused(f"journal[{number}] in the archive of run {self._cut.run} holds no complete snapshot")
        for problem in journal.problems:
            self._result.problem(problem)
        journal.check_counts(self._result.problem)
        self._result.ends["rollouts"][number] = journal.position
        part.batch_of, part.row_of = (np.full(journal.position, _NO_BATCH, np.int64) for _ in range(2))

    def _read_index(self) -> None:
        problem = self._result.problem
        for message, entry in valid_records(BatchIndexEntry, self._cut.messages("batch-index", 0), self._cut.skipped):
            with self._cut.skipped.passing(message):
                if not self._is_before_cut(entry.partition, entry.batch_id):
                    continue
                self._entries.add(message.offset, entry)
                if entry.batch_id in self._index:
                    problem(f"batch-index offset {message.offset} names batch {entry.batch_id} a second time")
                    continue
                self._index[entry.batch_id] = message.offset, entry

    def _is_before_cut(self, partition: int, batch_id: str) -> bool:
        part = self._partitions.get(partition)
        return part is not None and batch_numbers(batch_id)[1] < part.journal.batches

    def _read_batches(self) -> None:
        problem, seen = self._result.problem, set[str]()
        messages = chain.from_iterable(self._cut.messages("batches", number) for number in self._partitions)
        for message, batch in valid_records(TrainingBatch, messages, self._cut.skipped):
            with self._cut.skipped.passing(message):
                if not self._is_before_cut(batch.partition, batch.batch_id):
                    continue
                name = batch.batch_id
                if name in seen:
                    problem(f"batch {name} is in batches twice")
                    continue
                seen.add(name)
                self._take_batch(batch, message)
        for number, part in self._partitions.items():
            for name in sorted(part.named - seen, key=batch_numbers):
                problem(f"batch {name} is in the journal but not in batches")
            for name in sorted(seen - part.named, key=batch_numbers):
                if batch_numbers(name)[0] == number:
                    problem(f"batch {name} is in batches but not in the journal")

    def _take_batch(self, batch: TrainingBatch, message: KafkaRecord) -> None:
        problem, name, digest = self._result.problem, batch.batch_id, batch_digest(batch)
        if digest != batch.digest:
            problem(f"batch {name}: its content does not match the digest it carries")
        place, index_offset = (message.partition, message.offset), -1
        if name not in self._index:
            problem(f"batch {name} has no entry in batch-index, so no learner finds it")
        else:
            index_offset, entry = self._index[name]
            if (entry.partition, entry.offset, entry.digest) != (*place, digest):
                problem(f"batch-index offset {index_offset} names batch {name} with another digest or at another place")
        self._digests[name] = digest
        self._table.found(*batch_numbers(name), place, len(batch))
        self._result.add("batches", batch_leaf(batch, digest, index_offset))
        part = self._partitions[batch.partition]
        for row, offset in enumerate(batch.source_offsets.tolist()):
            if not 0 <= offset < part.journal.position:
                problem(f"batch {name} row {row} is from offset {offset}, which grouping had not read")
            elif part.batch_of[offset] != _NO_BATCH:
                other = f"{batch.partition}-{part.batch_of[offset]}"
                problem(f"rollouts[{batch.partition}] offset {offset} is in batch {other} and in batch {name}")
            else:
                part.batch_of[offset], part.row_of[offset] = batch.number, row

    def _read_steps(self) -> None:
        newest: dict[tuple[str, int], LearnerStep] = {}
        for message, step in self._cut.records("steps", LearnerStep):
            with self._cut.skipped.passing(message):
                check_uses(step)
                newest[step.learner, step.step] = step
        elsewhere = next((step for step in newest.values() if step.input_run != self._cut.run), None)
        if elsewhere is not None:
            raise StateRefused(
                f"step {elsewhere.step} of learner {elsewhere.learner} of run {self._cut.run} used batches of run "
                f"{elsewhere.input_run}; an attestation covers only a learner and its batches in one run"
            )
        uses, book = LearnerUses(self._cut.run), Ledger()
        uses.take(newest[key] for key in sorted(newest))
        journals = {number: part.journal for number, part in self._partitions.items()}
        uses.check(self._table, {}, journals, self._entries, self._cut.ends["batch-index"][0], book)
        for problem in book.problems:
            self._result.problem(problem)
        # A learner begins with step 0, its initial parameters, or with step 1.
        before = "", 0
        for name, number in sorted(newest):
            expected = before[1] + 1 if before[0] == name else min(number, 1)
            if number != expected:
                self._result.problem(f"step {expected} of learner {name} is missing before step {number}")
            before = name, number
        for (name, number), step in sorted(newest.items()):
            # Skips before the next step: the record of that step replaces this one, and compaction deletes this one.
            if step.params_digest or step.policy_version >= 0 or (name, number + 1) in newest:
                self._result.add("steps", step_leaf(step))

    def _read_versions(self) -> None:
        newest = {manifest.version: manifest for _message, manifest in self._cut.records("policies", PolicyManifest)}
        for version in sorted(newest):
            self._result.add("versions", version_leaf(newest[version]))

    def _read_rollouts(self, number: int) -> None:
        """Fold a partition again, and add its records to the tree."""
        part, problem = self._partitions[number], self._result.problem
        position, journal = part.journal.position, part.journal
        skips = skips_in(part.records)
        reasons = {drop.offset: drop.reason for record in part.records for drop in record.drops}

        def inputs() -> Iterator[InputRecord]:
            for message in self._cut.messages("rollouts", number):
                if message.offset >= position:
                    break
                value = journal.table.set_bits_at(message.offset, SEEN)
                self._take_rollout(part, message, journal.fate_of(value) or "", reasons)
                yield records_of(message)

        restored = task_state.restored_state(part.head)
        drops, cut_again = set[tuple[int, str]](), set[str]()
        for output in fold_again(restored, inputs(), position, self._plug_ins, skips=skips):
            drops.update((drop.offset, drop.reason) for drop in output.journal.drops)
            for batch in output.encoded:
                cut_again.add(batch.batch_id)
                if part.named.isdisjoint([batch.batch_id]):
                    problem(f"batch {batch.batch_id}: the fold cuts it, but the journal does not name it")
                elif self._digests.get(batch.batch_id) not in (None, batch.digest):
                    problem(self._difference(batch.batch))
        self._result.folded += len(cut_again)
        for name in sorted(part.named - cut_again, key=batch_numbers):
            problem(f"batch {name}: the journal names it, but the fold does not cut it")
        for offset, reason in sorted(drops ^ set(reasons.items())):
            where = "journal" if reasons.get(offset) == reason else "refold"
            problem(f"rollouts[{number}] offset {offset} is dropped as {reason} only in the {where}")
        self._compare_places(part)

    def _take_rollout(self, part: _Partition, message: KafkaRecord, fate: str, reasons: dict[int, str]) -> None:
        offset, uid = message.offset, ""
        if codec.kind_of(message.value) == "Rollout":
            with self._cut.skipped.passing(message):
                assert message.value is not None, "it has a kind"
                uid = decode_as(Rollout, message.value).uid
        in_batch = int(part.batch_of[offset]) != _NO_BATCH
        batch = f"{message.partition}-{part.batch_of[offset]}" if in_batch else ""
        name = f"{fate}:{reasons[offset]}" if offset in reasons else fate
        leaf = rollout_leaf(message, uid, name, batch, int(part.row_of[offset]))
        self._on_rollout(len(self._result.trees["rollouts"]), leaf)
        self._result.add("rollouts", leaf)
        self._result.counts[name] += 1

    def _compare_places(self, part: _Partition) -> None:
        """Report offsets with a fate but no record, or a record but no fate, or batched only in the journal or only in
        a batch."""
        journal, problem = part.journal, self._result.problem
        runs = journal.table.runs().clipped(0, journal.position)
        has_fate, seen = runs.values & CODES != 0, runs.values & SEEN != 0
        for offset, fate in journal.named(runs.where(has_fate & ~seen)):
            problem(f"rollouts[{journal.number}] offset {offset} is {fate} but holds no record")
        for offset, _fate in journal.named(runs.where(~has_fate & seen)):
            problem(f"rollouts[{journal.number}] offset {offset} was read but has no fate")
        batched = np.zeros(journal.position, bool)
        delivered = runs.where(runs.values & DELIVERED != 0)
        for chosen in (journal.of_fate(BATCHED), delivered):
            for start, stop in zip(chosen.starts, chosen.stops, strict=True):
                batched[start:stop] = True
        for offset in np.flatnonzero(batched != (part.batch_of != _NO_BATCH))[:_MOST_NAMED].tolist():
            place = "the journal but in no batch" if batched[offset] else "a batch but not in the journal"
            problem(f"rollouts[{journal.number}] offset {offset} is batched in {place}")

    def _difference(self, folded: TrainingBatch) -> str:
        """Name the first row in which a recorded batch differs from the batch that its rollouts give."""
        name = folded.batch_id
        batches = (batch for _message, batch in self._cut.records("batches", TrainingBatch))
        recorded = next((batch for batch in batches if batch.batch_id == name), None)
        if recorded is not None and len(recorded) == len(folded):
            for row, (there, due) in enumerate(zip(_rows(recorded), _rows(folded), strict=True)):
                for column in due:
                    if there[column] != due[column]:
                        place = f"rollouts[{folded.partition}] offset {int(folded.source_offsets[row])}"
                        return f"batch {name} row {row}: {column} differ from rollout {folded.uids[row]} at {place}"
        return f"batch {name} differs from the batch that its rollouts give"


def _rows(batch: TrainingBatch) -> Iterator[dict[str, Any]]:
    """Yield the content of each row in a form that can be compared."""
    for row in range(len(batch)):
        span = slice(int(batch.splits[row]), int(batch.splits[row + 1]))
        yield {
            "uids": batch.uids[row],
            "offsets": int(batch.source_offsets[row]),
            "tokens": batch.tokens[span].tobytes(),
            "masks": batch.loss_mask[span].tobytes(),
            "logprobs": batch.logprobs[span].tobytes(),
            "rewards": batch.rewards[row].tobytes(),
            "advantages": batch.advantages[span].tobytes(),
        }


def _is_within(record: JournalRecord, end: int) -> bool:
    """Whether a journal record names no offset beyond `end`; larger offsets could make the tables arbitrarily large."""
    ranges = (record.admitted, record.unfinished, record.delivered, *(f.runs for f in record.finished))
    pairs = [np.asarray(each, np.int64).reshape(-1, 2) for each in ranges]
    return record.position <= end and all(
        ((pair >= 0) & (pair <= end)).all() and (pair.sum(1) <= end).all() for pair in pairs
    )
