"""The command `rollstream`: parses arguments, loads the configuration, calls one handler, turns errors into one line.

Handlers import what they need when they run, so that --help answers at once. Exit codes: 0 done, 1 the answer is no
(or a run failed), 2 something is wrong that the message says how to mend, 3 fenced, 130 interrupted.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from infra import commands as broker_commands
from pipeline.process import watch_lifeline
from topics.errors import RollstreamError

if TYPE_CHECKING:
    from pipeline.config import RunConfig

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
    Handler = Callable[[RunConfig, argparse.Namespace], int]

_BROKEN_PIPE = 128 + 13


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    watch_lifeline()
    args = build_parser().parse_args(arguments)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except RollstreamError as error:
        if args.debug:
            raise
        print(f"rollstream: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        if args.debug:
            raise
        return 128 + int(getattr(interrupt, "signal_number", signal.SIGINT))
    except BrokenPipeError:
        # Whoever read our output has seen enough; keep the interpreter from complaining about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE


def build_parser() -> argparse.ArgumentParser:
    """The whole command line. Each command sets `run`, a function from the parsed arguments to the exit code."""
    parser = argparse.ArgumentParser(
        prog="rollstream",
        description="Reinforcement learning of language models over a log: every rollout in exactly one place.",
        epilog="Start with `rollstream demo`. Every command answers --help.",
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    broker_commands.register(commands)
    _add_topics(commands)
    _add_roles(commands)
    _add_runs(commands)
    _add_questions(commands)
    return parser


def _add(
    commands: "Commands", name: str, handler: str, summary: str, *, example: str = "", json: bool = False
) -> argparse.ArgumentParser:
    """Add a command whose handler is `module:function`, with the flags every command takes."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example: {example}" if example else None,
    )
    common = parser.add_argument_group("configuration")
    common.add_argument("--config", type=Path, metavar="FILE", help="TOML file with the run's settings")
    common.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="one setting, e.g. grouping.batch_rollouts=64"
    )
    common.add_argument("--run", dest="run=", metavar="NAME", help="name of the run, before the topics' names")
    common.add_argument(
        "-b",
        "--bootstrap-servers",
        dest="kafka.bootstrap_servers=",
        metavar="HOST:PORT",
        help="the brokers' addresses",
    )
    common.add_argument(
        "-X", dest="client", action="append", default=[], metavar="KEY=VALUE", help="a key of librdkafka's, untouched"
    )
    common.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    if json:
        parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_lazily(handler))
    return parser


def _lazily(handler: str) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        from importlib import import_module

        from topics import logs

        config = config_of(args)
        # A tool's output is for whoever asked; what a role does is for its log.
        quiet = config.log_level == "info" and not getattr(args, "role", False)
        logs.setup("warning" if quiet else config.log_level)
        module, _, function = handler.partition(":")
        call: Handler = getattr(import_module(module), function)
        return call(config, args)

    return run


def config_of(args: argparse.Namespace) -> "RunConfig":
    """The configuration that the flags of a command, the environment and its file make together."""
    from pipeline.config import load

    # Flags of a command that stand for settings are stored under `KEY=`.
    flags = [f"{name}{value}" for name, value in vars(args).items() if name.endswith("=") and value is not None]
    path = args.config or getattr(args, "file", None) or getattr(args, "default_config", None)
    return load(path, environment=os.environ, flags=[*flags, *args.set], client_flags=args.client)


def _add_topics(commands: "Commands") -> None:
    topics = commands.add_parser("topics", help="the topics of a run: plan, apply, describe")
    actions = topics.add_subparsers(dest="topics_command", metavar="COMMAND", required=True)
    where = "pipeline.provision"
    _add(actions, "plan", f"{where}:plan", "show what apply would create or change", json=True)
    _add(actions, "apply", f"{where}:apply", "create and mend the run's topics; safe to repeat", json=True)
    _add(actions, "describe", f"{where}:describe", "show the run's topics as they are on the broker", json=True)


