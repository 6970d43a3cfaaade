"""Transactions of a consumer group's processes: what is written and how far was read appear together or not at all.

What errors mean is said in `grouping.decisions`. After an abort with ownership intact the same is sent again. The
transactional id decides who is who: whoever finds it taken over ends.
"""

import hashlib
import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from consumers.grouping.bounded import BoundedCalls, Stalled
from consumers.grouping.decisions import Decision, decide
from consumers.turns import Turn
from topics import clients
from topics.catalogue import topic_name
from topics.config import KafkaConfig
from topics.errors import DeliveryError, Fenced, RollstreamError
from topics.logs import event
from topics.transactional_ids import earlier_id, fence, transactional_id

logger = logging.getLogger(__name__)
_RETRY_FOR_S = 60.0
P = TypeVar("P")


class OwnershipLost(RollstreamError):
    """The transaction was aborted, and partitions may be of another process by now: go on from what is committed."""


class Refused(NamedTuple):
    """A record that means nothing, and why."""

    topic: str
    """Full name."""
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    error: str


class ExactlyOnce(ABC, Generic[P]):
    """Publishes parts of type P, each in one transaction with others and with the offsets they lead to."""

    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        group: str,
        role: str,
        ordinal: int,
        consumer: Consumer,
        topic: str,
    ) -> None:
        """`group` is the full name of the consumer group `consumer` is a member of, `topic` the full name of what it
        reads. One process at a time writes as the `ordinal` of a role of the run."""
        self._kafka = kafka
        self._run = run
        self._group = group
        self._id = transactional_id(run, role, ordinal)
        self._earlier_id = earlier_id(run, role, ordinal)
        self._turn = Turn(kafka, run, group, ordinal)
        self._letter_partitions = 1
        """Partitions of dead-letters, known from `start` on."""
        self._consumer = consumer
        self._topic = topic
        self._producer = clients.transactional_producer(kafka, self._id)
        self._calls = BoundedCalls()
        self._call_timeout_s = 0.8 * kafka.transaction_timeout_s
        """Within the transaction's own timeout, so that a new producer comes before the old one is fenced."""
        self._failed: KafkaError | None = None
        self.latest_s = 0.0
        """How long the latest transaction took, from its first record to its commit."""
        self._thread = BoundedCalls()
        self._begun: Future[None] | None = None

    @abstractmethod
    def _write(self, parts: Sequence[P]) -> list[TopicPartition]:
        """Queue the records of parts, `_flush` where their places are needed; returns the offsets to commit."""

    def start(self) -> None:
        """Fence whoever used the transactional id before, and abort what it left open; and whoever uses the id that
        an earlier release has for it. Raises TopicError where the run has no topic for dead letters."""
        self._letter_partitions = clients.partitions_of(
            self._kafka, topic_name(self._run, "dead-letters"), self._consumer
        )
        self._turn.take()
        fence(self._kafka, self._earlier_id)
        self._initialise()

    def _initialise(self) -> None:
        deadline = time.monotonic() + _RETRY_FOR_S
        while True:
            try:
                self._retry(
                    lambda: self._producer.init_transactions(self._call_timeout_s),
                    "init_transactions",
                    may_abort=False,
                    for_s=_RETRY_FOR_S,
                )
                return
            except Stalled as stalled:
                if time.monotonic() > deadline:
                    raise DeliveryError(f"{stalled}; are the brokers up?") from stalled
                self._assert_our_turn(str(stalled))
                self._replace_producer()
            except KafkaException as exception:
                error: KafkaError = exception.args[0]
                raise DeliveryError(
                    f"transactional id {self._id} cannot be written under: {error.str()} ({error.name()})"
                ) from exception

    def assert_ours(self, consumer: Consumer) -> None:
        """Go on with another consumer, unless the transactional id was taken over since: then raises Fenced.

        An aborted transaction asks the coordinator, who compares epochs; the offset in it is nobody's.
        """
        self._consumer = consumer
        outsider = clients.reader(self._kafka, group=self._group)
        try:
            self._ask_whose(outsider)
        except OwnershipLost:
            pass  # Renewed, with no rival behind it; nothing is held that would have to be restored.
        except Stalled as stalled:
            # No answer is no permission to take the id over.
            raise self._given_up(str(stalled), KafkaError(KafkaError._TIMED_OUT)) from stalled
        finally:
            outsider.close()
        # A process of an earlier release, started beside us, takes our membership and never our id: it is to end.
        fence(self._kafka, self._earlier_id)

    def _ask_whose(self, outsider: Consumer) -> None:
        try:
            self._producer.begin_transaction()
            nobodys = [TopicPartition(self._topic, 0, 0)]
            metadata = outsider.consumer_group_metadata()
            self._retry(
                lambda: self._producer.send_offsets_to_transaction(nobodys, metadata, self._call_timeout_s),
                "assert_ours",
            )
        except KafkaException as exception:
            self._raise_if_fatal(exception.args[0])
        self._abort()

    def begin(self, parts: Sequence[P]) -> None:
        """Publish on a thread of its own, while the caller reads on; `settle` tells how it went. One at a time."""
        # Asked for here: from another thread it is answered only once the consumer is not being polled, and within a
        # rebalance, which waits for this, never. A rebalance settles first, so it stays current.
        member = self._consumer.consumer_group_metadata()
        self._begun = self._thread.submit(lambda: self._publish_as(member, parts))

    @property
    def done(self) -> bool:
        """Whether `settle` would not wait."""
        return self._begun is None or self._begun.done()

    def settle(self) -> None:
        """Wait for what was begun. Raises what `publish` raises; whoever asks again hears of nothing."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.result()

    def publish(self, parts: Sequence[P]) -> None:
        """Commit outputs and the offsets they lead to. Raises OwnershipLost or Fenced when that is not ours to do."""
        self._publish_as(self._consumer.consumer_group_metadata(), parts)

    def _publish_as(self, member: object, parts: Sequence[P]) -> None:
        """Publish for the consumer that `member`, its group metadata, tells of."""
        began = time.monotonic()
        try:
            self._publish(member, parts)
        except Stalled as stalled:
            # We may have been stopped meanwhile, and nobody told us whether we were replaced.
            self._assert_our_turn(str(stalled))
            self._renew(str(stalled))
        self.latest_s = time.monotonic() - began

    def _assert_our_turn(self, reason: str) -> None:
        """Raise Fenced where another process began under our ordinal since: to start another producer would end it."""
        if not self._turn.is_ours():
            raise Fenced(
                f"{reason}, and another process has begun as {self._id} since: the transactional id is its to use; "
                f"only one process may run under an ordinal, this one stops"
            )

    def _renew(self, reason: str) -> NoReturn:
        """Leave the producer and what it has begun, and start another under the same id, which aborts that: what was
        committed tells how far it came. Raises OwnershipLost.
        """
        event(logger, "producer_renewed", level=logging.WARNING, reason=reason)
        self._replace_producer()
        self._initialise()
        raise OwnershipLost(f"the producer was renewed ({reason})")

    def _replace_producer(self) -> None:
        self._producer = clients.transactional_producer(self._kafka, self._id)
        self._calls.close()
        self._calls = BoundedCalls()

    def _publish(self, member: object, parts: Sequence[P]) -> None:
        deadline = time.monotonic() + _RETRY_FOR_S
        while True:
            try:
                self._attempt(member, parts)
                return
            except SystemError as lost:
                # The client's way of losing the exception for a fatal error; aborting says which it was.
                self._abort()
                raise DeliveryError(f"transaction of {self._id}: {lost}; start this process again") from lost
            except KafkaException as exception:
                error: KafkaError = exception.args[0]
                self._raise_if_fatal(error)
                self._abort()
                if decide(error, patient=False) is Decision.RESTORE:
                    raise OwnershipLost(
                        f"a rebalance came before the commit ({error.name()}); restoring"
                    ) from exception
                if time.monotonic() > deadline:
                    raise DeliveryError(
                        f"transaction {self._id} failed for {_RETRY_FOR_S:g} s, lastly with {error.str()} "
                        f"({error.name()}); check the brokers and min.insync.replicas"
                    ) from exception
                event(logger, "transaction_retried", level=logging.WARNING, error=error.str(), code=error.name())
                time.sleep(0.1)

    def _attempt(self, member: object, parts: Sequence[P]) -> None:
        self._failed = None
        self._producer.begin_transaction()
        commits = self._write(parts)
        self._retry(
            lambda: self._producer.send_offsets_to_transaction(commits, member, self._call_timeout_s),
            "send_offsets_to_transaction",
        )
        self._retry(
            lambda: self._producer.commit_transaction(self._call_timeout_s), "commit_transaction", may_abort=False
        )

    def _produce_dead_letter(self, letter: Refused) -> None:
        key, value = letter.key, letter.value
        room = self._kafka.max_record_bytes - 2048
        headers: dict[str, str | bytes | None] = {
            "__streams.errors.exception": "topics.errors.RecordError",
            "__streams.errors.message": letter.error,
            "__streams.errors.stacktrace": "",
            "__streams.errors.topic": letter.topic,
            "__streams.errors.partition": str(letter.partition),
            "__streams.errors.offset": str(letter.offset),
        }
        # It may have been compressed below the limit on its way in; what would not fit keeps its digest and place.
        if key is not None and len(key) > room // 2:
            headers["rollstream.key.sha256"] = hashlib.sha256(key).hexdigest()
            headers["rollstream.key.size_bytes"] = str(len(key))
            key = None
        if value is not None and len(value) + len(key or b"") > room:
            headers["rollstream.value.sha256"] = hashlib.sha256(value).hexdigest()
            headers["rollstream.value.size_bytes"] = str(len(value))
            value = None

        # With one for each, a transaction hides the letters of its own partitions alone while it stands open.
        partition = letter.partition % self._letter_partitions
        self._enqueue(topic_name(self._run, "dead-letters"), value, key, partition, headers)

    def _enqueue(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None,
        partition: int,
        headers: Mapping[str, str | bytes | None],
        delivered: Callable[[int], None] | None = None,
    ) -> None:
        """Queue a record of the transaction, whose offset `delivered` is told once it is known."""

        def report(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                self._failed = error
            elif delivered is not None:
                delivered(message.offset() or 0)

        clients.produce(
            self._producer, topic, value, key, partition=partition, headers=dict(headers), on_delivery=report
        )

    def _flush(self) -> None:
        deadline = time.monotonic() + self._kafka.transaction_timeout_s
        while self._producer.flush(1.0):
            if time.monotonic() > deadline or self._failed is not None:
                break
        if self._failed is not None:
            raise KafkaException(self._failed)
        if len(self._producer):
            raise KafkaException(KafkaError(KafkaError._MSG_TIMED_OUT, "records were not acknowledged in time"))

    def _retry(
        self, call: Callable[[], Any], name: str, *, may_abort: bool = True, for_s: float = _RETRY_FOR_S
    ) -> None:
        """Call until it returns. A retriable error means the same call again: a commit that timed out may be done, and
        `may_abort` is false for it: nobody may abort then. Raises Stalled after `for_s`: another producer finds out.

        It calls twice at least: a zombie may have been stopped during the first, and hears in the second who it is.
        """
        deadline = time.monotonic() + for_s
        for attempt in itertools.count(1):
            try:
                self._calls.run(call, name, self._call_timeout_s + 1.0)
                return
            except KafkaException as exception:
                error: KafkaError = exception.args[0]
                self._raise_if_fatal(error)
                if decide(error) is not Decision.CALL_AGAIN:
                    raise
                if attempt > 1 and time.monotonic() > deadline:
                    if may_abort:
                        raise
                    raise Stalled(f"{name} had no answer for {for_s:g} s") from exception
                event(logger, "transaction_call_retried", level=logging.WARNING, call=name, error=error.str())

    def _abort(self) -> None:
        try:
            # The client may wait for ever for an abort; past this time the coordinator has aborted by itself.
            self._retry(
                lambda: self._producer.abort_transaction(self._call_timeout_s),
                "abort_transaction",
                may_abort=False,
                for_s=self._kafka.transaction_timeout_s,
            )
        except KafkaException as exception:
            raise self._given_up("it cannot be aborted", exception.args[0]) from exception

    def _raise_if_fatal(self, error: KafkaError) -> None:
        decision = decide(error)
        if decision is Decision.LEAVE:
            raise Fenced(
                f"transactional id {self._id} was taken over, or its transaction outlived kafka.transaction_timeout_s "
                f"({error.name()}: {error.str()}); only one process may run under an ordinal, this one stops"
            )
        if decision is Decision.RENEW:
            self._renew(f"{error.name()}: {error.str()}")
        if decision is Decision.GIVE_UP:
            raise self._given_up("it cannot go on", error)

    def _given_up(self, what: str, error: KafkaError) -> DeliveryError:
        return DeliveryError(
            f"transaction of {self._id}: {what} ({error.name()}: {error.str()}); start this process again, it goes on "
            f"from what was committed"
        )


def fenced(error: KafkaError) -> bool:
    """Whether another consumer joined under our name. As a message a fatal error tells its cause in its text only."""
    return bool(
        error.code() == KafkaError.FENCED_INSTANCE_ID or (error.code() == KafkaError._FATAL and "fenced" in error.str())
    )
