"""`rollstream exclude`: excludes environments, workers or ranges of offsets after their rollouts were produced.

Writes marks with a new generation of the grouping configuration to every partition, in one transaction, and waits until
all are read: a rollout not batched by then is never batched. Batches that hold excluded rollouts are named on
`control`, so that learners leave them out, and in the report, with the steps that used or skipped them.
"""

import argparse
import difflib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from rollstream.consumers.grouping.config import EXCLUSIONS, GrouperConfig, GroupingConfig
from rollstream.consumers.grouping.core.configuration_marks import check_names, mark_outcome
from rollstream.consumers.grouping.makers.registry import load_makers
from rollstream.consumers.grouping.process.bootstrap import committed_offsets
from rollstream.consumers.grouping.process.skipped_offsets import asked_for
from rollstream.pipeline.audit.topic_reading import read_batches
from rollstream.pipeline.command_parser import set_handler
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.progress_bar import progress
from rollstream.pipeline.text_tables import command_text, table
from rollstream.pipeline.tools.plain_values import compact, decoded, tell
from rollstream.pipeline.tools.run_view import IN_FLIGHT, UNREAD, RunView
from rollstream.topics.catalogue import topic_name
from rollstream.topics.codec import decode_as, encode
from rollstream.topics.commit_metadata import CommitMetadata
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError, DeadlineExceeded, DeliveryError, StateRefused
from rollstream.topics.fates import DETAIL_LIMIT, DROPPED, OTHER_ENVIRONMENTS, clip, exclusion_detail
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.bounded_calls import Stalled
from rollstream.topics.kafka.reader import read_to_end, record_at
from rollstream.topics.kafka.records import GroupPosition
from rollstream.topics.kafka.sender import Delivery, Sender
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.kafka.skipping_reader import records_between
from rollstream.topics.kafka.transactional_ids import transactional_id
from rollstream.topics.kafka.transactions import TransactionalProducer, TransactionFailed
from rollstream.topics.keys import encode_key
from rollstream.topics.offset_ranges import OffsetRange, from_ranges
from rollstream.topics.records import ExcludedBatch, JournalRecord, Mark, Rollout

_TIMEOUT_S = 30.0
_ROWS = 40
"""Maximum number of batches printed for people."""


@dataclass(frozen=True, kw_only=True)
class Exclusion:
    """Environments, workers and offsets to exclude."""

    environments: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()
    offsets: tuple[str, ...] = ()

    def added_to(self, config: GroupingConfig) -> GroupingConfig:
        """Return the configuration with this exclusion added; its generation stays."""
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
    """Offset of its mark; -1 if that lies before the state of the grouping task."""


@dataclass
class ExclusionReport:
    """Fates of excluded rollouts."""

    fates: Counter[str] = field(default_factory=Counter)
    """Excluded rollouts by fate; dropped ones by reason."""
    dropped_along: int = 0
    """Rollouts dropped because another member of their group is excluded."""
    batches: list[dict[str, Any]] = field(default_factory=list)
    """Batches that hold excluded rollouts, in index order; `name_steps` adds the steps that used or skipped them."""
    touched: list[dict[str, Any]] = field(default_factory=list)
    """By learner, the steps that trained on such batches, and the first policy version published after."""
    skipped: SkippedRecords = field(default_factory=partial(SkippedRecords, logged=False))
    """Invalid records that were skipped."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream exclude`."""
    set_handler(parser, exclude, example="rollstream exclude --run main --worker env-3 --dry-run", json=True)
    parser.add_argument("--env", action="append", default=[], metavar="NAME", help="an environment; may be repeated")
    parser.add_argument("--worker", action="append", default=[], metavar="ID", help="a worker; may be repeated")
    parser.add_argument(
        "--offsets", action="append", default=[], metavar="P:A-B", help="offsets A to B of partition P of rollouts"
    )
    parser.add_argument("--unseen", action="store_true", help="environments of which there are no rollouts, too")
    parser.add_argument("--dry-run", action="store_true", help="report only, and change nothing")
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds to wait for the grouping processes (default: %(default)g)",
    )


