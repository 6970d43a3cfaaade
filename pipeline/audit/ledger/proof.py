"""The conservation proof: every record of `rollouts` is in exactly one place, read from the topics alone.

The cut: steps first, then the position that the group committed for each partition, then the journal up to the records
those commits name, and batches and dead letters up to those. Later records are unread. Each contradiction is a problem
with its partition and offset. Pruned records are known by the journal's cumulative counts.
"""

import contextlib
from collections import Counter
from typing import Any

from rollstream.consumers.grouping.config import GrouperConfig
from rollstream.consumers.grouping.selection_bias import selections, with_skipped
from rollstream.consumers.labeling.config import LabelingConfig
from rollstream.pipeline.audit.ledger.batches import check_batches
from rollstream.pipeline.audit.ledger.book import Ledger
from rollstream.pipeline.audit.ledger.calls import check_calls
from rollstream.pipeline.audit.ledger.dead_letters import check_dead_letters
from rollstream.pipeline.audit.ledger.evaluations import read_evals
from rollstream.pipeline.audit.ledger.hidden_records import HiddenRecords
from rollstream.pipeline.audit.ledger.index import check_index
from rollstream.pipeline.audit.ledger.learners import check_positions, check_steps, read_steps, untrained_rows
from rollstream.pipeline.audit.ledger.moved import check_splits
from rollstream.pipeline.audit.ledger.rollouts import check_records
from rollstream.pipeline.audit.ledger.topic_tail import PATIENCE_S, TopicTail, read_until_complete
from rollstream.pipeline.audit.ledger.trajectories import check_trajectories
from rollstream.pipeline.audit.partition_journal import IN_FLIGHT, PartitionJournal, environment_counts
from rollstream.topics.catalogue import topic_name
from rollstream.topics.commit_metadata import CommitMetadata
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import BrokerUnavailable, StateRefused
from rollstream.topics.fates import CONTROL, MOVED_CONTROL, READ
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.reader import Reader
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import JournalRecord
from rollstream.topics.retired_learners import retired_learners

_NO_ROLLOUTS = (READ, CONTROL, MOVED_CONTROL)
"""Names of counts that are not the fate of a rollout."""


def ledger(kafka: KafkaConfig, run: str, group: str | None = None, labeling_group: str | None = None) -> Ledger:
    """Read a run's topics and prove, or disprove, that every record is in one place.

    `group` is the consumer group of the run's grouping processes and `labeling_group` that of its labeling processes;
    each is needed only if it differs from the default.
    """
    clients.check_broker(kafka)
    result, hidden = Ledger(), HiddenRecords(kafka, run)
    steps = read_steps(kafka, run, result)
    index_end = topic_admin.bounds(kafka, topic_name(run, "batch-index"))[0][1]
    # Read before the cut, because a janitor deletes up to the position of the group.
    begins = {p: begin for p, (begin, _end) in topic_admin.bounds(kafka, topic_name(run, "rollouts")).items()}
    journals = _read_journals(kafka, run, group or GrouperConfig().group_id(run), hidden, result)
    evals = read_evals(kafka, run, result)
    batches = check_batches(kafka, run, journals, evals, untrained_rows(steps, run), hidden, result)
    counts = (count for journal in journals.values() for count in journal.counts)
    result.selection = with_skipped(selections(counts), batches.skipped)
    entries = check_index(kafka, run, journals, batches.places, index_end, hidden, result)
    check_dead_letters(kafka, run, journals, hidden, result)
    in_flight = check_records(kafka, run, journals, begins, hidden, result)
    _sum_up(journals, in_flight, result)
    carried = {entry.batch_id: entry.rollouts for entry in entries.values() if entry.run}
    check_steps(steps, batches.rows, journals, run, result, carried)
    check_positions(steps, entries, index_end, run, result)
    for name in retired_learners(kafka, run).keys() & result.learners.keys():
        result.learners[name]["retired"] = True
        result.learners[name].pop("waiting", None)
    check_splits(kafka, run, result)
    check_trajectories(kafka, run, labeling_group or LabelingConfig().group_id(run), hidden, result)
    check_calls(kafka, run, result)
    return result


