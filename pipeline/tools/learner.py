"""`rollstream steer learner`: retires a learner, so that no records are kept for it, or reinstates it."""

import argparse

from rollstream.consumers.learner_retirement import resume, retire
from rollstream.pipeline.command_line.command_parser import set_handler
from rollstream.pipeline.config import RunConfig
from rollstream.topics.kafka import clients


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream steer learner`."""
    example = "rollstream steer learner retire old --run main --reason 'replaced by new'"
    set_handler(parser, change_learner, example=example)
    parser.add_argument(
        "action", choices=("retire", "resume"), help="retire: forbid it to train; resume: allow it again"
    )
    parser.add_argument("learner", metavar="NAME", help="name of the learner in the run's steps")
    parser.add_argument("--reason", default="", help="why it is retired; shown when somebody starts it")


def change_learner(config: RunConfig, args: argparse.Namespace) -> int:
    """Record that the learner is retired or reinstated, and print the consequences."""
    clients.check_broker(config.kafka)
    if args.action == "resume":
        resume(config.kafka, config.run, args.learner)
        print(
            f"learner {args.learner} of run {config.run} may train again; records pruned since its retirement are gone"
        )
        return 0
    retire(config.kafka, config.run, args.learner, args.reason)
    print(
        f"learner {args.learner} of run {config.run} is retired: prune, the ledger and workers ignore it, and it is "
        f"refused until `rollstream steer learner resume {args.learner} --run {config.run}`"
    )
    return 0
