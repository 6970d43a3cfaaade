"""The role `group`: one grouping consumer; scaling is starting more of them under further ordinals."""

import argparse
import gc

from consumers.grouping.shell import run_grouping
from pipeline.config import RunConfig
from pipeline.process import announce_ready, stop_on_signals

COLLECT_AFTER = (50_000, 50, 1000)
"""Thresholds of the garbage collector. What a fold holds grows with what is in flight, is in no cycles, and by default
would be looked through again and again."""


def run(config: RunConfig, args: argparse.Namespace) -> int:
    """Group rollouts until told to stop; or commit positions again from the journal, of a restored run too; or have a
    record skipped."""
    if args.action in ("recover", "adopt"):
        return _recover(config, restored=args.action == "adopt")
    if args.action == "skip":
        return _skip(config, args)
    stop = stop_on_signals()
    gc.set_threshold(*COLLECT_AFTER)
    run_grouping(config.kafka, config.run, config.grouping, config.grouper, args.ordinal, stop, on_ready=announce_ready)
    return 0


def _recover(config: RunConfig, restored: bool) -> int:
    from consumers.grouping.bootstrap import recover

    positions = recover(config.kafka, config.run, config.grouper, restored=restored)
    for partition, position in sorted(positions.items()):
        print(f"partition {partition}: position {position} committed again")
    return 0


def _skip(config: RunConfig, args: argparse.Namespace) -> int:
    from consumers.grouping.skips import ask

    skip = ask(config.kafka, config.run, config.grouper, args.record or "", args.reason)
    print(
        f"offset {skip.offset} of partition {skip.partition} is left out, dropped as skipped, by the task that starts "
        f"before it: start `rollstream group` again"
    )
    return 0
