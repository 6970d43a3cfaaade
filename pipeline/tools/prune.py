"""`rollstream prune`: deletes records of a run that recovery, verification and learners no longer need.

It reads positions, lets `rollstream.pipeline.audit.pruning_plan` make the plan, and deletes nothing without --yes. The
plan keeps records that a process may still read, and records that a learner may read again from a checkpoint, which its
steps on record name.
"""

import argparse
import math
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from rollstream.consumers.buffers.trajectories.filler import FILLER_GROUPS
from rollstream.consumers.grouping.process.bootstrap import committed_offsets
from rollstream.consumers.labeling.config import LabelingConfig
from rollstream.consumers.trainers.sample_log import checkpoint_ends, needed_from
from rollstream.consumers.weights.chains import needed
from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.content import place_of
from rollstream.consumers.weights.file_retention import FilesToPrune, listed_files, prunable, remove_files, roots
from rollstream.consumers.weights.manifests import committed_manifests, read_policies
from rollstream.consumers.weights.step_log import all_steps
from rollstream.pipeline.audit.pruning_plan import (
    ACCOUNT,
    CALLS,
    CONTROL_TOPICS,
    NO_FILLER,
    NO_LABELER,
    NO_QUEUE,
    QUEUE,
    RECOVERY,
    SAMPLES,
    SESSIONS,
    WINDOW,
    CommittedTask,
    Deletion,
    JournalSnapshot,
    LastStep,
    Positions,
    PrunableBatch,
    TopicAndPartition,
    plan,
    read_session_groups,
)
from rollstream.pipeline.audit.refold import beginnings, ends_snapshot
from rollstream.pipeline.audit.topic_reading import read_journal, valid_records
from rollstream.pipeline.command_line.command_parser import set_handler
from rollstream.pipeline.command_line.plain_values import compact, time_text
from rollstream.pipeline.command_line.text_tables import bytes_text, clipped, printable, table
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.deployment.description import ARCHIVE, expanded, role_of
from rollstream.topics.config import KafkaConfig
from rollstream.topics.control.named_records import FORKED, RETIRED, read_named
from rollstream.topics.errors import AccessDenied, BrokerUnavailable, ConfigurationError, StateRefused
from rollstream.topics.files.atomic_files import StoreError
from rollstream.topics.files.stored_arrays import NAMING, StoredArrays, day_of, names_in
from rollstream.topics.files.stores import StoredFile
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.groups import group_positions
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.kafka.topic_admin import delete_records, group_names, topic_names
from rollstream.topics.records import (
    BatchIndexEntry,
    ForkedLearner,
    JournalRecord,
    LearnerStep,
    RetiredLearner,
    batch_numbers,
)
from rollstream.topics.wire.catalogue import PRUNED, name_in_run, topic_name
from rollstream.topics.wire.commit_metadata import CommitMetadata

