"""`rollstream broker mend`: shows transactions of a run that hang on the brokers, and ends them with --yes."""

import argparse
import json
from dataclasses import asdict

from pipeline.config import RunConfig
from topics import hanging
from topics.hanging import OpenTransaction


def show_mend(config: RunConfig, args: argparse.Namespace) -> int:
    """Show what hangs, and end it with --yes. Exit code 0 where nothing hangs (any more), 1 where something does."""
    found = hanging.hanging(config.kafka, config.run)
    left = hanging.end(config.kafka, found) if args.yes else found
    if args.json:
        rows = [{**asdict(each), "ends_as": _end_of(each), "ended": each not in left} for each in found]
        print(json.dumps({"hanging": rows}))
        return 1 if left else 0
    for each in found:
        print(f"{each}: {_end_of(each) if each not in left else f'hangs, to be {_end_of(each)}'}")
    if not found:
        print(f"no transaction of run {config.run} hangs at {config.kafka.bootstrap_servers}")
    elif left:
        print("ending them failed: repeat it" if args.yes else "nothing was changed; end them with --yes")
    return 1 if left else 0


def _end_of(each: OpenTransaction) -> str:
    return "committed" if each.committed else "aborted"