def _add_roles(commands: "Commands") -> None:
    infer = _add(commands, "infer", "pipeline.roles.infer:run", "serve completions from the newest policy version")
    env = _add(commands, "env", "pipeline.roles.env:run", "play the environment and publish rollouts")
    env.add_argument("--ordinal", type=int, default=0, help="number of this worker, from 0 (default: %(default)s)")
    env.add_argument(
        "--workers", dest="supervisor.workers=", metavar="N", help="workers that share the work (default: 2)"
    )
    evaluator = _add(
        commands, "eval", "pipeline.roles.eval:run", "evaluate the held-out split at every so many policy versions"
    )
    evaluator.add_argument(
        "--every", dest="evaluation.every_versions=", metavar="K", help="versions that K divides (default: none)"
    )
    group = _add(commands, "group", "pipeline.roles.group:run", "group rollouts into training batches, exactly once")
    group.add_argument("--ordinal", type=int, default=0, help="number of this consumer, from 0 (default: %(default)s)")
    group.add_argument(
        "action",
        nargs="?",
        choices=("recover",),
        help="recover: commit lost positions again from the journal, and exit",
    )
    learn = _add(commands, "learn", "pipeline.roles.learn:run", "train on the batches and publish policy versions")
    learn.add_argument(
        "--process", type=int, default=0, metavar="I", help="number of this process of learner.processes (default: 0)"
    )
    learn.add_argument(
        "--warm-start", dest="learner.warm_start.file=", metavar="FILE", help="supervised examples before version 0"
    )
    for role in (infer, env, evaluator, group, learn):
        role.set_defaults(role=True)


def _add_runs(commands: "Commands") -> None:
    run = _add(
        commands,
        "run",
        "pipeline.run:run",
        "run all roles under one supervisor until interrupted or the learner finishes",
        example="rollstream run run.toml",
    )
    run.set_defaults(role=True)
    run.add_argument("file", type=Path, nargs="?", metavar="run.toml", help="the same as --config")
    demo = _add(
        commands,
        "demo",
        "pipeline.demo:run",
        "train a small model through a local Kafka and print a report",
        example="rollstream demo --seed 1 --task add",
        json=True,
    )
    demo.add_argument("--seed", dest="seed=", metavar="N", help="of everything that is drawn (default: 0)")
    demo.add_argument("--task", dest="task=", metavar="NAME", help="dsort3 (the default), dsort4 or add")
    demo.add_argument("--steps", dest="learner.max_steps=", metavar="N", help="stop after this many learner steps")
    demo.add_argument("--data", dest="data_dir=", metavar="DIR", help="where its data lies (default: .rollstream/demo)")
    demo.add_argument("--keep", action="store_true", help="keep the broker's data, to ask it more afterwards")
    demo.add_argument("--no-faults", action="store_true", help="kill nothing on the way")
    demo.add_argument(
        "--compare", action="store_true", help="train the same recipe in one process, too, and show what the log costs"
    )
    demo.set_defaults(default_config=Path(__file__).with_name("demo.toml"))


