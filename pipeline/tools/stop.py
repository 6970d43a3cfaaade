"""`rollstream steer stop`: ends a run after a step, or with nothing in flight, or shows what was requested."""

import argparse
from collections.abc import Iterator

from rollstream.pipeline.command_line.command_parser import set_handler
from rollstream.pipeline.command_line.plain_values import compact
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.control import steering
from rollstream.topics.kafka import clients


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream steer stop`."""
    set_handler(parser, stop, example="rollstream steer stop --at-step 500 --run main", json=True)
    flags = parser.add_mutually_exclusive_group()
    flags.add_argument(
        "--at-step", type=int, metavar="N", help="the last step; a step that is already planned is still trained"
    )
    flags.add_argument(
        "--drain",
        action="store_true",
        help="begin no new groups, finish those that have begun, cancel those that stay incomplete, and end once "
        "learners have gone through all batches",
    )
    flags.add_argument(
        "--withdraw",
        action="store_true",
        help="withdraw both requests, so that learners train as long as their settings say",
    )


def stop(config: RunConfig, args: argparse.Namespace) -> int:
    """Record the request, and print the requests in force."""
    kafka, run = config.kafka, config.run
    clients.check_broker(kafka)
    steering.check_run(kafka, run)
    if args.at_step is not None or args.withdraw:
        steering.record(kafka, run, {"command": "stop", "at_step": args.at_step})
    if args.drain or args.withdraw:
        steering.record(kafka, run, {"command": "drain", "wanted": args.drain})
    wanted = steering.state(kafka, run)
    if args.json:
        print(compact({name: wanted[name] for name in ("stop_at_step", "drain")}))
        return 0
    for line in _lines(run, wanted["stop_at_step"], wanted["drain"]):
        print(line)
    return 0


def _lines(run: str, last: int | None, drain: str | None) -> Iterator[str]:
    if drain == "done":
        yield f"run {run} is drained: its learners end once they have trained on all batches"
    elif drain is not None:
        yield f"run {run} is being drained: no new groups begin, and its learners end once all batches are trained on"
    if last is not None:
        yield f"learners of run {run} end after step {last:,}, including learners that start later"
    elif drain is None:
        yield f"learners of run {run} train as long as their settings say"
