"""The report of an exclusion: fates of excluded rollouts, and the batches, steps and policy versions affected."""

import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.pipeline.audit.topic_reading import read_batches, read_journal
from rollstream.pipeline.command_line.progress_bar import progress
from rollstream.pipeline.index.indexed_run import IndexedRun, fates_in, oldest_snapshot
from rollstream.pipeline.plain_values import decoded
from rollstream.pipeline.tools.exclusion_marks import Exclusion
from rollstream.topics.config import KafkaConfig
from rollstream.topics.control.named_records import EXCLUDED, write
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import ExcludedBatch, Rollout, TrainingBatch
from rollstream.topics.records.fates import DETAIL_LIMIT, DROPPED, clip, exclusion_detail
from rollstream.topics.records.journal import OffsetRange
from rollstream.topics.wire.catalogue import topic_name


@dataclass
class ExclusionReport:
    """Fates of excluded rollouts."""

    fates: Counter[str] = field(default_factory=Counter)
    """Number of excluded rollouts by fate; for dropped rollouts, by reason."""
    dropped_along: int = 0
    """Rollouts dropped because another member of their group is excluded."""
    batches: list[dict[str, Any]] = field(default_factory=list)
    """Batches that hold excluded rollouts; `name_steps` puts them into index order, and adds the steps that used or
    skipped them."""
    touched: list[dict[str, Any]] = field(default_factory=list)
    """For each learner, the steps that trained on these batches, and the first policy version published after them."""
    skipped: SkippedRecords = field(default_factory=partial(SkippedRecords, logged=False))
    """Invalid records that were skipped."""


def find(kafka: KafkaConfig, run: str, exclusion: Exclusion, partitions: int) -> ExclusionReport:
    """Find excluded rollouts, other members of their groups that were dropped, and batches with excluded rollouts."""
    report = ExclusionReport()
    config = exclusion.added_to(GroupingConfig())
    excluded_offsets: list[set[int]] = []
    with progress("partitions") as show:
        for partition in range(partitions):
            show(partition, partitions)
            excluded_offsets.append(_named(kafka, run, partition, config))
            # The index, which `name_steps` uses, names the skipped records of the journal.
            unread = SkippedRecords(logged=False)
            journal = [record for _offset, record in read_journal(kafka, run, partition, unread)]
            read = range(journal[0].begin, journal[-1].position) if journal else range(0)
            fates = fates_in(journal, read, excluded_offsets[-1], oldest_snapshot(journal))
            report.fates.update(
                f"{DROPPED}: {fate.drop.reason}" if fate.drop is not None else fate.name for fate in fates.values()
            )
            details = journal_details(exclusion, excluded_offsets[-1])
            report.dropped_along += sum(
                drop.offset not in excluded_offsets[-1] and drop.reason == "excluded" and drop.detail in details
                for record in journal
                for drop in record.drops
            )
        show(partitions, partitions)
    report.batches = _batches(kafka, run, config, excluded_offsets, report.skipped)
    return report


def tell_learners(
    kafka: KafkaConfig, run: str, batches: Iterable[Mapping[str, Any]], reason: str, generation: int
) -> None:
    """Name batches on `control`, so that learners leave them out from now on. Idempotent."""
    about: dict[str, Any] = {"reason": clip(reason, 200), "generation": generation, "wall_time": time.time()}
    records = {batch["batch_id"]: ExcludedBatch(batch_id=batch["batch_id"], **about) for batch in batches}
    write(kafka, run, EXCLUDED, records, "not every batch that learners must leave out is on record: run this again")


