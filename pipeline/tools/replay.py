"""`rollstream replay`: fold the recorded log again, as it was, or as another configuration would have had it.

The same configuration must give the same batches. Another shows what would have differed, side by side, and can write
its batches as those of a run of another name, for a learner to follow.
"""

import argparse
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, Message, Producer

from consumers.grouping import state
from consumers.grouping.config import GroupingConfig
from consumers.grouping.makers import makers_of
from consumers.grouping.publisher import index_entry
from consumers.grouping.runs import from_runs
from pipeline.config import RunConfig, by_reference
from pipeline.progress import Progress, progress
from pipeline.reading import read_batches
from pipeline.refold import Change, beginnings, configurations, journal_of, log_begins, refold, skips_in
from pipeline.settings import environment_layers, file_layers, fill, flag_layers
from pipeline.spread import spread
from pipeline.tables import table
from pipeline.tools.cat import milliseconds
from pipeline.tools.plain import compact, tell
from topics import clients, provisioning
from topics.catalogue import topic_name
from topics.codec import encode
from topics.config import KafkaConfig, TopicsConfig
from topics.errors import ConfigurationError, DeliveryError, TopicError
from topics.keys import encode_key
from topics.records import BatchIndexEntry, Drop, JournalRecord, TrainingBatch, batch_numbers
from topics.skipped import SkippedRecords

_FIXED = ("generation",)
"""What a replay does not change: configurations stay the ones they were, one after the other."""


@dataclass
class Advantages:
    """Advantages of the rollouts of one environment."""

    rollouts: int = 0
    total: float = 0.0
    squares: float = 0.0
    least: float = math.inf
    most: float = -math.inf
    reward: float = 0.0

    def add(self, advantage: float, reward: float) -> None:
        self.rollouts += 1
        self.total += advantage
        self.squares += advantage * advantage
        self.least, self.most = min(self.least, advantage), max(self.most, advantage)
        self.reward += reward

    def merge(self, other: "Advantages") -> None:
        self.rollouts += other.rollouts
        self.total += other.total
        self.squares += other.squares
        self.least, self.most = min(self.least, other.least), max(self.most, other.most)
        self.reward += other.reward

    def as_dict(self) -> dict[str, float]:
        count = max(self.rollouts, 1)
        mean = self.total / count
        return {
            "rollouts": self.rollouts,
            "reward": self.reward / count,
            "mean": mean,
            "std": max(self.squares / count - mean * mean, 0.0) ** 0.5,
            "min": self.least if self.rollouts else 0.0,
            "max": self.most if self.rollouts else 0.0,
        }


@dataclass
class Side:
    """What one way of folding made of the log."""

    batches: int = 0
    rollouts: int = 0
    tokens: int = 0
    in_flight: int = 0
    """Rollouts, and cancellations, held where the log ends."""
    dropped: Counter[str] = field(default_factory=Counter)
    environments: dict[str, Advantages] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    def take(self, batches: Iterable[TrainingBatch], drops: Iterable[Drop]) -> None:
        """Count batches and drops."""
        for batch in batches:
            self.batches += 1
            self.rollouts += len(batch)
            self.tokens += len(batch.tokens)
            self.digests[batch.batch_id] = batch.digest
            for row, group in enumerate(batch.group_index.tolist()):
                of = self.environments.setdefault(batch.groups[group].environment, Advantages())
                of.add(float(batch.advantages[batch.splits[row]]), float(batch.rewards[row]))
        self.dropped.update(drop.reason for drop in drops)

    def merge(self, other: "Side") -> None:
        """Add another partition's."""
        self.batches += other.batches
        self.rollouts += other.rollouts
        self.tokens += other.tokens
        self.in_flight += other.in_flight
        self.dropped += other.dropped
        for name, advantages in other.environments.items():
            self.environments.setdefault(name, Advantages()).merge(advantages)
        self.digests |= other.digests

    def as_dict(self) -> dict[str, Any]:
        """As programs read it."""
        return {
            "batches": self.batches,
            "rollouts": self.rollouts,
            "tokens": self.tokens,
            "in_flight": self.in_flight,
            "dropped": dict(sorted(self.dropped.items())),
            "advantages": {name: value.as_dict() for name, value in sorted(self.environments.items())},
        }