def exclude(config: RunConfig, args: argparse.Namespace) -> int:
    """Exclude, wait until every partition has read its mark, and report."""
    exclusion = Exclusion(environments=tuple(args.env), workers=tuple(args.worker), offsets=tuple(args.offsets))
    wanted = exclusion.added_to(GroupingConfig())  # Refuses invalid ranges.
    if wanted == GroupingConfig():
        raise ConfigurationError("nothing to exclude is named; give --env, --worker or --offsets")
    clients.check_broker(config.kafka)
    partitions = topic_admin.partitions_of(config.kafka, topic_name(config.run, "rollouts"))
    for text in exclusion.offsets:
        if OffsetRange.parse(text).partition >= partitions:
            raise ConfigurationError(f"--offsets {text}: run {config.run} has partitions 0 to {partitions - 1}")
    where = (config.kafka, config.run, config.grouper)
    if not args.unseen:
        _check_environments(exclusion.environments, *where)
    configurations = partition_configurations(*where) if args.dry_run else put_in_force(*where, exclusion, args.timeout)
    with RunView(config.kafka, config.run) as view:
        report = find(view, exclusion, partitions)
        if not args.dry_run:
            tell_learners(view, report.batches, str(exclusion), newest(configurations).generation)
        name_steps(view, report)
        report.skipped = view.skipped
        _print(config, exclusion, newest(configurations), report, args)
        tell(view.skipped)
        return 0


# ---------------------------------------------------------------------- the configuration


def partition_configurations(kafka: KafkaConfig, run: str, grouper: GrouperConfig) -> list[PartitionConfiguration]:
    """Return the configuration of each partition of `rollouts`, including marks that no task has read yet.

    Raises StateRefused if a partition has no grouping state, or a mark carries settings unknown to this release.
    """
    topic, makers, configurations = topic_name(run, "rollouts"), load_makers(grouper.makers), []
    for partition, journal in _tasks(kafka, run, grouper):
        config, since = GroupingConfig.from_json(journal.watermark_configuration), -1
        clock = journal.watermark_policy_version
        requested = (offset for offset in asked_for(kafka, run, partition) if offset >= journal.position)
        hopped = {*from_ranges(journal.hopped), *requested}
        left_out = {*journal.skipped, *hopped}
        _begin, end = topic_admin.bounds(kafka, topic, [partition])[partition]
        for message in records_between(kafka, topic, partition, journal.watermark, end, hopped, wait=False):
            if message is None:
                continue
            value = decoded(message.value)
            if isinstance(value, Mark) and message.offset not in left_out:
                judged = mark_outcome(value, config, clock, makers)
                clock = clock if judged.problem else max(clock, value.policy_version)
                config, since = (judged.config, message.offset) if judged.config else (config, since)
        configurations.append(PartitionConfiguration(config, since))
    return configurations


def _check_environments(named: Iterable[str], kafka: KafkaConfig, run: str, grouper: GrouperConfig) -> None:
    """Raise ConfigurationError for an environment that has no rollout in the run and is not excluded yet.

    The journal's counts since its newest snapshot name environments that were grouped; later records are read.
    """
    topic, known = (
        topic_name(run, "rollouts"),
        {*newest(partition_configurations(kafka, run, grouper)).exclude_environments},
    )
    tails = {}
    for committed in _committed(kafka, run, grouper):
        tails[committed.partition] = committed.offset
        known |= _counted(kafka, run, committed)
    # In a run with very many environments, the journal does not count all of them by name.
    missing = set() if OTHER_ENVIRONMENTS in known else set(named) - known
    if missing:
        for message in read_to_end(kafka, topic, partitions=list(tails), start=tails):
            value = decoded(message.value)
            if isinstance(value, Rollout):
                known.add(value.environment)
    for name in sorted(missing - known):
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"its environments: {', '.join(sorted(known - {''})) or 'none'}."
        raise ConfigurationError(
            f"--env {name}: no rollout of run {run} is of that environment; {hint} To exclude it before it is seen, "
            f"add --unseen"
        )


