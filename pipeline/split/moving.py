"""Fills the successor of a run: topics, configuration, clock, rollouts without a batch, waiting batches, decisions."""

import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core.configuration_marks import VERSION_STEP
from rollstream.consumers.grouping.process.bootstrap import initialise
from rollstream.consumers.grouping.process.moving import committed_task, move_unfinished
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.split.records import write_to_successor
from rollstream.pipeline.tools.exclusion_marks import Exclusion, newest, partition_configurations, write_marks
from rollstream.topics import steering
from rollstream.topics.catalogue import topic_name
from rollstream.topics.codec import decode, encode
from rollstream.topics.errors import DeliveryError, RecordError
from rollstream.topics.kafka import clients, provisioning, topic_admin
from rollstream.topics.kafka.bounded_calls import Stalled
from rollstream.topics.kafka.open_transactions import await_decided
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.sender import Delivery, Sender
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.kafka.transactional_ids import transactional_id
from rollstream.topics.kafka.transactions import TransactionalProducer, TransactionFailed
from rollstream.topics.keys import encode_key
from rollstream.topics.offset_ranges import to_ranges
from rollstream.topics.records import BatchIndexEntry, ExcludedBatch, Mark, MixtureState, RunSplit
from rollstream.topics.run_splits import PREDECESSOR_KEY, moved_from, splits_of
from rollstream.topics.signatures import MarkSigner


def create(config: RunConfig, after: RunConfig, split: RunSplit) -> None:
    """Create the topics of the successor, with the configuration and the clock of the run that ends.

    The successor's batches get higher numbers than all batches of the run that ends, so that no batch id is used twice.
    """
    kafka = config.kafka
    provisioning.apply(kafka, after.topics, after.run)
    if splits_of(kafka, after.run).predecessor is None:
        write_to_successor(kafka, split)
    partitions = topic_admin.partitions_of(kafka, topic_name(config.run, "rollouts"))
    states = [committed_task(kafka, config.run, config.grouper, partition).state for partition in range(partitions)]
    initialise(
        kafka,
        after.run,
        configuration_after(config),
        after.grouper,
        first_batch=max(state.batch_number for state in states),
    )
    _set_clock(after, max(state.policy_version for state in states))


def configuration_after(config: RunConfig) -> GroupingConfig:
    """Return the grouping configuration in force at the end of a run, with which its successor begins.

    It lacks the excluded offsets, because they name records of the run that ends; see `exclude_copies`.
    """
    return replace(_in_force(config), exclude_offsets=())


def _in_force(config: RunConfig) -> GroupingConfig:
    return newest(partition_configurations(config.kafka, config.run, config.grouper))


def move_rollouts(config: RunConfig, after: RunConfig) -> int:
    """Move all rollouts without a batch to the successor; return the number of records moved by this call."""
    partitions = topic_admin.partitions_of(config.kafka, topic_name(config.run, "rollouts"))
    return sum(
        move_unfinished(config.kafka, config.run, config.grouper, partition, after.run)
        for partition in range(partitions)
    )


def exclude_copies(config: RunConfig, after: RunConfig) -> GroupingConfig:
    """Exclude the copies of moved records whose offsets are excluded; return the successor's configuration.

    An open group keeps excluded members until it seals, so it takes them along to other offsets. Safe to repeat, once
    all records are moved.
    """
    ended = _in_force(config)
    if not ended.exclude_offsets:
        return after.grouping
    copies = defaultdict[int, list[int]](list)
    for message in read_to_end(after.kafka, topic_name(after.run, "rollouts")):
        source = moved_from(message)
        if source is not None and source[0] == config.run and ended.excludes_offset(*source[1:]):
            copies[message.partition].append(message.offset)
    offsets = tuple(
        f"{partition}:{first}-{first + count - 1}"
        for partition, places in sorted(copies.items())
        for first, count in to_ranges(places).reshape(-1, 2).tolist()
    )
    if offsets:
        write_marks(after.kafka, after.run, after.grouper, Exclusion(offsets=offsets))
    return newest(partition_configurations(after.kafka, after.run, after.grouper))


def carry_batches(config: RunConfig, after: RunConfig, split: RunSplit, start: int, wait_s: float) -> RunSplit:
    """Copy the index entries at offset `start` and later to the index of the successor, exactly once.

    The batches stay where they are; each entry names the run of its batch. Returns the split with the entries' offsets.
    Raises DeadlineExceeded if a transaction hides entries for longer than `wait_s`.
    """
    kafka = config.kafka
    known = splits_of(kafka, after.run).predecessor
    if known is not None and known.carried_from >= 0:
        return known
    # No later call carries more over, so an entry that is hidden now would stay behind for good.
    await_decided(kafka, topic_name(config.run, "batch-index"), "no batch was carried over", wait_s)
    entries = list(_entries(config, start))
    places: list[int] = []

    def delivered(delivery: Delivery) -> None:
        places.append(delivery.offset)

    try:
        with closing(TransactionalProducer(kafka, transactional_id(after.run, "split"))) as producer:
            producer.start()
            with producer.transaction() as transaction:
                for entry in entries:
                    value, key = encode(entry), encode_key(entry.batch_id)
                    transaction.send(
                        topic_name(after.run, "batch-index"), value, key, partition=0, on_delivery=delivered
                    )
                transaction.flush(kafka.patience_s)
                split = replace(split, carried_from=start, carried_at=min(places, default=0), carried=len(entries))
                control = topic_name(after.run, "control")
                transaction.send(control, encode(split), PREDECESSOR_KEY, partition=0)
    except (TransactionFailed, Stalled) as error:
        raise DeliveryError(f"the waiting batches were not carried over ({error}); split again") from error
    return split


def _entries(config: RunConfig, start: int) -> Iterable[BatchIndexEntry]:
    messages = read_to_end(config.kafka, topic_name(config.run, "batch-index"), start=start)
    for _message, entry in SkippedRecords("split").records(BatchIndexEntry, messages):
        yield replace(entry, run=entry.run or config.run)


def copy_decisions(config: RunConfig, after: RunConfig) -> None:
    """Copy what applies beyond the end of a run from `control`: states of mixtures, exclusions of batches, and paused
    and weighed environments. Safe to repeat."""
    with Sender(clients.producer(config.kafka)) as sender:
        for message in read_to_end(config.kafka, topic_name(config.run, "control")):
            try:
                record = decode(message.value)
            except RecordError:
                continue
            if isinstance(record, ExcludedBatch | MixtureState):
                sender.send(topic_name(after.run, "control"), message.value, message.key, partition=0)
    decided = steering.desired_state(config.kafka, config.run)
    steering.write(after.kafka, after.run, steering.PAUSED, decided.paused)
    steering.write(after.kafka, after.run, steering.WEIGHT, decided.weighed)


def _set_clock(after: RunConfig, policy_version: int) -> None:
    """Write marks with the policy version of the run that ends to all partitions, because moved rollouts wait for
    it."""
    topic = topic_name(after.run, "rollouts")
    signer = MarkSigner(after.grouper.signing_key)
    with Sender(clients.producer(after.kafka)) as sender:
        for version in (*range(0, policy_version, VERSION_STEP), policy_version):
            if version >= 0:
                mark = Mark(kind="policy_version", policy_version=version, wall_time=time.time(), author="split")
                for partition in range(after.topics.partitions):
                    value = signer.encoded(mark, partition)
                    sender.send(topic, value, encode_key("mark", mark.kind), partition=partition)
