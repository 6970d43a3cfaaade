"""`rollstream ledger`: proves from a run's topics alone that every record is in exactly one place.

Exit code 0 if the ledger balances, 1 if it does not, 4 if it balances but some records are still undecided.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rollstream.pipeline.audit.ledger import ledger
from rollstream.pipeline.command_parser import set_handler, wait_seconds
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.run.demo_report import ledger_text
from rollstream.pipeline.text_tables import clipped, printable, table
from rollstream.pipeline.tools.plain_values import compact

_NAME_WIDTH = 48
"""Width of an environment's name in a table that must fit 80 columns."""
_LINE = 200
_NAMED = 3
_UNDECIDED = 4
"""Exit code if an open transaction still hides some records."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream ledger`."""
    set_handler(parser, show_ledger, example="rollstream ledger --run main --by env --watch 5", json=True)
    parser.add_argument("--by", choices=("env",), help="rollouts and tokens of each environment, too")
    parser.add_argument(
        "--watch",
        type=wait_seconds,
        nargs="?",
        const=3.0,
        metavar="SECONDS",
        help="print it again every so many seconds until interrupted (default: 3)",
    )


def show_ledger(config: RunConfig, args: argparse.Namespace) -> int:
    """Print the ledger, repeatedly with --watch until interrupted.

    Return 1 if it does not balance, 4 if it does and an open transaction hides some of it, else 0.
    """
    while True:
        book = ledger(
            config.kafka, config.run, config.grouper.group_id(config.run), config.labeling.group_id(config.run)
        ).as_dict()
        print(compact(book) if args.json else printable(book_text(book, by_environment=args.by == "env")), flush=True)
        if args.watch is None:
            return 1 if not book["balanced"] else _UNDECIDED if book["undecided"] else 0
        time.sleep(args.watch)
        if not args.json:
            print()


def book_text(book: Mapping[str, Any], *, by_environment: bool = False) -> str:
    """A ledger for people: records, tokens, learners, evaluations, and environments on request."""
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
    if book["evaluations"]:
        parts.append(evaluations_text(book["evaluations"]))
    apart = [f"evals, apart from all this: {book['evals']:,} rollouts"]
    if book["evals"]:
        trained_on = f"{book['evals_batched']:,} OF THEM IN BATCHES" if book["evals_batched"] else "none in a batch"
        apart[0] += f", {trained_on}"
    if book["pruned"]:
        apart.append(f"{book['pruned']:,} records were pruned: only the journal's counts tell of them")
    if book["records_skipped"]:
        first = (f"  {line[:_LINE]}" for line in book["unreadable"][:_NAMED])
        apart += [f"{book['records_skipped']:,} records could not be read and count for nothing, the first:", *first]
    return "\n\n".join([*parts, "\n".join(apart)])


def learners_text(learners: Mapping[str, Any]) -> str:
    """Table of learners: steps, rollouts trained on and skipped, batches waiting."""
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
    """Table of the fates of trajectories that waited for a label, and of what waits for each filler."""
    rows: list[tuple[object, ...]] = [("unlabelled", unlabelled["produced"])]
    fates = ("labeled", "left_out", "dead_lettered", "pending", "undecided")
    rows += [(f"  {_words(fate)}", unlabelled[fate]) for fate in fates if unlabelled[fate]]
    rows.append(("trajectories", trajectories["records"]))
    rows += [
        (f"  wait for {clipped(name, _NAME_WIDTH)}", filler["waiting"])
        for name, filler in trajectories["fillers"].items()
    ]
    pruned = f"\n{unlabelled['pruned']:,} of these are pruned: only counts tell of them" if unlabelled["pruned"] else ""
    return table(("ledger of trajectories", "records"), rows) + pruned


def calls_text(calls: Mapping[str, Any]) -> str:
    """Table of the fates of model calls, and of the reasons for which sessions were cancelled."""
    rows: list[tuple[object, ...]] = [("calls", calls["recorded"])]
    rows += [(f"  {_words(fate)}", calls[fate]) for fate in ("in_rollouts", "open") if calls[fate]]
    dropped = ("cancelled", "retried", "late", "no_session")
    rows += [(f"  dropped: {_words(fate)}", calls[fate]) for fate in dropped if calls[fate]]
    rows += [("sessions", calls["sessions"]), ("  open", calls["open_sessions"])]
    rows += [(f"  cancelled: {clipped(reason, _NAME_WIDTH)}", count) for reason, count in calls["reasons"].items()]
    pruned = calls.get("pruned_offsets", 0)
    return table(("ledger of calls", "records"), rows) + (
        f"\n{pruned:,} offsets before them are pruned" if pruned else ""
    )


def environments_text(environments: Mapping[str, Any]) -> str:
    """Rollouts and tokens by environment and fate."""
    rows: list[tuple[object, ...]] = []
    for environment, counts in environments.items():
        for fate, count in counts["records"].items():
            label = clipped(environment or "(none)", _NAME_WIDTH) if fate == "produced" else f"  {_words(fate)}"
            if count or fate == "produced":
                rows.append((label, count, counts["tokens"].get(fate, 0)))
    return table(("environment", "rollouts", "tokens"), rows) if rows else "no environment is on record yet"


def evaluations_text(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """Table of evaluations, with the versions that answered if they are not the one requested."""
    rows: list[tuple[object, ...]] = []
    for evaluation in evaluations:
        low, high = evaluation["lowest_version"], evaluation["highest_version"]
        answered = "" if low == high == evaluation["version"] else f"{low}" if low == high else f"{low}-{high}"
        missing = f" of {evaluation['prompts']:,}" if evaluation["episodes"] < evaluation["prompts"] else ""
        means = (evaluation["reward"], "" if evaluation["exact"] is None else f"{evaluation['exact']:.3f}")
        name = f"{clipped(evaluation['environment'], _NAME_WIDTH)}/{evaluation['split']} {evaluation['phase']}"
        rows.append((name, evaluation["version"], answered, f"{evaluation['rollouts']:,}{missing}", *means))
    return table(("evaluation", "version", "answered by", "rollouts", "reward", "exact"), rows)


def _words(fate: str) -> str:
    return fate.replace("_", " ").replace(":", ": ")