@dataclass
class Replay:
    """Both sides, and how they differ."""

    recorded: Side = field(default_factory=Side)
    replayed: Side = field(default_factory=Side)
    changed: dict[str, list[Any]] = field(default_factory=dict)
    """Settings that differ: what the log's configurations say, and what the replay said instead."""
    entries: list[tuple[int, BatchIndexEntry]] = field(default_factory=list)
    """Time of each batch written into another run, and its entry."""
    skipped: SkippedRecords = field(default_factory=partial(SkippedRecords, logged=False))
    """Records of journal and batches that are none."""

    @property
    def differing(self) -> list[str]:
        """Batches that are not the same on both sides."""
        a, b = self.recorded.digests, self.replayed.digests
        return sorted((name for name in a.keys() | b.keys() if a.get(name) != b.get(name)), key=batch_numbers)

    def merge(self, other: "Replay") -> None:
        """Add another partition's."""
        self.recorded.merge(other.recorded)
        self.replayed.merge(other.replayed)
        self.entries += other.entries
        self.skipped.merge(other.skipped)
        for name, (before, after) in other.changed.items():
            kept = self.changed.setdefault(name, [[], after])
            kept[0] += [value for value in before if value not in kept[0]]

    def as_dict(self) -> dict[str, Any]:
        """As programs read it."""
        return {
            "changed": self.changed,
            "recorded": self.recorded.as_dict(),
            "replayed": self.replayed.as_dict(),
            "differing": len(self.differing),
            "batches_differing": self.differing[:100],
            "skipped": self.skipped.as_dict(),
        }


@dataclass(frozen=True)
class _Job:
    kafka: KafkaConfig
    run: str
    partition: int
    makers: tuple[str, ...]
    overrides: Mapping[str, Any]
    since_ms: int | None
    into: str | None


def show_replay(config: RunConfig, args: argparse.Namespace) -> int:
    """Print both sides; 1 when the configuration is the same and a batch is not."""
    overrides = {name: getattr(config.grouping, name) for name in _set_keys(args) if name not in _FIXED}
    since_ms = None if args.since is None else milliseconds(args.since)
    with progress("partitions") as show:
        found = replay(
            config.kafka,
            config.run,
            overrides,
            config.grouper.makers,
            since_ms=since_ms,
            into=args.into,
            processes=os.cpu_count() or 1,
            progress=show,
        )
    print(compact({**found.as_dict(), "into": args.into}) if args.json else replay_text(found, args.into))
    tell(found.skipped)
    return 0 if found.changed or not found.differing else 1


def _set_keys(args: argparse.Namespace) -> list[str]:
    """Settings of grouping that a file, the environment or a flag gives: defaults override nothing."""
    layers = [*file_layers(args.config), *environment_layers(os.environ), *flag_layers(args.set, args.client)]
    _config, origins = fill(RunConfig, layers, by_reference)
    return list(dict.fromkeys(path[1] for path in origins if path[0] == "grouping" and len(path) > 1))


def replay(
    kafka: KafkaConfig,
    run: str,
    overrides: Mapping[str, Any],
    makers: Iterable[str] = (),
    *,
    since_ms: int | None = None,
    into: str | None = None,
    processes: int = 1,
    progress: Progress = lambda _done, _all: None,
) -> Replay:
    """Fold a run again with `overrides` in every configuration its log holds.

    From `since_ms` on where it is given: from a snapshot before it where nothing is overridden, else with nothing held.
    Batches go into the topics of run `into` where it is named. Raises TopicError when that run has batches already.
    """
    clients.check_broker(kafka)
    partitions = clients.partitions_of(kafka, topic_name(run, "rollouts"))
    if into is not None:
        _prepare(kafka, run, into, partitions)
    jobs = [_Job(kafka, run, p, tuple(makers), dict(overrides), since_ms, into) for p in range(partitions)]
    result = Replay()
    progress(0, len(jobs))
    for done, part in enumerate(spread(_replay_partition, jobs, processes), 1):
        result.merge(part)
        progress(done, len(jobs))
    if into is not None:
        _index(kafka, into, [entry for _time, entry in sorted(result.entries, key=_in_order)])
    return result


