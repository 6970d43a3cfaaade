"""The conservation proof: every record of `rollouts` is in exactly one place, read from the topics alone.

The cut: steps first, then the position each partition's group committed last, then the journal up to the records it
names, and batches and dead letters up to those. What lies beyond is unread; whatever does not add up is a problem,
named with its partition and offset. What was pruned is known by the journal's cumulative counts.
"""

import contextlib
import time
from collections import Counter
from typing import Any

from confluent_kafka import KafkaException, TopicPartition

from consumers.grouping.changes import BATCHED, CONTROL, DEAD_LETTERED, DROPPED
from consumers.grouping.config import GrouperConfig
from consumers.grouping.selection import selections, with_skipped
from consumers.grouping.state import CommitMetadata
from consumers.labelling.config import LabellingConfig
from pipeline.journals import IN_FLIGHT, READ, PartitionJournal, environments
from pipeline.ledger.batches import check_batches
from pipeline.ledger.book import PATIENCE_S, Ledger
from pipeline.ledger.evaluations import read_evals
from pipeline.ledger.hidden import Hidden
from pipeline.ledger.index import check_index
from pipeline.ledger.learners import check_positions, check_steps, read_steps, untrained_rows
from pipeline.ledger.letters import check_dead_letters
from pipeline.ledger.rollouts import check_records
from pipeline.ledger.tail import Tail
from pipeline.ledger.trajectories import check_trajectories
from topics import clients
from topics.catalogue import topic_name
from topics.config import KafkaConfig
from topics.errors import StateRefused
from topics.records import JournalRecord
from topics.retired import retired_learners
from topics.skipped import SkippedRecords


def ledger(kafka: KafkaConfig, run: str, group: str | None = None, labeller: str | None = None) -> Ledger:
    """Read a run's topics and prove, or disprove, that every record is in one place.

    `group` is the consumer group of the run's grouping processes, `labeller` that of its labelling processes, where the
    name is not the usual one.
    """
    clients.check_broker(kafka)
    result, hidden = Ledger(), Hidden(kafka, run)
    steps = read_steps(kafka, run, result)
    index_end = clients.bounds(kafka, topic_name(run, "batch-index"))[0][1]
    # Before the cut, as a janitor deletes up to where the group was then.
    begins = {p: begin for p, (begin, _end) in clients.bounds(kafka, topic_name(run, "rollouts")).items()}
    journals = _read_journals(kafka, run, group or GrouperConfig().group_id(run), hidden, result)
    evals = read_evals(kafka, run, result)
    batches = check_batches(kafka, run, journals, evals, untrained_rows(steps, run), hidden, result)
    counts = (count for journal in journals.values() for count in journal.counts)
    result.selection = with_skipped(selections(counts), batches.skipped)
    entries = check_index(kafka, run, journals, batches.places, index_end, hidden, result)
    check_dead_letters(kafka, run, journals, hidden, result)
    in_flight = check_records(kafka, run, journals, begins, hidden, result)
    _sum_up(journals, in_flight, result)
    check_steps(steps, batches.rows, journals, run, result)
    check_positions(steps, entries, index_end, run, result)
    for name in retired_learners(kafka, run).keys() & result.learners.keys():
        result.learners[name]["retired"] = True
        result.learners[name].pop("waiting", None)
    check_trajectories(kafka, run, labeller or LabellingConfig().group_id(run), hidden, result)
    return result


def _read_journals(
    kafka: KafkaConfig, run: str, group: str, hidden: Hidden, result: Ledger
) -> dict[int, PartitionJournal]:
    """The journal of each partition up to the record its committed offset names; to its end where none is."""
    topic = topic_name(run, "journal")
    partitions = clients.partitions_of(kafka, topic_name(run, "rollouts"))
    cut = _cut(kafka, run, group, partitions)
    journals = {p: PartitionJournal(p, result.problem) for p in range(partitions)}
    tail, skipped = Tail(kafka, run, "journal"), SkippedRecords("ledger", logged=False)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        for message, record in skipped.records(JournalRecord, tail.messages()):
            partition, offset = message.partition() or 0, message.offset() or 0
            if offset <= cut.get(partition, offset):
                begins = journals[partition].sequence < 0 < record.sequence
                if begins and not clients.bounds(kafka, topic)[partition][0]:
                    result.problem(f"journal[{partition}] begins with sequence {record.sequence}; nothing was pruned")
                journals[partition].read(record)
        behind = sorted(p for p, last in cut.items() if tail.follows.get(p, 0) <= last)
        if not behind or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    result.note_skipped(skipped)
    hides = hidden.parts("journal") if behind else {}
    for partition in behind:
        if partition in hides and hides[partition].start <= cut[partition] < hides[partition].end:
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

    Without those of a transaction that stays open, or where nothing is committed: the journal ends then where it ends.
    """
    consumer = clients.reader(kafka, group=group)
    found = {}
    try:
        wanted = [TopicPartition(topic_name(run, "rollouts"), p) for p in range(partitions)]
        for committed in consumer.committed(wanted, PATIENCE_S):
            if committed.error is None and committed.offset >= 0:
                # Whoever else committed there is refused by the grouping process; nothing is cut by it.
                with contextlib.suppress(StateRefused):
                    found[committed.partition] = CommitMetadata.decode(committed.metadata, run).journal
    except KafkaException:
        return {}
    finally:
        consumer.close()
    return found


def _sum_up(journals: dict[int, PartitionJournal], in_flight: int, result: Ledger) -> None:
    """Totals by fate: what was settled before the journal begins by its counts, what came since by its offsets."""
    fates: Counter[str] = Counter()
    for journal in journals.values():
        fates += journal.before
        fates += journal.since
        result.in_flight += len(journal.offsets(IN_FLIGHT))
    result.batched, result.control, result.dead_lettered = fates[BATCHED], fates[CONTROL], fates[DEAD_LETTERED]
    dropped = {fate.partition(":")[2]: count for fate, count in fates.items() if fate.startswith(f"{DROPPED}:")}
    if dropped.pop("", 0):
        result.problem("records are dropped without a reason")
    result.dropped = dropped
    open_by_environments = 0
    for environment, of in environments(journals.values()).items():
        figures: dict[str, Any] = {}
        for name, counts in of.items():
            ended = {fate: counts[fate] for fate in sorted(counts) if fate not in (READ, CONTROL) and counts[fate]}
            figures[name] = {"produced": counts[READ], **ended, IN_FLIGHT: counts[READ] - sum(ended.values())}
        open_by_environments += figures["records"][IN_FLIGHT]
        if any(figures["records"].values()):
            result.environments[environment] = figures
    if open_by_environments != in_flight:
        result.problem(
            f"by the journal's counts {open_by_environments} rollouts are without a fate; {in_flight} are in flight"
        )
