"""`rollstream exclude`: quarantine after the fact, of environments, workers or ranges of offsets.

Raises the generation of the grouping configuration that is in force by marks on every partition, in one transaction,
and waits until all of them go by it: what was not batched by then never is. Batches that hold such rollouts are named
on `control`, for learners to leave them out, and in the report, with the steps that met them.
"""

import argparse
import difflib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from consumers.grouping.account import DETAIL_LIMIT, clip
from consumers.grouping.bootstrap import committed_offsets
from consumers.grouping.changes import DROPPED
from consumers.grouping.config import EXCLUSIONS, GrouperConfig, GroupingConfig, offset_range
from consumers.grouping.configuring import check_names, judge_mark
from consumers.grouping.counts import OTHERS
from consumers.grouping.judging import exclusion_detail
from consumers.grouping.makers import makers_of
from consumers.grouping.skips import asked_for
from consumers.grouping.state import CommitMetadata
from pipeline.config import RunConfig
from pipeline.progress import progress
from pipeline.reading import read_batches
from pipeline.tables import command_text, table
from pipeline.tools.plain import compact, decoded, tell
from pipeline.tools.view import IN_FLIGHT, UNREAD, View
from topics import clients
from topics.catalogue import topic_name
from topics.codec import decode_as, encode
from topics.config import KafkaConfig
from topics.errors import ConfigurationError, DeadlineExceeded, DeliveryError, StateRefused
from topics.keys import encode_key
from topics.records import ExcludedBatch, JournalRecord, Mark, Rollout
from topics.skipped import SkippedRecords
from topics.transactional_ids import transactional_id

_TIMEOUT_S = 30.0
_ROWS = 40
"""Most lines of batches that are printed for people."""


@dataclass(frozen=True, kw_only=True)
class Exclusion:
    """What is to be excluded."""

    environments: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()
    offsets: tuple[str, ...] = ()

    def added_to(self, config: GroupingConfig) -> GroupingConfig:
        """The configuration with this excluded too; its generation stays."""
        both = {
            name: tuple(dict.fromkeys((*getattr(config, name), *wanted)))
            for name, wanted in zip(EXCLUSIONS, (self.environments, self.workers, self.offsets), strict=True)
        }
        return replace(config, **both)  # type: ignore[arg-type]

    def __str__(self) -> str:
        named = (("environment", self.environments), ("worker", self.workers), ("offsets", self.offsets))
        return ", ".join(f"{what} {name}" for what, names in named for name in names)


class Standing(NamedTuple):
    """The configuration of one partition."""

    config: GroupingConfig
    """In force where the partition ends."""
    since: int
    """Offset of the mark that said so; -1 when it lies before what the grouping task still holds."""


@dataclass
class Report:
    """Where the rollouts of an exclusion are."""

    fates: Counter[str] = field(default_factory=Counter)
    """Rollouts that are excluded by name, by fate; dropped ones by reason."""
    dropped_along: int = 0
    """Rollouts dropped because another member of their group is excluded."""
    batches: list[dict[str, Any]] = field(default_factory=list)
    """Batches that hold excluded rollouts, in index order; `name_steps` adds the steps that met them."""
    touched: list[dict[str, Any]] = field(default_factory=list)
    """By learner, steps trained on such batches, and the first policy version published after."""
    skipped: SkippedRecords = field(default_factory=partial(SkippedRecords, logged=False))
    """Records that were passed over on the way."""


def exclude(config: RunConfig, args: argparse.Namespace) -> int:
    """Exclude, wait until every partition goes by it, and report."""
    exclusion = Exclusion(environments=tuple(args.env), workers=tuple(args.worker), offsets=tuple(args.offsets))
    wanted = exclusion.added_to(GroupingConfig())  # Refuses what is no range.
    if wanted == GroupingConfig():
        raise ConfigurationError("nothing to exclude is named; give --env, --worker or --offsets")
    clients.check_broker(config.kafka)
    partitions = clients.partitions_of(config.kafka, topic_name(config.run, "rollouts"))
    for text in exclusion.offsets:
        if offset_range(text).partition >= partitions:
            raise ConfigurationError(f"--offsets {text}: run {config.run} has partitions 0 to {partitions - 1}")
    where = (config.kafka, config.run, config.grouper)
    if not args.unseen:
        _check_environments(exclusion.environments, *where)
    standings = stand(*where) if args.dry_run else put_in_force(*where, exclusion, args.timeout)
    with View(config.kafka, config.run) as view:
        report = find(view, exclusion, partitions)
        if not args.dry_run:
            tell_learners(view, report.batches, str(exclusion), newest(standings).generation)
        name_steps(view, report)
        report.skipped = view.skipped
        _print(config, exclusion, newest(standings), report, args)
        tell(view.skipped)
        return 0


