"""The command `rollstream`: parses arguments, loads the configuration, calls one handler, turns errors into one line.

Handlers import what they need when they run, so that --help answers at once. Exit codes: 0 done, 1 the answer is no
(or a run failed), 2 something is wrong that the message says how to mend, 3 fenced, 130 interrupted.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from infra import commands as broker_commands
from pipeline import interruption
from pipeline.commands import Parser, Setting, add_command
from pipeline.process import watch_lifeline
from pipeline.tool_commands import add_mend, add_tools
from topics.errors import RollstreamError

if TYPE_CHECKING:
    from pipeline.commands import Commands

_BROKEN_PIPE = 128 + 13


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    watch_lifeline()
    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what may come next
        import argcomplete

        argcomplete.autocomplete(parser)
    args = parser.parse_args(arguments)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except RollstreamError as error:
        if args.debug or interruption.received():
            raise
        print(f"rollstream: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        return 128 + int(getattr(interrupt, "signal_number", signal.SIGINT))
    except BrokenPipeError:
        # Whoever read our output has seen enough; keep the interpreter from complaining about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE


def build_parser() -> argparse.ArgumentParser:
    """The whole command line. Each command sets `run`, a function from the parsed arguments to the exit code."""
    parser: argparse.ArgumentParser = Parser(
        prog="rollstream",
        description="Reinforcement learning of language models over a log: every rollout in exactly one place.",
        epilog="Start with `rollstream demo`. Every command answers --help.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    add_mend(broker_commands.register(commands))
    _add_topics(commands)
    _add_roles(commands)
    _add_runs(commands)
    add_tools(commands)
    completion = commands.add_parser("completion", help="print what makes a shell complete commands and flags")
    completion.add_argument("shell", choices=("bash", "zsh", "fish"), help="which shell")
    completion.set_defaults(run=_show_completion)
    return parser


class _Version(argparse.Action):
    """Prints the version and exits; asks for it only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"rollstream {version('rollstream')}")
        parser.exit()


def _show_completion(args: argparse.Namespace) -> int:
    from argcomplete.shell_integration import shellcode

    print(shellcode(["rollstream"], shell=args.shell))
    return 0


def _add_topics(commands: "Commands") -> None:
    topics = commands.add_parser("topics", help="the topics of a run: plan, apply, describe")
    actions = topics.add_subparsers(dest="topics_command", metavar="COMMAND", required=True)
    where = "pipeline.provision"
    add_command(actions, "plan", f"{where}:plan", "show what apply would create or change", json=True)
    add_command(actions, "apply", f"{where}:apply", "create and mend the run's topics; safe to repeat", json=True)
    add_command(actions, "describe", f"{where}:describe", "show the run's topics as they are on the broker", json=True)


def _add_roles(commands: "Commands") -> None:
    infer = add_command(
        commands, "infer", "pipeline.roles.infer:run", "serve completions from the newest policy version"
    )
    env = add_command(commands, "env", "pipeline.roles.env:run", "play the environment and publish rollouts")
    env.add_argument("--ordinal", type=int, default=0, help="number of this worker, from 0 (default: %(default)s)")
    env.add_argument(
        "--workers",
        dest="supervisor.workers=",
        action=Setting,
        metavar="N",
        help="workers that share the work (default: 2)",
    )
    evaluator = add_command(
        commands, "eval", "pipeline.roles.eval:run", "evaluate the held-out split at every so many policy versions"
    )
    evaluator.add_argument(
        "--every",
        dest="evaluation.every_versions=",
        action=Setting,
        metavar="K",
        help="versions that K divides (default: none)",
    )
    group = add_command(
        commands, "group", "pipeline.roles.group:run", "group rollouts into training batches, exactly once"
    )
    group.add_argument("--ordinal", type=int, default=0, help="number of this consumer, from 0 (default: %(default)s)")
    group.add_argument(
        "action",
        nargs="?",
        choices=("recover", "adopt", "skip"),
        help="recover: commit lost positions again from the journal, and exit; adopt: the same for a run restored from "
        "an archive; skip: have a record left out unread",
    )
    group.add_argument("record", nargs="?", metavar="PARTITION:OFFSET", help="record to skip, as the error names it")
    group.add_argument("--reason", default="", help="why it is skipped; stays in the journal")
    learn = add_command(
        commands, "learn", "pipeline.roles.learn:run", "train on the batches and publish policy versions"
    )
    learn.add_argument(
        "--process", type=int, default=0, metavar="I", help="number of this process of learner.processes (default: 0)"
    )
    learn.add_argument(
        "--warm-start",
        dest="learner.warm_start.file=",
        action=Setting,
        metavar="FILE",
        help="supervised examples before version 0",
    )
    label = add_command(
        commands,
        "label",
        "pipeline.roles.label:run",
        "give trajectories that wait for their rewards what a labeler makes of them, exactly once",
        example="rollstream label rewards.grasping:judge --run robot",
    )
    label.add_argument(
        "labeler",
        nargs="?",
        metavar="MODULE:FUNCTION",
        help="takes a Trajectory, returns it labelled, or None (default: labelling.labeler); recover: commit lost "
        "positions again, and exit",
    )
    label.add_argument("--ordinal", type=int, default=0, help="number of this labeller, from 0 (default: %(default)s)")
    collect = add_command(
        commands,
        "collect",
        "pipeline.roles.collect:run",
        "play a control task and publish trajectories",
        example="rollstream collect --run robot --set collect.player=cell.arm:play",
    )
    collect.add_argument("--ordinal", type=int, default=0, help="number of this process, from 0 (default: %(default)s)")
    filler = add_command(
        commands,
        "fill",
        "pipeline.roles.fill:run",
        "fill a trajectory buffer on disk from the log",
        example="rollstream fill --run robot --set fill.directory=windows",
    )
    for role in (infer, env, evaluator, group, learn, label, collect, filler):
        role.set_defaults(role=True)


def _add_runs(commands: "Commands") -> None:
    run = add_command(
        commands,
        "run",
        "pipeline.run:run",
        "run all roles under one supervisor until interrupted or their work is done",
        example="rollstream run run.toml",
    )
    run.set_defaults(role=True)
    add_command(commands, "runs", "pipeline.runs:show_runs", "list the runs that are on the brokers", json=True)
    run.add_argument("file", type=Path, nargs="?", metavar="run.toml", help="the same as --config")
    demo = add_command(
        commands,
        "demo",
        "pipeline.demo:run",
        "train a small model through a local Kafka and print a report",
        example="rollstream demo --seed 1 --task add",
        json=True,
    )
    demo.add_argument(
        "--seed", dest="seed=", action=Setting, metavar="N", help="of everything that is drawn (default: 0)"
    )
    demo.add_argument(
        "--task", dest="task=", action=Setting, metavar="NAME", help="dsort3 (the default), dsort4 or add"
    )
    demo.add_argument(
        "--steps", dest="learner.max_steps=", action=Setting, metavar="N", help="stop after this many learner steps"
    )
    demo.add_argument(
        "--data",
        dest="data_dir=",
        action=Setting,
        metavar="DIR",
        help="where its data lies (default: .rollstream/demo)",
    )
    demo.add_argument("--keep", action="store_true", help="keep the broker's data, to ask it more afterwards")
    demo.add_argument("--no-faults", action="store_true", help="kill nothing on the way")
    demo.add_argument(
        "--compare", action="store_true", help="train the same recipe in one process, too, and show what the log costs"
    )
    demo.set_defaults(default_config=Path(__file__).with_name("demo.toml"))