def _committed(kafka: KafkaConfig, run: str, grouper: GrouperConfig) -> Iterator[GroupPosition]:
    """Committed state of each partition of `rollouts`. Raises StateRefused if a partition has none."""
    topic = topic_name(run, "rollouts")
    for committed in committed_offsets(kafka, grouper.group_id(run), topic, topic_admin.partitions_of(kafka, topic)):
        if committed.offset < 0:
            raise StateRefused(f"run {run} has no grouping state; prepare it with `rollstream topics apply`")
        yield committed


def _tasks(kafka: KafkaConfig, run: str, grouper: GrouperConfig) -> Iterator[tuple[int, JournalRecord]]:
    """The journal record that each partition of `rollouts` was committed with. Raises StateRefused if there is none."""
    for committed in _committed(kafka, run, grouper):
        yield committed.partition, _journal_at(kafka, run, committed)


def _counted(kafka: KafkaConfig, run: str, committed: GroupPosition) -> set[str]:
    """Environments that the journal counts up to the committed record.

    Records of aborted transactions count, too, because the rollouts they read are on the log.
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


def _journal_at(kafka: KafkaConfig, run: str, committed: GroupPosition) -> JournalRecord:
    """Fetch the journal record that a committed offset names; the commit proves that it is committed, too."""
    partition, topic = committed.partition, topic_name(run, "journal")
    at = CommitMetadata.decode(committed.metadata, f"{committed.topic}[{partition}]").journal
    message = record_at(kafka, topic, partition, at, isolation="read_uncommitted")
    if message is None:
        raise StateRefused(f"{topic}[{partition}] does not hold offset {at}, which the committed offset names")
    return decode_as(JournalRecord, message.value)


def newest(configurations: Iterable[PartitionConfiguration]) -> GroupingConfig:
    """Return the configuration of the highest generation."""
    return max((standing.config for standing in configurations), key=lambda config: config.generation)


def put_in_force(
    kafka: KafkaConfig, run: str, grouper: GrouperConfig, exclusion: Exclusion, timeout_s: float
) -> list[PartitionConfiguration]:
    """Add an exclusion to every partition, and return their configurations once all grouping tasks have read it.

    If it is already in force, only wait. Raises DeadlineExceeded if some partition was not read within `timeout_s`; the
    marks are on the log then, and take effect when it is read.
    """
    generation, marks = _written(kafka, run, grouper, exclusion)
    topic = topic_name(run, "rollouts")
    deadline = time.monotonic() + timeout_s
    while behind := _unread(kafka, run, grouper, marks):
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"the exclusion is on the log as generation {generation}, and partitions {behind} of {topic} were not "
                f"read up to it within {timeout_s:g} s; start `rollstream group`, which goes by it, and run this again "
                f"for the report"
            )
        time.sleep(0.1)
    configurations = partition_configurations(kafka, run, grouper)
    others = [p for p, (config, _since) in enumerate(configurations) if exclusion.added_to(config) != config]
    if others:
        raise StateRefused(
            f"partitions {others} of run {run} were given another configuration meanwhile, of a generation not below "
            f"{generation}; run this again, to exclude under that one"
        )
    return configurations


def _unread(kafka: KafkaConfig, run: str, grouper: GrouperConfig, marks: Mapping[int, int]) -> list[int]:
    """Return the partitions whose committed position is not past their mark."""
    committed = committed_offsets(kafka, grouper.group_id(run), topic_name(run, "rollouts"), len(marks))
    return [tp.partition for tp in committed if tp.offset <= marks[tp.partition]]


def _written(
    kafka: KafkaConfig, run: str, grouper: GrouperConfig, exclusion: Exclusion
) -> tuple[int, Mapping[int, int]]:
    """Write the marks that are missing, in one transaction; return their generation and offsets."""
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
            check_names(wanted, load_makers(grouper.makers))
            mark = Mark(
                kind="configuration",
                generation=wanted.generation,
                configuration=wanted.to_json(),
                wall_time=time.time(),
                author="exclude",
            )
            value, key = encode(mark), encode_key("mark", mark.kind)
            with producer.transaction() as transaction:
                for partition in range(len(configurations)):
                    transaction.send(topic, value, key, partition=partition, on_delivery=delivered)
                transaction.flush(_TIMEOUT_S)
    except (TransactionFailed, Stalled) as error:
        raise DeliveryError(f"the exclusion was not written ({error}); run it again") from error
    return wanted.generation, marks


# ---------------------------------------------------------------------- the report


def find(view: RunView, exclusion: Exclusion, partitions: int) -> ExclusionReport:
    """Find excluded rollouts, their groups' members that were dropped with them, and the batches that hold them."""
    report = ExclusionReport()
    config = exclusion.added_to(GroupingConfig())
    named: list[set[int]] = []
    with progress("partitions") as show:
        for partition in range(partitions):
            show(partition, partitions)
            named.append(_named(view, partition, config))
            fates = view.fates(partition, named[-1])
            report.fates.update(
                f"{DROPPED}: {fate.drop.reason}" if fate.drop is not None else fate.name for fate in fates.values()
            )
            details = journal_details(exclusion, named[-1])
            report.dropped_along += sum(
                drop.offset not in named[-1] and drop.reason == "excluded" and drop.detail in details
                for record in view.journal(partition)
                for drop in record.drops
            )
        show(partitions, partitions)
    report.batches = _batches(view, config, named)
    return report


