"""`rollstream fork`: start another learner where one stood, with other settings, on the same batches.

It writes to the new run alone: topics, a copy of the checkpoint, a configuration. The run it comes from is only read.
"""

import argparse
import json
import os
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from consumers.learner.checkpoint_paths import checkpoint_steps, learner_directory
from consumers.learner.fork import copy_checkpoint
from consumers.learner.step_log import read_steps
from pipeline import plan as plans
from pipeline.config import RunConfig
from pipeline.provision import provision
from pipeline.tables import command_text
from topics import clients, provisioning
from topics.catalogue import topic_name
from topics.errors import ConfigurationError
from topics.records import LearnerStep


@dataclass(frozen=True, kw_only=True)
class Fork:
    """A learner that is ready to go on elsewhere."""

    config: RunConfig
    """Of the new run."""
    path: Path
    """Where that lies."""
    record: LearnerStep
    """The step it goes on from, as the source has it on record."""

    @property
    def command(self) -> tuple[str, ...]:
        """What starts it."""
        return ("rollstream", "learn", "--config", str(self.path))


def show_fork(config: RunConfig, args: argparse.Namespace) -> int:
    """Prepare the run and print the command, or with --start become the learner."""
    made = fork(config, args.from_step, args.into, args.learner or config.learner.name)
    learner = made.config.learner
    told = {
        "run": made.config.run,
        "learner": learner.name,
        "from_step": made.record.step,
        "parameters": made.record.params_digest,
        "input_run": learner.input_run,
        "position": made.record.position,
        "configuration": str(made.path),
        "checkpoints": learner.checkpoint.directory,
        "command": shlex.join(made.command),
    }
    if args.json:
        print(json.dumps(told), flush=True)
    else:
        print(
            f"run {made.config.run}: learner {learner.name} goes on after step {made.record.step} of run {config.run}\n"
            f"parameters: {made.record.params_digest[:16]}\n"
            f"batches: of run {learner.input_run}, from offset {made.record.position} of its index\n"
            f"configuration: {made.path}\n\n"
            f"{'starting' if args.start else 'start it with'}:\n{command_text(shlex.join(made.command))}",
            flush=True,
        )
    if args.start:
        words = [sys.executable, "-P", "-m", "pipeline", *made.command[1:]]
        os.execve(sys.executable, words, plans.child_environment(made.config))
    return 0


def fork(config: RunConfig, step: int, into: str, source: str) -> Fork:
    """Prepare run `into` for a learner of the settings of `config`, from where the learner `source` of its run stood
    after a step.

    Safe to repeat. Raises ConfigurationError where the run has steps of its own or the step is not on record,
    StateRefused where there is no checkpoint of it.
    """
    if into == config.run:
        raise ConfigurationError(f"--into {into} is the run itself; name another, whose topics this creates")
    clients.check_broker(config.kafka)
    directory = config.learner.checkpoint.directory
    checkpoints = learner_directory(directory, config.run, source)
    recorded = read_steps(config.kafka, config.run, source)
    record = recorded.get(step)
    if record is None or not record.params_digest:
        raise ConfigurationError(
            f"step {step} of learner {source!r} is not on record in run {config.run}; there are checkpoints of steps "
            f"{checkpoint_steps(checkpoints)} in {checkpoints}"
        )
    learner = replace(config.learner, input_run=record.input_run)
    # As it would be had nobody set it.
    if directory == str(config.run_dir / "checkpoints"):
        run_dir = replace(config, run=into).run_dir
        learner = replace(learner, checkpoint=replace(learner.checkpoint, directory=str(run_dir / "checkpoints")))
    made = replace(config, run=into, learner=learner)
    _refuse_if_begun(made)
    target = learner_directory(learner.checkpoint.directory, into, learner.name)
    copy_checkpoint(checkpoints, step, target)
    provision(made)
    return Fork(config=made, path=plans.write(made), record=record)


def _refuse_if_begun(config: RunConfig) -> None:
    topic = topic_name(config.run, "steps")
    if topic not in {found.topic for found in provisioning.describe(config.kafka, config.run)}:
        return
    if next(iter(clients.read_to_end(config.kafka, topic)), None) is not None:
        raise ConfigurationError(
            f"run {config.run} has steps already; fork into a run that has none: its learner would not go on from here"
        )
