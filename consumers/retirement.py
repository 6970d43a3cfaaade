"""Learners that train no more, as `control` of the run whose steps they wrote says: nothing is kept for a retired one.

Whoever operates the run decides so. A retired learner that still runs is fenced, and one that starts is refused until
it is resumed.
"""

import time

from consumers.learner.step_log import read_learners
from topics import clients
from topics.catalogue import topic_name
from topics.codec import encode
from topics.config import KafkaConfig
from topics.errors import ConfigurationError, DeliveryError
from topics.keys import encode_key
from topics.records import RetiredLearner
from topics.retired import RETIRED, retired_learners
from topics.transactional_ids import fence, transactional_id

_TIMEOUT_S = 30.0


def retire(kafka: KafkaConfig, run: str, learner: str, reason: str) -> RetiredLearner:
    """Put on record that a learner of a run trains no more, and fence it where it published last.

    Raises ConfigurationError where the run has no step of it.
    """
    known = read_learners(kafka, run)
    if learner not in known:
        raise ConfigurationError(
            f"run {run} has no step of learner {learner!r}; those on record: {', '.join(sorted(known)) or 'none'}"
        )
    record = RetiredLearner(learner=learner, reason=reason, wall_time=time.time())
    _write(kafka, run, learner, encode(record))
    if known[learner] == max(known.values()):
        fence(kafka, transactional_id(run, "learner"))
    return record


def resume(kafka: KafkaConfig, run: str, learner: str) -> None:
    """Let a retired learner train again. Raises ConfigurationError where it is not retired."""
    if learner not in retired_learners(kafka, run):
        raise ConfigurationError(f"learner {learner!r} of run {run} is not retired")
    _write(kafka, run, learner, None)


def _write(kafka: KafkaConfig, run: str, learner: str, value: bytes | None) -> None:
    failed: list[str] = []
    topic, producer = topic_name(run, "control"), clients.producer(kafka)
    clients.partitions_of(kafka, topic)
    clients.produce(
        producer,
        topic,
        value,
        encode_key(RETIRED, learner),
        partition=0,
        on_delivery=lambda error, _message: failed.append(error.str()) if error is not None else None,
    )
    if producer.flush(_TIMEOUT_S) or failed:
        why = failed[0] if failed else f"no answer within {_TIMEOUT_S:g} s"
        raise DeliveryError(f"{topic} was not written ({why}); run this again")
