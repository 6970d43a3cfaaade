"""Marks that put an exclusion in force on every partition of `rollouts`, and the configurations that result."""

import difflib
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import NamedTuple

from rollstream.consumers.grouping.config import EXCLUSIONS, GrouperConfig, GroupingConfig
from rollstream.consumers.grouping.core.configuration_marks import check_names, mark_outcome
from rollstream.consumers.grouping.core.plug_ins import load_plug_ins
from rollstream.consumers.grouping.process.bootstrap import committed_offsets
from rollstream.consumers.grouping.process.restoration import records_of
from rollstream.consumers.grouping.process.skipped_offsets import requested_skips
from rollstream.pipeline.audit.topic_reading import committed_positions, committed_tasks
from rollstream.pipeline.command_line.plain_values import decoded
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError, DeadlineExceeded, DeliveryError, StateRefused
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.client_calls import Stalled
from rollstream.topics.kafka.reader import read_to_end, records_between
from rollstream.topics.kafka.records import GroupPosition
from rollstream.topics.kafka.sender import Delivery
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.kafka.transactions import TransactionalProducer, TransactionFailed, transactional_id
from rollstream.topics.records import JournalRecord, Mark, Rollout
from rollstream.topics.records.fates import OTHER_ENVIRONMENTS
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.commit_metadata import CommitMetadata
from rollstream.topics.wire.keys import encode_key
from rollstream.topics.wire.signatures import MarkSigner

_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Exclusion:
    """Environments, workers and offsets to exclude."""

    environments: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()
    offsets: tuple[str, ...] = ()

    def added_to(self, config: GroupingConfig) -> GroupingConfig:
        """Return the configuration with this exclusion added; the generation stays the same."""
        both = {
            name: tuple(dict.fromkeys((*getattr(config, name), *wanted)))
            for name, wanted in zip(EXCLUSIONS, (self.environments, self.workers, self.offsets), strict=True)
        }
        return replace(config, **both)  # type: ignore[arg-type]

    def __str__(self) -> str:
        named = (("environment", self.environments), ("worker", self.workers), ("offsets", self.offsets))
        return ", ".join(f"{what} {name}" for what, names in named for name in names)


class PartitionConfiguration(NamedTuple):
    """The configuration of one partition."""

    config: GroupingConfig
    """Configuration in force at the end of the partition."""
    since: int
    """Offset of the mark that set it; -1 if the mark is older than the state of the grouping task."""


def partition_configurations(kafka: KafkaConfig, run: str, grouper: GrouperConfig) -> list[PartitionConfiguration]:
    """Return the configuration of each partition of `rollouts`, including marks that no task has read yet.

    Raises StateRefused if a partition has no grouping state, or a mark carries settings unknown to this release.
    """
    topic, plug_ins, configurations = topic_name(run, "rollouts"), load_plug_ins(grouper), []
    for partition, journal in committed_tasks(kafka, run, grouper):
        config, since = GroupingConfig.from_json(journal.watermark_configuration), -1
        clock = journal.watermark_policy_version
        requested = requested_skips(kafka, run, partition)
        skips = {*journal.skipped, *(offset for offset in requested if offset >= journal.position)}
        _begin, end = topic_admin.bounds(kafka, topic, [partition])[partition]
        for message in records_between(kafka, topic, partition, journal.watermark, end, wait=False):
            if message is None:
                continue
            value = decoded(message.value)
            if isinstance(value, Mark) and message.offset not in skips:
                judged = mark_outcome(records_of(message), value, partition, config, clock, plug_ins)
                clock = clock if judged.problem else max(clock, value.policy_version)
                config, since = (judged.config, message.offset) if judged.config else (config, since)
        configurations.append(PartitionConfiguration(config, since))
    return configurations


def check_environments(named: Iterable[str], kafka: KafkaConfig, run: str, grouper: GrouperConfig) -> None:
    """Raise ConfigurationError for an environment that has no rollout in the run and is not excluded yet.

    Environments of grouped records are taken from the journal's counts; later records of `rollouts` are read.
    """
    topic, known = (
        topic_name(run, "rollouts"),
        {*newest(partition_configurations(kafka, run, grouper)).exclude_environments},
    )
    tails = {}
    for committed in committed_positions(kafka, run, grouper):
        tails[committed.partition] = committed.offset
        known |= _counted(kafka, run, committed)
    # In a run with very many environments, the journal counts some of them together, without names.
    missing = set() if OTHER_ENVIRONMENTS in known else set(named) - known
    if missing:
        for message in read_to_end(kafka, topic, partitions=tails, start=tails):
            value = decoded(message.value)
            if isinstance(value, Rollout):
                known.add(value.environment)
    for name in sorted(missing - known):
        near = difflib.get_close_matches(name, known, 1)
        hint = (
            f"did you mean {near[0]}?"
            if near
            else f"environments of the run: {', '.join(sorted(known - {''})) or 'none'}."
        )
        raise ConfigurationError(
            f"--env {name}: run {run} has no rollout of that environment; {hint} To exclude it in advance, add --unseen"
        )