def _in_order(timed: tuple[int, BatchIndexEntry]) -> tuple[int, int, int]:
    return timed[0], timed[1].partition, timed[1].offset


# ---------------------------------------------------------------------- one partition


def _replay_partition(job: _Job) -> Replay:
    result = Replay()
    journal = journal_of(job.kafka, job.run, job.partition, result.skipped)
    if not journal:
        return result
    makers = makers_of(job.makers)
    usable = beginnings(journal, log_begins(job.kafka, job.run, "rollouts")[job.partition])
    if not usable:
        raise TopicError(
            f"partition {job.partition} of run {job.run} was pruned beyond its snapshots; replay it when the next one "
            f"is written, as a grouping process does when it ends"
        )
    in_force = configurations(job.kafka, job.run, journal[usable[0] :], makers) if job.overrides else {}
    for name, value in job.overrides.items():
        if any(getattr(c, name) != value for c in in_force.values()):
            result.changed[name] = [list(dict.fromkeys(getattr(c, name) for c in in_force.values())), value]
    change: Change | None = (lambda c: replace(c, **job.overrides)) if result.changed else None
    begin, first = _beginning(job, journal, usable, in_force, change)
    stop = journal[-1].position
    later = [record for record in journal if record.sequence > first]
    result.recorded.take(_recorded(job, later, result.skipped), (drop for record in later for drop in record.drops))
    result.recorded.in_flight = len(state.restore(journal).unfinished)
    writer = _Writer(job.kafka, job.into) if job.into else None
    for output in refold(job.kafka, job.run, begin, stop, makers, change, skips_in(later)):
        result.replayed.take(output.batches, output.journal.drops)
        result.replayed.in_flight = len(list(from_runs(output.journal.unfinished)))
        for batch in output.batches:
            if writer is not None:
                writer.write(batch)
    if writer is not None:
        result.entries = writer.close()
    return result


def _beginning(
    job: _Job,
    journal: Sequence[JournalRecord],
    usable: Sequence[int],
    in_force: Mapping[int, GroupingConfig],
    change: Change | None,
) -> tuple[Sequence[JournalRecord], int]:
    """The journal to begin with, and the last sequence before what is compared.

    `usable` is as `beginnings` returns it, and `in_force` holds the configuration of each generation.
    """
    last = usable[0]
    if job.since_ms is not None:
        last = max((i for i, record in enumerate(journal) if record.stream_time_ms < job.since_ms), default=last)
    elif journal[last].sequence == 0:
        return journal[:1], journal[0].sequence
    if change is None:
        last = max((i for i in usable if i <= last), default=usable[0])
        return journal[: last + 1], journal[last].sequence
    last = max(last, usable[0])
    # Under another configuration what was held then would not be what is held here: it begins with nothing.
    record = journal[last]
    empty = state.initial(job.partition, record.partitions, record.topic_id, GroupingConfig())
    position = record.position
    return [
        replace(
            empty,
            begin=position,
            position=position,
            watermark=position,
            stream_time_ms=record.stream_time_ms,
            watermark_stream_time_ms=record.stream_time_ms,
            policy_version=record.policy_version,
            watermark_policy_version=record.policy_version,
            generation=record.generation,
            watermark_generation=record.generation,
            watermark_configuration=in_force[record.generation].to_json(),
            batch_number=record.batch_number,
        )
    ], record.sequence


def _recorded(job: _Job, journal: Sequence[JournalRecord], skipped: SkippedRecords) -> Iterable[TrainingBatch]:
    wanted = {batch_id for record in journal for batch_id in record.batch_ids}
    batches = read_batches(job.kafka, job.run, skipped, job.partition)
    return (batch for batch in batches if batch.batch_id in wanted)


# ---------------------------------------------------------------------- into another run


def _prepare(kafka: KafkaConfig, run: str, into: str, partitions: int) -> None:
    """Make the topics of the other run, and tell there which policy versions this one had: staleness goes by them."""
    if into == run:
        raise ConfigurationError(f"--into {into} is the run that is replayed; name another")
    provisioning.apply(kafka, TopicsConfig(partitions=partitions), into)
    if next(iter(clients.read_to_end(kafka, topic_name(into, "batches"))), None) is not None:
        raise TopicError(f"run {into} has batches already; name another run with --into")
    policies = clients.read_to_end(kafka, topic_name(run, "policies"))
    _write(kafka, topic_name(into, "policies"), ((message.key(), message.value()) for message in policies))


