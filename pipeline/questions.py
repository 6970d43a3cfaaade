"""`rollstream ledger` and `rollstream verify`: what can be asked of a run, live or over, from its topics alone.

Exit code 0 when the answer is yes, 1 when it is no, 4 when it is yes as far as it is decided yet.
"""

import argparse
import os
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.config import RunConfig
from pipeline.report import ledger_text, verification_text
from pipeline.tables import clipped, printable, table
from pipeline.tools.plain import compact, tell
from topics.errors import ConfigurationError

_NAME_WIDTH = 48
"""Of an environment in a table that must fit 80 columns."""
_LINE = 200
_NAMED = 3
_UNDECIDED = 4
"""Exit code where there is no answer yet."""


def show_ledger(config: RunConfig, args: argparse.Namespace) -> int:
    """Print the ledger, again and again with --watch until interrupted; 1 when it does not balance, 4 when it does and
    a transaction that stands open hides some of it."""
    from pipeline.ledger import ledger

    while True:
        book = ledger(
            config.kafka, config.run, config.grouper.group_id(config.run), config.labelling.group_id(config.run)
        ).as_dict()
        print(compact(book) if args.json else printable(book_text(book, by_environment=args.by == "env")), flush=True)
        if args.watch is None:
            return 1 if not book["balanced"] else _UNDECIDED if book["undecided"] else 0
        time.sleep(args.watch)
        if not args.json:
            print()


def book_text(book: Mapping[str, Any], *, by_environment: bool = False) -> str:
    """A ledger for people: records, tokens, evaluations apart; by environment where that is asked for."""
    parts = [ledger_text(book)]
    tokens = book["tokens"]
    if tokens:
        rows = [(_words(name), count) for name, count in tokens.items() if count or name == "produced"]
        parts.append(table(("of what was read", "tokens"), rows))
    if book["learners"]:
        parts.append(learners_text(book["learners"]))
    if book["unlabelled"]["produced"] or book["trajectories"]["records"]:
        parts.append(trajectories_text(book["unlabelled"], book["trajectories"]))
    if by_environment:
        parts.append(environments_text(book["environments"]))
    if book["evaluations"]:
        parts.append(evaluations_text(book["evaluations"]))
    apart = [f"evals, apart from all this: {book['evals']:,} rollouts"]
    if book["evals"]:
        trained_on = f"{book['evals_batched']:,} OF THEM IN BATCHES" if book["evals_batched"] else "none in a batch"
        apart[0] += f", {trained_on}"
    if book["pruned"]:
        apart.append(f"{book['pruned']:,} records were pruned: they are known by the journal's counts alone")
    if book["records_skipped"]:
        first = (f"  {line[:_LINE]}" for line in book["unreadable"][:_NAMED])
        apart += [f"{book['records_skipped']:,} records could not be read and count for nothing, the first:", *first]
    return "\n\n".join([*parts, "\n".join(apart)])


def learners_text(found: Mapping[str, Any]) -> str:
    """What each learner made of the batches: its steps, what it trained on and skipped, and what waits for it."""
    rows = [
        (
            clipped(name, _NAME_WIDTH),
            row["step"],
            row["trained"],
            row["skipped"],
            "(retired)" if row.get("retired") else row.get("waiting", f"(run {row['input_run']})"),
        )
        for name, row in found.items()
    ]
    return table(("learner", "step", "trained", "skipped", "batches waiting"), rows)


def trajectories_text(unlabelled: Mapping[str, int], trajectories: Mapping[str, Any]) -> str:
    """What became of trajectories that waited for a label, and what waits for each filler."""
    rows: list[tuple[object, ...]] = [("unlabelled", unlabelled["produced"])]
    fates = ("labelled", "left_out", "dead_lettered", "pending", "undecided")
    rows += [(f"  {_words(fate)}", unlabelled[fate]) for fate in fates if unlabelled[fate]]
    rows.append(("trajectories", trajectories["records"]))
    rows += [
        (f"  wait for {clipped(name, _NAME_WIDTH)}", of["waiting"]) for name, of in trajectories["fillers"].items()
    ]
    pruned = f"\n{unlabelled['pruned']:,} of these are known by counts alone" if unlabelled["pruned"] else ""
    return table(("ledger of trajectories", "records"), rows) + pruned


def environments_text(found: Mapping[str, Any]) -> str:
    """Rollouts and tokens by environment and fate."""
    rows: list[tuple[object, ...]] = []
    for environment, figures in found.items():
        for fate, count in figures["records"].items():
            label = clipped(environment or "(none)", _NAME_WIDTH) if fate == "produced" else f"  {_words(fate)}"
            if count or fate == "produced":
                rows.append((label, count, figures["tokens"].get(fate, 0)))
    return table(("environment", "rollouts", "tokens"), rows) if rows else "no environment is on record yet"


def evaluations_text(found: Sequence[Mapping[str, Any]]) -> str:
    """Evaluations by environment, split and version; what answered, where that is not the version asked for."""
    rows: list[tuple[object, ...]] = []
    for one in found:
        low, high = one["lowest_version"], one["highest_version"]
        answered = "" if low == high == one["version"] else f"{low}" if low == high else f"{low}-{high}"
        missing = f" of {one['prompts']:,}" if one["rollouts"] < one["prompts"] else ""
        means = (one["reward"], "" if one["exact"] is None else f"{one['exact']:.3f}")
        name = f"{clipped(one['environment'], _NAME_WIDTH)}/{one['split']} {one['phase']}"
        rows.append((name, one["version"], answered, f"{one['rollouts']:,}{missing}", *means))
    return table(("evaluation", "version", "answered by", "rollouts", "reward", "exact"), rows)


def _words(fate: str) -> str:
    return fate.replace("_", " ").replace(":", ": ")


def show_verification(config: RunConfig, args: argparse.Namespace) -> int:
    """Compute batches again and print what differs; 1 when one does."""
    from pipeline.progress import progress
    from pipeline.verify import index_of, verify

    if args.batch and (args.all or args.last is not None or args.sample is not None):
        raise ConfigurationError("batches are named, and --all, --last or --sample chooses others; say one of both")
    only = list(args.batch) or None
    if args.last is not None or args.sample is not None:
        names = list(index_of(config.kafka, config.run))
        only = names[-args.last :] if args.last is not None else _sample(names, args.sample, args.seed)
    with progress("batches") as show:
        verification = verify(
            config.kafka, config.run, config.grouper.makers, only=only, processes=os.cpu_count() or 1, progress=show
        )
    found = verification.as_dict()
    text = verification_text(found)
    if found["unverifiable"]:
        text += f"\n{found['unverifiable']:,} batches are no longer verifiable: what they were made of was pruned"
    print(compact(found) if args.json else text)
    tell(verification.skipped)
    return 0 if not found["mismatches"] and not (args.batch and found["unverifiable"]) else 1


def _sample(names: list[str], count: int, seed: int) -> list[str]:
    return random.Random(seed).sample(names, min(count, len(names)))
