"""`rollstream steer learner`: retires a learner, so that no records are kept for it, or reinstates it."""

import argparse
import time

from rollstream.consumers.weights.step_log import all_steps, read_publications
from rollstream.pipeline.command_line.command_parser import set_handler
from rollstream.pipeline.config import RunConfig
from rollstream.topics.config import KafkaConfig
from rollstream.topics.control.named_records import FORKED, RETIRED, read_named, write
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.open_transactions import await_markers
from rollstream.topics.kafka.transactions import fence, transactional_id
from rollstream.topics.records import ForkedLearner, RetiredLearner
from rollstream.topics.wire.catalogue import topic_name


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


def retire(kafka: KafkaConfig, run: str, learner: str, reason: str) -> RetiredLearner:
    """Record that a learner of a run is retired, and fence it if it published last.

    Raises ConfigurationError if the run has no step of this learner, and no record of a fork with its name.
    """
    for name in ("steps", "policies"):
        await_markers(kafka, topic_name(run, name))
    known = {step.learner for step in all_steps(kafka, run)} | read_named(kafka, run, FORKED, ForkedLearner).keys()
    if learner not in known:
        raise ConfigurationError(
            f"run {run} has no step of learner {learner!r}; learners on record: {', '.join(sorted(known)) or 'none'}"
        )
    last = max(read_publications(kafka, run), default=None)
    record = RetiredLearner(learner=learner, reason=reason, wall_time=time.time())
    write(kafka, run, RETIRED, {learner: record})
    if last is not None and last.learner == learner:
        fence(kafka, transactional_id(run, "learner"))
    return record


def resume(kafka: KafkaConfig, run: str, learner: str) -> None:
    """Let a retired learner train again. Raises ConfigurationError if it is not retired."""
    if learner not in read_named(kafka, run, RETIRED, RetiredLearner):
        raise ConfigurationError(f"learner {learner!r} of run {run} is not retired")
    write(kafka, run, RETIRED, {learner: None})
