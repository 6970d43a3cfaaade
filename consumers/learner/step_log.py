"""The learner's transactions: a steps record and the manifest it led to appear together or not at all.

One learner per name: building a StepLog fences every earlier one of that name, whose next commit then raises Fenced.
"""

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from topics import clients
from topics.catalogue import topic_name
from topics.codec import encode
from topics.config import KafkaConfig
from topics.errors import BrokerUnavailable, Fenced
from topics.keys import decode_key, encode_key
from topics.logs import event
from topics.records import LearnerStep
from topics.skipped import SkippedRecords

logger = logging.getLogger(__name__)

_TIMEOUT_S = 60.0
_FENCED = (KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH)

TopicRecord = tuple[str, bytes, bytes]
"""Topic, key and value."""


def read_steps(kafka: KafkaConfig, run: str, learner: str) -> dict[int, LearnerStep]:
    """The newest committed record of each step of a learner, by step; what cannot be read is skipped and logged."""
    found = {}
    skipped = SkippedRecords(f"learner-{learner}")
    for message in clients.read_to_end(kafka, topic_name(run, "steps")):
        with skipped.passing(message):
            key = message.key()
            if decode_key(key if isinstance(key, bytes) else None)[:1] == (learner,):
                record = skipped.decode(LearnerStep, message)
                if record is not None:
                    found[record.step] = record
    return found


class StepLog:
    """Commits records of one learner atomically."""

    def __init__(self, kafka: KafkaConfig, run: str, learner: str) -> None:
        self._learner = learner
        self._run = run
        self._steps_topic = topic_name(run, "steps")
        clients.partitions_of(kafka, self._steps_topic)
        self._transactional_id = f"learner-{run}-{learner}"
        # With a logger, what librdkafka says when it is fenced is a line of our log rather than one of its own.
        self._producer = clients.transactional_producer(kafka, self._transactional_id, logger=logger)
        self._retry("initialising transactions", self._producer.init_transactions)

    def record(self, step: LearnerStep) -> TopicRecord:
        """Topic, key and value of a steps record."""
        return self._steps_topic, encode_key(step.learner, step.step), encode(step)

    def commit(self, records: Sequence[TopicRecord]) -> None:
        """Write records in one transaction, again from its beginning where the broker made us abort.

        Raises Fenced when another learner of the name took over, BrokerUnavailable when it cannot be done in time.
        """
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            try:
                self._producer.begin_transaction()
                for topic, key, value in records:
                    self._producer.produce(topic, value, key)
                self._retry("committing", self._producer.commit_transaction)
                return
            except KafkaException as error:
                reason = _error_of(error)
                self._raise_if_final(reason, deadline)
                event(logger, "transaction_aborted", level=logging.WARNING, error=reason.str())
                self._retry("aborting", self._producer.abort_transaction)

    def close(self) -> None:
        """Nothing is left open between commits; only the client's own queue is emptied."""
        # A fenced client raises here again; what ended the learner is on its way already, and must not be hidden.
        with contextlib.suppress(KafkaException):
            self._producer.flush(5.0)

    def _retry(self, doing: str, call: Any) -> None:
        """Call until it neither times out nor fails in a way that passes by itself."""
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            try:
                call(5.0)
                return
            except KafkaException as error:
                reason = _error_of(error)
                if reason.txn_requires_abort() and not reason.fatal():
                    raise
                self._raise_if_final(reason, deadline)
                if not reason.retriable():
                    raise BrokerUnavailable(f"{doing} of {self._transactional_id}: {reason.str()}") from error

    def _raise_if_final(self, reason: KafkaError, deadline: float) -> None:
        if reason.code() in _FENCED or reason.fatal():
            raise Fenced(
                f"learner {self._learner!r} of run {self._run} was taken over by another process of that name "
                f"({reason.name()}); this one stops. Give each learner its own learner.name"
            )
        if time.monotonic() > deadline:
            raise BrokerUnavailable(
                f"a transaction of {self._transactional_id} did not succeed within {_TIMEOUT_S:g} s: {reason.str()}"
            )


def _error_of(error: KafkaException) -> KafkaError:
    reason: KafkaError = error.args[0]
    return reason
