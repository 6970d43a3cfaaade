"""Transactions of a consumer group's processes: outputs and offsets are committed together or not at all.

`topics.kafka.transaction_errors` explains the errors. After an abort, a process that still owns its partitions sends
the same records again. A process whose transactional id was taken over ends.
"""

import hashlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, NamedTuple, NoReturn, TypeVar

from rollstream.consumers.ordinal_claim import OrdinalClaim
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import DeliveryError, Fenced, Lapsed, RollstreamError
from rollstream.topics.kafka.client_calls import BoundedCalls, Stalled
from rollstream.topics.kafka.reader import Poller, Reader
from rollstream.topics.kafka.records import GroupPosition
from rollstream.topics.kafka.transactions import (
    ABORT,
    Decision,
    Transaction,
    TransactionalProducer,
    TransactionFailed,
    transactional_id,
)
from rollstream.topics.logs import event
from rollstream.topics.metrics.values import VALUES
from rollstream.topics.records.fates import DETAIL_LIMIT, clip
from rollstream.topics.wire.catalogue import topic_name

logger = logging.getLogger(__name__)
_ABORTS = "rollstream_transaction_aborts_total"
RETRY_FOR_S = 60.0
"""How long a call is retried while no broker answers."""
_PAUSE_S = 0.1
P = TypeVar("P")


class OwnershipLost(RollstreamError):
    """The transaction was aborted, or nobody knows whether it was committed, and partitions may belong to another
    process: continue from the committed state."""


class Refused(NamedTuple):
    """An invalid record, and the reason."""

    topic: str
    """Full name."""
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    error: str


def repeated(
    attempt: Callable[[], None], for_s: float, raise_if_final: Callable[[TransactionFailed | Stalled, bool], None]
) -> None:
    """Call `attempt` until a transaction succeeds, for up to `for_s`.

    `raise_if_final` gets the error of each failed attempt, and whether the time is over; it raises the error that the
    caller knows, unless the same records may be sent again.
    """
    deadline = time.monotonic() + for_s
    while True:
        try:
            attempt()
            return
        except (TransactionFailed, Stalled) as failed:
            raise_if_final(failed, time.monotonic() > deadline)
            event(logger, "transaction_retried", level=logging.WARNING, error=str(failed))
            time.sleep(_PAUSE_S)


