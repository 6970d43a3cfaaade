"""Retirement of learners, recorded on `control` of the run that they publish into.

Pruning keeps no records for retired learners.

The operator of the run retires and resumes learners. A retired learner is fenced if it published last, and cannot
start until it is resumed.
"""

import time

from rollstream.consumers.step_log import all_steps, read_publications
from rollstream.topics.config import KafkaConfig
from rollstream.topics.control.forked_learners import forked_learners
from rollstream.topics.control.named_records import write_named
from rollstream.topics.control.retired_learners import RETIRED, retired_learners
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.kafka.open_transactions import await_markers
from rollstream.topics.kafka.transactional_ids import fence, transactional_id
from rollstream.topics.records import RetiredLearner
from rollstream.topics.wire.catalogue import topic_name


def retire(kafka: KafkaConfig, run: str, learner: str, reason: str) -> RetiredLearner:
    """Record that a learner of a run is retired, and fence it if it published last.

    Raises ConfigurationError if the run has no step of this learner, and no record of a fork with its name.
    """
    for name in ("steps", "policies"):
        await_markers(kafka, topic_name(run, name))
    known = {step.learner for step in all_steps(kafka, run)} | forked_learners(kafka, run).keys()
    if learner not in known:
        raise ConfigurationError(
            f"run {run} has no step of learner {learner!r}; learners on record: {', '.join(sorted(known)) or 'none'}"
        )
    last = max(read_publications(kafka, run), default=None)
    record = RetiredLearner(learner=learner, reason=reason, wall_time=time.time())
    write_named(kafka, run, RETIRED, learner, record)
    if last is not None and last.learner == learner:
        fence(kafka, transactional_id(run, "learner"))
    return record


def resume(kafka: KafkaConfig, run: str, learner: str) -> None:
    """Let a retired learner train again. Raises ConfigurationError if it is not retired."""
    if learner not in retired_learners(kafka, run):
        raise ConfigurationError(f"learner {learner!r} of run {run} is not retired")
    write_named(kafka, run, RETIRED, learner, None)
