"""Verification: folds the recorded log again and compares every batch and drop with the record, bit for bit.

It folds whole partitions from their first record, or from the oldest complete snapshot of a pruned log. If only
some batches are requested, it recomputes each from the snapshot before it.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from rollstream.consumers.grouping.config import GrouperConfig
from rollstream.consumers.grouping.core.plug_ins import load_plug_ins
from rollstream.pipeline.audit.process_pool import spread
from rollstream.pipeline.audit.refold import beginnings, journal_of, log_begins, refold, skips_in
from rollstream.pipeline.audit.topic_reading import batch_at, read_batches, read_index
from rollstream.pipeline.command_line.progress_bar import ProgressCallback
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RecordError, TopicError
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.open_transactions import await_decided, undecided
from rollstream.topics.kafka.reader import record_at
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import BatchIndexEntry, Drop, JournalRecord, TrainingBatch, batch_numbers, same
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.rl_examples import batch_digest


@dataclass
class Verification:
    """Result of a second fold of the log, compared with the recorded batches and drops."""

    batches: int = 0
    """Batches computed again."""
    drops: int = 0
    """Drops compared; 0 if only some batches were requested."""
    unverifiable: int = 0
    """Recorded batches whose rollouts, or the journal before them, the log does not have."""
    mismatches: list[str] = field(default_factory=list)
    """Description of each difference."""
    skipped: SkippedRecords = field(default_factory=partial(SkippedRecords, logged=False))
    """Invalid records in the index, journal and batches."""

    def as_dict(self) -> dict[str, Any]:
        """Return the result as plain values for JSON."""
        return {
            "batches": self.batches,
            "drops": self.drops,
            "unverifiable": self.unverifiable,
            "mismatches": len(self.mismatches),
            "differences": self.mismatches,
            "skipped": self.skipped.as_dict(),
        }

    def add(self, other: "Verification") -> None:
        """Add the result of another partition."""
        self.batches += other.batches
        self.drops += other.drops
        self.unverifiable += other.unverifiable
        self.mismatches += other.mismatches
        self.skipped.merge(other.skipped)


@dataclass(frozen=True)
class _Job:
    """One partition to verify; sent to a child process, so it holds only plain values."""

    kafka: KafkaConfig
    run: str
    partition: int
    grouper: GrouperConfig
    """Settings with the user's own makers and estimators, which the partition's configurations may name."""
    index: dict[str, BatchIndexEntry]
    """Entries of the partition's batches."""
    log_begin: int
    """First offset of rollouts that the partition still holds."""
    only: frozenset[str] | None

    @property
    def named(self) -> frozenset[str]:
        """Batches to verify: those that were requested, or all that the index names."""
        return frozenset(self.index) if self.only is None else self.only


def verify(
    kafka: KafkaConfig,
    run: str,
    makers: Iterable[str] = (),
    *,
    estimators: Iterable[str] = (),
    only: Collection[str] | None = None,
    processes: int = 1,
    progress: ProgressCallback = lambda _done, _all: None,
) -> Verification:
    """Fold a run again, and compare batches and drops with the record.

    `makers` and `estimators` name the user's own plug-ins, which the run's configurations may use (grouper.makers,
    grouper.estimators). `only` are the batches to verify; None means every batch and every drop. Partitions are spread
    over `processes`.
    Raises StateRefused if a newer core version cut the log, TopicError if a requested batch is not in the index.
    """
    clients.check_broker(kafka)
    partitions = range(topic_admin.partitions_of(kafka, topic_name(run, "journal")))
    result = Verification()
    index = index_of(kafka, run, result.skipped)
    unknown = sorted(set(only or ()) - index.keys())
    if unknown:
        raise TopicError(f"run {run} has no batch {unknown[0]}; `rollstream cat batch-index` lists them")
    log_begin = log_begins(kafka, run, "rollouts")
    grouper = GrouperConfig(makers=tuple(makers), estimators=tuple(estimators))
    jobs = []
    for partition in partitions:
        mine = {name: entry for name, entry in index.items() if entry.partition == partition}
        wanted = None if only is None else frozenset(mine).intersection(only)
        if wanted is None or wanted:
            jobs.append(_Job(kafka, run, partition, grouper, mine, log_begin[partition], wanted))
    expected = len(index) if only is None else len(set(only))
    progress(0, expected)
    for partition_result in spread(_verify_partition, jobs, processes):
        result.add(partition_result)
        done = result.batches + result.unverifiable
        progress(done, max(expected, done))
    return result


