"""The commands that look into a run, or change what is kept of it: their flags. The handlers are in pipeline.tools."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.commands import add_command

if TYPE_CHECKING:
    from pipeline.commands import Commands


def add_tools(commands: "Commands") -> None:
    ledger = add_command(
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
    verify = add_command(
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
    lineage = add_command(
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
    replay = add_command(
        commands,
        "replay",
        "pipeline.tools.replay:show_replay",
        "fold the recorded log again, as it was or under another configuration",
        example="rollstream replay --run main --set grouping.estimator=grpo",
        json=True,
    )
    replay.add_argument("--from", dest="since", metavar="TIME", help="from this time on (as cat's --since)")
    replay.add_argument("--into", metavar="RUN", help="write the batches as those of another run, to train on")
    show = add_command(
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
    _add_groups(commands)
    _add_dlq(commands)
    _add_exclude(commands)
    _add_learner(commands)
    _add_cat(commands)
    _add_trajectories(commands)
    top = add_command(
        commands,
        "top",
        "pipeline.tools.top:top",
        "show how a run goes, on one screen",
        example="rollstream top --run main",
        json=True,
    )
    top.add_argument("--once", action="store_true", help="show it as it is now and end, as --json does")


def add_mend(broker_commands: "Commands") -> None:
    """Add `mend` to the commands of `broker`."""
    mend = add_command(
        broker_commands,
        "mend",
        "pipeline.tools.mend:show_mend",
        "show transactions of a run that hang on the brokers, and end them",
        example="rollstream broker mend --run main --yes",
        json=True,
    )
    mend.add_argument("--yes", action="store_true", help="end them, as their coordinator did")


def _add_retrain(commands: "Commands") -> None:
    retrain = add_command(
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
    fork = add_command(
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
    migrate = add_command(
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
    export = add_command(
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
    fit = add_command(
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
    prune = add_command(
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
    archive = add_command(
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
    restore = add_command(
        commands,
        "restore",
        "pipeline.tools.archive:show_restore",
        "fill the topics of a new run from an archive, every record at the offset it had",
        example="rollstream restore .rollstream/archive --run main --into again",
        json=True,
    )
    restore.add_argument("archive", metavar="ARCHIVE", help="where it lies; --run says which run of it")
    restore.add_argument("--into", required=True, metavar="RUN", help="the run whose topics are created")
    sql = add_command(
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


def _add_groups(commands: "Commands") -> None:
    groups = add_command(
        commands,
        "groups",
        "pipeline.tools.groups:show_groups",
        "write what is new of the run's groups into Parquet files, in a store of groups",
        example="rollstream groups data/groups --run main --batches",
        json=True,
    )
    groups.add_argument(
        "directory", nargs="?", type=Path, metavar="DIRECTORY", help="the store (default: groups/RUN in data_dir)"
    )
    groups.add_argument("--batches", action="store_true", help="the run's training batches, too")
    groups.add_argument(
        "--policy-version",
        action="append",
        type=int,
        default=[],
        metavar="V",
        help="rollouts of this version only; may be repeated",
    )
    groups.add_argument("--compression", default="zstd", metavar="NAME", help="of the files (default: %(default)s)")


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no time to wait, in seconds")
    return value


def _add_dlq(commands: "Commands") -> None:
    letters = commands.add_parser("dlq", help="dead letters: ls, show, redrive")
    actions = letters.add_subparsers(dest="action", metavar="COMMAND", required=True)
    where = "pipeline.tools.dlq:dlq"
    add_command(actions, "ls", where, "list dead letters, with their reasons", example="rollstream dlq ls", json=True)
    show = add_command(
        actions,
        "show",
        where,
        "show dead letters whole: headers, key, bytes",
        example="rollstream dlq show 0:3",
        json=True,
    )
    redrive = add_command(
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
            "letter", nargs="*", metavar="LETTER", help="PARTITION:OFFSET in dead-letters, as listed (default: all)"
        )


def _add_exclude(commands: "Commands") -> None:
    exclude = add_command(
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
    exclude.add_argument("--unseen", action="store_true", help="environments of which there are no rollouts, too")
    exclude.add_argument("--dry-run", action="store_true", help="report only, and change nothing")
    exclude.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds to wait for the grouping processes (default: %(default)g)",
    )


def _add_learner(commands: "Commands") -> None:
    learner = add_command(
        commands,
        "learner",
        "pipeline.tools.learner:change_learner",
        "retire a learner that trains no more, so that nothing is kept for it; or let it train again",
        example="rollstream learner retire old --run main --reason 'replaced by new'",
    )
    learner.add_argument(
        "action", choices=("retire", "resume"), help="retire: it trains no more; resume: it does again"
    )
    learner.add_argument("learner", metavar="NAME", help="its name, as steps of --run have it")
    learner.add_argument("--reason", default="", help="why it is retired; whoever starts it is told")


def _add_cat(commands: "Commands") -> None:
    cat = add_command(
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


def _add_trajectories(commands: "Commands") -> None:
    trajectories = commands.add_parser("trajectories", help="saved trajectory buffers: show, merge, split")
    actions = trajectories.add_subparsers(dest="action", metavar="COMMAND", required=True)
    where = "pipeline.tools.trajectories"
    show = add_command(
        actions,
        "show",
        f"{where}:show",
        "show what a directory of trajectories holds",
        example="rollstream trajectories show checkpoints/100",
        json=True,
    )
    show.add_argument("directory", type=Path, metavar="DIRECTORY", help="a checkpoint, or what a buffer saves to")
    show.add_argument("--check", action="store_true", help="read every file, and compare checksums where it has them")
    merge = add_command(
        actions,
        "merge",
        f"{where}:merge",
        "make one checkpoint of several; trajectories get new ids",
        example="rollstream trajectories merge checkpoints/100 --into checkpoints/whole",
        json=True,
    )
    merge.add_argument(
        "source", nargs="+", type=Path, metavar="SOURCE", help="a checkpoint, or a directory of rank_0, rank_1, ..."
    )
    merge.add_argument("--into", type=Path, required=True, metavar="DIRECTORY", help="a new directory")
    split = add_command(
        actions,
        "split",
        f"{where}:split",
        "make several checkpoints of one, or one of its oldest trajectories",
        example="rollstream trajectories split checkpoints/whole --into checkpoints/100 --parts 4",
        json=True,
    )
    split.add_argument("source", type=Path, metavar="SOURCE", help="a checkpoint")
    split.add_argument("--into", type=Path, required=True, metavar="DIRECTORY", help="a new directory")
    how = split.add_mutually_exclusive_group(required=True)
    how.add_argument("--parts", type=int, metavar="N", help="rank_0 to rank_N-1, as N ranks would load it")
    how.add_argument("--first", type=int, metavar="N", help="the N oldest")
    for command in (show, merge, split):
        command.add_argument(
            "--allow-pickle", action="store_true", help="load pkl files, which run what their writer put into them"
        )