class _Writer:
    """Writes the batches of one partition into another run."""

    def __init__(self, kafka: KafkaConfig, into: str) -> None:
        self._producer = clients.producer(kafka)
        self._topic = topic_name(into, "batches")
        self._entries: list[tuple[int, BatchIndexEntry]] = []
        self._failed: list[KafkaError] = []

    def write(self, batch: TrainingBatch) -> None:
        """Produce a batch; its entry is known once it was acknowledged."""

        def delivered(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                self._failed.append(error)
            else:
                self._entries.append((batch.cut_ms, index_entry(batch, message.offset() or 0)))

        value, key = encode(batch), encode_key(batch.batch_id)
        clients.produce(self._producer, self._topic, value, key, partition=batch.partition, on_delivery=delivered)
        self._producer.poll(0)

    def close(self) -> list[tuple[int, BatchIndexEntry]]:
        """Wait until all are acknowledged."""
        _flush(self._producer, self._topic, self._failed)
        return self._entries


def _index(kafka: KafkaConfig, into: str, entries: Sequence[BatchIndexEntry]) -> None:
    records = ((encode_key(entry.batch_id), encode(entry)) for entry in entries)
    _write(kafka, topic_name(into, "batch-index"), records)


def _write(kafka: KafkaConfig, topic: str, records: Iterable[tuple[bytes | None, bytes | None]]) -> None:
    """Write keys and values to a topic of one partition."""
    producer, failed = clients.producer(kafka), []

    def delivered(error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            failed.append(error)

    for key, value in records:
        clients.produce(producer, topic, value, key, partition=0, on_delivery=delivered)
        producer.poll(0)
    _flush(producer, topic, failed)


def _flush(producer: Producer, topic: str, failed: Sequence[KafkaError]) -> None:
    """Wait until all is acknowledged. Raises DeliveryError where something is not."""
    left = producer.flush(60)
    if left or failed:
        why = failed[0].str() if failed else f"{left} records had no answer within 60 s; are the brokers up?"
        raise DeliveryError(f"not everything was written to {topic}: {why}")


# ---------------------------------------------------------------------- output


def replay_text(found: Replay, into: str | None = None) -> str:
    """Both sides as a table, and the verdict."""
    a, b = found.recorded, found.replayed
    rows: list[tuple[object, ...]] = [
        ("batches", a.batches, b.batches),
        ("rollouts kept", a.rollouts, b.rollouts),
        ("tokens kept", a.tokens, b.tokens),
    ]
    rows += [
        (f"dropped: {reason.replace('_', ' ')}", a.dropped[reason], b.dropped[reason])
        for reason in sorted(a.dropped.keys() | b.dropped.keys())
    ]
    rows.append(("in flight where the log ends", a.in_flight, b.in_flight))
    lines = [f"{name}: {', '.join(map(str, before))} -> {after}" for name, (before, after) in found.changed.items()]
    books = table(("", "recorded", "replayed"), rows)
    lines = [*lines, "", books, ""] if lines else [books, ""]
    advantages = []
    for name in sorted(a.environments.keys() | b.environments.keys()):
        for side, label in ((a, "recorded"), (b, "replayed")):
            figures = side.environments.get(name, Advantages()).as_dict()
            advantages.append((name, label, *(figures[key] for key in ("mean", "std", "min", "max"))))
    lines += [table(("advantages", "", "mean", "std", "min", "max"), advantages), ""]
    if not found.differing:
        lines.append(f"every batch is the same: {b.batches:,} batches")
    elif found.changed:
        lines.append(f"{len(found.differing):,} batches differ, as another configuration has it")
    else:
        these = " ".join(found.differing[:8])
        lines.append(f"{len(found.differing):,} BATCHES DIFFER UNDER THE SAME CONFIGURATION: {these}")
    if into is not None:
        lines.append(f"written as batches of run {into}; a learner follows them with learner.input_run={into}")
    return "\n".join(lines)
