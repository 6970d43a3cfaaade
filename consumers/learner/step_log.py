"""A run's publisher: steps records and the manifests they led to, which appear together or not at all.

One process at a time publishes into a run: building a StepLog fences whoever did so before, whose next commit then
raises Fenced. So a policy version is a number of the run, used once, whatever learners are called.
"""

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException

from consumers.weights.publisher import read_manifests
from topics import clients
from topics.catalogue import topic_name
from topics.codec import encode
from topics.config import KafkaConfig
from topics.errors import BrokerUnavailable, Fenced, StateRefused
from topics.keys import encode_key
from topics.logs import event
from topics.records import LearnerStep
from topics.retired import retired_learners
from topics.skipped import SkippedRecords
from topics.transactional_ids import earlier_id, fence, transactional_id

logger = logging.getLogger(__name__)

_TIMEOUT_S = 60.0
_FENCED = (KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH)

TopicRecord = tuple[str, bytes, bytes]
"""Topic, key and value."""


def read_steps(kafka: KafkaConfig, run: str, learner: str) -> dict[int, LearnerStep]:
    """The newest committed record of each step of a learner, by step; what cannot be read is skipped and logged."""
    return {record.step: record for record in _all_steps(kafka, run) if record.learner == learner}


def _all_steps(kafka: KafkaConfig, run: str, start: int = OFFSET_BEGINNING) -> Iterator[LearnerStep]:
    messages = clients.read_to_end(kafka, topic_name(run, "steps"), start=start)
    return (record for _message, record in SkippedRecords("learner").records(LearnerStep, messages))


def read_learners(kafka: KafkaConfig, run: str) -> dict[str, float]:
    """Learners on record in a run, each with the time of its newest record."""
    found: dict[str, float] = {}
    for record in _all_steps(kafka, run):
        found[record.learner] = max(found.get(record.learner, 0.0), record.timestamp)
    return found


class Publication(NamedTuple):
    """One record of a run that a learner wrote."""

    time: float
    learner: str
    version: int
    """Policy version it published, -1 where it is a step without one."""


class StepLog:
    """Commits records of one learner atomically."""

    def __init__(self, kafka: KafkaConfig, run: str, learner: str, *, take_over: bool = False) -> None:
        """Become the publisher of a run.

        Raises StateRefused where this learner is retired; and, unless `take_over`, where another that is not retired
        published last.
        """
        self._learner = learner
        self._run = run
        self._steps_topic, self._policies_topic = topic_name(run, "steps"), topic_name(run, "policies")
        ends = {topic: clients.bounds(kafka, topic)[0][1] for topic in (self._steps_topic, self._policies_topic)}
        # Asked before, so that a learner that is refused fences nobody; and after, when what is there is final.
        self._retired = retired_learners(kafka, run)
        before = self._publications(kafka, {})
        self._refuse_a_second(before, take_over)
        for name in sorted({learner, *(publication.learner for publication in before)}):
            fence(kafka, earlier_id(run, "learner", name))
        self._transactional_id = transactional_id(run, "learner")
        # With a logger, what librdkafka says when it is fenced is a line of our log rather than one of its own.
        self._producer = clients.transactional_producer(kafka, self._transactional_id, logger=logger)
        self._retry("initialising transactions", self._producer.init_transactions)
        self._refuse_a_second(self._publications(kafka, ends), take_over)

    def _publications(self, kafka: KafkaConfig, start: Mapping[str, int]) -> list[Publication]:
        """What was published from these offsets on, from the beginning where none is given."""
        steps = _all_steps(kafka, self._run, start.get(self._steps_topic, OFFSET_BEGINNING))
        manifests = read_manifests(kafka, self._run, start.get(self._policies_topic, OFFSET_BEGINNING)).values()
        found = [Publication(step.timestamp, step.learner, step.policy_version) for step in steps]
        return found + [Publication(manifest.created, manifest.learner, manifest.version) for manifest in manifests]

    def _refuse_a_second(self, publications: Sequence[Publication], take_over: bool) -> None:
        if self._learner in self._retired:
            reason = self._retired[self._learner].reason
            raise StateRefused(
                f"learner {self._learner!r} of run {self._run} is retired{f' ({reason})' if reason else ''}, and what "
                f"it would read may be gone; start one of another name, or let it train again with `rollstream learner "
                f"resume {self._learner} --run {self._run}`"
            )
        newest = max((p for p in publications if p.learner not in self._retired), default=None)
        if newest is None or newest.learner == self._learner or take_over:
            return
        version = max(publication.version for publication in publications)
        raise StateRefused(
            f"learner {newest.learner!r} publishes into run {self._run} (newest policy version {version}), and a run "
            f"has one publisher: learner {self._learner!r} is refused. To train on its batches beside it, give another "
            f"run and set learner.input_run to {self._run}; to take its place for good, set learner.take_over to true"
        )

    def record(self, step: LearnerStep) -> TopicRecord:
        """Topic, key and value of a steps record."""
        return self._steps_topic, encode_key(step.learner, step.step), encode(step)

    def commit(self, records: Sequence[TopicRecord]) -> None:
        """Write records in one transaction, again from its beginning where the broker made us abort.

        Raises Fenced when another publisher of the run took over, BrokerUnavailable when it cannot be done in time.
        """
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            try:
                self._producer.begin_transaction()
                for topic, key, value in records:
                    clients.produce(self._producer, topic, value, key)
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
                f"learner {self._learner!r} of run {self._run} was taken over by another process that publishes into "
                f"the run ({reason.name()}); this one stops. Only one may: give each learner a run of its own, and "
                f"learner.input_run to share batches"
            )
        if time.monotonic() > deadline:
            raise BrokerUnavailable(
                f"a transaction of {self._transactional_id} did not succeed within {_TIMEOUT_S:g} s: {reason.str()}"
            )


def _error_of(error: KafkaException) -> KafkaError:
    reason: KafkaError = error.args[0]
    return reason