def _add_questions(commands: "Commands") -> None:
    ledger = _add(
        commands,
        "ledger",
        "pipeline.questions:show_ledger",
        "prove from the topics alone that every record is in exactly one place",
        example="rollstream ledger --run main --by env --watch 5",
        json=True,
    )
    ledger.add_argument("--by", choices=("env",), help="rollouts and tokens of each environment, too")
    ledger.add_argument(
        "--watch",
        type=_seconds,
        nargs="?",
        const=3.0,
        metavar="SECONDS",
        help="print it again every so many seconds until interrupted (default: 3)",
    )
    verify = _add(
        commands,
        "verify",
        "pipeline.questions:show_verification",
        "compute batches again from the log and compare them bit for bit",
        example="rollstream verify --run main --last 20",
        json=True,
    )
    verify.add_argument("batch", nargs="*", metavar="BATCH", help="these batches only")
    which = verify.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help="every batch and every drop (what happens without a choice)")
    which.add_argument("--sample", type=int, metavar="N", help="N batches drawn at random")
    which.add_argument("--last", type=int, metavar="N", help="the newest N batches")
    verify.add_argument("--seed", type=int, default=0, metavar="N", help="of --sample (default: %(default)s)")
    lineage = _add(
        commands,
        "lineage",
        "pipeline.tools.lineage:lineage",
        "show where something came from and what became of it",
        example="rollstream lineage --run main --batch 0-17",
        json=True,
    )
    of = lineage.add_mutually_exclusive_group(required=True)
    of.add_argument("--rollout", metavar="UID", help="a rollout, by its uid")
    of.add_argument("--offset", metavar="P:O", help="a record of rollouts, by partition and offset")
    of.add_argument("--batch", metavar="ID", help="a batch")
    of.add_argument("--step", type=int, metavar="N", help="a learner's step")
    of.add_argument("--policy", type=int, metavar="V", help="a policy version")
    replay = _add(
        commands,
        "replay",
        "pipeline.tools.replay:show_replay",
        "fold the recorded log again, as it was or under another configuration",
        example="rollstream replay --run main --set grouping.estimator=grpo",
        json=True,
    )
    replay.add_argument("--from", dest="since", metavar="TIME", help="from this time on (as cat's --since)")
    replay.add_argument("--into", metavar="RUN", help="write the batches as those of another run, to train on")
    show = _add(
        commands,
        "show",
        "pipeline.tools.show:show",
        "show one rollout as a person reads it, with its group and its fate",
        example="rollstream show --run main 0:1234",
        json=True,
    )
    show.add_argument("rollout", metavar="ROLLOUT", help="its uid, or PARTITION:OFFSET")
    show.add_argument("--full", action="store_true", help="all tokens; with --json, arrays in full")
    show.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="advantage as colour (default: %(default)s)",
    )
    _add_retrain(commands)
    _add_export(commands)
    _add_fit(commands)
    _add_migrate(commands)
    _add_prune(commands)
    _add_archive(commands)
    _add_dlq(commands)
    _add_exclude(commands)
    _add_cat(commands)
    top = _add(
        commands,
        "top",
        "pipeline.tools.top:top",
        "show how a run goes, on one screen",
        example="rollstream top --run main",
        json=True,
    )
    top.add_argument("--once", action="store_true", help="show it as it is now and end, as --json does")


def _add_retrain(commands: "Commands") -> None:
    retrain = _add(
        commands,
        "retrain",
        "pipeline.tools.retrain:show_retraining",
        "execute recorded steps again, from a checkpoint and the log, and compare the parameters",
        example="rollstream retrain --config run.toml --from-step 100 --to-step 120",
        json=True,
    )
    retrain.add_argument(
        "--from-step", type=int, required=True, metavar="A", help="begin where the learner stood after this step"
    )
    retrain.add_argument("--to-step", type=int, metavar="B", help="the last step to execute (default: that on record)")
    fork = _add(
        commands,
        "fork",
        "pipeline.tools.fork:show_fork",
        "start another learner where one stood, with other settings, on the same batches",
        example="rollstream fork --config run.toml --from-step 100 --into longer --set learner.max_steps=2000",
        json=True,
    )
    fork.add_argument(
        "--from-step", type=int, required=True, metavar="A", help="the step it goes on after; a checkpoint is needed"
    )
    fork.add_argument("--into", required=True, metavar="RUN", help="the run of its own that it writes to")
    fork.add_argument(
        "--learner", metavar="NAME", help="the learner that made the step (default: learner.name, as the new one's)"
    )
    fork.add_argument("--start", action="store_true", help="start it here and now")


def _add_migrate(commands: "Commands") -> None:
    migrate = _add(
        commands,
        "migrate",
        "pipeline.tools.migrate:migrate",
        "bring rollouts of the old form, with metadata on the batch, into a run or new files, and count them",
        example="rollstream migrate old-rollouts run:main",
        json=True,
    )
    migrate.add_argument("source", metavar="SOURCE", help="an Avro file, a directory of them, or topic:NAME")
    migrate.add_argument("target", metavar="TARGET", help="run:NAME, or a directory for new files")
    migrate.add_argument("--dry-run", action="store_true", help="read and count, and write nothing")


