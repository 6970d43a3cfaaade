"""`rollstream rescore`: scores old rollouts with another verifier, and shows steps that trained on wrong advantages.

The rewards go to `rescores`, and no other record changes. With --into, the batches that follow from the new rewards are
written to another run, for a fork from the last clean step.
"""

import argparse
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from rollstream.consumers.learner.checkpoint_paths import checkpoint_steps, learner_directory
from rollstream.consumers.weights.manifests import none_whole, read_policies
from rollstream.consumers.weights.step_log import all_steps
from rollstream.pipeline.audit.process_pool import spread
from rollstream.pipeline.command_line.command_parser import set_handler
from rollstream.pipeline.command_line.plain_values import compact, tell
from rollstream.pipeline.command_line.progress_bar import progress
from rollstream.pipeline.command_line.text_tables import command_text, printable, table
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.rescoring.consequences import LearnerConsequences, consequences, errors_of, taken_until
from rollstream.pipeline.rescoring.corrected_fold import (
    CorrectedPartition,
    CorrectionJob,
    TakenRows,
    correct_partition,
)
from rollstream.pipeline.rescoring.rescorer import Rescoring, ScoredRun, rescore, rescoring_of
from rollstream.pipeline.run.batch_run import prepare, write_index
from rollstream.producers.environments.verifier_pool import VerifierPool
from rollstream.topics.control.named_records import EXCLUDED, read_named
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import ExcludedBatch
from rollstream.topics.wire.catalogue import topic_name

_ROWS = 20
"""Largest number of a learner's steps printed for people."""


