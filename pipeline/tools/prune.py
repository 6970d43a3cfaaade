"""`rollstream prune`: delete what recovery, verification and learners no longer need of a run's log.

Positions are read, the plan is made by `pipeline.pruning`, and nothing is deleted without --yes. What a process or a
checkpoint may still read is never part of the plan.
"""

import argparse
import json
import math
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from consumers.buffers.filling import FILLER_GROUPS
from consumers.grouping.bootstrap import committed_offsets
from consumers.grouping.state import CommitMetadata
from consumers.labelling.config import LabellingConfig
from consumers.learner.checkpoint_paths import META, checkpoint_steps, directory_of
from pipeline.config import RunConfig
from pipeline.pruning import (
    ACCOUNT,
    CONTROL_TOPICS,
    NO_FILLER,
    NO_LABELLER,
    RECOVERY,
    TOPICS,
    WINDOW,
    Batch,
    Deletion,
    LastStep,
    Place,
    Positions,
    Snapshot,
    Task,
    plan,
)
from pipeline.reading import read_journal
from pipeline.refold import beginnings, ends_snapshot
from pipeline.tables import clipped, table
from pipeline.tools.plain import compact, time_text
from topics import clients
from topics.catalogue import topic_name
from topics.config import KafkaConfig
from topics.errors import BrokerUnavailable, ConfigurationError, StateRefused
from topics.records import BatchIndexEntry, JournalRecord, LearnerStep, batch_numbers
from topics.retired import retired_learners
from topics.skipped import SkippedRecords
from topics.validation import entry_problems

KEEP_BATCHES = 1000
"""Batches that stay verifiable where nothing else is said."""
_TIMEOUT_S = 30.0
_WHY = {
    WINDOW: "what stays verifiable, from a snapshot on",
    RECOVERY: "what a grouping process restores its tasks from",
    ACCOUNT: "batches that the journal, where it is kept, tells of",
    NO_LABELLER: "nobody has labelled yet, or the positions of labelling are lost",
    NO_FILLER: "nobody has filled a buffer yet",
}
_BARE = " (no checkpoint)"
_LEARNERS = {
    False: "may have to read on from there",
    True: "--checkpoints may say where they lie",
}
_WHY_WIDTH = 26


def show_prune(config: RunConfig, args: argparse.Namespace) -> int:
    """Print the plan, and carry it out with --yes."""
    if (args.keep_batches is not None and args.keep_batches < 0) or (args.keep_hours or 0) < 0:
        raise ConfigurationError("--keep-batches and --keep-hours take what is kept, 0 or more")
    if not args.dry_run and not args.yes:
        raise ConfigurationError("prune deletes for good; look with --dry-run first, then say --yes")
    positions = read_positions(
        config.kafka,
        config.run,
        config.grouper.group_id(config.run),
        None if args.without_checkpoints else directory_of(args.checkpoints or config.learner.checkpoint.directory),
        config.labelling.group_id(config.run),
    )
    keep = KEEP_BATCHES if args.keep_batches is None and args.keep_hours is None else args.keep_batches or 0
    keep_from_ms = None if args.keep_hours is None else int((time.time() - args.keep_hours * 3600) * 1000)
    deletions = plan(positions, keep_batches=keep, keep_from_ms=keep_from_ms)
    if not args.dry_run:
        delete(config.kafka, config.run, deletions)
    rows, skipped = rows_of(deletions), positions.skipped
    if args.json:
        learners = {name: asdict(last) for name, last in positions.last_steps.items()}
        print(compact({"deleted": not args.dry_run, "plan": rows, "learners": learners, "skipped": skipped}))
    else:
        print(plan_text(rows, args.dry_run, positions.last_steps, skipped))
    return 0


def rows_of(deletions: Sequence[Deletion]) -> list[dict[str, Any]]:
    """A plan as programs read it."""
    return [
        {
            "topic": d.topic,
            "partition": d.partition,
            "from": d.begin,
            "to": d.to,
            "offsets": d.offsets,
            "kept_for": d.why,
        }
        for d in deletions
    ]


