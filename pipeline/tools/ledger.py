"""`rollstream ledger`: proves from a run's topics alone that every record is in exactly one place.

With `--incremental` or `--follow`, it reads only new records and keeps its state in a file, which may be deleted.
Exit code 0 if the ledger balances, 1 if it does not, 4 if it balances but some records are still undecided.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rollstream.pipeline.audit.ledger import LiveLedger, ledger
from rollstream.pipeline.audit.texts import ledger_text
from rollstream.pipeline.command_line.command_parser import set_handler, wait_seconds
from rollstream.pipeline.command_line.plain_values import compact
from rollstream.pipeline.command_line.text_tables import clipped, printable, table
from rollstream.pipeline.config import RunConfig

_NAME_WIDTH = 48
"""Width of an environment's name in a table that must fit 80 columns."""
_COLUMNS = 80
_LINE = 200
_NAMED = 3
_IN_ONE_LINE = (
    "produced",
    "batched",
    "dropped",
    "dead_lettered",
    "control",
    "in_flight",
    "unread",
    "trained",
    "skipped",
)
_UNDECIDED = 4
"""Exit code if an open transaction still hides some records."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream ledger`."""
    set_handler(parser, show_ledger, example="rollstream ledger --run main --by env --watch 5", json=True)
    parser.add_argument("--by", choices=("env",), help="also show rollouts and tokens of each environment")
    parser.add_argument(
        "--incremental",
        action="store_true",
        help="read only records that are new since the last time; the state for this is in a file below data_dir",
    )
    often = parser.add_mutually_exclusive_group()
    often.add_argument(
        "--follow",
        type=wait_seconds,
        nargs="?",
        const=1.0,
        metavar="SECONDS",
        help="like --incremental, repeated at this interval until interrupted; print a line per change (default: 1)",
    )
    often.add_argument(
        "--watch",
        type=wait_seconds,
        nargs="?",
        const=3.0,
        metavar="SECONDS",
        help="print the ledger again at this interval, until interrupted (default: 3)",
    )


def show_ledger(config: RunConfig, args: argparse.Namespace) -> int:
    """Print the ledger, repeatedly with --watch and on changes with --follow until interrupted.

    Return 1 if it does not balance, 4 if it balances but an open transaction hides records, else 0.
    """
    with ExitStack() as stack:
        live = stack.enter_context(live_ledger(config)) if args.incremental or args.follow is not None else None
        if args.follow is not None and live is not None:
            _follow(live, args)
        while True:
            book = _book(config) if live is None else _live_book(live)
            text = "" if args.json else book_text(book, by_environment=args.by == "env")
            print(compact(book) if args.json else printable(text), flush=True)
            if args.watch is None:
                return 1 if not book["balanced"] else _UNDECIDED if book["undecided"] else 0
            time.sleep(args.watch)
            if not args.json:
                print()


def live_ledger(config: RunConfig) -> LiveLedger:
    """Return the incremental ledger of a run, whose file is in the run's directory."""
    groups = config.grouper.group_id(config.run), config.labeling.group_id(config.run)
    return LiveLedger(config.kafka, config.run, ledger_file(config), *groups)


def ledger_file(config: RunConfig) -> Path:
    """Return the file of a run's incremental ledger."""
    return config.run_dir / "ledger" / "books"


def _follow(live: LiveLedger, args: argparse.Namespace) -> None:
    """Print a line, or the whole ledger as JSON, whenever the ledger changes, until interrupted."""
    before = None
    while True:
        book = live.poll().as_dict()
        if book != before:
            print(compact(book) if args.json else printable(line_text(book)), flush=True)
        before = book
        time.sleep(args.follow)


def line_text(book: Mapping[str, Any]) -> str:
    """Return a ledger in one line: its places, how much was trained on, and whether it balances."""
    counts = {**book, "dropped": sum(book["dropped"].values())}
    places = [f"{_words(name)} {counts[name]:,}" for name in _IN_ONE_LINE if counts[name]]
    first = [*book["problems"], "the counts do not add up"][0]
    verdict = f"DOES NOT BALANCE: {first}" if not book["balanced"] else "balanced"
    return f"{', '.join(places) or 'nothing produced'}; {verdict}" + (" as far as decided" * bool(book["undecided"]))


def _live_book(live: LiveLedger) -> dict[str, Any]:
    book = live.poll().as_dict()
    return {**book, "books": {"bytes": live.state_bytes, "begun_anew": live.begun_anew}}


def _book(config: RunConfig) -> dict[str, Any]:
    kafka, run = config.kafka, config.run
    return ledger(kafka, run, config.grouper.group_id(run), config.labeling.group_id(run)).as_dict()


def book_text(book: Mapping[str, Any], *, by_environment: bool = False) -> str:
    """Return a ledger as text: records, tokens, learners, evaluations, and environments on request."""
    parts = [ledger_text(book)]
    tokens = book["tokens"]
    if tokens:
        rows = [(_words(name), count) for name, count in tokens.items() if count or name == "produced"]
        parts.append(table(("of records read", "tokens"), rows))
    if book["learners"]:
        parts.append(learners_text(book["learners"]))
    if book["unlabelled"]["produced"] or book["trajectories"]["records"]:
        parts.append(trajectories_text(book["unlabelled"], book["trajectories"]))
    if book.get("calls", {}).get("sessions"):
        parts.append(calls_text(book["calls"]))
    if by_environment:
        parts.append(environments_text(book["environments"]))
    if book.get("configurations"):
        parts.append(configurations_text(book["configurations"]))
    if book["evaluations"]:
        parts.append(evaluations_text(book["evaluations"]))
    apart = [f"evals, not included above: {book['evals']:,} rollouts"]
    if book["evals"]:
        trained_on = f"{book['evals_batched']:,} OF THEM IN BATCHES" if book["evals_batched"] else "none in a batch"
        apart[0] += f", {trained_on}"
    if kept := book.get("books"):
        apart.append(f"read {kept_text(kept)}")
    if book["pruned"]:
        apart.append(f"{book['pruned']:,} records were pruned: only the journal's counts include them")
    if book["records_skipped"]:
        first = (f"  {line[:_LINE]}" for line in book["unreadable"][:_NAMED])
        apart += [f"{book['records_skipped']:,} records could not be read and were ignored, the first:", *first]
    return "\n\n".join([*parts, "\n".join(apart)])