def tell_learners(view: RunView, batches: Iterable[Mapping[str, Any]], reason: str, generation: int) -> None:
    """Name batches on `control`: learners that reach one from now on leave it out. Idempotent."""
    topic = view.topic("control")
    topic_admin.partitions_of(view.kafka, topic)  # raises an error with the remedy if there is none
    remedy = "learners were not told of every batch to leave out: run this again"
    with Sender(clients.producer(view.kafka), remedy=remedy) as sender:
        for batch in batches:
            name = batch["batch_id"]
            value = encode(
                ExcludedBatch(batch_id=name, reason=clip(reason, 200), generation=generation, wall_time=time.time())
            )
            sender.send(topic, value, encode_key("excluded", name), partition=0, name=f"the exclusion of batch {name}")


def name_steps(view: RunView, report: ExclusionReport) -> None:
    """Add to a report the steps that used or skipped its batches so far, and the policy versions after them."""
    for batch in report.batches:
        batch["uses"] = [
            {
                "learner": step.learner,
                "step": step.step,
                "use": use.use,
                "reason": use.reason,
                "policy_version": step.policy_version if step.policy_version >= 0 else None,
            }
            for step, use in view.uses.get(batch["batch_id"], ())
        ]
    report.touched = _touched(view, report.batches)


def journal_details(exclusion: Exclusion, named: Iterable[int]) -> set[str]:
    """Details with which the journal records drops for this exclusion, which names these offsets of a partition.

    Every member of a group is dropped with the detail of one member.
    """
    names: list[tuple[str, str | int]] = [("environment", name) for name in exclusion.environments]
    names += [("worker", name) for name in exclusion.workers]
    names += [("offset", offset) for offset in named] if exclusion.offsets else []
    return {clip(exclusion_detail(what, name), DETAIL_LIMIT) for what, name in names}


def _named(view: RunView, partition: int, config: GroupingConfig) -> set[int]:
    """Offsets of the excluded rollouts of a partition."""
    offsets: set[int] = set()
    anywhere = config.exclude_environments or config.exclude_workers
    if not anywhere and all(OffsetRange.parse(text).partition != partition for text in config.exclude_offsets):
        return offsets
    for message in view.rollout_messages([partition]):
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


def _batches(view: RunView, config: GroupingConfig, named: Sequence[set[int]]) -> list[dict[str, Any]]:
    """Find batches that hold excluded rollouts: by their content, and by worker if `rollouts` still has the records."""
    held: dict[str, dict[str, Any]] = {}
    # The commit of a batch may not be visible yet. If it is aborted, the batch is made again with the same content.
    for batch in read_batches(view.kafka, view.run, view.skipped, isolation="read_uncommitted"):
        offsets, groups = batch.source_offsets.tolist(), batch.group_index.tolist()
        excluded = np.array(
            [
                offset in named[batch.partition]
                or config.excludes_offset(batch.partition, offset)
                or batch.groups[group].environment in config.exclude_environments
                for offset, group in zip(offsets, groups, strict=True)
            ]
        )
        if excluded.any():
            counts = {"excluded": int(excluded.sum()), "rollouts": len(batch)}
            held[batch.batch_id] = {"batch_id": batch.batch_id, **counts, "uses": []}
    places = {name: place for place, name in enumerate(view.index)}
    return sorted(held.values(), key=lambda item: places.get(item["batch_id"], len(places)))


