"""The role `group`: one grouping consumer. To scale, start more processes with the next ordinals."""

import argparse
import gc
from contextlib import closing

from rollstream.consumers.grouping.process.grouping_process import run_grouping
from rollstream.pipeline.command_line.command_parser import set_handler
from rollstream.pipeline.command_line.process_number import add_number
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.process.role_process import announce_progress, announce_ready, stop_on_signals
from rollstream.pipeline.run.broker_wait import wait_for_broker
from rollstream.topics.errors import ConfigurationError

COLLECT_AFTER = (50_000, 50, 1000)
"""Thresholds of the garbage collector. Grouping keeps many objects in flight, none of them in cycles; with the default
thresholds, the collector would scan them again and again."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream role group`."""
    set_handler(parser, run, role=True, serves=lambda args: args.action is None)
    add_number(parser, "consumer")
    parser.add_argument(
        "action",
        nargs="?",
        choices=("recover", "adopt", "skip", "pause", "resume"),
        help="recover: commit lost positions again from the journal, and exit; adopt: the same for a run restored from "
        "an archive; skip: make a record a dead letter without decoding it; pause: stop reading a partition; "
        "resume: read it again",
    )
    parser.add_argument(
        "place",
        nargs="?",
        metavar="PARTITION[:OFFSET]",
        help="record to skip, as the error names it; or the partition to pause or resume",
    )
    parser.add_argument("--reason", default="", help="why; the reason of a skip is kept in the dead letter")


def run(config: RunConfig, args: argparse.Namespace) -> int:
    """Group rollouts until stopped, or change what the processes of the run read."""
    if args.action in ("recover", "adopt"):
        return _recover(config, restored=args.action == "adopt")
    if args.action == "skip":
        return _skip(config, args)
    if args.action in ("pause", "resume"):
        return _pause(config, args)
    stop = stop_on_signals()
    wait_for_broker(config)
    gc.set_threshold(*COLLECT_AFTER)
    from rollstream.pipeline.run.draining import Drainer

    with closing(Drainer(config)):
        run_grouping(
            config.kafka,
            config.run,
            config.grouping,
            config.grouper,
            args.ordinal,
            stop,
            on_ready=announce_ready,
            on_progress=announce_progress,
        )
    if config.grouper.leave_on_stop:
        _leave(config, args.ordinal)
    return 0


def _leave(config: RunConfig, ordinal: int) -> None:
    from rollstream.pipeline.run.autoscaling import leave_group  # imported here because few processes need it

    leave_group(config, (ordinal,))


def _recover(config: RunConfig, restored: bool) -> int:
    from rollstream.consumers.grouping.process.bootstrap import recover

    positions = recover(config.kafka, config.run, config.grouper, restored=restored)
    for partition, position in sorted(positions.items()):
        print(f"partition {partition}: position {position} committed again")
    return 0


def _skip(config: RunConfig, args: argparse.Namespace) -> int:
    from rollstream.consumers.grouping.process.skipped_offsets import request_skip

    skip = request_skip(config.kafka, config.run, config.grouper, args.place or "", args.reason)
    print(
        f"offset {skip.offset} of partition {skip.partition} will be a dead letter, without being decoded, when its "
        f"grouping task starts again: start `rollstream role group` again"
    )
    return 0


def _pause(config: RunConfig, args: argparse.Namespace) -> int:
    from rollstream.topics.control.named_records import pause, resume
    from rollstream.topics.kafka import clients

    if not (args.place or "").isdecimal():
        raise ConfigurationError(f"name a partition, e.g. `rollstream role group {args.action} 0 --run {config.run}`")
    clients.check_broker(config.kafka)
    partition = int(args.place)
    if args.action == "resume":
        resume(config.kafka, config.run, partition)
        print(f"partition {partition} of rollouts is read again")
        return 0
    pause(config.kafka, config.run, partition, args.reason)
    print(
        f"no process reads partition {partition} of rollouts any further until `rollstream role group "
        f"resume {partition} --run {config.run}`"
    )
    return 0
