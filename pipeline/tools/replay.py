"""`rollstream replay`: folds the recorded log again, with its own configuration or another.

The same configuration must give the same batches. A replay with another configuration shows the differences side by
side, and can write its batches to another run, to train a learner on them.
"""

import argparse
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rollstream.consumers.grouping.config import GrouperConfig, GroupingConfig
from rollstream.consumers.grouping.core import task_state
from rollstream.consumers.grouping.core.configuration_marks import Change
from rollstream.consumers.grouping.core.plug_ins import load_plug_ins
from rollstream.pipeline.audit.process_pool import spread
from rollstream.pipeline.audit.refold import (
    beginnings,
    configurations,
    emptied,
    journal_of,
    log_begins,
    refold,
    skips_in,
)
from rollstream.pipeline.audit.topic_reading import read_batches
from rollstream.pipeline.command_line.command_parser import set_handler
from rollstream.pipeline.command_line.plain_values import compact, tell
from rollstream.pipeline.command_line.progress_bar import ProgressCallback, progress
from rollstream.pipeline.command_line.text_tables import table
from rollstream.pipeline.config import RunConfig, settings_with_origins
from rollstream.pipeline.run.batch_run import BatchWriter, TimedEntry, prepare, write_index
from rollstream.pipeline.tools.cat import milliseconds
from rollstream.topics.config import KafkaConfig, TopicsConfig
from rollstream.topics.errors import TopicError
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import Drop, JournalRecord, TrainingBatch, batch_numbers
from rollstream.topics.records.journal import from_ranges
from rollstream.topics.wire.catalogue import topic_name

_FIXED = ("generation",)
"""Settings that a replay does not change."""


@dataclass
class AdvantageStatistics:
    """Statistics of the advantages of one environment's rollouts."""

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

    def merge(self, other: "AdvantageStatistics") -> None:
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
class FoldSummary:
    """Summary of one fold of the log."""

    batches: int = 0
    rollouts: int = 0
    tokens: int = 0
    in_flight: int = 0
    """Rollouts and cancellations in flight at the end of the log."""
    dropped: Counter[str] = field(default_factory=Counter)
    environments: dict[str, AdvantageStatistics] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    def add(self, batches: Iterable[TrainingBatch], drops: Iterable[Drop]) -> None:
        """Count batches and drops."""
        for batch in batches:
            self.batches += 1
            self.rollouts += len(batch)
            self.tokens += len(batch.tokens)
            self.digests[batch.batch_id] = batch.digest
            for row, group in enumerate(batch.group_index.tolist()):
                statistics = self.environments.setdefault(batch.groups[group].environment, AdvantageStatistics())
                statistics.add(float(batch.advantages[batch.splits[row]]), float(batch.rewards[row]))
        self.dropped.update(drop.reason for drop in drops)

    def merge(self, other: "FoldSummary") -> None:
        """Add the summary of another partition."""
        self.batches += other.batches
        self.rollouts += other.rollouts
        self.tokens += other.tokens
        self.in_flight += other.in_flight
        self.dropped += other.dropped
        for name, advantages in other.environments.items():
            self.environments.setdefault(name, AdvantageStatistics()).merge(advantages)
        self.digests |= other.digests

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        return {
            "batches": self.batches,
            "rollouts": self.rollouts,
            "tokens": self.tokens,
            "in_flight": self.in_flight,
            "dropped": dict(sorted(self.dropped.items())),
            "advantages": {name: value.as_dict() for name, value in sorted(self.environments.items())},
        }


