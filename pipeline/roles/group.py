"""The role `group`: one grouping consumer. To scale, start more with further ordinals."""

import argparse
import gc

from rollstream.consumers.grouping.process.grouping_process import run_grouping
from rollstream.pipeline.command_parser import set_handler
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.process_number import add_number
from rollstream.pipeline.roles.following_splits import end_with_split
from rollstream.pipeline.run.role_process import announce_ready, stop_on_signals

COLLECT_AFTER = (50_000, 50, 1000)
"""Thresholds of the garbage collector. A fold holds many objects in flight, none of them in cycles; with the default
thresholds the collector would scan them again and again."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream group`."""
    set_handler(parser, run, role=True, serves=lambda args: args.action is None)
    add_number(parser, "consumer")
    parser.add_argument(
        "action",
        nargs="?",
        choices=("recover", "adopt", "skip"),
        help="recover: commit lost positions again from the journal, and exit; adopt: the same for a run restored from "
        "an archive; skip: have records left out unread",
    )
    parser.add_argument(
        "record", nargs="?", metavar="PARTITION:OFFSET[-LAST]", help="records to skip, as the error names them"
    )
    parser.add_argument("--reason", default="", help="why it is skipped; stays in the journal")


def run(config: RunConfig, args: argparse.Namespace) -> int:
    """Group rollouts until stopped, recover positions from the journal, or mark records to be skipped."""
    if args.action in ("recover", "adopt"):
        return _recover(config, restored=args.action == "adopt")
    if args.action == "skip":
        return _skip(config, args)
    stop = stop_on_signals()
    end_with_split(config.kafka, config.run)
    gc.set_threshold(*COLLECT_AFTER)
    run_grouping(config.kafka, config.run, config.grouping, config.grouper, args.ordinal, stop, on_ready=announce_ready)
    return 0


def _recover(config: RunConfig, restored: bool) -> int:
    from rollstream.consumers.grouping.process.bootstrap import recover

    positions = recover(config.kafka, config.run, config.grouper, restored=restored)
    for partition, position in sorted(positions.items()):
        print(f"partition {partition}: position {position} committed again")
    return 0


def _skip(config: RunConfig, args: argparse.Namespace) -> int:
    from rollstream.consumers.grouping.process.skipped_offsets import ask

    skip = ask(config.kafka, config.run, config.grouper, args.record or "", args.reason)
    last = skip.offset + skip.count - 1
    offsets = f"offset {last} of" if skip.count == 1 else f"{skip.count} offsets, {skip.offset} to {last}, of"
    print(
        f"{offsets} partition {skip.partition} left out, dropped as skipped, by the task that starts before: start "
        f"`rollstream group` again"
    )
    return 0