KEEP_BATCHES = 1000
"""Default number of batches that stay verifiable."""
_WHY = {
    WINDOW: "records that stay verifiable, from a snapshot on",
    RECOVERY: "records from which a grouping process restores its tasks",
    ACCOUNT: "batches that the kept journal names",
    SESSIONS: "calls of sessions that are not finished, or may still be started",
    NO_LABELER: "no labeler has run yet, or the positions of labeling are lost",
    NO_FILLER: "no filler has filled a buffer yet",
    QUEUE: "samples that --queue-checkpoint, or a later checkpoint, needs",
    NO_QUEUE: "samples of a TransferQueue are deleted below what its checkpoint needs; name it with --queue-checkpoint",
}
_NO_ARCHIVE = (
    "no archiver is on record: none runs, or one was stopped for longer than offsets.retention.minutes, so "
    "brokers have forgotten its positions. If there is an archive, run `rollstream archive` before `rollstream prune`"
)
_NOT_STARTED = " (not started)"
_WHY_WIDTH = 26


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream prune`."""
    set_handler(parser, show_prune, example="rollstream prune --run main --keep-batches 500 --dry-run", json=True)
    parser.add_argument(
        "--keep-batches", type=int, metavar="N", help="the newest N batches stay verifiable (default: 1000)"
    )
    parser.add_argument(
        "--keep-hours",
        type=float,
        metavar="H",
        help="batches cut in the last H hours stay verifiable, and the newest N if --keep-batches is given, too",
    )
    parser.add_argument(
        "--queue-checkpoint",
        default="",
        metavar="FOLDER",
        help="the oldest checkpoint of a TransferQueue that may be restored; samples that it does not need are deleted",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be deleted, and why other records are kept"
    )
    parser.add_argument("--yes", action="store_true", help="delete the records; this cannot be undone")


def show_prune(config: RunConfig, args: argparse.Namespace) -> int:
    """Print the plan, and carry it out with --yes."""
    if (args.keep_batches is not None and args.keep_batches < 0) or not 0 <= (args.keep_hours or 0) < math.inf:
        raise ConfigurationError("--keep-batches and --keep-hours must be 0 or more, and finite")
    if not args.dry_run and not args.yes:
        raise ConfigurationError("prune deletes records for good; run it with --dry-run first, then with --yes")
    positions = read_positions(
        config.kafka,
        config.run,
        config.grouper.group_id(config.run),
        config.labeling.group_id(config.run),
        args.queue_checkpoint,
    )
    keep = KEEP_BATCHES if args.keep_batches is None and args.keep_hours is None else args.keep_batches or 0
    keep_from_ms = None if args.keep_hours is None else int((time.time() - args.keep_hours * 3600) * 1000)
    deletions = plan(positions, keep_batches=keep, keep_from_ms=keep_from_ms)
    weight_files = files_to_prune(config)
    archived = any(expanded(name, config) in positions.groups for name in role_of(ARCHIVE).groups)
    if not archived and not args.json:
        print(_NO_ARCHIVE)
    if not args.dry_run:
        delete(config.kafka, config.run, deletions)
    arrays = arrays_to_prune(config, deletions)
    if not args.dry_run:
        weight_files = [_without(files, config.learner.weights) for files in weight_files]
        arrays = _without_arrays(arrays, config) if arrays.removable else arrays
    rows, skipped = rows_of(deletions), positions.skipped
    if args.json:
        learners = {name: asdict(last) for name, last in positions.last_steps.items()}
        files = [{**there._asdict(), "removable": len(there.removable)} for there in weight_files]
        answer = {"deleted": not args.dry_run, "plan": rows, "learners": learners, "skipped": skipped}
        stored = {**arrays._asdict(), "removable": len(arrays.removable)}
        print(compact({**answer, "weight_files": files, "stored_arrays": stored, "archive_on_record": archived}))
    else:
        print(plan_text(rows, args.dry_run, positions.last_steps, skipped))
        for there in weight_files:
            print(files_text(there, args.dry_run, "files of policy versions"))
        if arrays.url:
            print(files_text(arrays, args.dry_run, "stored arrays"))
    return 0


def files_to_prune(config: RunConfig) -> list[FilesToPrune]:
    """Return the files of policy versions that no kept version needs, for each URL with files of the run.

    Without learner.weights.url this command was not given the learner's settings, and does not know how many versions
    the learner keeps: then only files that no manifest names may be removed.
    """
    urls = roots(config.run, config.learner.weights, committed_manifests(config.kafka, config.run))
    if not urls:
        return []
    listed = listed_files(config.run, urls, timeout_s=config.learner.weights.store_timeout_s)
    # Read manifests after the lists, so that the manifest of every listed file is known.
    weights = config.learner.weights
    kept = partial(needed, versions=weights.keep_versions)
    policies = read_policies(config.kafka, config.run, kept, logged=False)
    named = frozenset[str]() if weights.url else _named(config, listed)
    return prunable(config.run, listed, policies.by_version, weights, unreadable=policies.skipped.total, spared=named)


def _named(config: RunConfig, listed: Mapping[str, Mapping[str, StoredFile] | str]) -> frozenset[str]:
    """Return the names of listed files that a manifest names."""
    names = {name for files in listed.values() if not isinstance(files, str) for name in files}
    manifests = committed_manifests(config.kafka, config.run)
    urls = (chunk.url for manifest in manifests for chunk in manifest.chunks if chunk.url)
    return frozenset(names.intersection(place_of(url)[1] for url in urls))


def _without(there: FilesToPrune, config: WeightsConfig) -> FilesToPrune:
    """Delete the removable files, and return the files that were deleted."""
    removed, problem = remove_files(there.removable, at_once=config.files_at_once, timeout_s=config.store_timeout_s)
    if not problem:
        return there
    left = f"{len(there.removable) - removed} files could not be deleted ({problem}); repeat `rollstream prune`"
    return there._replace(removable=there.removable[:removed], problem=left)


def arrays_to_prune(config: RunConfig, deletions: Sequence[Deletion]) -> FilesToPrune:
    """Return the stored arrays that no record names which remains after `deletions`.

    An array may be named for the first time until the end of the day on which it was stored. Younger arrays stay, and
    all arrays stay if a record cannot be read, because it may name them.
    """
    settings = config.kafka.arrays
    if not settings.url:
        return FilesToPrune("", 0, (), 0)
    arrays = StoredArrays.of(config.run, settings)
    try:
        sizes = arrays.sizes()
    except StoreError as error:
        return FilesToPrune(arrays.url, 0, (), 0, f"not listed: {error}")
    latest = time.time() - 86400 - settings.orphan_hours * 3600
    left = {name for name in sizes if day_of(name) < latest}
    first = {(d.topic, d.partition): d.to for d in deletions}
    for topic in NAMING if left else ():
        for message in read_to_end(config.kafka, topic_name(config.run, topic)):
            if message.offset < first.get((topic, message.partition), 0):
                continue
            if not message.readable:
                reason = f"{topic}[{message.partition}] offset {message.offset} cannot be read, and may name arrays"
                return FilesToPrune(arrays.url, len(sizes), (), 0, reason)
            left -= names_in(message.value)
    return FilesToPrune(arrays.url, len(sizes), tuple(sorted(left)), sum(sizes[name] for name in left))


def _without_arrays(there: FilesToPrune, config: RunConfig) -> FilesToPrune:
    """Delete the removable arrays; return them, or none and the problem if the store fails."""
    try:
        StoredArrays.of(config.run, config.kafka.arrays).delete(there.removable)
    except StoreError as error:
        return there._replace(removable=(), size_bytes=0, problem=f"{error}; repeat `rollstream prune`")
    return there


def files_text(there: FilesToPrune, dry_run: bool, what: str) -> str:
    """Return one line on the files at one URL."""
    gone = f"{len(there.removable):,} of {there.files:,} {what}, {bytes_text(there.size_bytes)},"
    line = f"{there.url}: {gone} {'would be' if dry_run else 'were'} deleted"
    return printable(f"{line}; {there.problem}" if there.problem else line)


def rows_of(deletions: Sequence[Deletion]) -> list[dict[str, Any]]:
    """Convert the plan to plain values for JSON."""
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
    """Return a table of deletions and of reasons to keep later records; what a terminal would obey is escaped.

    `last_steps` and `skipped` are those of `Positions`.
    """
    header = ("topic", "partition", "from", "to", "offsets", "later records kept for")
    cells = [
        (*(row[n] for n in ("topic", "partition", "from", "to", "offsets")), clipped(row["kept_for"], _WHY_WIDTH))
        for row in rows
    ]
    lines = [table(header, cells), ""]
    met = dict.fromkeys(row["kept_for"] for row in rows)
    lines += [f"{why}: {_WHY[why]}" for why in met if why in _WHY]
    lines += [f"{why}: may still have to read these records" for why in met if why.startswith("learner")]
    for name, last in (last_steps or {}).items():
        if last.replaced_by:
            at = time_text(int(last.time * 1000)) if math.isfinite(last.time) else "unknown time"
            lines.append(
                f"{name}: its last step is {last.step}, of {at}, and learner {last.replaced_by} has published into run "
                f"{last.run} since; its records are still kept until `rollstream steer learner retire`"
            )
    lines += [
        f"{why}: has not read further; delete the group if it is not used any more"
        for why in met
        if why.startswith("group")
    ]
    if skipped:
        lines.append(f"{len(skipped)} records could not be read and were ignored, the first: {skipped[0]}")
    total = sum(row["offsets"] for row in rows)
    return printable("\n".join([*lines, f"{total:,} offsets {'would be' if dry_run else 'were'} deleted"]))


def delete(kafka: KafkaConfig, run: str, deletions: Sequence[Deletion]) -> None:
    """Carry out a plan, topic by topic in the order of PRUNED. Raises BrokerUnavailable if a broker fails."""
    for topic in PRUNED:
        name = topic_name(run, topic)
        below = {(name, d.partition): d.to for d in deletions if d.topic == topic and d.offsets > 0}
        try:
            delete_records(kafka, below)
        except BrokerUnavailable as error:
            raise BrokerUnavailable(f"{error}; repeat `rollstream prune`") from error


# ---------------------------------------------------------------------- positions


def read_positions(
    kafka: KafkaConfig,
    run: str,
    group: str,
    labeling_group: str | None = None,
    queue_checkpoint: str = "",
) -> Positions:
    """Read the positions of every task, learner and consumer group of a run.

    `labeling_group` is the consumer group of labeling processes, if its name is not the default, and `queue_checkpoint`
    the folder of a TransferQueue's checkpoint. Raises StateRefused if
    the group of grouping processes has a journal but no committed offsets.
    """
    clients.check_broker(kafka)
    labeling_group = labeling_group or LabelingConfig().group_id(run)
    bounds = {topic: topic_admin.bounds(kafka, topic_name(run, topic)) for topic in PRUNED}
    places = {topic_name(run, topic): (*ends,) for topic, ends in bounds.items()}
    for topic in (*CONTROL_TOPICS, CALLS, SAMPLES):
        if not any(end for _low, end in bounds[topic].values()):
            del bounds[topic]
    begins = {(topic, partition): low for topic, ends in bounds.items() for partition, (low, _end) in ends.items()}
    partitions = sum(topic == "rollouts" for topic, _partition in begins)
    # Positions of groups are read first and can only advance later, so the plan never deletes records that they need.
    groups = _other_groups(kafka, group, places)
    # Read these positions after those of fillers, so that trajectories read by fillers were labeled below them.
    if labeling_group in groups:
        groups[labeling_group] |= _offsets_of(kafka, labeling_group, places)
    skipped = SkippedRecords(logged=False)
    learners, last_steps = _learners(kafka, run, skipped)
    sessions = read_session_groups(kafka, run, skipped) if CALLS in bounds else ()
    samples_needed: dict[int, int] = {}
    if queue_checkpoint:
        samples_needed = needed_from(kafka, run, checkpoint_ends(kafka, run, queue_checkpoint))
    committed = committed_offsets(kafka, group, topic_name(run, "rollouts"), partitions)
    if all(place.offset < 0 for place in committed) and not any(end for _low, end in bounds["journal"].values()):
        # The run has no grouping, so other positions are unknown, and nothing is deleted there.
        alone = (*CONTROL_TOPICS, SAMPLES)
        committed, begins = [], {place: low for place, low in begins.items() if place[0] in alone}
    tasks = {}
    for place in committed:
        where = f"rollouts[{place.partition}] by group {group}"
        if place.offset < 0:
            remedy = "commit it again with `rollstream role group recover`"
            raise StateRefused(f"no offset is committed for {where}; {remedy}")
        metadata = CommitMetadata.decode(place.metadata, where)
        log_begin = begins["rollouts", place.partition]
        tasks[place.partition] = _task(kafka, run, place.partition, metadata, log_begin, skipped)
    return Positions(
        tasks=tasks,
        batches=_batches(kafka, run, skipped),
        learners=learners,
        begins=begins,
        groups=groups,
        labeling_group=labeling_group,
        fillers=frozenset(name for name in groups if name.startswith(f"{run}{FILLER_GROUPS}")),
        last_steps=last_steps,
        sessions=sessions,
        calls_read={partition: end for partition, (_low, end) in bounds.get(CALLS, {}).items()},
        samples_needed=samples_needed,
        skipped=tuple(map(str, skipped.first)),
    )


def _task(
    kafka: KafkaConfig, run: str, partition: int, metadata: CommitMetadata, log_begin: int, skipped: SkippedRecords
) -> CommittedTask:
    offsets: list[int] = []
    journal: list[JournalRecord] = []
    for offset, record in read_journal(kafka, run, partition, skipped):
        if offset <= metadata.journal:
            offsets.append(offset)
            journal.append(record)
    if not journal:
        raise StateRefused(
            f"journal[{partition}] of run {run} lacks the records that its group committed; nothing is deleted"
        )
    usable = set(beginnings(journal, log_begin))
    times = [record.stream_time_ms for record in journal]
    snapshots = []
    for i, record in enumerate(journal):
        if ends_snapshot(journal, i):
            # Also keep the record before the first that may name a remembered group: it proves that none is missing.
            remembered = max(0, bisect_left(times, record.remembered_since_ms) - 1)
            snapshots.append(
                JournalSnapshot(
                    offset=offsets[i - record.part],
                    watermark=record.watermark,
                    batch_number=record.batch_number,
                    journal_from=offsets[min(remembered, i - record.part)] if i in usable else None,
                )
            )
    return CommittedTask(
        watermark=journal[-1].watermark,
        journal_from=min(metadata.oldest, metadata.snapshot),
        snapshots=tuple(snapshots),
    )


def _batches(kafka: KafkaConfig, run: str, skipped: SkippedRecords) -> tuple[PrunableBatch, ...]:
    messages = read_to_end(kafka, topic_name(run, "batch-index"))
    return tuple(
        PrunableBatch(
            partition=entry.partition,
            number=batch_numbers(entry.batch_id)[1],
            offset=entry.offset,
            index_offset=message.offset,
            time_ms=message.timestamp_ms,
        )
        for message, entry in valid_records(BatchIndexEntry, messages, skipped)
    )


def _learners(kafka: KafkaConfig, run: str, skipped: SkippedRecords) -> tuple[dict[str, int], dict[str, LastStep]]:
    """Return the index offset from which each learner may read, and its last step.

    These are the learners of any run that train on this run and are not retired; also forked learners, which have no
    step before they are started. Without such a learner, the offset is 0, so that the whole index is kept.
    """
    newest: dict[tuple[str, str], LearnerStep] = {}
    publishers: dict[str, LearnerStep] = {}
    forked: dict[tuple[str, str], int] = {}
    for topic in (name for name in topic_names(kafka) if name.endswith(".steps")):
        owner = topic.removesuffix(".steps")
        with _readable(owner, run):
            # Forks are read before steps, so that a learner that starts in the meantime is in one of the two.
            forks = read_named(kafka, owner, FORKED, ForkedLearner).items()
            forked |= {(owner, name): fork.position for name, fork in forks if fork.input_run == run}
            for step in all_steps(kafka, owner, skipped):
                if owner not in publishers or publishers[owner].timestamp <= step.timestamp:
                    publishers[owner] = step
                before = newest.get((owner, step.learner))
                if step.input_run == run and (before is None or before.step <= step.step):
                    newest[owner, step.learner] = step
    known = newest.keys() | forked.keys()
    retired = {owner: read_named(kafka, owner, RETIRED, RetiredLearner) for owner, _learner in known}
    gone = {(owner, learner) for owner, learner in known if learner in retired[owner]}
    if known == gone:
        return {"no learner on record" if not gone else "no learner but retired ones": 0}, {}
    positions, last_steps = {}, {}
    for owner, learner in known - newest.keys() - gone:
        positions[f"learner {owner}/{learner}{_NOT_STARTED}"] = forked[owner, learner]
    for (owner, learner), step in newest.items():
        if (owner, learner) in gone:
            continue
        name = f"learner {learner}" if owner == run else f"learner {owner}/{learner}"
        needed = step.position if step.oldest < 0 else step.oldest
        positions[name] = min(step.resumes_at, needed)
        publisher = publishers[owner].learner
        last_steps[name] = LastStep(
            step=step.step, time=step.timestamp, run=owner, replaced_by="" if publisher == learner else publisher
        )
    return positions, last_steps


@contextmanager
def _readable(owner: str, run: str) -> Iterator[None]:
    """Name the remedy if another run's learners cannot be read: no rule of `run` grants that."""
    try:
        yield
    except AccessDenied as error:
        if owner == run:
            raise
        raise AccessDenied(
            f"learners of run {owner} may still read batches of run {run}, but this client's user lacks a permission "
            f"on {owner}.steps, which it sees, or on {owner}.control; grant it READ on both by hand, because no rule "
            f"of run {run} does, or take away DESCRIBE on {owner}.steps if no learner of run {owner} trains on run "
            f"{run}"
        ) from error


def _other_groups(
    kafka: KafkaConfig, group: str, places: Mapping[str, Sequence[int]]
) -> dict[str, dict[TopicAndPartition, int]]:
    """Return the offsets that other consumer groups than `group` committed for these partitions."""
    names = (name for name in group_names(kafka) if name != group)
    return {name: offsets for name in names if (offsets := _offsets_of(kafka, name, places))}


def _offsets_of(kafka: KafkaConfig, group: str, places: Mapping[str, Sequence[int]]) -> dict[TopicAndPartition, int]:
    """Return the offsets that a consumer group committed for these partitions."""
    return {(name_in_run(at.topic), at.partition): at.offset for at in group_positions(kafka, group, places)}