@dataclass
class ReplayComparison:
    """Both folds and their differences."""

    recorded: FoldSummary = field(default_factory=FoldSummary)
    replayed: FoldSummary = field(default_factory=FoldSummary)
    changed: dict[str, list[Any]] = field(default_factory=dict)
    """Settings that differ: their values in the log's configurations, and their value in the replay."""
    entries: list[TimedEntry] = field(default_factory=list)
    """Entries of the batches written into another run."""
    skipped: SkippedRecords = field(default_factory=partial(SkippedRecords, logged=False))
    """Invalid records in `journal` and `batches`."""

    @property
    def differing(self) -> list[str]:
        """Batches that differ between the folds."""
        a, b = self.recorded.digests, self.replayed.digests
        return sorted((name for name in a.keys() | b.keys() if a.get(name) != b.get(name)), key=batch_numbers)

    def merge(self, other: "ReplayComparison") -> None:
        """Add the comparison of another partition."""
        self.recorded.merge(other.recorded)
        self.replayed.merge(other.replayed)
        self.entries += other.entries
        self.skipped.merge(other.skipped)
        for name, (before, after) in other.changed.items():
            kept = self.changed.setdefault(name, [[], after])
            kept[0] += [value for value in before if value not in kept[0]]

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
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
    grouper: GrouperConfig
    overrides: Mapping[str, Any]
    since_ms: int | None
    into: str | None


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream replay`."""
    set_handler(parser, show_replay, example="rollstream replay --run main --set grouping.estimator=grpo", json=True)
    parser.add_argument("--from", dest="since", metavar="TIME", help="begin at this time, in the form of cat's --since")
    parser.add_argument("--into", metavar="RUN", help="write the batches to another run, to train on them")


def show_replay(config: RunConfig, args: argparse.Namespace) -> int:
    """Print both folds; return 1 if a batch differs under the same configuration."""
    overrides = {name: getattr(config.grouping, name) for name in _set_keys(args) if name not in _FIXED}
    since_ms = None if args.since is None else milliseconds(args.since)
    with progress("partitions") as show:
        comparison = replay(
            config.kafka,
            config.run,
            overrides,
            config.grouper.makers,
            estimators=config.grouper.estimators,
            since_ms=since_ms,
            into=args.into,
            topics=config.topics,
            processes=os.cpu_count() or 1,
            progress=show,
        )
    print(compact({**comparison.as_dict(), "into": args.into}) if args.json else replay_text(comparison, args.into))
    tell(comparison.skipped)
    return 0 if comparison.changed or not comparison.differing else 1


def _set_keys(args: argparse.Namespace) -> list[str]:
    """Return the names of grouping settings that a file, a variable or a flag sets; defaults are omitted."""
    _config, origins = settings_with_origins(args.config, os.environ, args.set, args.client)
    return list(dict.fromkeys(path[1] for path in origins if path[0] == "grouping" and len(path) > 1))


def replay(
    kafka: KafkaConfig,
    run: str,
    overrides: Mapping[str, Any],
    makers: Iterable[str] = (),
    *,
    estimators: Iterable[str] = (),
    since_ms: int | None = None,
    into: str | None = None,
    topics: TopicsConfig | None = None,
    processes: int = 1,
    progress: ProgressCallback = lambda _done, _all: None,
) -> ReplayComparison:
    """Fold a run again with `overrides` in every configuration of its log.

    With `since_ms`, begin at that time: from a snapshot before it if nothing is overridden, else with an empty state.
    With `into`, write the batches to the topics of run `into`, which get the settings of `topics`. Raises TopicError if
    that run already has batches.
    """
    clients.check_broker(kafka)
    partitions = topic_admin.partitions_of(kafka, topic_name(run, "rollouts"))
    if into is not None:
        prepare(kafka, run, into, replace(topics or TopicsConfig(), partitions=partitions))
    grouper = GrouperConfig(makers=tuple(makers), estimators=tuple(estimators))
    jobs = [_Job(kafka, run, p, grouper, dict(overrides), since_ms, into) for p in range(partitions)]
    result = ReplayComparison()
    progress(0, len(jobs))
    for done, part in enumerate(spread(_replay_partition, jobs, processes), 1):
        result.merge(part)
        progress(done, len(jobs))
    if into is not None:
        write_index(kafka, into, result.entries)
    return result


# ---------------------------------------------------------------------- one partition


def _replay_partition(job: _Job) -> ReplayComparison:
    result = ReplayComparison()
    journal = journal_of(job.kafka, job.run, job.partition, result.skipped)
    if not journal:
        return result
    plug_ins = load_plug_ins(job.grouper)
    usable = beginnings(journal, log_begins(job.kafka, job.run, "rollouts")[job.partition])
    if not usable:
        raise TopicError(
            f"partition {job.partition} of run {job.run} was pruned beyond its snapshots; replay it after the next "
            f"snapshot, which a grouping process writes when it ends"
        )
    in_force = configurations(job.kafka, job.run, journal[usable[0] :], plug_ins) if job.overrides else {}
    for name, value in job.overrides.items():
        if any(getattr(c, name) != value for c in in_force.values()):
            result.changed[name] = [list(dict.fromkeys(getattr(c, name) for c in in_force.values())), value]
    change: Change | None = (lambda c: replace(c, **job.overrides)) if result.changed else None
    begin, first = _beginning(job, journal, usable, in_force, change)
    stop = journal[-1].position
    later = [record for record in journal if record.sequence > first]
    result.recorded.add(_recorded(job, later, result.skipped), (drop for record in later for drop in record.drops))
    result.recorded.in_flight = len(task_state.restored_state(journal).unfinished)
    writer = BatchWriter(job.kafka, job.run, job.into) if job.into else None
    for output in refold(job.kafka, job.run, begin, stop, plug_ins, change, skips_in(later)):
        result.replayed.add(output.batches, output.journal.drops)
        result.replayed.in_flight = len(list(from_ranges(output.journal.unfinished)))
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
    """Return the journal to begin with, and the last sequence number before the part that is compared.

    `usable` is the result of `beginnings`; `in_force` holds the configuration of each generation.
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
    record = journal[last]
    return [emptied(record, in_force[record.generation])], record.sequence


def _recorded(job: _Job, journal: Sequence[JournalRecord], skipped: SkippedRecords) -> Iterable[TrainingBatch]:
    wanted = {batch_id for record in journal for batch_id in record.batch_ids}
    batches = read_batches(job.kafka, job.run, skipped, job.partition)
    return (batch for batch in batches if batch.batch_id in wanted)


# ---------------------------------------------------------------------- output


def replay_text(comparison: ReplayComparison, into: str | None = None) -> str:
    """Return a table of both folds, and the verdict."""
    a, b = comparison.recorded, comparison.replayed
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
    lines = [
        f"{name}: {', '.join(map(str, before))} -> {after}" for name, (before, after) in comparison.changed.items()
    ]
    books = table(("", "recorded", "replayed"), rows)
    lines = [*lines, "", books, ""] if lines else [books, ""]
    advantages = []
    for name in sorted(a.environments.keys() | b.environments.keys()):
        for side, label in ((a, "recorded"), (b, "replayed")):
            figures = side.environments.get(name, AdvantageStatistics()).as_dict()
            advantages.append((name, label, *(figures[key] for key in ("mean", "std", "min", "max"))))
    lines += [table(("advantages", "", "mean", "std", "min", "max"), advantages), ""]
    if not comparison.differing:
        lines.append(f"all {b.batches:,} batches are the same")
    elif comparison.changed:
        lines.append(f"{len(comparison.differing):,} batches differ under the other configuration")
    else:
        these = " ".join(comparison.differing[:8])
        lines.append(f"{len(comparison.differing):,} BATCHES DIFFER UNDER THE SAME CONFIGURATION: {these}")
    if into is not None:
        lines.append(f"written to run {into}; a learner trains on these batches with learner.input_run={into}")
    return "\n".join(lines)
