"""StepLog, the publisher of a run: commits the records of steps and their policy manifests together or not at all.

One process at a time publishes into a run: creating a StepLog fences the previous publisher, whose next commit then
raises Fenced. So each policy version of a run is used once, even if learners of different names publish.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from rollstream.consumers.ordinal_claim import OrdinalClaim
from rollstream.consumers.transactions import repeated
from rollstream.consumers.weights.manifests import ROLLBACK_OF
from rollstream.topics.config import KafkaConfig
from rollstream.topics.control.named_records import RETIRED, read_named
from rollstream.topics.errors import AccessDenied, BrokerUnavailable, Fenced, Lapsed, RecordTooLarge, StateRefused
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.client_calls import Stalled
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.records import BEGINNING
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.kafka.transactions import TransactionalProducer, TransactionFailed, transactional_id
from rollstream.topics.records import LearnerStep, PolicyManifest, RetiredLearner
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key

logger = logging.getLogger(__name__)

_TIMEOUT_S = 60.0

TopicRecord = tuple[str, bytes, bytes]
"""Topic, key and value."""


def read_steps(kafka: KafkaConfig, run: str, learner: str) -> dict[int, LearnerStep]:
    """The newest committed record of each step of a learner, by step; unreadable records are skipped and logged."""
    return {record.step: record for record in all_steps(kafka, run) if record.learner == learner}


def all_steps(
    kafka: KafkaConfig, run: str, skipped: SkippedRecords | None = None, start: int = BEGINNING
) -> Iterator[LearnerStep]:
    """Yield the committed records of a run's steps in the order of the log: a later record of a step replaces it.

    `skipped` gets the unreadable records; by default they are logged.
    """
    messages = read_to_end(kafka, topic_name(run, "steps"), start=start)
    return (record for _message, record in (skipped or SkippedRecords("learner")).records(LearnerStep, messages))


class Publication(NamedTuple):
    """A step or a policy version that a learner published into a run."""

    time: float
    learner: str
    version: int
    """Policy version that was published; -1 for a step that published none."""


def read_publications(kafka: KafkaConfig, run: str, start: Mapping[str, int] | None = None) -> list[Publication]:
    """Return the steps and versions that learners published into a run.

    `start` has the offset from which a topic is read, by full name; other topics are read from their beginning. A
    version of a rollback has the time 0, because the learner that it names did not publish it then.
    """
    offsets = start or {}
    steps = all_steps(kafka, run, start=offsets.get(topic_name(run, "steps"), BEGINNING))
    policies = topic_name(run, "policies")
    messages = read_to_end(kafka, policies, start=offsets.get(policies, BEGINNING))
    of_steps = [Publication(step.timestamp, step.learner, step.policy_version) for step in steps]
    return of_steps + [
        Publication(0.0 if message.header(ROLLBACK_OF) else manifest.created, manifest.learner, manifest.version)
        for message, manifest in SkippedRecords("policies").records(PolicyManifest, messages)
    ]


class StepLog:
    """Commits the records of one learner atomically."""

    def __init__(self, kafka: KafkaConfig, run: str, learner: str, *, take_over: bool = False) -> None:
        """Become the publisher of a run.

        Raises StateRefused if this learner is retired, or if `take_over` is not set and, of the learners that are not
        retired, another published last. Raises AccessDenied for a missing permission.
        """
        self._learner = learner
        self._run = run
        self._steps_topic = topic_name(run, "steps")
        topics = (self._steps_topic, topic_name(run, "policies"))
        ends = {topic: topic_admin.bounds(kafka, topic)[0][1] for topic in topics}
        # Checked before fencing, so that a refused learner fences nobody, and again after it, when no other publisher
        # can write any more.
        self._retired = read_named(kafka, run, RETIRED, RetiredLearner)
        self._refuse_a_second(read_publications(kafka, run), take_over)
        self._transactional_id = transactional_id(run, "learner")
        self._turn = OrdinalClaim(kafka, run, f"{run}.learner", "publisher")
        self._turn.take()
        # With a logger, librdkafka reports to our log, not to stderr, that the producer was fenced.
        self._producer = TransactionalProducer(kafka, self._transactional_id, retry_for_s=_TIMEOUT_S, logger=logger)
        try:
            self._producer.start()
        except (TransactionFailed, Stalled) as failed:
            raise self._ended(failed) from failed
        self._refuse_a_second(read_publications(kafka, run, ends), take_over)

    def _refuse_a_second(self, publications: Sequence[Publication], take_over: bool) -> None:
        if self._learner in self._retired:
            reason = self._retired[self._learner].reason
            raise StateRefused(
                f"learner {self._learner!r} of run {self._run} is retired{f' ({reason})' if reason else ''}, and its "
                f"input may be gone; start a learner of another name, or let it train again with "
                f"`rollstream steer learner resume {self._learner} --run {self._run}`"
            )
        newest = max((p for p in publications if p.learner not in self._retired), default=None)
        if newest is None or newest.learner == self._learner or take_over:
            return
        version = max(publication.version for publication in publications)
        raise StateRefused(
            f"learner {newest.learner!r} publishes into run {self._run} (newest policy version {version}), and a run "
            f"has one publisher: learner {self._learner!r} is refused. To train on the same batches in parallel, give "
            f"another run and set learner.input_run to {self._run}; to replace the other learner for good, set "
            f"learner.take_over (take_over of a StepWriter) to true"
        )

    def record(self, step: LearnerStep) -> TopicRecord:
        """Return the topic, key and value of a step's record."""
        return self._steps_topic, encode_key(step.learner, step.step), encode(step)

    def commit(self, records: Sequence[TopicRecord], headers: Mapping[str, str] | None = None) -> None:
        """Write records, each with these headers, in one transaction; repeat it if the broker aborts it.

        Raises Fenced if another publisher of the run took over, Lapsed if the transaction outlived its timeout,
        AccessDenied for a missing permission, RecordTooLarge for a record above the limit, and BrokerUnavailable if the
        transaction does not succeed in time.
        """

        def attempt() -> None:
            with self._producer.transaction() as transaction:
                for topic, key, value in records:
                    transaction.send(topic, value, key, headers=headers)

        repeated(attempt, _TIMEOUT_S, self._raise_if_final)

    def close(self) -> None:
        """Flush the producer; no transaction is open between commits."""
        # For a fenced producer this only logs an error, so that the error that ended the learner is not hidden.
        self._producer.flush(5.0)
        self._producer.close()

    def _raise_if_final(self, failed: TransactionFailed | Stalled, too_late: bool) -> None:
        passing = isinstance(failed, TransactionFailed) and not (failed.fatal or failed.refused or failed.too_large)
        if not passing or too_late:
            raise self._ended(failed) from failed

    def _ended(self, failed: TransactionFailed | Stalled) -> Fenced | AccessDenied | RecordTooLarge | BrokerUnavailable:
        """Return the error to raise for a failed transaction."""
        if isinstance(failed, TransactionFailed) and failed.refused:
            return AccessDenied(f"learner {self._learner!r} of run {self._run}: {failed.reason}")
        if isinstance(failed, TransactionFailed) and failed.fatal:
            if self._turn.is_ours():
                return Lapsed(
                    f"a transaction of learner {self._learner!r} of run {self._run} outlived "
                    f"kafka.transaction_timeout_s ({failed.reason}); start it again, and it continues from its "
                    "checkpoint"
                )
            return Fenced(
                f"learner {self._learner!r} of run {self._run} was taken over by another process that publishes into "
                f"the run ({failed.reason}), so this process stops; give each learner a separate run, and set "
                f"learner.input_run to share batches"
            )
        if isinstance(failed, TransactionFailed) and failed.too_large:
            return RecordTooLarge(
                f"a record of learner {self._learner!r} of run {self._run} is larger than kafka.max_record_bytes or "
                f"the brokers allow ({failed.reason}); raise kafka.max_record_bytes, or, if it is the manifest of a "
                "version, learner.weights.chunk_bytes and learner.weights.file_bytes, so that it names fewer chunks"
            )
        return BrokerUnavailable(
            f"a transaction of {self._transactional_id} did not succeed within {_TIMEOUT_S:g} s: {failed}"
        )
