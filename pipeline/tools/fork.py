"""`rollstream fork`: continues a learner from one of its steps in another run, with other settings.

The fork trains on the same batches, or, with a number of partitions, on batches of its own, which workers and grouping
processes of the new run make. So a run that needs more partitions is drained, and forked. The command creates the
topics of the new run, copies the checkpoint, writes a configuration, and only reads the original run.
"""

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rollstream.consumers.batch_reader import first_offset
from rollstream.consumers.learner.checkpoint_paths import checkpoint_steps, learner_directory
from rollstream.consumers.learner.records.fork import copy_checkpoint, places_in
from rollstream.consumers.weights.step_log import read_steps
from rollstream.pipeline.command_line.command_parser import positive_count, set_handler
from rollstream.pipeline.command_line.text_tables import command_text
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.run import plan as plans
from rollstream.pipeline.run.batch_run import first_record
from rollstream.pipeline.tools.topics import provision
from rollstream.producers.flow.mixture_states import MIXTURE, newest_states
from rollstream.topics.control.named_records import FORKED, write
from rollstream.topics.control.steering import desired_state
from rollstream.topics.errors import ConfigurationError, StateRefused
from rollstream.topics.kafka import clients
from rollstream.topics.records import ForkedLearner, LearnerStep


@dataclass(frozen=True, kw_only=True)
class Fork:
    """A learner that is ready to continue in another run."""

    config: RunConfig
    """Configuration of the new run."""
    path: Path
    """File with this configuration."""
    record: LearnerStep
    """Step from which it continues, as recorded by the original run."""
    position: int
    """Offset in the index of the input run from which the learner reads."""

    @property
    def command(self) -> tuple[str, ...]:
        """Command that starts the learner, or all roles of a run that makes its own batches."""
        words = ("role", "learn") if self.config.learner.input_run else ("run",)
        return ("rollstream", *words, "--config", str(self.path))


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream fork`."""
    set_handler(
        parser,
        show_fork,
        example="rollstream fork --config run.toml --from-step 100 --into longer --set learner.max_steps=2000",
        json=True,
    )
    parser.add_argument(
        "--from-step",
        type=int,
        metavar="A",
        help="the step after which the learner continues; it must have a checkpoint (default: the last that has one)",
    )
    parser.add_argument("--into", required=True, metavar="RUN", help="the new run to which the new learner writes")
    parser.add_argument(
        "--learner",
        metavar="NAME",
        help="the learner to fork (default: learner.name, which is also the name of the new learner)",
    )
    batches = parser.add_mutually_exclusive_group()
    batches.add_argument(
        "--batches",
        metavar="RUN",
        help="train on all batches of this run, which rescore --into or replay --into has written",
    )
    batches.add_argument(
        "--partitions",
        type=positive_count,
        metavar="N",
        help="train on batches that the new run makes from rollouts of its own, on N partitions",
    )
    parser.add_argument("--start", action="store_true", help="also start the learner, or the run, here")


def show_fork(config: RunConfig, args: argparse.Namespace) -> int:
    """Prepare the run and print the command; with --start, become the learner."""
    source = args.learner or config.learner.name
    forked = fork(config, args.from_step, args.into, source, batches=args.batches, partitions=args.partitions)
    learner = forked.config.learner
    input_run = learner.input_run or forked.config.run
    summary = {
        "run": forked.config.run,
        "learner": learner.name,
        "from_step": forked.record.step,
        "parameters": forked.record.params_digest,
        "input_run": input_run,
        "position": forked.position,
        "configuration": str(forked.path),
        "checkpoints": learner.checkpoint.directory,
        "command": shlex.join(forked.command),
    }
    if args.json:
        print(json.dumps(summary), flush=True)
    else:
        print(
            f"run {forked.config.run}: learner {learner.name} continues after step {forked.record.step} of run "
            f"{config.run}\n"
            f"parameters: {forked.record.params_digest[:16]}\n"
            f"batches: of run {input_run}, from offset {forked.position} of its index\n"
            f"configuration: {forked.path}\n\n"
            f"{'starting' if args.start else 'start it with'}:\n{command_text(shlex.join(forked.command))}",
            flush=True,
        )
    if forked.record.oldest >= 0:
        print(
            f"note: rollouts that the buffer of learner {source} held at step "
            f"{forked.record.step} are not in the fork, which begins with the next batch",
            file=sys.stderr,
            flush=True,
        )
    if args.partitions and not desired_state(config.kafka, config.run).drained:
        print(
            f"note: run {config.run} is not drained, and the fork trains on rollouts of its own; to leave none behind, "
            f"end run {config.run} with `rollstream steer stop --drain`, and then fork its last step",
            file=sys.stderr,
            flush=True,
        )
    if args.start:
        words = [sys.executable, "-P", "-m", "rollstream", *forked.command[1:]]
        os.execve(sys.executable, words, plans.child_environment(forked.config))
    return 0


def fork(
    config: RunConfig,
    step: int | None,
    into: str,
    source: str,
    *,
    batches: str | None = None,
    partitions: int | None = None,
) -> Fork:
    """Prepare run `into` for a learner with the settings of `config`, from a step of the learner `source`.

    The learner trains on the remaining batches of the same run, or on all batches of run `batches`, or on those that
    run `into` makes of rollouts on so many `partitions`. Without `step`, it continues from the last checkpoint. Safe to
    repeat. Raises ConfigurationError if `into` is the run itself or already has steps, or if the step is not on record,
    and StateRefused if the step has no checkpoint, or if batches that its learner would read were deleted.
    """
    if into == config.run:
        raise ConfigurationError(f"--into {into} is the run itself; name a new run, whose topics are created")
    clients.check_broker(config.kafka)
    directory = config.learner.checkpoint.directory
    checkpoints = learner_directory(directory, config.run, source)
    available = checkpoint_steps(checkpoints)
    if step is None:
        step = max(available, default=-1)
    recorded = read_steps(config.kafka, config.run, source)
    record = recorded.get(step)
    if record is None or not record.params_digest:
        raise ConfigurationError(
            f"step {step} of learner {source!r} is not on record in run {config.run}; there are checkpoints of steps "
            f"{available} in {checkpoints}"
        )
    learner = replace(config.learner, input_run="" if partitions else batches or record.input_run)
    # If the checkpoints are in the default directory, use the default directory of the new run.
    if directory == str(config.run_dir / "checkpoints"):
        run_dir = replace(config, run=into).run_dir
        learner = replace(learner, checkpoint=replace(learner.checkpoint, directory=str(run_dir / "checkpoints")))
    forked = replace(config, run=into, learner=learner)
    if partitions:
        forked = replace(forked, topics=replace(config.topics, partitions=partitions))
    _refuse_if_begun(forked)
    position, changed = record.position, dict[str, int]()
    if batches or partitions:
        position = first_offset(config.kafka, batches) if batches else 0
        changed = dict.fromkeys(places_in(checkpoints, step), position)
    if partitions:
        changed |= {"trained_total": 0, "skipped_total": 0}  # These count from the start of a run.
    target = learner_directory(learner.checkpoint.directory, into, learner.name)
    copy_checkpoint(checkpoints, step, target, changed)
    provision(forked)
    _hold_batches(
        forked,
        ForkedLearner(
            learner=learner.name,
            source_run=config.run,
            source_learner=source,
            step=step,
            input_run=learner.input_run or into,
            position=min(places_in(target, step).values()),
            first_version=_next_version(recorded, step),
            wall_time=time.time(),
        ),
    )
    if partitions:
        write(config.kafka, into, MIXTURE, newest_states(config.kafka, config.run))
    return Fork(config=forked, path=plans.write(forked), record=record, position=position)


def _next_version(recorded: Mapping[int, LearnerStep], step: int) -> int:
    """Return the number of the policy version that a step published, or else of the version after those before it."""
    if recorded[step].policy_version >= 0:
        return recorded[step].policy_version
    return 1 + max((record.policy_version for number, record in recorded.items() if number < step), default=-1)


def _hold_batches(forked: RunConfig, record: ForkedLearner) -> None:
    """Put the fork on record, so that `rollstream prune` keeps its batches until its learner has a step on record."""
    write(forked.kafka, forked.run, FORKED, {record.learner: record})
    begin = first_offset(forked.kafka, record.input_run)
    if begin > record.position:
        write(forked.kafka, forked.run, FORKED, {record.learner: None})
        raise StateRefused(
            f"the learner would read the index of run {record.input_run} from offset {record.position}, and "
            f"`rollstream prune` has deleted the entries below {begin}; fork from a later step"
        )


def _refuse_if_begun(config: RunConfig) -> None:
    # A learner would continue from steps; the other records are those of a run that others use.
    if begun := first_record(config.kafka, config.run, ("steps", "policies", "batches", "rollouts")):
        raise ConfigurationError(f"run {config.run} has {begun} already; name a run that has not begun")