def plan_text(
    rows: Sequence[Mapping[str, Any]],
    dry_run: bool,
    last_steps: Mapping[str, LastStep] | None = None,
    skipped: Sequence[str] = (),
) -> str:
    """What goes, and what the rest is kept for; `last_steps` and `skipped` as in `Positions`."""
    header = ("topic", "partition", "from", "to", "offsets", "the rest is kept for")
    cells = [
        (*(row[n] for n in ("topic", "partition", "from", "to", "offsets")), clipped(row["kept_for"], _WHY_WIDTH))
        for row in rows
    ]
    lines = [table(header, cells), ""]
    met = dict.fromkeys(row["kept_for"] for row in rows)
    lines += [f"{why}: {_WHY[why]}" for why in met if why in _WHY]
    lines += [f"{why}: {_LEARNERS[why.endswith(_BARE)]}" for why in met if why.startswith("learner")]
    for name, last in (last_steps or {}).items():
        if last.replaced_by:
            at = time_text(int(last.time * 1000)) if math.isfinite(last.time) else "no time"
            lines.append(
                f"{name}: its last step is {last.step}, of {at}, and learner {last.replaced_by} has published into run "
                f"{last.run} since; what it would read again is kept all the same until `rollstream learner retire`"
            )
    lines += [
        f"{why}: has not read beyond it; delete the group if it is over" for why in met if why.startswith("group")
    ]
    if skipped:
        lines.append(f"{len(skipped)} records could not be read and count for nothing, the first: {skipped[0]}")
    total = sum(row["offsets"] for row in rows)
    return "\n".join([*lines, f"{total:,} offsets {'would be' if dry_run else 'were'} deleted"])


def delete(kafka: KafkaConfig, run: str, deletions: Sequence[Deletion]) -> None:
    """Carry a plan out, topic by topic in its order. Raises BrokerUnavailable where a broker does not."""
    client = clients.admin(kafka)
    for topic in TOPICS:
        name = topic_name(run, topic)
        wanted = [TopicPartition(name, d.partition, d.to) for d in deletions if d.topic == topic and d.offsets > 0]
        futures = client.delete_records(wanted, request_timeout=_TIMEOUT_S) if wanted else {}
        for place, future in futures.items():
            try:
                future.result(_TIMEOUT_S)
            except KafkaException as error:
                raise BrokerUnavailable(
                    f"records of {name}[{place.partition}] below {place.offset} cannot be deleted "
                    f"({error.args[0].str()}); repeat `rollstream prune`"
                ) from error


# ---------------------------------------------------------------------- positions


def read_positions(
    kafka: KafkaConfig, run: str, group: str, checkpoints: Path | None, labeller: str | None = None
) -> Positions:
    """Where everything and everybody of a run stands.

    Learners go back to their oldest checkpoint below `checkpoints`, to where their steps end where that is None, and to
    where they say themselves where they do. `labeller` is the consumer group of labelling processes, where its name is
    not the usual one. Raises StateRefused when the group of grouping processes has a journal and no offsets.
    """
    clients.check_broker(kafka)
    labeller = labeller or LabellingConfig().group_id(run)
    bounds = {topic: clients.bounds(kafka, topic_name(run, topic)) for topic in TOPICS}
    for topic in CONTROL_TOPICS:
        if not any(end for _low, end in bounds[topic].values()):
            del bounds[topic]
    begins = {(topic, partition): low for topic, of in bounds.items() for partition, (low, _end) in of.items()}
    partitions = sum(topic == "rollouts" for topic, _partition in begins)
    # Who reads stands where it did or further when the rest is read: what is found to be needed is, or was.
    groups = _other_groups(kafka, run, group)
    # After fillers: what they have read was labelled below these positions.
    if labeller in groups:
        client = clients.admin(kafka)
        groups[labeller] |= _offsets_of(client, run, labeller)
    skipped = SkippedRecords(logged=False)
    learners, last_steps = _learners(kafka, run, checkpoints, skipped)
    committed = committed_offsets(kafka, group, topic_name(run, "rollouts"), partitions)
    if all(place.offset < 0 for place in committed) and not any(end for _low, end in bounds["journal"].values()):
        # A run that groups nothing; of the rest nothing is known, and nothing goes.
        committed, begins = [], {place: low for place, low in begins.items() if place[0] in CONTROL_TOPICS}
    tasks = {}
    for place in committed:
        where = f"rollouts[{place.partition}] by group {group}"
        if place.offset < 0:
            raise StateRefused(f"no offset is committed for {where}; commit it again with `rollstream group recover`")
        metadata = CommitMetadata.decode(place.metadata, where)
        log_begin = begins["rollouts", place.partition]
        tasks[place.partition] = _task(kafka, run, place.partition, metadata, log_begin, skipped)
    return Positions(
        tasks=tasks,
        batches=_batches(kafka, run, skipped),
        learners=learners,
        begins=begins,
        groups=groups,
        labeller=labeller,
        fillers=frozenset(name for name in groups if name.startswith(f"{run}{FILLER_GROUPS}")),
        last_steps=last_steps,
        skipped=tuple(map(str, skipped.first)),
    )