@dataclass
class RescoringReport:
    """Result of a rescoring."""

    rescoring: Rescoring
    scored: int
    """Rollouts scored by this call; earlier calls scored the other rollouts."""
    corrected: CorrectedPartition
    learners: list[LearnerConsequences]
    fork_step: int | None = None
    """Newest clean step of the chosen learner that has a checkpoint; None if there is none, or if nothing was wrong."""
    fork_command: tuple[str, ...] = ()
    into: str | None = None
    batches_written: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        corrected = self.corrected
        return {
            "rescoring": self.rescoring.id,
            "verifier": self.rescoring.verifier,
            "digest": self.rescoring.digest,
            "version": self.rescoring.version,
            "scored": self.scored,
            "rewards": corrected.rewards.as_dict(),
            "groups": {
                "compared": corrected.groups,
                "changed": corrected.groups_changed,
                "lost_variance": corrected.groups_lost,
                "gained_variance": corrected.groups_gained,
                "rollouts_gained": corrected.rollouts_gained,
            },
            "advantages": errors_of((batch, ()) for batch in corrected.batches.values()).as_dict(),
            "batches": {
                name: errors_of([(batch, ())]).as_dict()
                for name, batch in sorted(corrected.batches.items())
                if batch.wrong.any()
            },
            "learners": [learner.as_dict() for learner in self.learners],
            "into": self.into,
            "batches_written": self.batches_written,
            "fork_step": self.fork_step,
            "fork": shlex.join(self.fork_command) or None,
            "skipped": corrected.skipped.as_dict(),
        }


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream rescore`."""
    example = "rollstream rescore --run main --verifier judge.py:Strict --into right"
    set_handler(parser, show_rescoring, example=example, json=True)
    parser.add_argument(
        "--verifier",
        required=True,
        metavar="NAME",
        help="a function of a rollout, or a class with __call__: package.module:Class or path/to/file.py:Class",
    )
    parser.add_argument("--env", action="append", default=[], metavar="NAME", help="an environment; may be repeated")
    parser.add_argument(
        "--into", metavar="RUN", help="write the batches that follow from the new rewards to another run"
    )
    parser.add_argument("--learner", metavar="NAME", help="the learner to fork (default: learner.name)")
    parser.add_argument(
        "--timeout", type=float, default=10.0, metavar="S", help="seconds allowed per rollout (default: %(default)g)"
    )
    parser.add_argument(
        "--processes", type=int, default=0, metavar="N", help="processes of the verifier (default: one for each core)"
    )


def show_rescoring(config: RunConfig, args: argparse.Namespace) -> int:
    """Score the rollouts not scored yet, fold again with these rewards, and print the report."""
    rescoring = rescoring_of(args.verifier, tuple(args.env))
    with (
        VerifierPool(args.verifier, processes=args.processes, timeout_s=args.timeout) as pool,
        progress("rollouts") as show,
    ):
        scored = rescore(config.kafka, config.run, rescoring, pool, show)
    report = _report(config, args, rescoring, scored)
    print(compact(report.as_dict()) if args.json else rescoring_text(report, config.run))
    tell(report.corrected.skipped)
    return 0


def _report(config: RunConfig, args: argparse.Namespace, rescoring: Rescoring, scored: ScoredRun) -> RescoringReport:
    corrected = _corrected(config, rescoring, scored)
    skipped, policies = SkippedRecords(logged=False), read_policies(config.kafka, config.run, none_whole, logged=False)
    steps = {(step.learner, step.step): step for step in all_steps(config.kafka, config.run, skipped)}.values()
    learners = consequences(steps, policies.by_version.values(), config.run, corrected.batches)
    report = RescoringReport(rescoring, scored.rollouts, corrected, learners, into=args.into)
    name = args.learner or config.learner.name
    report.fork_step = _fork_step(config, name, learners)
    taken: TakenRows = {}
    if report.fork_step is not None:
        report.fork_command = _fork_command(config, args, report.fork_step)
        taken = taken_until(steps, config.run, name, report.fork_step)
    if args.into is not None:
        # Learners leave out excluded batches, so the new batches leave out their rollouts.
        taken = {**taken, **dict.fromkeys(read_named(config.kafka, config.run, EXCLUDED, ExcludedBatch), ())}
        partitions = topic_admin.partitions_of(config.kafka, topic_name(config.run, "rollouts"))
        prepare(config.kafka, config.run, args.into, replace(config.topics, partitions=partitions))
        entries = _corrected(config, rescoring, scored, args.into, taken).entries
        write_index(config.kafka, args.into, entries)
        report.batches_written = len(entries)
    corrected.skipped.merge(skipped)
    corrected.skipped.merge(policies.skipped)
    return report


def _corrected(
    config: RunConfig, rescoring: Rescoring, scored: ScoredRun, into: str = "", taken: TakenRows | None = None
) -> CorrectedPartition:
    """Fold every partition again; partitions are spread over processes."""
    jobs = [
        CorrectionJob(config.kafka, config.run, partition, rescoring.id, end, config.grouper, into, taken or {})
        for partition, end in sorted(scored.ends.items())
    ]
    partitions = len(jobs)
    whole = CorrectedPartition()
    with progress("partitions") as show:
        for done, part in enumerate(spread(correct_partition, jobs, os.cpu_count() or 1), 1):
            whole.merge(part)
            show(done, partitions)
    return whole


# ---------------------------------------------------------------------- fork


def _fork_step(config: RunConfig, name: str, learners: Sequence[LearnerConsequences]) -> int | None:
    """Return the newest step of a learner that is clean and has a checkpoint, if wrong steps follow it."""
    last = next((known.last_clean_step for known in learners if known.learner == name and known.wrong), None)
    if last is None:
        return None
    steps = checkpoint_steps(learner_directory(config.learner.checkpoint.directory, config.run, name))
    return max((step for step in steps if step <= last), default=None)


def _fork_command(config: RunConfig, args: argparse.Namespace, step: int) -> tuple[str, ...]:
    """Return the command that forks the learner, with the settings that this command was given."""
    own = config.run_dir / "run.toml"
    file = args.config or (own if own.exists() else None)
    words = ["rollstream", "fork", *(("--config", str(file)) if file else ())]
    for key, flag in getattr(args, "options", {}).items():
        words += [flag, getattr(args, key)]
    words += [word for value in args.set for word in ("--set", value)]
    words += [word for value in args.client for word in ("-X", value)]
    words += ["--learner", args.learner] if args.learner else []
    words += ["--from-step", str(step), "--into", f"{args.into or config.run}-clean"]
    return (*words, "--batches", args.into) if args.into else tuple(words)


# ---------------------------------------------------------------------- output


def rescoring_text(report: RescoringReport, run: str) -> str:
    """Return tables of rewards, groups and steps, and how to continue from the last clean step.

    Names from records are escaped where a terminal would obey them.
    """
    corrected = report.corrected
    rows = [(name, *changes.as_dict().values()) for name, changes in sorted(corrected.rewards.environments.items())]
    columns = ("environment", "rescored", "changed", "failed", "reward before", "after", "largest difference")
    groups = [
        ("compared", corrected.groups),
        ("with changed advantages", corrected.groups_changed),
        ("  of these, now without variance", corrected.groups_lost),
        ("dropped for lack of variance, now with variance", corrected.groups_gained),
    ]
    lines = [
        f"rescoring {report.rescoring.id} of run {run}: {report.scored:,} rollouts scored now",
        "",
        table(columns, rows) if rows else "the log has no rollout to rescore",
        "",
        table(("groups", ""), groups),
    ]
    for learner in report.learners:
        lines += ["", *map(printable, _learner_lines(learner))]
    return "\n".join([*lines, *_way_on(report)])


def _learner_lines(learner: LearnerConsequences) -> list[str]:
    if not learner.wrong:
        known = "is known to have trained" if learner.unknown_steps else "trained"
        return [
            f"learner {learner.learner}: no step of {learner.steps:,} {known} on wrong advantages",
            *_unknown_lines(learner),
        ]
    rows = [
        (
            wrong.step,
            "" if wrong.policy_version is None else wrong.policy_version,
            wrong.errors.rollouts,
            wrong.errors.wrong,
            f"{wrong.errors.token_share:.1%}",
            wrong.errors.sign_flips,
            wrong.errors.largest,
            f"{wrong.errors.relative:.1%}",
        )
        for wrong in learner.wrong
    ]
    header = ("step", "version", "rollouts", "wrong", "of tokens", "sign flips", "largest error", "of advantages")
    lines = [
        f"learner {learner.learner}: {len(rows):,} of {learner.steps:,} steps trained on wrong advantages",
        table(header, rows[:_ROWS]),
    ]
    if len(rows) > _ROWS:
        lines.append(f"... and {len(rows) - _ROWS:,} more; --json names all of them")
    lines += _unknown_lines(learner)
    clean, version = learner.last_clean_step, learner.last_clean_version
    lines.append(
        "no step on record is known to be clean"
        if clean is None
        else f"last clean step: {clean}; last clean policy version: {'none' if version is None else version}"
    )
    if learner.touched_versions:
        lines.append(f"policy versions trained on wrong advantages: {_spans(learner.touched_versions)}")
    return lines


def _spans(versions: Iterable[int]) -> str:
    """Return versions as text, with one span for consecutive numbers; a rollback to a clean version leaves a gap."""
    spans = [[v for _, v in span] for _, span in groupby(enumerate(sorted(versions)), lambda item: item[1] - item[0])]
    return ", ".join(f"{span[0]}" if len(span) == 1 else f"{span[0]} to {span[-1]}" for span in spans)


def _unknown_lines(learner: LearnerConsequences) -> list[str]:
    if not learner.unknown_steps:
        return []
    return [
        f"{learner.unknown_steps:,} steps, from step {learner.first_unknown_step} on, trained on "
        f"{learner.unknown_rollouts:,} rollouts that cannot be checked: their batches were pruned or moved, or they "
        "arrived after the scoring"
    ]


def _way_on(report: RescoringReport) -> list[str]:
    lines = []
    if report.into is not None:
        lines += ["", f"run {report.into} has {report.batches_written:,} batches with the new rewards"]
    elif any(learner.wrong for learner in report.learners):
        lines += ["", "to write batches with the new rewards, run this again with --into RUN"]
    if report.fork_command:
        which = "these batches" if report.into is not None else "the batches as they are"
        lines.append(f"to train on {which} from step {report.fork_step}, the last clean step with a checkpoint:")
        lines.append(command_text(shlex.join(report.fork_command)))
    elif report.into is not None:
        lines.append(
            f"there is no step to fork from; set learner.input_run={report.into} to train a learner on these batches"
        )
    return lines