def _add_export(commands: "Commands") -> None:
    export = _add(
        commands,
        "export",
        "pipeline.tools.export:show_export",
        "write the newest policy version as a Hugging Face checkpoint",
        example="rollstream export --config run.toml trained --dtype bfloat16",
        json=True,
    )
    export.add_argument("directory", type=Path, metavar="DIRECTORY", help="where to; it must not hold a model yet")
    export.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="what parameters are stored as (default: as published)",
    )


def _add_fit(commands: "Commands") -> None:
    fit = _add(
        commands,
        "fit",
        "pipeline.tools.fit:show_fit",
        "compile the training step for TPUs that are not here and say what memory it takes there",
        example="rollstream fit v5e:2x4 --config run.toml --set learner.mesh.fsdp=8",
        json=True,
    )
    fit.add_argument("topology", metavar="TOPOLOGY", help="what libtpu calls it, e.g. v5e:2x4, v5e:4x4, v6e:4x4")
    fit.add_argument("--thorough", action="store_true", help="compile as a learner does, which takes minutes")


def _add_prune(commands: "Commands") -> None:
    prune = _add(
        commands,
        "prune",
        "pipeline.tools.prune:show_prune",
        "delete what recovery, verification and learners no longer need",
        example="rollstream prune --run main --keep-batches 500 --dry-run",
        json=True,
    )
    prune.add_argument("--keep-batches", type=int, metavar="N", help="the newest N stay verifiable (default: 1000)")
    prune.add_argument(
        "--keep-hours",
        type=float,
        metavar="H",
        help="those cut in the last H hours stay verifiable; N is 0 then where it is not given",
    )
    prune.add_argument("--dry-run", action="store_true", help="print what would go and why the rest stays")
    prune.add_argument("--yes", action="store_true", help="delete it; there is no way back")
    prune.add_argument("--checkpoints", type=Path, metavar="DIR", help="where learners' checkpoints lie")
    prune.add_argument(
        "--without-checkpoints", action="store_true", help="keep nothing for going back to a checkpoint of a learner"
    )


def _add_archive(commands: "Commands") -> None:
    archive = _add(
        commands,
        "archive",
        "pipeline.tools.archive:show_archive",
        "copy what is new in the run's topics into Parquet files, each record once",
        example="rollstream archive s3://bucket/runs --run main --follow",
        json=True,
    )
    archive.add_argument(
        "archive", nargs="?", metavar="ARCHIVE", help="a directory, or a URL of fsspec's (default: archive in data_dir)"
    )
    archive.add_argument("--follow", action="store_true", help="go on until interrupted")
    archive.add_argument(
        "--every", type=_seconds, default=10.0, metavar="S", help="seconds between looks (default: %(default)g)"
    )
    archive.add_argument("--arrays", action="store_true", help="tokens, masks and logprobs as columns, too")
    archive.add_argument("--compact", action="store_true", help="merge small files instead; reads no topic")
    archive.add_argument("--check", action="store_true", help="read every file again instead, and compare digests")
    restore = _add(
        commands,
        "restore",
        "pipeline.tools.archive:show_restore",
        "fill the topics of a new run from an archive, every record at the offset it had",
        example="rollstream restore .rollstream/archive --run main --into again",
        json=True,
    )
    restore.add_argument("archive", metavar="ARCHIVE", help="where it lies; --run says which run of it")
    restore.add_argument("--into", required=True, metavar="RUN", help="the run whose topics are created")
    sql = _add(
        commands,
        "sql",
        "pipeline.tools.sql:show_sql",
        "query the archive with DuckDB; without a query, show its tables",
        example="rollstream sql 'select * from drops_by_reason'",
        json=True,
    )
    sql.add_argument("query", nargs="?", metavar="QUERY", help="one SELECT")
    sql.add_argument(
        "--archive", metavar="ARCHIVE", help="a directory, or a URL of fsspec's (default: archive in data_dir)"
    )
    sql.add_argument("--csv", action="store_true", help="print CSV")
    sql.add_argument("--plot", type=Path, metavar="FILE.png", help="draw two columns: a line, or bars over texts")


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no time to wait, in seconds")
    return value


