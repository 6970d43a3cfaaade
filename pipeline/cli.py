"""The command `rollstream`: parses arguments, loads the configuration, calls one handler, turns errors into one line.

Each command is a module that adds its flags and holds its handler, imported when the command is chosen, so that --help
answers at once. Exit codes: 0 success, 1 a negative result (or a failed run), 2 an error with a remedy in its message,
3 fenced, 4 a ledger that cannot be decided yet, 130 interrupted, 143 ended by SIGTERM before the work was done.
"""

import argparse
import os
import signal
import sys
from collections.abc import Collection, Sequence

from rollstream.pipeline import interruption
from rollstream.pipeline.command_parser import Parser, add_command
from rollstream.pipeline.run.role_process import watch_lifeline
from rollstream.pipeline.text_tables import printable
from rollstream.topics.errors import RollstreamError

_BROKEN_PIPE = 128 + 13
COMMANDS = {
    "broker": ("tools.broker", "a local Kafka: start, stop, status; on any Kafka: end hanging transactions"),
    "topics": ("tools.topics", "the topics of a run: plan, apply, describe"),
    "doctor": ("tools.doctor", "check what a role can see and do on the brokers, with a remedy for each fault"),
    "infer": ("roles.infer", "serve completions from the newest policy version"),
    "env": ("roles.env", "play the environment and publish rollouts"),
    "gateway": ("roles.gateway", "capture the model calls of any agent, and write them as rollouts"),
    "eval": ("roles.eval", "evaluate the held-out split at every K-th policy version"),
    "group": ("roles.group", "group rollouts into training batches, exactly once"),
    "learn": ("roles.learn", "train on the batches and publish policy versions"),
    "serve-weights": ("roles.serve_weights", "keep engines such as vLLM and SGLang on the newest policy version"),
    "engine": ("roles.engine", "run the vLLM of another Python environment with the newest policy version"),
    "label": (
        "roles.label",
        "label trajectories that wait for their rewards, exactly once",
    ),
    "collect": ("roles.collect", "play a control task and publish trajectories"),
    "fill": ("roles.fill", "fill a trajectory buffer on disk from the log"),
    "run": ("run.command", "run all roles under one supervisor until interrupted or their work is done"),
    "scale": ("tools.scale", "change how many processes of each role a run has, while it runs"),
    "environment": ("tools.environment", "the environments of a run, while it runs: pause, resume, weigh"),
    "stop": ("tools.stop", "end a run after a given step as if its work were done, or with nothing in flight"),
    "evaluate": ("tools.evaluate", "have the newest policy version of a run evaluated now"),
    "runs": ("tools.runs", "list the runs that are on the brokers"),
    "plan": ("tools.plan", "compute partitions, processes and brokers for a load from measured rates"),
    "deploy": ("tools.deploy", "write a run as a compose file or Helm chart; write a dashboard and alert rules"),
    "demo": ("run.demo", "train a small model through a local Kafka and print a report"),
    "ledger": ("tools.ledger", "prove from the topics alone that every record is in exactly one place"),
    "verify": ("tools.verify", "compute batches again from the log and compare them bit for bit"),
    "attest": ("tools.attest", "sign what a model was trained on, and check it from an archive alone"),
    "lineage": ("tools.lineage", "show where something came from and what became of it"),
    "replay": ("tools.replay", "fold the recorded log again, as it was or under another configuration"),
    "rescore": (
        "tools.rescore",
        "score old rollouts with another verifier, and show which steps trained on wrong advantages",
    ),
    "show": ("tools.show", "show one rollout as a person reads it, with its group and its fate"),
    "retrain": (
        "tools.retrain",
        "execute recorded steps again from a checkpoint and the log, and compare parameters",
    ),
    "split": ("tools.split", "continue a run as another run with a different number of partitions"),
    "fork": ("tools.fork", "start another learner from a recorded step, with other settings, on the same batches"),
    "export": ("tools.export", "write the newest policy version as a Hugging Face checkpoint"),
    "weights": ("tools.weights", "policy versions: list, show, pull, verify, compare, roll back"),
    "fit": ("tools.fit", "compile the training step for TPUs without having any, and show the memory it needs"),
    "migrate": (
        "tools.migrate",
        "copy rollouts of the old form, with metadata on the batch, into a run or new files",
    ),
    "prune": ("tools.prune", "delete what recovery, verification and learners no longer need"),
    "archive": ("tools.archive", "copy new records of the run's topics into Parquet files, each once"),
    "restore": ("tools.restore", "fill the topics of a new run from an archive, every record at the offset it had"),
    "sql": ("tools.sql", "query the archive with DuckDB; without a query, show its tables"),
    "sink": ("tools.sink", "fill trackio, Weights & Biases or another tracker from the log: steps and traces"),
    "groups": ("tools.groups", "write new groups of the run into Parquet files, in a group store"),
    "dlq": ("tools.dlq", "dead letters: ls, show, redrive"),
    "exclude": (
        "tools.exclude",
        "quarantine rollouts: drop those not yet batched, and let learners leave out the batched ones",
    ),
    "key": ("tools.key", "private keys with which marks and rollouts are signed: new, show"),
    "learner": (
        "tools.learner",
        "retire a learner, so that nothing is kept for it, or let it train again",
    ),
    "cat": ("tools.cat", "print the records of a topic, decoded, one per line"),
    "trajectories": ("tools.trajectories", "saved trajectory buffers: show, merge, split"),
    "top": ("tools.top", "show the state of a run on one screen"),
    "ui": ("ui.command", "show runs in a browser: rollouts, groups, curves, drops, weights, ledger"),
    "report": ("tools.report", "write one HTML file that shows how a run went, and how to verify it"),
    "completion": ("tools.completion", "print the script that lets a shell complete commands and flags"),
}
"""Module, below rollstream.pipeline, and summary of each command."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    watch_lifeline()
    if "_ARGCOMPLETE" in os.environ:  # a shell requests completions
        import argcomplete

        argcomplete.autocomplete(build_parser(load=os.environ["COMP_LINE"].split()))
    debug = False
    try:
        args = build_parser().parse_args(arguments)
        debug = args.debug
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except RollstreamError as error:
        if debug or interruption.received():
            raise
        # The message may contain names from records, which anybody can write.
        print(printable(f"rollstream: {error}"), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        return 128 + int(getattr(interrupt, "signal_number", signal.SIGINT))
    except BrokenPipeError:
        # The reader of our output is gone; keep the interpreter from reporting that at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except OSError as error:
        # A file that a command reads or writes; `str` names it.
        if debug or error.filename is None:
            raise
        print(printable(f"rollstream: {error}; check the path and its permissions, or free space"), file=sys.stderr)
        return 2


def build_parser(load: Collection[str] = ()) -> Parser:
    """Return the parser of the whole command line; only the commands named in `load` have their flags yet.

    A command sets `run`, a function from the parsed arguments to the exit code.
    """
    parser = Parser(
        prog="rollstream",
        description="Reinforcement learning of language models over a log: every rollout in exactly one place.",
        epilog="Start with `rollstream demo`. Every command answers --help.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, summary) in COMMANDS.items():
        command = add_command(commands, name, summary, f"rollstream.pipeline.{module}")
        if name in load:
            command.load()
    return parser


class _Version(argparse.Action):
    """Prints the version, which is looked up only when requested, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"rollstream {version('rollstream')}")
        parser.exit()