# ---------------------------------------------------------------------- the configuration


def stand(kafka: KafkaConfig, run: str, grouper: GrouperConfig) -> list[Standing]:
    """The configuration of each partition of `rollouts`, marks included that no task has read yet.

    Raises StateRefused when a partition has no grouping state, or a mark carries what this release does not know.
    """
    topic, makers, found = topic_name(run, "rollouts"), makers_of(grouper.makers), []
    for partition, journal in _tasks(kafka, run, grouper):
        config, since = GroupingConfig.from_json(journal.watermark_configuration), -1
        clock = journal.watermark_policy_version
        asked = (offset for offset in asked_for(kafka, run, partition) if offset >= journal.position)
        left_out = {*journal.skipped, *asked}
        for message in clients.read_to_end(kafka, topic, partitions=[partition], start={partition: journal.watermark}):
            value = decoded(message.value())
            if isinstance(value, Mark) and message.offset() not in left_out:
                judged = judge_mark(value, config, clock, makers)
                clock = clock if judged.problem else max(clock, value.policy_version)
                config, since = (judged.config, message.offset() or 0) if judged.config else (config, since)
        found.append(Standing(config, since))
    return found


def _check_environments(named: Iterable[str], kafka: KafkaConfig, run: str, grouper: GrouperConfig) -> None:
    """Raise ConfigurationError for an environment that no rollout of the run is of, and nothing excludes yet.

    Those that were grouped are in the journal's counts since its newest snapshot; what comes after is read.
    """
    topic, known = topic_name(run, "rollouts"), {*newest(stand(kafka, run, grouper)).exclude_environments}
    tails = {}
    for committed in _committed(kafka, run, grouper):
        tails[committed.partition] = committed.offset
        known |= _counted(kafka, run, committed)
    # Of a run of very many environments the last ones are not counted by name.
    missing = set() if OTHERS in known else set(named) - known
    if missing:
        for message in clients.read_to_end(kafka, topic, partitions=list(tails), start=tails):
            value = decoded(message.value())
            if isinstance(value, Rollout):
                known.add(value.environment)
    for name in sorted(missing - known):
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"its environments: {', '.join(sorted(known - {''})) or 'none'}."
        raise ConfigurationError(
            f"--env {name}: no rollout of run {run} is of that environment; {hint} To exclude it before it is seen, "
            f"add --unseen"
        )


def _committed(kafka: KafkaConfig, run: str, grouper: GrouperConfig) -> Iterator[TopicPartition]:
    """What is committed of each partition of `rollouts`. Raises StateRefused where nothing is."""
    topic = topic_name(run, "rollouts")
    for committed in committed_offsets(kafka, grouper.group_id(run), topic, clients.partitions_of(kafka, topic)):
        if committed.offset < 0:
            raise StateRefused(f"run {run} has no grouping state; prepare it with `rollstream topics apply`")
        yield committed


def _tasks(kafka: KafkaConfig, run: str, grouper: GrouperConfig) -> Iterator[tuple[int, JournalRecord]]:
    """The journal record each partition of `rollouts` was committed with. Raises StateRefused where there is none."""
    for committed in _committed(kafka, run, grouper):
        yield committed.partition, _journal_at(kafka, run, committed)


def _counted(kafka: KafkaConfig, run: str, committed: TopicPartition) -> set[str]:
    """Environments that the journal counts up to what was committed.

    Records of aborted transactions count, too: what they read is on the log.
    """
    partition, topic = committed.partition, topic_name(run, "journal")
    metadata = CommitMetadata.decode(committed.metadata, f"{committed.topic}[{partition}]")
    found: set[str] = set()
    start = {partition: metadata.snapshot}
    messages = clients.read_to_end(kafka, topic, partitions=[partition], start=start, isolation="read_uncommitted")
    for message, record in SkippedRecords("exclude").records(JournalRecord, messages):
        if (message.offset() or 0) > metadata.journal:
            break
        found.update(count.environment for count in (*record.produced, *record.counts))
    return found