def _counted(kafka: KafkaConfig, run: str, committed: GroupPosition) -> set[str]:
    """Return the environments that the journal counts up to the committed record.

    Records of aborted transactions count, too, because the rollouts that they read are on the log.
    """
    partition, topic = committed.partition, topic_name(run, "journal")
    metadata = CommitMetadata.decode(committed.metadata, f"{committed.topic}[{partition}]")
    environments: set[str] = set()
    start = {partition: metadata.snapshot}
    messages = read_to_end(kafka, topic, partitions=[partition], start=start, isolation="read_uncommitted")
    for message, record in SkippedRecords("exclude").records(JournalRecord, messages):
        if message.offset > metadata.journal:
            break
        environments.update(count.environment for count in (*record.produced, *record.counts))
    return environments


def newest(configurations: Iterable[PartitionConfiguration]) -> GroupingConfig:
    """Return the configuration of the highest generation."""
    return max((standing.config for standing in configurations), key=lambda config: config.generation)


def put_in_force(
    kafka: KafkaConfig, run: str, grouper: GrouperConfig, exclusion: Exclusion, timeout_s: float
) -> list[PartitionConfiguration]:
    """Add an exclusion to every partition, and return their configurations once all grouping tasks have read it.

    If the exclusion is already in force, only wait. Raises DeadlineExceeded if the mark of some partition was not read
    within `timeout_s`; the mark is on the log, and takes effect when it is read.
    """
    generation, marks = write_marks(kafka, run, grouper, exclusion)
    topic = topic_name(run, "rollouts")
    deadline = time.monotonic() + timeout_s
    while behind := _unread(kafka, run, grouper, marks):
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"the exclusion is on the log as generation {generation}, but partitions {behind} of {topic} were not "
                f"read up to it within {timeout_s:g} s; start `rollstream role group`, which applies it (or resume "
                f"paused partitions), and run this again: until then, learners may train on excluded rollouts in "
                "batches that are cut from now on"
            )
        time.sleep(0.1)
    configurations = partition_configurations(kafka, run, grouper)
    others = [p for p, (config, _since) in enumerate(configurations) if exclusion.added_to(config) != config]
    if others:
        raise StateRefused(
            f"partitions {others} of run {run} were given another configuration in the meantime, of generation "
            f"{generation} or later; run this again, to add the exclusion to it"
        )
    return configurations


def _unread(kafka: KafkaConfig, run: str, grouper: GrouperConfig, marks: Mapping[int, int]) -> list[int]:
    """Return the partitions whose committed position is not past their mark."""
    committed = committed_offsets(kafka, grouper.group_id(run), topic_name(run, "rollouts"), len(marks))
    return [tp.partition for tp in committed if tp.offset <= marks[tp.partition]]


def write_marks(
    kafka: KafkaConfig, run: str, grouper: GrouperConfig, exclusion: Exclusion
) -> tuple[int, Mapping[int, int]]:
    """Write marks for an exclusion in one transaction, unless all partitions have it; return generation and offsets.

    Raises DeliveryError if they were not written, and as `partition_configurations` does.
    """
    topic, marks = topic_name(run, "rollouts"), dict[int, int]()

    def delivered(delivery: Delivery) -> None:
        marks[delivery.partition] = delivery.offset

    try:
        with closing(TransactionalProducer(kafka, transactional_id(run, "exclude"))) as producer:
            # From here on no other exclusion of the run can commit, so none is lost between reading and writing.
            producer.start()
            configurations = partition_configurations(kafka, run, grouper)
            current = newest(configurations)
            if all(exclusion.added_to(config) == config for config, _since in configurations):
                return current.generation, {p: since for p, (_config, since) in enumerate(configurations)}
            wanted = replace(exclusion.added_to(current), generation=current.generation + 1)
            check_names(wanted, load_plug_ins(grouper))
            mark = Mark(
                kind="configuration",
                generation=wanted.generation,
                configuration=wanted.to_json(),
                wall_time=time.time(),
                author="exclude",
            )
            signer, key = MarkSigner(grouper.signing_key), encode_key("mark", mark.kind)
            signer.check(current.mark_keys)
            with producer.transaction() as transaction:
                for partition in range(len(configurations)):
                    value = signer.encoded(mark, partition)
                    transaction.send(topic, value, key, partition=partition, on_delivery=delivered)
                transaction.flush(_TIMEOUT_S)
    except (TransactionFailed, Stalled) as error:
        raise DeliveryError(f"the exclusion was not written ({error}); run it again") from error
    return wanted.generation, marks
