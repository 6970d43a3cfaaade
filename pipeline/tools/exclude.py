"""`rollstream steer exclude`: excludes environments, workers or ranges of offsets after their rollouts were produced.

Writes marks with a new generation of the grouping configuration to every partition, in one transaction, and waits until
all are read: an excluded rollout not batched by then is never batched. Batches that contain excluded rollouts are named
on `control`, so that learners leave them out, and in the report, with the steps that used or skipped them.
"""

import argparse
import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from rollstream.consumers.grouping.config import EXCLUSIONS, GroupingConfig
from rollstream.pipeline.audit.topic_reading import read_batches, read_journal
from rollstream.pipeline.command_line.command_parser import set_handler
from rollstream.pipeline.command_line.plain_values import compact, decoded, tell
from rollstream.pipeline.command_line.progress_bar import progress
from rollstream.pipeline.command_line.text_tables import command_text, printable, table
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.index.fates import IN_FLIGHT, SETTLED, UNREAD
from rollstream.pipeline.index.indexed_run import IndexedRun, fates_in, indexed_run, oldest_snapshot
from rollstream.pipeline.tools.exclusion_marks import (
    Exclusion,
    check_environments,
    newest,
    partition_configurations,
    put_in_force,
)
from rollstream.topics.config import KafkaConfig
from rollstream.topics.control.named_records import EXCLUDED, write
from rollstream.topics.errors import ConfigurationError, DeadlineExceeded
from rollstream.topics.kafka import clients, topic_admin
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


_ROWS = 40
"""Maximum number of batches printed for people."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream steer exclude`."""
    set_handler(parser, exclude, example="rollstream steer exclude --run main --worker env-3 --dry-run", json=True)
    parser.add_argument("--env", action="append", default=[], metavar="NAME", help="an environment; may be repeated")
    parser.add_argument("--worker", action="append", default=[], metavar="ID", help="a worker; may be repeated")
    parser.add_argument(
        "--offsets",
        action="append",
        default=[],
        metavar="P:A-B",
        help="offsets A to B of partition P of the run's own rollouts",
    )
    parser.add_argument("--unseen", action="store_true", help="also exclude environments that have no rollouts yet")
    parser.add_argument("--dry-run", action="store_true", help="report only, and change nothing")
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds to wait for the grouping processes (default: %(default)g)",
    )


class ExclusionOutcome(NamedTuple):
    """The state of a run after an exclusion."""

    current: GroupingConfig
    """The newest grouping configuration."""
    report: ExclusionReport


def exclude(config: RunConfig, args: argparse.Namespace) -> int:
    """Exclude, wait until every partition has read its mark, and report."""
    exclusion = Exclusion(environments=tuple(args.env), workers=tuple(args.worker), offsets=tuple(args.offsets))
    done = put_on_record(config, exclusion, unseen=args.unseen, dry_run=args.dry_run, timeout_s=args.timeout)
    _print(config, exclusion, done.current, done.report, args)
    tell(done.report.skipped)
    return 0


def put_on_record(
    config: RunConfig, exclusion: Exclusion, *, unseen: bool = False, dry_run: bool = False, timeout_s: float
) -> ExclusionOutcome:
    """Exclude, and wait up to `timeout_s` until every partition has read its mark; with `dry_run`, only report the
    consequences. Raises ConfigurationError if the exclusion is invalid, StateRefused if a partition has no grouping
    state or was given another configuration, or DeadlineExceeded if a partition is late: then the marks are on the log,
    and learners leave out the batches that were cut by now, but not those that the partition cuts later."""
    wanted = exclusion.added_to(GroupingConfig())  # This refuses invalid ranges.
    if wanted == GroupingConfig():
        raise ConfigurationError("there is nothing to exclude; give --env, --worker or --offsets")
    clients.check_broker(config.kafka)
    partitions = topic_admin.partitions_of(config.kafka, topic_name(config.run, "rollouts"))
    for text in exclusion.offsets:
        if OffsetRange.parse(text).partition >= partitions:
            raise ConfigurationError(f"--offsets {text}: run {config.run} has partitions 0 to {partitions - 1}")
    where = (config.kafka, config.run, config.grouper)
    if not unseen:
        check_environments(exclusion.environments, *where)
    late: DeadlineExceeded | None = None
    try:
        configurations = partition_configurations(*where) if dry_run else put_in_force(*where, exclusion, timeout_s)
    except DeadlineExceeded as error:
        # Learners leave out the batches that were cut so far, whenever the last partition reads its mark.
        late, configurations = error, partition_configurations(*where)
    report, generation = find(config.kafka, config.run, exclusion, partitions), newest(configurations).generation
    if not dry_run:
        tell_learners(config.kafka, config.run, report.batches, str(exclusion), generation)
    if late is not None:
        raise late
    with indexed_run(config) as view:
        name_steps(view, report)
    return ExclusionOutcome(newest(configurations), report)


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
    verb = "would be excluded" if args.dry_run else f"excluded by generation {current.generation}"
    print(f"run {config.run}: {exclusion} {verb}\n")
    texts = {
        IN_FLIGHT: "in flight, dropped when their groups are complete or due",
        UNREAD: "not yet read",
        SETTLED: "settled before the journal begins, because it was pruned",
    }
    fates = [(texts.get(name, name), count) for name, count in sorted(report.fates.items())]
    if report.dropped_along:
        fates.append(("dropped with them, as members of their groups", report.dropped_along))
    print(table(("rollouts", ""), fates) if fates else "the log has no such rollout")
    if report.batches:
        print()
        rows = _rows(report.batches)
        most = _ROWS if sys.stdout.isatty() else len(rows)
        print(table(("batch", "excluded", "rollouts", "learner", "step", "use", "version"), rows[-most:]))
        if len(rows) > most:
            print(f"... the newest of {len(report.batches):,} batches; --json names all of them")
        if not args.dry_run:
            print("\nlearners skip these batches entirely from now on")
    for learner in report.touched:
        first = learner["first_policy_version"]
        since = (
            "no policy version is affected yet" if first is None else f"policy versions {first} and later are affected"
        )
        steps = "1 step" if len(learner["steps"]) == 1 else f"{len(learner['steps'])} steps"
        print(f"\nlearner {printable(learner['learner'])} trained on them in {steps}; {since}")
    flags = [word for name, values in settings.items() for word in ("--set", f"{name}={_toml_text(values)}")]
    replay = shlex.join(["rollstream", "replay", "--run", config.run, *flags])
    print(f"\na replay without them:\n{command_text(replay)}")
    if not args.dry_run:
        print(
            f"keep these settings in any configuration of a generation above {current.generation}: it replaces this one"
        )


def _toml_text(values: list[str]) -> str:
    """Return a list as TOML that can be copied from a terminal: characters that would affect it are escaped."""
    # JSON would write a character above U+FFFF as two surrogates, which TOML refuses.
    text = json.dumps(values, ensure_ascii=False)
    return "".join(c if printable(c) == c else f"\\U{ord(c):08x}" for c in text)


def _rows(batches: Iterable[Mapping[str, Any]]) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for batch in batches:
        head = (batch["batch_id"], batch["excluded"], batch["rollouts"])
        uses = [(use["learner"], use["step"], use["use"], _version(use)) for use in batch["uses"]]
        rows += [(*head, *use) for use in uses] or [(*head, "", "", "not reached yet", "")]
    return rows


def _version(use: Mapping[str, Any]) -> object:
    return "" if use["policy_version"] is None or use["use"] != "trained" else use["policy_version"]
