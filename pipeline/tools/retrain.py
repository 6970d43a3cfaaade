"""`rollstream retrain`: executes recorded steps again from a checkpoint and the log, and compares the parameters.

Exit code 0 if every step gives the parameters on record, 1 if one does not. Nothing is written to the run. All
processes of a learner execute the steps together, as in training.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollstream.pipeline.command_line.command_parser import set_handler
from rollstream.pipeline.command_line.process_number import add_number
from rollstream.pipeline.command_line.text_tables import clipped, table
from rollstream.pipeline.config import RunConfig, to_toml
from rollstream.pipeline.run.jax_runtime import ending_at_once, prepare_jax, printing_to_stderr
from rollstream.pipeline.run.learner_start import warm_start_examples
from rollstream.pipeline.run.plan import child_environment, is_of_this_machine, with_coordinator
from rollstream.topics.errors import RollstreamError
from rollstream.topics.kafka import clients

if TYPE_CHECKING:
    from rollstream.consumers.learner.retraining import RetrainedStep, Retraining

_DIGEST = 16
"""Number of characters shown of a digest."""
_VALUE = 60
"""Number of characters shown of a setting."""
_LEAVE_TIMEOUT_S = 60.0


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream retrain`."""
    set_handler(
        parser, show_retraining, example="rollstream retrain --config run.toml --from-step 100 --to-step 120", json=True
    )
    parser.add_argument(
        "--from-step", type=int, required=True, metavar="A", help="begin with the learner's state after this step"
    )
    parser.add_argument(
        "--to-step", type=int, metavar="B", help="the last step to execute (default: the last on record)"
    )
    add_number(parser, "process of learner.processes", "--process")


def show_retraining(config: RunConfig, args: argparse.Namespace) -> int:
    """Print a line for each step, and the first difference with possible causes."""
    clients.check_broker(config.kafka)
    to_step = () if args.to_step is None else ("--to-step", str(args.to_step))
    command = ("retrain", "--from-step", str(args.from_step), *to_step)
    with ending_at_once(config.learner.processes, args.debug), members(config, command, args.process) as own:
        retraining = _retrained(own, args)
    if args.process == 0:
        print(json.dumps(as_dict(retraining)) if args.json else text_of(retraining))
    return 0 if retraining.difference is None else 1


def _retrained(config: RunConfig, args: argparse.Namespace) -> "Retraining":
    """Execute the steps, together with the other processes of the learner."""
    prepare_jax(config)
    from rollstream.consumers.learner.parallel.team import join, leave, raising_team_lost
    from rollstream.consumers.learner.retraining import retrain

    shows = args.process == 0 and sys.stderr.isatty()

    def progress(step: "RetrainedStep") -> None:
        if shows:
            print(f"\rstep {step.step}", end="", file=sys.stderr, flush=True)

    team = join(config.learner, args.process)
    with printing_to_stderr(), raising_team_lost(team):
        retraining = retrain(
            config.learner,
            config.kafka,
            config.run,
            args.from_step,
            args.to_step,
            warm_start_examples=lambda: warm_start_examples(config),
            on_step=progress,
            team=team,
        )
        leave(team)
    if shows:
        print("\r", end="", file=sys.stderr)
    return retraining


def as_dict(retraining: "Retraining") -> dict[str, Any]:
    """Convert the result to plain values for JSON."""
    difference = retraining.difference
    return {
        "learner": retraining.learner,
        "checkpoint": retraining.checkpoint,
        "to_step": retraining.last,
        "same": difference is None,
        "first_difference": None if difference is None else difference.step,
        "environment": {name: {"then": then, "now": now} for name, (then, now) in retraining.environment.items()},
        "steps": [{**asdict(step), "same": step.same} for step in retraining.steps],
    }


def text_of(retraining: "Retraining") -> str:
    """Return the result as tables."""
    rows = [
        (s.step, s.batches, s.trained, s.skipped, s.recorded[:_DIGEST], "the same" if s.same else s.again[:_DIGEST])
        for s in retraining.steps
    ]
    begun = (
        "initial parameters, made again"
        if retraining.checkpoint is None
        else f"checkpoint of step {retraining.checkpoint}"
    )
    parts = [
        f"learner {retraining.learner}: started from the {begun}",
        table(("step", "batches", "trained", "skipped", "parameters on record", "executed again"), rows),
        _verdict(retraining),
    ]
    if retraining.environment:
        changed = [
            (name, clipped(then, _VALUE) or "-", clipped(now, _VALUE) or "-")
            for name, (then, now) in retraining.environment.items()
        ]
        parts.append(table(("changed since the checkpoint", "then", "now"), changed))
    return "\n\n".join(parts)


def _verdict(retraining: "Retraining") -> str:
    difference, executed = retraining.difference, len(retraining.steps) - 1
    if difference is None:
        return f"{executed} steps executed again from the log, all with the parameters on record"
    where = f"STEP {difference.step} DIFFERS"
    if not executed:
        where = f"THE PARAMETERS OF STEP {difference.step} DIFFER, before anything was executed"
    return (
        f"{where}: on record\n  {difference.recorded}\nexecuted again\n  {difference.again}\n"
        f"later steps were not executed (requested: up to step {retraining.last})"
    )


@contextmanager
def members(config: RunConfig, command: Sequence[str], process: int) -> Iterator[RunConfig]:
    """Execute a command as processes 1, 2, ... of a learner; yield the configuration of this `process`.

    Process 0 starts the others if all of them run on this machine. They do if `learner.coordinator` is empty or was
    chosen by `rollstream run`; a new coordinator then replaces it, because a learner may still use the old one. With
    any other coordinator, the user starts each process. The log of a member that failed goes to stderr if this process
    fails, too. No member outlives the block; if this process is killed, the members lose their coordinator and end.
    """
    if config.learner.processes == 1 or process > 0 or not is_of_this_machine(config.learner.coordinator):
        yield config
        return
    config = with_coordinator(replace(config, learner=replace(config.learner, coordinator="")))
    with tempfile.TemporaryDirectory(prefix="rollstream-") as folder:
        settings = Path(folder) / "run.toml"
        settings.write_text(to_toml(config), encoding="utf-8")
        started = [
            _start(number, settings, command, child_environment(config))
            for number in range(1, config.learner.processes)
        ]
        try:
            yield config
            for member in started:
                member.wait(_LEAVE_TIMEOUT_S)
        except RollstreamError:
            for number, member in enumerate(started, 1):
                if member.poll() not in (None, 0):
                    sys.stderr.write(_log(settings, number).read_text(encoding="utf-8", errors="replace"))
            raise
        finally:
            for member in started:
                member.kill()
                member.wait()


def _start(number: int, settings: Path, command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    name, *flags = command
    words = [sys.executable, "-P", "-m", "rollstream", name, "--config", str(settings), *flags]
    with _log(settings, number).open("wb") as log:
        return subprocess.Popen(
            [*words, "--process", str(number)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env=environment,
        )


def _log(settings: Path, number: int) -> Path:
    return settings.with_name(f"{number}.log")