class ExactlyOnce(ABC, Generic[P]):
    """Publishes parts of type P in transactions that also commit their offsets."""

    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        group: str,
        role: str,
        ordinal: int,
        member: Poller,
        topic: str,
    ) -> None:
        """`group` is the full name of the consumer group of `member`, `topic` the full name of its topic. Only one
        process at a time writes under an `ordinal` of a role of the run."""
        self._kafka = kafka
        self._run = run
        self._group = group
        self._id = transactional_id(run, role, ordinal)
        self._turn = OrdinalClaim(kafka, run, group, ordinal)
        self._member = member
        self._topic = topic
        self._producer = self._new_producer()
        self.latest_s = 0.0
        """Duration of the latest transaction, from its first record to its commit."""
        self._thread = BoundedCalls()
        self._begun: Future[None] | None = None
        VALUES.count(_ABORTS, 0)

    @abstractmethod
    def _write(self, transaction: Transaction, parts: Sequence[P]) -> list[GroupPosition]:
        """Send the records of parts, call `_flush` if their offsets are needed, and return the positions to commit."""

    def _new_producer(self) -> TransactionalProducer:
        # Below the transaction timeout, so that a new producer starts before the old one is fenced.
        call_timeout_s = 0.8 * self._kafka.transaction_timeout_s
        return TransactionalProducer(self._kafka, self._id, call_timeout_s=call_timeout_s, retry_for_s=RETRY_FOR_S)

    def start(self) -> None:
        """Fence the previous producers of the transactional id, which aborts their open transactions."""
        self._turn.take()
        self.start_producer()

    def start_producer(self) -> None:
        """Start the producer under its transactional id. Raises DeliveryError if no broker answers for RETRY_FOR_S."""
        deadline = time.monotonic() + RETRY_FOR_S
        while True:
            try:
                self._producer.start()
                return
            except Stalled as stalled:
                if time.monotonic() > deadline:
                    raise DeliveryError(f"{stalled}; are the brokers up?") from stalled
                self._assert_our_turn(str(stalled))
                self._replace_producer()
            except TransactionFailed as failed:
                self._raise_if_fatal(failed)
                raise DeliveryError(f"cannot write under transactional id {self._id}: {failed.reason}") from failed

    def assert_ours(self, member: Poller) -> None:
        """Continue with another member of the group. Raises Fenced if the transactional id was taken over,
        and DeliveryError if no answer shows whose it is.

        The check is a transaction that is aborted: the coordinator compares epochs, and commits no offset.
        """
        self._member = member
        try:
            with Reader(self._kafka, group=self._group) as outsider:
                self._ask_whose(outsider)
        except OwnershipLost:
            pass  # The producer was renewed without a rival; no state has to be restored.
        except Stalled as stalled:
            # Without an answer this process must not take the id over.
            raise self._given_up(str(stalled), "no answer") from stalled

    def _ask_whose(self, outsider: Reader) -> None:
        try:
            with self._producer.transaction(commit=False) as transaction:
                transaction.send_offsets([GroupPosition(self._topic, 0, 0)], outsider.group_metadata())
        except TransactionFailed as failed:
            self._raise_if_fatal(failed)

    @property
    def has_rival(self) -> bool:
        """Whether another process has started under our ordinal. Raises BrokerUnavailable if no broker answers.

        If there is none, the producer was fenced by the broker, because its transaction outlived its timeout, or by a
        tool that recovers positions.
        """
        return not self._turn.is_ours()

    def begin(self, parts: Sequence[P]) -> None:
        """Publish on a separate thread while the caller keeps reading. Call `settle`, which reports the result, before
        the next `begin`."""
        # The metadata is read on this thread. Another thread could read it only while the consumer is not polled, and
        # not during a rebalance, which waits for the transaction. Because it waits, the metadata stays current.
        member = self._member.group_metadata()
        self._begun = self._thread.submit(lambda: self._publish_as(member, parts))

    @property
    def done(self) -> bool:
        """Whether `settle` would return without waiting."""
        return self._begun is None or self._begun.done()

    def settle(self) -> None:
        """Wait for the transaction in progress. Raises the errors of `publish`; a second call raises nothing."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.result()

    def publish(self, parts: Sequence[P]) -> None:
        """Commit outputs and their offsets. Raises OwnershipLost or Fenced if this process may not commit them."""
        self._publish_as(self._member.group_metadata(), parts)

    def _publish_as(self, member: object, parts: Sequence[P]) -> None:
        """Publish with the group metadata `member`."""
        began = time.monotonic()
        try:
            self._publish(member, parts)
        except Stalled as stalled:
            VALUES.count(_ABORTS)
            # This process may have been paused during the call, and replaced by another one.
            self._assert_our_turn(str(stalled))
            self._renew(str(stalled))
        self.latest_s = time.monotonic() - began
        VALUES.observe("rollstream_transaction_seconds", [self.latest_s])

    def _assert_our_turn(self, reason: str) -> None:
        """Raise Fenced if another process has started under our ordinal: a new producer would fence that process."""
        if self.has_rival:
            raise Fenced(
                f"{reason}, and another process has since started as {self._id} and owns the "
                f"transactional id now; only one process may run under an ordinal, so this process stops"
            )

    def _renew(self, reason: str) -> NoReturn:
        """Replace the producer by a new one under the same id, which aborts the old transaction. Raises OwnershipLost,
        because only the committed state shows whether that transaction was committed.
        """
        event(logger, "producer_renewed", level=logging.WARNING, reason=reason)
        self._replace_producer()
        self.start_producer()
        raise OwnershipLost(f"the producer was renewed ({reason})")

    def _replace_producer(self) -> None:
        self._producer.close()
        self._producer = self._new_producer()

    def _publish(self, member: object, parts: Sequence[P]) -> None:
        def attempt() -> None:
            with self._producer.transaction() as transaction:
                positions = self._write(transaction, parts)
                transaction.send_offsets(positions, member)

        repeated(attempt, RETRY_FOR_S, self._raise_if_final)

    def _raise_if_final(self, failed: TransactionFailed | Stalled, too_late: bool) -> None:
        if isinstance(failed, Stalled):
            raise failed
        VALUES.count(_ABORTS)
        if failed.refused:
            raise DeliveryError(f"transaction {self._id} is refused: {failed.reason}") from failed
        if failed.too_large:
            raise DeliveryError(
                f"a record of transaction {self._id} is larger than kafka.max_record_bytes or the brokers "
                f"allow ({failed.reason}); `rollstream topics apply` gives the topics the limit of the settings"
            ) from failed
        self._raise_if_fatal(failed)
        if failed.decision is Decision.RESTORE:
            raise OwnershipLost(f"a rebalance happened before the commit ({failed.reason}); restoring") from failed
        if too_late:
            raise DeliveryError(
                f"transaction {self._id} failed for {RETRY_FOR_S:g} s, the last time with {failed.reason}; "
                "check the brokers and min.insync.replicas"
            ) from failed

    def _send_dead_letter(self, transaction: Transaction, letter: Refused) -> None:
        key, value = letter.key, letter.value
        room = self._kafka.max_record_bytes - 2048
        # Errors of a user's labeler may quote a whole record.
        headers = error_headers(letter.topic, letter.partition, letter.offset, clip(letter.error, DETAIL_LIMIT))
        # The original record may have been within the size limit only because it was compressed. A key or value that
        # is too large here is replaced by headers with its digest and size.
        if key is not None and len(key) > room // 2:
            headers["rollstream.key.sha256"] = hashlib.sha256(key).hexdigest()
            headers["rollstream.key.size_bytes"] = str(len(key))
            key = None
        if value is not None and len(value) + len(key or b"") > room:
            headers["rollstream.value.sha256"] = hashlib.sha256(value).hexdigest()
            headers["rollstream.value.size_bytes"] = str(len(value))
            value = None

        # With a partition for each input partition, an open transaction hides no dead letters of other partitions.
        letters = topic_name(self._run, "dead-letters")
        transaction.send(letters, value, key, partition=letter.partition, headers=headers)

    def _flush(self, transaction: Transaction) -> None:
        transaction.flush(self._kafka.transaction_timeout_s)

    def _raise_if_fatal(self, failed: TransactionFailed) -> None:
        if failed.decision is Decision.LEAVE:
            if not self.has_rival:
                raise Lapsed(
                    f"a transaction of {self._id} outlived kafka.transaction_timeout_s, or a tool ended it "
                    f"({failed.reason}); start this process again, and it continues from the committed state"
                ) from failed
            raise Fenced(
                f"transactional id {self._id} was taken over ({failed.reason}); only one process may run under an "
                f"ordinal, so this process stops"
            ) from failed
        if failed.decision is Decision.RENEW:
            self._renew(failed.reason)
        if failed.decision is Decision.GIVE_UP:
            raise self._given_up("it cannot continue", failed.reason) from failed
        if failed.call == ABORT:
            raise self._given_up("it cannot be aborted", failed.reason) from failed

    def _given_up(self, what: str, reason: str) -> DeliveryError:
        return DeliveryError(
            f"transaction of {self._id}: {what} ({reason}); restart this process; it continues from the committed "
            f"offsets"
        )


def error_headers(topic: str, partition: int, offset: int, message: str) -> dict[str, str | bytes | None]:
    """Return the headers of the dead letter about a record, as Kafka Streams names them (KIP-1034)."""
    return {
        "__streams.errors.exception": "rollstream.topics.errors.RecordError",
        "__streams.errors.message": message,
        "__streams.errors.stacktrace": "",
        "__streams.errors.topic": topic,
        "__streams.errors.partition": str(partition),
        "__streams.errors.offset": str(offset),
    }