def configurations_text(listed: Sequence[Mapping[str, Any]]) -> str:
    """Return lines on the grouping configurations, oldest first: where each is in force, and what it changed."""
    lines = []
    for each in listed:
        partitions = len(each["in_force"])
        force = f"in force on {partitions} partition{'s' * (partitions != 1)}" if partitions else "no longer in force"
        lines.append(f"configuration of generation {each['generation']}, {force}")
        changed = each["changed"]
        if changed is None:
            lines.append("  its changes are not known yet")
        else:
            lines += [f"  {name}: {compact(before)} -> {compact(now)}" for name, (before, now) in changed.items()]
    return "\n".join(clipped(line, _COLUMNS) for line in lines)


def kept_text(kept: Mapping[str, Any]) -> str:
    """Return how much was read, and the size of the file that is kept for the next reading."""
    read = f"from the beginning ({kept['begun_anew']})" if kept["begun_anew"] else "only new records"
    return f"{read}; the file for the next reading has {kept['bytes']:,} bytes"


def learners_text(learners: Mapping[str, Any]) -> str:
    """Return a table of learners: steps, rollouts trained on and skipped, batches waiting."""
    rows = [
        (
            clipped(name, _NAME_WIDTH),
            row["step"],
            row["trained"],
            row["skipped"],
            "(retired)" if row.get("retired") else row.get("waiting", f"(run {row['input_run']})"),
        )
        for name, row in learners.items()
    ]
    return table(("learner", "step", "trained", "skipped", "batches waiting"), rows)


def trajectories_text(unlabelled: Mapping[str, int], trajectories: Mapping[str, Any]) -> str:
    """Return a table of the fates of records that waited for a label, and of trajectories that wait for each filler."""
    rows: list[tuple[object, ...]] = [("unlabelled", unlabelled["produced"])]
    fates = ("labeled", "left_out", "dead_lettered", "pending", "undecided")
    rows += [(f"  {_words(fate)}", unlabelled[fate]) for fate in fates if unlabelled[fate]]
    rows.append(("trajectories", trajectories["records"]))
    rows += [
        (f"  wait for {clipped(name, _NAME_WIDTH)}", filler["waiting"])
        for name, filler in trajectories["fillers"].items()
    ]
    pruned = (
        f"\n{unlabelled['pruned']:,} of these were pruned: only counts include them" if unlabelled["pruned"] else ""
    )
    return table(("ledger of trajectories", "records"), rows) + pruned


def calls_text(calls: Mapping[str, Any]) -> str:
    """Return a table of the fates of model calls, and of the reasons for which sessions were cancelled."""
    rows: list[tuple[object, ...]] = [("calls", calls["recorded"])]
    rows += [(f"  {_words(fate)}", calls[fate]) for fate in ("in_rollouts", "open") if calls[fate]]
    dropped = ("cancelled", "retried", "late", "no_session")
    rows += [(f"  dropped: {_words(fate)}", calls[fate]) for fate in dropped if calls[fate]]
    if calls["pruned"]:
        rows.append(("  of sessions whose start was pruned", calls["pruned"]))
    rows += [("sessions", calls["sessions"]), ("  open", calls["open_sessions"])]
    rows += [(f"  cancelled: {clipped(reason, _NAME_WIDTH)}", count) for reason, count in calls["reasons"].items()]
    pruned = calls.get("pruned_offsets", 0)
    return table(("ledger of calls", "records"), rows) + (
        f"\n{pruned:,} offsets before these were pruned" if pruned else ""
    )


def environments_text(environments: Mapping[str, Any]) -> str:
    """Return a table of rollouts and tokens by environment and fate."""
    rows: list[tuple[object, ...]] = []
    for environment, counts in environments.items():
        for fate, count in counts["records"].items():
            label = clipped(environment or "(none)", _NAME_WIDTH) if fate == "produced" else f"  {_words(fate)}"
            if count or fate == "produced":
                rows.append((label, count, counts["tokens"].get(fate, 0)))
    return table(("environment", "rollouts", "tokens"), rows) if rows else "no environment is on record yet"


def evaluations_text(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of evaluations, with the versions that answered if they differ from the requested version."""
    rows: list[tuple[object, ...]] = []
    for evaluation in evaluations:
        low, high = evaluation["lowest_version"], evaluation["highest_version"]
        answered = "" if low == high == evaluation["version"] else f"{low}" if low == high else f"{low}-{high}"
        answers = evaluation["prompts"] * evaluation["samples"]
        missing = f" of {answers:,}" if evaluation["episodes"] < answers else ""
        passed = evaluation.get(f"pass@{evaluation['samples']}")
        means = (evaluation["reward"], evaluation["success"], "" if passed is None else f"{passed:.3f}")
        name = f"{clipped(evaluation['environment'], _NAME_WIDTH)}/{evaluation['split']} {evaluation['phase']}"
        rows.append((name, evaluation["version"], answered, f"{evaluation['rollouts']:,}{missing}", *means))
    return table(("evaluation", "version", "answered by", "rollouts", "reward", "success", "pass@n"), rows)


def _words(fate: str) -> str:
    return fate.replace("_", " ").replace(":", ": ")