def _add_dlq(commands: "Commands") -> None:
    letters = commands.add_parser("dlq", help="dead letters: ls, show, redrive")
    actions = letters.add_subparsers(dest="action", metavar="COMMAND", required=True)
    where = "pipeline.tools.dlq:dlq"
    _add(actions, "ls", where, "list dead letters, with their reasons", example="rollstream dlq ls", json=True)
    show = _add(
        actions,
        "show",
        where,
        "show dead letters whole: headers, key, bytes",
        example="rollstream dlq show 3",
        json=True,
    )
    redrive = _add(
        actions,
        "redrive",
        where,
        "send dead letters to rollouts again, each once, mended by a script where one is given",
        example="rollstream dlq redrive --fix mend.py",
        json=True,
    )
    redrive.add_argument("--fix", type=Path, metavar="SCRIPT", help="a file that defines fix(value, key, headers)")
    redrive.add_argument("--dry-run", action="store_true", help="say what would be sent, and send nothing")
    for action in (show, redrive):
        action.add_argument(
            "letter", nargs="*", type=int, metavar="LETTER", help="offsets in dead-letters (default: all)"
        )


def _add_exclude(commands: "Commands") -> None:
    exclude = _add(
        commands,
        "exclude",
        "pipeline.tools.exclude:exclude",
        "quarantine rollouts after the fact: what is not yet batched is dropped, learners leave out the rest",
        example="rollstream exclude --run main --worker env-3 --dry-run",
        json=True,
    )
    exclude.add_argument("--env", action="append", default=[], metavar="NAME", help="an environment; may be repeated")
    exclude.add_argument("--worker", action="append", default=[], metavar="ID", help="a worker; may be repeated")
    exclude.add_argument(
        "--offsets", action="append", default=[], metavar="P:A-B", help="offsets A to B of partition P of rollouts"
    )
    exclude.add_argument("--dry-run", action="store_true", help="report only, and change nothing")
    exclude.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds to wait for the grouping processes (default: %(default)g)",
    )


def _add_cat(commands: "Commands") -> None:
    cat = _add(
        commands,
        "cat",
        "pipeline.tools.cat:cat",
        "print the records of a topic, decoded, one a line",
        example="rollstream cat rollouts --run main -o -10 --env dsort3",
        json=True,
    )
    cat.add_argument("topic", metavar="TOPIC", help="its name, with or without the run's")
    cat.add_argument("-p", dest="partition", type=int, metavar="N", help="this partition only")
    cat.add_argument(
        "-o",
        dest="offset",
        default="beginning",
        metavar="OFFSET",
        help="where to begin: beginning, end, an offset, -N for the last N of each partition, s@MS for those of a time "
        "on; e@MS ends at a time (default: %(default)s)",
    )
    cat.add_argument("-c", dest="count", type=int, metavar="N", help="this many records at most")
    cat.add_argument(
        "-f",
        dest="format",
        metavar="FORMAT",
        help="as in kcat: %%s value, %%S its size, %%k key, %%K its size, %%t topic, %%p partition, %%o offset, "
        "%%T time, %%h headers",
    )
    cat.add_argument("--follow", action="store_true", help="wait for more at the end")
    cat.add_argument("--full", action="store_true", help="arrays and bytes in full, not in summary")
    cat.add_argument("--env", metavar="NAME", help="records about this environment only")
    cat.add_argument("--example", metavar="ID", help="about this example only")
    cat.add_argument("--uid", help="about this rollout only")
    cat.add_argument("--policy-version", type=int, metavar="V", help="about this policy version only")
    cat.add_argument("--since", metavar="TIME", help="from this time on: ISO 8601, seconds since 1970, -SECONDS ago")
    cat.add_argument("--until", metavar="TIME", help="before this time only")