def name_steps(view: IndexedRun, report: ExclusionReport) -> None:
    """Add to a report the steps that have used or skipped its batches, and the policy versions after these steps."""
    entries = {batch["batch_id"]: view.entry(batch["batch_id"]) for batch in report.batches}
    report.batches.sort(key=lambda batch: entry.offset if (entry := entries[batch["batch_id"]]) else sys.maxsize)
    for batch in report.batches:
        batch["uses"] = [
            {
                "learner": step.learner,
                "step": step.step,
                "use": use.use,
                "reason": use.reason,
                "policy_version": step.policy_version if step.policy_version >= 0 else None,
            }
            for step, use in view.uses_of(batch["batch_id"])
        ]
    report.touched = _touched(view, report.batches)
    report.skipped.merge(view.skipped)


def journal_details(exclusion: Exclusion, excluded_offsets: Iterable[int]) -> set[str]:
    """Return the details with which the journal records drops for this exclusion of rollouts at these offsets.

    If a member is excluded, every member of its group is dropped with the detail for that member.
    """
    names: list[tuple[str, str | int]] = [("environment", name) for name in exclusion.environments]
    names += [("worker", name) for name in exclusion.workers]
    names += [("offset", offset) for offset in excluded_offsets] if exclusion.offsets else []
    return {clip(exclusion_detail(what, name), DETAIL_LIMIT) for what, name in names}


def _named(kafka: KafkaConfig, run: str, partition: int, config: GroupingConfig) -> set[int]:
    """Return the offsets of the excluded rollouts of a partition."""
    offsets: set[int] = set()
    anywhere = config.exclude_environments or config.exclude_workers
    if not anywhere and all(OffsetRange.parse(text).partition != partition for text in config.exclude_offsets):
        return offsets
    for message in read_to_end(kafka, topic_name(run, "rollouts"), partitions=[partition]):
        offset = message.offset
        by_offset = config.excludes_offset(partition, offset)
        if not by_offset and not anywhere:
            continue
        rollout = decoded(message.value)
        if isinstance(rollout, Rollout) and (
            by_offset
            or rollout.environment in config.exclude_environments
            or rollout.metadata.worker_id in config.exclude_workers
        ):
            offsets.add(offset)
    return offsets


def _batches(
    kafka: KafkaConfig, run: str, config: GroupingConfig, excluded_offsets: Sequence[set[int]], skipped: SkippedRecords
) -> list[dict[str, Any]]:
    """Find batches that hold excluded rollouts. One excluded by worker is found only if `rollouts` still holds it."""
    held: dict[str, dict[str, Any]] = {}
    # Include batches whose commit is not visible yet; a batch of an aborted transaction is cut again unchanged.
    for batch in read_batches(kafka, run, skipped, isolation="read_uncommitted"):
        # A record that grouping did not write may name any partition.
        if batch.partition < len(excluded_offsets) and (
            summary := _summary(batch, config, excluded_offsets[batch.partition])
        ):
            held[batch.batch_id] = summary
    return list(held.values())


def _summary(batch: TrainingBatch, config: GroupingConfig, excluded_offsets: Set[int]) -> dict[str, Any] | None:
    """Return the counts of a batch that holds excluded rollouts; None for another batch.

    `excluded_offsets` holds the offsets of excluded rollouts of its partition, as far as `rollouts` still has them.
    """
    excluded = sum(
        offset in excluded_offsets
        or config.excludes_offset(batch.partition, offset)
        or batch.groups[group].environment in config.exclude_environments
        for offset, group in zip(batch.source_offsets.tolist(), batch.group_index.tolist(), strict=True)
    )
    if not excluded:
        return None
    return {"batch_id": batch.batch_id, "excluded": excluded, "rollouts": len(batch), "uses": []}


def _touched(view: IndexedRun, batches: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each learner, the steps that trained on these batches, and the first policy version affected."""
    steps: dict[str, set[int]] = {}
    for batch in batches:
        for use in batch["uses"]:
            if use["use"] == "trained":
                steps.setdefault(use["learner"], set()).add(use["step"])
    return [
        {
            "learner": learner,
            "steps": sorted(numbers),
            "first_policy_version": view.first_version_after(learner, min(numbers)),
        }
        for learner, numbers in sorted(steps.items())
    ]