def index_of(kafka: KafkaConfig, run: str, skipped: SkippedRecords | None = None) -> dict[str, BatchIndexEntry]:
    """Return the entries of the index by batch, in the order of the index."""
    index = read_index(kafka, run, skipped or SkippedRecords(logged=False))
    return {batch_id: entry for batch_id, (_offset, entry) in index.items()}


def _verify_partition(job: _Job) -> Verification:
    # Only batches in the index that was read before the journal must be in the journal: a live run goes on.
    named = job.named
    job, journal, skipped = _settled(job)
    begin = next(iter(beginnings(journal, job.log_begin)), None)
    if begin is None:
        return Verification(unverifiable=len(named), skipped=skipped)
    verifiable = _from_number(named, journal[begin].batch_number)
    verify_these = _verify_all if job.only is None else _verify_some
    result = verify_these(job, journal, begin, verifiable)
    result.skipped.merge(skipped)
    result.unverifiable = len(named) - len(verifiable)
    return result


def _from_number(batch_ids: Iterable[str], first: int) -> frozenset[str]:
    return frozenset(batch_id for batch_id in batch_ids if batch_numbers(batch_id)[1] >= first)


def _settled(job: _Job) -> tuple[_Job, list[JournalRecord], SkippedRecords]:
    """Read the journal until it and the index agree on the batches, and return job, journal and skipped records.

    In a live run, the records of a transaction do not become visible on all partitions at once, and new transactions
    follow. A batch that only one of the two names is a difference only if the other has no hidden records; these are
    waited for. Raises DeadlineExceeded if a transaction stays open for longer than kafka.patience_s.
    """
    named = job.named
    while True:
        journal_hides = bool(undecided(job.kafka, topic_name(job.run, "journal"), [job.partition]))
        skipped = SkippedRecords(logged=False)
        journal = journal_of(job.kafka, job.run, job.partition, skipped)
        begin = next(iter(beginnings(journal, job.log_begin)), None)
        if begin is None:
            return job, journal, skipped
        journaled = {batch_id for record in journal[begin + 1 :] for batch_id in record.batch_ids}
        wanted = _from_number(named, journal[begin].batch_number)
        index_hides = False
        if not journaled <= job.index.keys():
            index_hides = bool(undecided(job.kafka, topic_name(job.run, "batch-index")))
            index = index_of(job.kafka, job.run)
            job = replace(job, index={name: e for name, e in index.items() if e.partition == job.partition})
        index_may_follow = index_hides and not journaled <= job.index.keys()
        journal_may_follow = journal_hides and not wanted <= journaled
        if index_may_follow:
            await_decided(job.kafka, topic_name(job.run, "batch-index"), "not verified")
        elif journal_may_follow:
            await_decided(job.kafka, topic_name(job.run, "journal"), "not verified", among=[job.partition])
        else:
            return job, journal, skipped


def _verify_all(job: _Job, journal: Sequence[JournalRecord], begin: int, named: Collection[str]) -> Verification:
    """Recompute every batch of the journal; each batch in `named` must be one of them."""
    later = journal[begin + 1 :]
    wanted = {batch_id for record in later for batch_id in record.batch_ids}
    result = Verification(mismatches=_not_journaled(named, wanted))
    recorded = _recorded_digests(job, wanted, result)
    result.batches = len(wanted)
    drops: set[tuple[int, str]] = set()
    met = set()
    where = (job.kafka, job.run, journal[: begin + 1], journal[-1].position, load_plug_ins(job.grouper))
    for output in refold(*where, skips=skips_in(later)):
        for batch in output.encoded:
            met.add(batch.batch_id)
            if batch.batch_id not in recorded:
                result.mismatches.append(f"batch {batch.batch_id}: the fold cuts it, but topic batches lacks it")
            elif recorded[batch.batch_id] != batch.digest:
                result.mismatches += _differences(job, batch.batch)
        drops.update(_identity(output.journal.drops))
    for batch_id in sorted(recorded.keys() - met):
        result.mismatches.append(f"batch {batch_id}: topic batches has it, but the fold does not cut it")
    written = [drop for record in later for drop in record.drops]
    result.drops = len(written)
    result.mismatches += _drop_differences(job.partition, set(_identity(written)), drops)
    return result


def _recorded_digests(job: _Job, wanted: Collection[str], result: Verification) -> dict[str, str]:
    """Compute the digest of each wanted batch, and compare it with the digests in the batch and in the index."""
    digests: dict[str, str] = {}
    for batch in read_batches(job.kafka, job.run, result.skipped, job.partition):
        if batch.batch_id in wanted:
            digests[batch.batch_id] = _checked(job, batch, result)
    return digests