def _journal_at(kafka: KafkaConfig, run: str, committed: TopicPartition) -> JournalRecord:
    """The journal record that an offset was committed with: its being committed proves the record to be."""
    partition, topic = committed.partition, topic_name(run, "journal")
    at = CommitMetadata.decode(committed.metadata, f"{committed.topic}[{partition}]").journal
    message = clients.fetch(kafka, topic, partition, at, isolation="read_uncommitted")
    if message is None:
        raise StateRefused(f"{topic}[{partition}] does not hold offset {at}, which the committed offset names")
    return decode_as(JournalRecord, message.value())


def newest(standings: Iterable[Standing]) -> GroupingConfig:
    """The configuration of the highest generation."""
    return max((standing.config for standing in standings), key=lambda config: config.generation)


def put_in_force(
    kafka: KafkaConfig, run: str, grouper: GrouperConfig, exclusion: Exclusion, timeout_s: float
) -> list[Standing]:
    """Have every partition exclude something; returns how each stands once all grouping tasks have read so.

    Does nothing but wait where it is in force already. Raises DeadlineExceeded when some partition was not read within
    `timeout_s`; the marks are on the log then, and whoever reads it next goes by them.
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
    standings = stand(kafka, run, grouper)
    others = [p for p, (config, _since) in enumerate(standings) if exclusion.added_to(config) != config]
    if others:
        raise StateRefused(
            f"partitions {others} of run {run} were given another configuration meanwhile, of a generation not below "
            f"{generation}; run this again, to exclude under that one"
        )
    return standings


def _unread(kafka: KafkaConfig, run: str, grouper: GrouperConfig, marks: Mapping[int, int]) -> list[int]:
    """Partitions whose grouping task has not committed having read past their mark."""
    committed = committed_offsets(kafka, grouper.group_id(run), topic_name(run, "rollouts"), len(marks))
    return [tp.partition for tp in committed if tp.offset <= marks[tp.partition]]


def _written(
    kafka: KafkaConfig, run: str, grouper: GrouperConfig, exclusion: Exclusion
) -> tuple[int, Mapping[int, int]]:
    """Write the marks where they are not there yet, all or none of them; returns their generation and offsets."""
    producer = clients.transactional_producer(kafka, transactional_id(run, "exclude"))
    marks: dict[int, int] = {}

    def delivered(error: KafkaError | None, message: Message) -> None:
        if error is None:
            marks[message.partition() or 0] = message.offset() or 0

    try:
        # From here on no other exclusion of the run can commit, so none is lost between reading and writing.
        producer.init_transactions(_TIMEOUT_S)
        standings = stand(kafka, run, grouper)
        current = newest(standings)
        if all(exclusion.added_to(config) == config for config, _since in standings):
            return current.generation, {p: since for p, (_config, since) in enumerate(standings)}
        wanted = replace(exclusion.added_to(current), generation=current.generation + 1)
        check_names(wanted, makers_of(grouper.makers))
        mark = Mark(
            kind="configuration",
            generation=wanted.generation,
            configuration=wanted.to_json(),
            wall_time=time.time(),
            author="exclude",
        )
        value, key, topic = encode(mark), encode_key("mark", mark.kind), topic_name(run, "rollouts")
        producer.begin_transaction()
        for partition in range(len(standings)):
            clients.produce(producer, topic, value, key, partition=partition, on_delivery=delivered)
        producer.flush(_TIMEOUT_S)
        producer.commit_transaction(_TIMEOUT_S)
    except KafkaException as exception:
        error: KafkaError = exception.args[0]
        raise DeliveryError(
            f"the exclusion was not written ({error.name()}: {error.str()}); run it again"
        ) from exception
    return wanted.generation, marks


# ---------------------------------------------------------------------- the report


def find(view: View, exclusion: Exclusion, partitions: int) -> Report:
    """Where excluded rollouts are, and what went with them."""
    report = Report()
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
            details = _details(exclusion, named[-1])
            report.dropped_along += sum(
                drop.offset not in named[-1] and drop.reason == "excluded" and drop.detail in details
                for record in view.journal(partition)
                for drop in record.drops
            )
        show(partitions, partitions)
    report.batches = _batches(view, config, named)
    return report


def tell_learners(view: View, batches: Iterable[Mapping[str, Any]], reason: str, generation: int) -> None:
    """Name batches on `control`: whoever reaches one from now on leaves it out. Repeating it changes nothing."""
    producer, failed = clients.producer(view.kafka), []

    def delivered(error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            failed.append(error)

    clients.partitions_of(view.kafka, view.topic("control"))  # Says what to do where there is none.
    for batch in batches:
        name = batch["batch_id"]
        value = encode(
            ExcludedBatch(batch_id=name, reason=clip(reason, 200), generation=generation, wall_time=time.time())
        )
        key = encode_key("excluded", name)
        clients.produce(producer, view.topic("control"), value, key, partition=0, on_delivery=delivered)
        producer.poll(0)
    if producer.flush(_TIMEOUT_S) or failed:
        why = failed[0].str() if failed else f"no answer within {_TIMEOUT_S:g} s"
        raise DeliveryError(f"learners were not told which batches to leave out ({why}); run this again")


def name_steps(view: View, report: Report) -> None:
    """Add to a report which steps met its batches so far, and the policy versions that came of it."""
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


def _details(exclusion: Exclusion, named: Iterable[int]) -> set[str]:
    """What the journal says of rollouts that were dropped for this exclusion, which names these offsets of a partition:
    every member of a group goes with the detail of one."""
    names: list[tuple[str, str | int]] = [("environment", name) for name in exclusion.environments]
    names += [("worker", name) for name in exclusion.workers]
    names += [("offset", offset) for offset in named] if exclusion.offsets else []
    return {clip(exclusion_detail(what, name), DETAIL_LIMIT) for what, name in names}


def _named(view: View, partition: int, config: GroupingConfig) -> set[int]:
    """Offsets of the rollouts of a partition that are excluded themselves."""
    found: set[int] = set()
    anywhere = config.exclude_environments or config.exclude_workers
    if not anywhere and all(offset_range(text).partition != partition for text in config.exclude_offsets):
        return found
    for message in view.messages("rollouts", [partition]):
        offset = message.offset() or 0
        by_offset = config.excludes_offset(partition, offset)
        if not by_offset and not anywhere:
            continue
        rollout = decoded(message.value())
        if isinstance(rollout, Rollout) and (
            by_offset
            or rollout.environment in config.exclude_environments
            or rollout.metadata.worker_id in config.exclude_workers
        ):
            found.add(offset)
    return found


def _batches(view: View, config: GroupingConfig, named: Sequence[set[int]]) -> list[dict[str, Any]]:
    """Batches that hold excluded rollouts: by what they say themselves, and by worker where `rollouts` still says."""
    held: dict[str, dict[str, Any]] = {}
    # The transaction of one may not show as committed yet. It holds the same whether it is then or is made again.
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


def _touched(view: View, batches: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """By learner, the steps that trained on these batches, and the first policy version that carries any of it."""
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
    """The settings of a configuration that exclude anything."""
    return {f"grouping.{name}": list(getattr(config, name)) for name in EXCLUSIONS if getattr(config, name)}


def _print(
    config: RunConfig, exclusion: Exclusion, current: GroupingConfig, report: Report, args: argparse.Namespace
) -> None:
    settings = settings_of(exclusion.added_to(current))
    if args.json:
        told = {
            "dry_run": args.dry_run,
            "generation": current.generation,
            "settings": settings,
            "rollouts": dict(report.fates),
            "dropped_along": report.dropped_along,
            "batches": report.batches,
            "touched": report.touched,
            "skipped": report.skipped.as_dict(),
        }
        print(compact(told))
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
    for of in report.touched:
        first = of["first_policy_version"]
        since = "no policy version yet" if first is None else f"policy versions {first} and later"
        steps = "1 step" if len(of["steps"]) == 1 else f"{len(of['steps'])} steps"
        print(f"\nlearner {of['learner']} trained on them in {steps}; {since} carry it")
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