def _task(
    kafka: KafkaConfig, run: str, partition: int, metadata: CommitMetadata, log_begin: int, skipped: SkippedRecords
) -> Task:
    offsets: list[int] = []
    journal: list[JournalRecord] = []
    for offset, record in read_journal(kafka, run, partition, skipped):
        if offset <= metadata.journal:
            offsets.append(offset)
            journal.append(record)
    if not journal:
        raise StateRefused(
            f"journal[{partition}] of run {run} does not hold what its group committed; nothing is deleted"
        )
    usable = set(beginnings(journal, log_begin))
    times = [record.stream_time_ms for record in journal]
    snapshots = []
    for i, record in enumerate(journal):
        if ends_snapshot(journal, i):
            # The record before the first that may tell of a group remembered then: it proves that none is missing.
            remembered = max(0, bisect_left(times, record.remembered_since_ms) - 1)
            snapshots.append(
                Snapshot(
                    offset=offsets[i - record.part],
                    watermark=record.watermark,
                    batch_number=record.batch_number,
                    journal_from=offsets[min(remembered, i - record.part)] if i in usable else None,
                )
            )
    return Task(
        watermark=journal[-1].watermark,
        journal_from=min(metadata.oldest, metadata.snapshot),
        snapshots=tuple(snapshots),
    )


def _batches(kafka: KafkaConfig, run: str, skipped: SkippedRecords) -> tuple[Batch, ...]:
    found = []
    for message, entry in skipped.records(BatchIndexEntry, clients.read_to_end(kafka, topic_name(run, "batch-index"))):
        problems = entry_problems(entry)
        if problems:
            skipped.skip(message, problems[0])
            continue
        found.append(
            Batch(
                partition=entry.partition,
                number=batch_numbers(entry.batch_id)[1],
                offset=entry.offset,
                index_offset=message.offset() or 0,
                time_ms=message.timestamp()[1],
            )
        )
    return tuple(found)


def _learners(
    kafka: KafkaConfig, run: str, checkpoints: Path | None, skipped: SkippedRecords
) -> tuple[dict[str, int], dict[str, LastStep]]:
    """Offset of the index each learner on record, of this run or another, may have to read again from; and its last
    step."""
    newest: dict[tuple[str, str], LearnerStep] = {}
    publishers: dict[str, LearnerStep] = {}
    for topic in sorted(_steps_topics(kafka)):
        of = topic.removesuffix(".steps")
        for _message, step in skipped.records(LearnerStep, clients.read_to_end(kafka, topic)):
            if of not in publishers or publishers[of].timestamp <= step.timestamp:
                publishers[of] = step
            known = newest.get((of, step.learner))
            if step.input_run == run and (known is None or known.step <= step.step):
                newest[of, step.learner] = step
    retired = {of: retired_learners(kafka, of) for of, _learner in newest}
    gone = {(of, learner) for of, learner in newest if learner in retired[of]}
    if newest.keys() == gone:
        return {"no learner on record" if not gone else "no learner but retired ones": 0}, {}
    found, last_steps = {}, {}
    for (of, learner), step in newest.items():
        if (of, learner) in gone:
            continue
        name = f"learner {learner}" if of == run else f"learner {of}/{learner}"
        needed = step.position if step.oldest < 0 else step.oldest
        if step.resumes_at >= 0:
            position: int | None = step.resumes_at
        else:
            position = needed if checkpoints is None else _oldest_checkpoint(checkpoints / of / learner)
        if position is None:
            name += _BARE
        found[name] = 0 if position is None else min(position, needed)
        publisher = publishers[of].learner
        last_steps[name] = LastStep(
            step=step.step, time=step.timestamp, run=of, replaced_by="" if publisher == learner else publisher
        )
    return found, last_steps


def _steps_topics(kafka: KafkaConfig) -> set[str]:
    client = clients.admin(kafka)
    return {name for name in client.list_topics(timeout=_TIMEOUT_S).topics if name.endswith(".steps")}


def _oldest_checkpoint(directory: Path) -> int | None:
    """First offset of the index that the oldest checkpoint kept needs; None where there is none."""
    positions = []
    for step in checkpoint_steps(directory):
        meta = json.loads((directory / str(step) / META).read_text())
        oldest = int(meta.get("oldest", -1))  # Of what a rollout buffer held.
        positions.append(int(meta["position"]) if oldest < 0 else oldest)
    return min(positions, default=None)


def _other_groups(kafka: KafkaConfig, run: str, group: str) -> dict[str, dict[Place, int]]:
    """What consumer groups that are not ours committed of what is pruned."""
    client = clients.admin(kafka)
    listed = clients.retrying(lambda: client.list_consumer_groups().result(_TIMEOUT_S), "listing consumer groups")
    names = sorted(item.group_id for item in listed.valid if item.group_id != group)
    return {name: offsets for name in names if (offsets := _offsets_of(client, run, name))}


def _offsets_of(client: AdminClient, run: str, group: str) -> dict[Place, int]:
    """What a consumer group committed of what is pruned."""
    topics = {topic_name(run, topic): topic for topic in TOPICS}
    asked = client.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])[group]
    offsets = clients.retrying(partial(asked.result, _TIMEOUT_S), f"asking for offsets of group {group}")
    return {
        (topics[at.topic], at.partition): at.offset
        for at in offsets.topic_partitions or ()
        if at.topic in topics and at.offset >= 0
    }