def _checked(job: _Job, batch: TrainingBatch, result: Verification) -> str:
    digest = batch_digest(batch)
    if digest != batch.digest:
        result.mismatches.append(f"batch {batch.batch_id}: its content does not match the digest it carries")
    entry = job.index.get(batch.batch_id)
    if entry is None or entry.digest != batch.digest:
        result.mismatches.append(f"batch {batch.batch_id}: the index has digest {entry.digest if entry else 'none'}")
    return digest


def _verify_some(job: _Job, journal: Sequence[JournalRecord], begin: int, only: Collection[str]) -> Verification:
    """Recompute the batches in `only`, each from the snapshot before it; one pass for each snapshot."""
    result = Verification()
    snapshots = beginnings(journal, job.log_begin)
    cut_at = {batch_id: i for i, record in enumerate(journal) if i > begin for batch_id in record.batch_ids}
    result.mismatches += _not_journaled(only, cut_at)
    waiting = sorted((batch_id for batch_id in only if batch_id in cut_at), key=lambda batch_id: cut_at[batch_id])
    while waiting:
        first = cut_at[waiting[0]]
        start = _before(snapshots, first)
        last = first
        # Up to the next snapshot, continuing the fold costs less than restoring again.
        for batch_id in waiting:
            if _before(snapshots, cut_at[batch_id]) <= last:
                last = cut_at[batch_id]
        these = {batch_id for batch_id in waiting if cut_at[batch_id] <= last}
        waiting = [batch_id for batch_id in waiting if batch_id not in these]
        recorded = {batch_id: _fetched(job, batch_id, result) for batch_id in these}
        met = set()
        stop = journal[last].position
        where = (job.kafka, job.run, journal[: start + 1], stop, load_plug_ins(job.grouper))
        for output in refold(*where, skips=skips_in(journal[start + 1 : last + 1])):
            for batch in output.encoded:
                if batch.batch_id in these:
                    met.add(batch.batch_id)
                    if recorded[batch.batch_id] not in (None, batch.digest):
                        result.mismatches += _differences(job, batch.batch)
        result.batches += len(these)
        result.mismatches += [
            f"batch {batch_id}: topic batches has it, but the fold does not cut it" for batch_id in sorted(these - met)
        ]
    return result


def _not_journaled(named: Iterable[str], journaled: Collection[str]) -> list[str]:
    missing = sorted(batch_id for batch_id in named if batch_id not in journaled)
    return [f"batch {batch_id}: the index names it, but the journal does not" for batch_id in missing]


def _before(snapshots: Sequence[int], position: int) -> int:
    """Return the newest of these snapshots before a record of the journal; one always exists."""
    return snapshots[bisect_left(snapshots, position) - 1]


def _fetched(job: _Job, batch_id: str, result: Verification) -> str | None:
    batch = _fetch(job, batch_id, result)
    return None if batch is None else _checked(job, batch, result)


def _fetch(job: _Job, batch_id: str, result: Verification) -> TrainingBatch | None:
    entry, topic = job.index[batch_id], topic_name(job.run, "batches")
    message = record_at(job.kafka, topic, job.partition, entry.offset)
    if message is None:
        result.mismatches.append(f"batch {batch_id}: {topic}[{job.partition}] holds nothing at offset {entry.offset}")
        return None
    try:
        return batch_at(message)
    except RecordError as error:
        result.mismatches.append(f"batch {batch_id} cannot be read: {error}")
        return None


def _differences(job: _Job, folded: TrainingBatch) -> list[str]:
    """Name the fields in which a recorded batch differs from the refolded one."""
    if folded.batch_id not in job.index:
        return [f"batch {folded.batch_id}: differs from the refold"]
    noted = Verification()
    recorded = _fetch(job, folded.batch_id, noted)
    if recorded is None:
        return noted.mismatches
    differing = [f.name for f in fields(recorded) if not same(getattr(recorded, f.name), getattr(folded, f.name))]
    return [f"batch {folded.batch_id}: {', '.join(differing)} differ from the refold"]


def _identity(drops: Iterable[Drop]) -> Iterable[tuple[int, str]]:
    return ((drop.offset, drop.reason) for drop in drops)


def _drop_differences(partition: int, recorded: set[tuple[int, str]], folded: set[tuple[int, str]]) -> list[str]:
    return [
        f"rollouts[{partition}] offset {drop[0]} is dropped as {drop[1]} only in the "
        f"{'journal' if drop in recorded else 'refold'}"
        for drop in sorted(recorded ^ folded)
    ]