def _touched(view: RunView, batches: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """By learner, the steps that trained on these batches, and the first policy version they affected."""
    steps: dict[str, set[int]] = {}
    for batch in batches:
        for use in batch["uses"]:
            if use["use"] == "trained":
                steps.setdefault(use["learner"], set()).add(use["step"])
    touched = []
    for learner, numbers in sorted(steps.items()):
        versions = [v for v, m in view.policies.items() if m.learner == learner and m.step >= min(numbers)]
        touched.append(
            {"learner": learner, "steps": sorted(numbers), "first_policy_version": min(versions, default=None)}
        )
    return touched


# ---------------------------------------------------------------------- output


def settings_of(config: GroupingConfig) -> dict[str, list[str]]:
    """Return the settings of a configuration that exclude something."""
    return {f"grouping.{name}": list(getattr(config, name)) for name in EXCLUSIONS if getattr(config, name)}


def _print(
    config: RunConfig, exclusion: Exclusion, current: GroupingConfig, report: ExclusionReport, args: argparse.Namespace
) -> None:
    settings = settings_of(exclusion.added_to(current))
    if args.json:
        summary = {
            "dry_run": args.dry_run,
            "generation": current.generation,
            "settings": settings,
            "rollouts": dict(report.fates),
            "dropped_along": report.dropped_along,
            "batches": report.batches,
            "touched": report.touched,
            "skipped": report.skipped.as_dict(),
        }
        print(compact(summary))
        return
    verb = "would be excluded" if args.dry_run else f"excluded, as generation {current.generation} has it"
    print(f"run {config.run}: {exclusion} {verb}\n")
    later = {IN_FLIGHT: "in flight, dropped when their groups are complete or due", UNREAD: "not yet read"}
    fates = [(later.get(name, name), count) for name, count in sorted(report.fates.items())]
    if report.dropped_along:
        fates.append(("dropped along, as members of their groups", report.dropped_along))
    print(table(("rollouts", ""), fates) if fates else "no rollout of it is on the log")
    if report.batches:
        print()
        rows = _rows(report.batches)
        most = _ROWS if sys.stdout.isatty() else len(rows)
        print(table(("batch", "excluded", "rollouts", "learner", "step", "use", "version"), rows[-most:]))
        if len(rows) > most:
            print(f"... the newest of {len(report.batches):,} batches; --json names all of them")
        if not args.dry_run:
            print("\nlearners that reach one of them from now on leave it out, whole")
    for learner in report.touched:
        first = learner["first_policy_version"]
        since = "no policy version yet" if first is None else f"policy versions {first} and later"
        steps = "1 step" if len(learner["steps"]) == 1 else f"{len(learner['steps'])} steps"
        print(f"\nlearner {learner['learner']} trained on them in {steps}; {since} carry it")
    flags = " ".join(f"--set '{name}={json.dumps(value)}'" for name, value in settings.items())
    print(f"\na replay without them:\n{command_text(f'rollstream replay --run {config.run} {flags}')}")
    if not args.dry_run:
        print(f"keep these in any configuration of a generation above {current.generation}, which replaces this one")


def _rows(batches: Iterable[Mapping[str, Any]]) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for batch in batches:
        head = (batch["batch_id"], batch["excluded"], batch["rollouts"])
        uses = [(use["learner"], use["step"], use["use"], _version(use)) for use in batch["uses"]]
        rows += [(*head, *use) for use in uses] or [(*head, "", "", "not reached yet", "")]
    return rows


def _version(use: Mapping[str, Any]) -> object:
    return "" if use["policy_version"] is None or use["use"] != "trained" else use["policy_version"]
