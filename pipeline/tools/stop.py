"""`rollstream stop`: lets the learner of a run end after a step; without a flag, shows after which."""

import argparse

from rollstream.pipeline import steering
from rollstream.pipeline.command_parser import set_handler
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.tools.plain_values import compact
from rollstream.topics.kafka import clients


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream stop`."""
    set_handler(parser, stop, example="rollstream stop --at-step 500 --run main", json=True)
    flags = parser.add_mutually_exclusive_group()
    flags.add_argument("--at-step", type=int, metavar="N", help="the last step; one that is planned already is trained")
    flags.add_argument("--withdraw", action="store_true", help="let it train on, to the end of its settings")


def stop(config: RunConfig, args: argparse.Namespace) -> int:
    """Record the step, and print the one that holds."""
    clients.check_broker(config.kafka)
    if args.at_step is not None or args.withdraw:
        steering.record(config.kafka, config.run, {"command": "stop", "at_step": args.at_step})
    last = steering.state(config.kafka, config.run)["stop_at_step"]
    if args.json:
        print(compact({"stop_at_step": last}))
    elif last is None:
        print(f"learners of run {config.run} train to the end of their settings")
    else:
        print(f"learners of run {config.run} end after step {last:,}, also those that start later")
    return 0
