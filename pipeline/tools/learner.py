"""`rollstream learner`: say that a learner trains no more, so that nothing is kept for it, or that it does again."""

import argparse

from consumers.retirement import resume, retire
from pipeline.config import RunConfig
from topics import clients


def change_learner(config: RunConfig, args: argparse.Namespace) -> int:
    """Put the decision on record and say what follows from it."""
    clients.check_broker(config.kafka)
    if args.action == "resume":
        resume(config.kafka, config.run, args.learner)
        print(f"learner {args.learner} of run {config.run} may train again; what was pruned meanwhile is gone")
        return 0
    retire(config.kafka, config.run, args.learner, args.reason)
    print(
        f"learner {args.learner} of run {config.run} is retired: prune, the ledger and workers leave it out, and it is "
        f"refused until `rollstream learner resume {args.learner} --run {config.run}`"
    )
    return 0
