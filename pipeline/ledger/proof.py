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
from consumers.grouping.selection import selections
from consumers.grouping.state import CommitMetadata
from pipeline.journals import IN_FLIGHT, READ, PartitionJournal, environments
from pipeline.ledger.batches import check_batches
from pipeline.ledger.book import PATIENCE_S, Ledger
from pipeline.ledger.evaluations import read_evals
from pipeline.ledger.learners import check_steps, read_steps
from pipeline.ledger.letters import check_dead_letters
from topics import clients, codec
from topics.catalogue import topic_name
from topics.codec import decode_as
from topics.config import KafkaConfig
from topics.errors import StateRefused
from topics.records import JournalRecord


def ledger(kafka: KafkaConfig, run: str, group: str | None = None) -> Ledger:
    """Read a run's topics and prove, or disprove, that every record is in one place.

    `group` is the consumer group of the run's grouping processes, where its name is not the usual one.
    """
    clients.check_broker(kafka)
    result = Ledger()
    steps = read_steps(kafka, run)
    journals = _read_journals(kafka, run, group or GrouperConfig().group_id(run), result)
    result.selection = selections(count for journal in journals.values() for count in journal.counts)
    evals = read_evals(kafka, run, result)
    rows = check_batches(kafka, run, journals, evals, result)
    check_dead_letters(kafka, run, journals, result)
    in_flight = _check_records(kafka, run, journals, result)
    _sum_up(journals, in_flight, result)
    check_steps(steps, rows, journals, run, result)
    return result


def _read_journals(kafka: KafkaConfig, run: str, group: str, result: Ledger) -> dict[int, PartitionJournal]:
    """The journal of each partition up to the record its committed offset names; to its end where none is."""
    topic = topic_name(run, "journal")
    partitions = clients.partitions_of(kafka, topic_name(run, "rollouts"))
    cut = _cut(kafka, run, group, partitions)
    journals = {p: PartitionJournal(p, result.problem) for p in range(partitions)}
    follows: dict[int, int] = {}
    deadline = time.monotonic() + PATIENCE_S
    while True:
        for message in clients.read_to_end(kafka, topic, start=dict(follows)):
            partition, offset = message.partition() or 0, message.offset() or 0
            if offset >= follows.get(partition, 0) and offset <= cut.get(partition, offset):
                record = decode_as(JournalRecord, message.value())
                if partition not in follows and record.sequence > 0 and not clients.bounds(kafka, topic)[partition][0]:
                    result.problem(f"journal[{partition}] begins with sequence {record.sequence}; nothing was pruned")
                journals[partition].read(record)
                follows[partition] = offset + 1
        behind = sorted(p for p, last in cut.items() if follows.get(p, 0) <= last)
        if not behind:
            break
        if time.monotonic() > deadline:
            for partition in behind:
                result.problem(f"journal[{partition}] does not hold offset {cut[partition]}, which group {group} names")
            break
        time.sleep(0.1)
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


def _check_records(kafka: KafkaConfig, run: str, journals: dict[int, PartitionJournal], result: Ledger) -> int:
    """Rollouts against the journal: below the position every record has a place, and every place a record.

    Returns how many of the records in flight are rollouts.
    """
    topic = topic_name(run, "rollouts")
    frames = codec.frames("Rollout")
    seen: dict[int, set[int]] = {p: set() for p in journals}
    rollouts: Counter[int] = Counter()
    unread: Counter[int] = Counter()
    in_flight = 0
    for message in clients.read_to_end(kafka, topic):
        number, offset = message.partition() or 0, message.offset() or 0
        journal = journals[number]
        rollout = (message.value() or b"").startswith(frames)
        if offset >= journal.position:
            result.unread += 1
            unread[number] += rollout
        elif not journal.settled_before(offset):
            seen[number].add(offset)
            rollouts[number] += rollout
            fate = journal.fate(offset)
            if fate is None:
                result.problem(f"rollouts[{number}] offset {offset} was read and is nowhere")
            in_flight += rollout and fate == IN_FLIGHT
    lows = {p: low for p, (low, _end) in clients.bounds(kafka, topic).items()}
    for number, journal in journals.items():
        gone = journal.offsets() - seen[number]
        for offset in sorted(gone):
            if offset >= lows[number]:
                result.problem(f"rollouts[{number}] offset {offset} is {journal.fate(offset)} and holds no record")
            elif journal.fate(offset) == IN_FLIGHT:
                result.problem(f"rollouts[{number}] offset {offset} is in flight and was deleted")
        deleted = sum(offset < lows[number] for offset in gone)
        settled = sum(journal.before.values())
        result.pruned += settled + deleted
        result.produced += len(seen[number]) + deleted + settled
        if settled or deleted:
            read = Counter({READ: sum(count.rollouts for count in journal.produced)})
            result.rollouts += read[READ] - journal.before[DEAD_LETTERED] - len(journal.offsets(DEAD_LETTERED))
        else:
            result.rollouts += rollouts[number]
    result.rollouts += sum(unread.values())
    result.produced += result.unread
    return in_flight


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