def _read_journals(
    kafka: KafkaConfig, run: str, group: str, hidden: HiddenRecords, result: Ledger
) -> dict[int, PartitionJournal]:
    """Read the journal of each partition up to the record its committed offset names; to its end if there is none."""
    topic = topic_name(run, "journal")
    partitions = topic_admin.partitions_of(kafka, topic_name(run, "rollouts"))
    cut = _cut(kafka, run, group, partitions)
    journals = {p: PartitionJournal(p, result.problem) for p in range(partitions)}
    tail, skipped = TopicTail(kafka, run, "journal"), SkippedRecords("ledger", logged=False)

    def read() -> list[int]:
        for message, record in skipped.records(JournalRecord, tail.messages()):
            partition, offset = message.partition, message.offset
            if offset <= cut.get(partition, offset):
                begins = journals[partition].sequence < 0 < record.sequence
                if begins and not topic_admin.bounds(kafka, topic)[partition][0]:
                    result.problem(f"journal[{partition}] begins with sequence {record.sequence}; nothing was pruned")
                journals[partition].read(record)
        return sorted(p for p, last in cut.items() if tail.follows.get(p, 0) <= last)

    behind = read_until_complete(read)
    result.note_skipped(skipped)
    open_ends = hidden.parts("journal") if behind else {}
    for partition in behind:
        if partition in open_ends and open_ends[partition].start <= cut[partition] < open_ends[partition].end:
            journals[partition].hidden = True
            result.undecide(f"journal[{partition}] offset {cut[partition]}", hidden.places("journal"))
        else:
            result.problem(f"journal[{partition}] does not hold offset {cut[partition]}, which group {group} names")
    for journal in journals.values():
        if journal.sequence >= 0 and journal.base < 0:
            result.problem(f"journal[{journal.number}] holds no whole snapshot")
        elif journal.base >= 0:
            journal.check_counts()
    return journals


def _cut(kafka: KafkaConfig, run: str, group: str, partitions: int) -> dict[int, int]:
    """Offset of the newest journal record of each partition, as the group committed it with its position.

    Partitions of an open transaction, or without a commit, are absent: their journal is read to its end.
    """
    offsets = {}
    with Reader(kafka, group=group) as reader:
        try:
            positions = reader.committed(
                topic_name(run, "rollouts"), range(partitions), f"reading offsets of group {group}", PATIENCE_S
            )
        except BrokerUnavailable:
            return {}
    for position in positions:
        if position.offset >= 0:
            # Ignore commits of other programs: grouping refuses them.
            with contextlib.suppress(StateRefused):
                offsets[position.partition] = CommitMetadata.decode(position.metadata, run).journal
    return offsets


def _sum_up(journals: dict[int, PartitionJournal], in_flight: int, result: Ledger) -> None:
    """Sum up by fate: records before the journal's first snapshot from its counts, later ones by their offsets."""
    fates: Counter[str] = Counter()
    for journal in journals.values():
        fates += journal.before
        fates += journal.since
        result.in_flight += len(journal.offsets(IN_FLIGHT))
    result.place(fates)
    if result.dropped.pop("", 0):
        result.problem("records are dropped without a reason")
    open_by_environments = 0
    for environment, read in environment_counts(journals.values()).items():
        totals: dict[str, Any] = {}
        for name, counts in read.items():
            ended = {fate: counts[fate] for fate in sorted(counts) if fate not in _NO_ROLLOUTS and counts[fate]}
            totals[name] = {"produced": counts[READ], **ended, IN_FLIGHT: counts[READ] - sum(ended.values())}
        open_by_environments += totals["records"][IN_FLIGHT]
        if any(totals["records"].values()):
            result.environments[environment] = totals
    if open_by_environments != in_flight:
        result.problem(
            f"by the journal's counts {open_by_environments} rollouts have no fate; {in_flight} are in flight"
        )
