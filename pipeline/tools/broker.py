"""`rollstream broker`: runs a local Kafka; `mend` ends hanging transactions of a run, on any Kafka."""

import argparse
import json
from dataclasses import asdict

from rollstream.infra import commands
from rollstream.pipeline.command_line.command_parser import add_command, set_handler
from rollstream.pipeline.config import RunConfig
from rollstream.topics.kafka import hanging_transactions
from rollstream.topics.kafka.hanging_transactions import OpenTransaction


def register(parser: argparse.ArgumentParser) -> None:
    """Add the commands of `rollstream broker`."""
    mend = add_command(
        commands.register(parser), "mend", "show a run's transactions that hang on the brokers, and end them"
    )
    set_handler(mend, show_mend, example="rollstream broker mend --run main --yes", json=True)
    mend.add_argument("--yes", action="store_true", help="commit or abort them, as their coordinator decided")
    unclear = mend.add_mutually_exclusive_group()
    unclear.add_argument(
        "--commit", action="store_true", help="with --yes, commit those that may be what the coordinator committed last"
    )
    unclear.add_argument("--abort", action="store_true", help="with --yes, abort those")


def show_mend(config: RunConfig, args: argparse.Namespace) -> int:
    """Show hanging transactions, and end them with --yes. Exit code 1 if one still hangs, else 0."""
    transactions = hanging_transactions.hanging(config.kafka, config.run)
    decision = True if args.commit else False if args.abort else None
    if args.yes:
        left = hanging_transactions.end(config.kafka, transactions, commit_unclear=decision)
    else:
        left = transactions
    unclear = any(t.committed is None for t in left)
    if args.json:
        rows = [{**asdict(t), "ends_as": _end_of(t, decision), "ended": t not in left} for t in transactions]
        print(json.dumps({"hanging": rows}))
        return 1 if left else 0
    for t in transactions:
        print(f"{t}: {_end_of(t, decision) if t not in left else f'hangs, to be {_end_of(t, decision)}'}")
    if not transactions:
        print(f"no transaction of run {config.run} hangs at {config.kafka.bootstrap_servers}")
    elif left and unclear:
        print(_UNCLEAR)
    elif left:
        print("some could not be ended; run this again" if args.yes else "nothing was changed; end them with --yes")
    return 1 if left else 0


_UNCLEAR = (
    "the coordinator committed its latest transaction of a producer, which may be the one that hangs or a later one: "
    "give --yes --commit if the group's offsets or an index name its records, else --yes --abort (docs/runbook.md)"
)


def _end_of(transaction: OpenTransaction, decision: bool | None) -> str:
    committed = decision if transaction.committed is None else transaction.committed
    return "committed or aborted" if committed is None else "committed" if committed else "aborted"
