"""`rollstream steer exclude`: excludes environments, workers or ranges of offsets after their rollouts were produced.

Writes marks with a new generation of the grouping configuration to every partition, in one transaction, and waits until
all are read: an excluded rollout not batched by then is never batched. Batches that contain excluded rollouts are named
on `control`, so that learners leave them out, and in the report, with the steps that used or skipped them.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from rollstream.consumers.grouping.config import EXCLUSIONS, GroupingConfig
from rollstream.pipeline.command_line.command_parser import set_handler
from rollstream.pipeline.command_line.text_tables import command_text, printable, table
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.index.fates import IN_FLIGHT, SETTLED, UNREAD
from rollstream.pipeline.index.indexed_run import indexed_run
from rollstream.pipeline.plain_values import compact, tell
from rollstream.pipeline.tools.exclusion_marks import (
    Exclusion,
    check_environments,
    newest,
    partition_configurations,
    put_in_force,
)
from rollstream.pipeline.tools.exclusion_report import (
    ExclusionReport,
    find,
    name_steps,
    tell_learners,
)
from rollstream.topics.errors import ConfigurationError, DeadlineExceeded
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.records.journal import OffsetRange
from rollstream.topics.wire.catalogue import topic_name

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
