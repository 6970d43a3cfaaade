"""Transactions: records and consumer group positions that are committed together or not at all.

A transactional id has one writer at a time; a new writer fences the previous one, and aborts its open transaction.

Errors are judged in the order fatal, abortable, retriable: after a fatal error the next call fails with a conflict that
is marked retriable, and a rebalance may appear as an abortable error although the partitions belong to another process
already. In a transactional id the run comes first, and no run's name contains "/": an access rule for the prefix `exp/`
covers run `exp` and not run `exp-lr`.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Any, Unpack

from confluent_kafka import KafkaError, KafkaException, Producer

from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import AccessDenied, BrokerUnavailable, DeliveryError
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.client_calls import BoundedCalls, Stalled, refusal
from rollstream.topics.kafka.clients import user_of
from rollstream.topics.kafka.records import GroupPosition
from rollstream.topics.kafka.sender import Delivery, Sender, SendFailed, SendOptions
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)


class Decision(Enum):
    """Decision on an error."""

    LEAVE = "the transactional id was taken over: this process ends"
    RENEW = "the producer is unusable, and nobody took its place: a new producer continues under the same id"
    GIVE_UP = "the producer is unusable: this process ends, and continues when it is started again"
    RESTORE = "abort; partitions may belong to another process by now: restore those that are still ours"
    RESEND = "abort, and send the same records again"
    CALL_AGAIN = "repeat the same call, which may already have taken effect"


_TAKEN_OVER = (KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH)
_NOT_OURS = (
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.FENCED_MEMBER_EPOCH,
    KafkaError.STALE_MEMBER_EPOCH,
    # Also occurs if a static member joins again; if a rival caused it, the following abort is fenced.
    KafkaError.FENCED_INSTANCE_ID,
    KafkaError._ASSIGNMENT_LOST,
)


def decide(error: KafkaError, *, patient: bool = True) -> Decision:
    """Decide on an error of a transactional call or of a delivery within a transaction.

    `patient` is false if the call was repeated for too long, or if there is no call to repeat.
    """
    code = error.code()
    if code in _TAKEN_OVER:
        return Decision.LEAVE
    if error.fatal():
        # This state means that the coordinator does not know the aborted transaction, as after a broker's restart. The
        # coordinator compares epochs first, so no rival caused it.
        return Decision.RENEW if code == KafkaError.INVALID_TXN_STATE else Decision.GIVE_UP
    # After a fatal error, every further call fails with a conflict that is marked retriable.
    if patient and error.retriable() and not error.txn_requires_abort() and code != KafkaError._CONFLICT:
        return Decision.CALL_AGAIN
    return Decision.RESTORE if code in _NOT_OURS else Decision.RESEND


_FATAL = (Decision.LEAVE, Decision.RENEW, Decision.GIVE_UP)
_CALL_S = 5.0
ABORT = "abort_transaction"
_PURGED = (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT)


class TransactionFailed(DeliveryError):
    """A call of a transaction failed; its records are not visible, unless the call was a commit without an answer."""

    def __init__(self, call: str, error: KafkaError | str, transactional_id: str, refused: str | None = None) -> None:
        """`refused` names the missing permission, if that is the cause."""
        lost = isinstance(error, str)
        self.call, self.refused = call, refused is not None
        self.reason = refused or (error if isinstance(error, str) else f"{error.name()}: {error.str()}")
        self.too_large = isinstance(error, KafkaError) and error.code() == KafkaError.MSG_SIZE_TOO_LARGE
        """Whether a record exceeds the limit of the client or of the brokers, so that sending it again is useless."""
        # The client may lose the exception of a fatal error and raise SystemError instead.
        self.decision = Decision.GIVE_UP if isinstance(error, str) else decide(error, patient=False)
        self.taken_over = (
            lost
            or self.decision is Decision.LEAVE
            # An error that follows a fatal error gives the cause only in its text.
            or (isinstance(error, KafkaError) and error.code() == KafkaError._FATAL and "fenced" in error.str())
        )
        """Whether another writer started under the same transactional id. This is assumed for an error that the client
        loses, because nearly all such errors have this cause."""
        super().__init__(f"{call} of {transactional_id}: {self.reason}")

    @property
    def fatal(self) -> bool:
        """Whether the producer is unusable."""
        return self.decision in _FATAL


class Transaction:
    """One transaction, from its first record to its commit."""

    def __init__(self, producer: "TransactionalProducer", sender: Sender) -> None:
        self._producer, self._sender = producer, sender

    def send(self, topic: str, value: bytes | None, key: bytes | None = None, **options: Unpack[SendOptions]) -> None:
        """Queue a record; the arguments are those of `Sender.send`. Raises TransactionFailed."""
        with self._failing("send"):
            self._sender.send(topic, value, key, **options)

    def flush(self, timeout_s: float) -> None:
        """Wait until all records are delivered and their offsets are known. Raises TransactionFailed."""
        deadline = time.monotonic() + timeout_s
        with self._failing("flush"):
            while self._sender.waiting(1.0):
                self._sender.check()
                if time.monotonic() > deadline:
                    error = KafkaError(KafkaError._MSG_TIMED_OUT, "records were not acknowledged in time")
                    raise KafkaException(error)
            self._sender.check()

    def offset_of(self, delivery: Delivery) -> int:
        """Return the offset of an acknowledged record. Raises TransactionFailed if the offset is not known."""
        try:
            return delivery.offset
        except DeliveryError as unknown:
            # Brokers leave out the offset of a record that was sent twice; the transaction may be repeated.
            error = KafkaError(KafkaError.DUPLICATE_SEQUENCE_NUMBER, str(unknown))
            raise TransactionFailed("send", error, self._producer.transactional_id) from unknown

    def send_offsets(self, positions: Iterable[GroupPosition], group_metadata: object) -> None:
        """Commit a group's positions with the records; `group_metadata` belongs to a reader or to a group member.

        Raises TransactionFailed or Stalled.
        """
        offsets = [position.for_client() for position in positions]
        self._producer.call(
            lambda client, timeout_s: client.send_offsets_to_transaction(offsets, group_metadata, timeout_s),
            "send_offsets_to_transaction",
        )

    def check(self) -> None:
        """Raise TransactionFailed if a record was not delivered."""
        with self._failing("send"):
            self._sender.check()

    def _failing(self, call: str) -> AbstractContextManager[None]:
        return self._producer.failing(call)


class TransactionalProducer:
    """Writes in transactions under one transactional id."""

    def __init__(
        self,
        kafka: KafkaConfig,
        transactional_id: str,
        *,
        call_timeout_s: float | None = None,
        retry_for_s: float | None = None,
        **overrides: Any,
    ) -> None:
        """A call may take `call_timeout_s`, and is repeated for `retry_for_s`, kafka.patience_s by default."""
        self.transactional_id = transactional_id
        self._call_timeout_s = min(_CALL_S, kafka.patience_s) if call_timeout_s is None else call_timeout_s
        self._retry_for_s = kafka.patience_s if retry_for_s is None else retry_for_s
        self._abort_for_s = kafka.transaction_timeout_s
        self.client: Producer = clients.transactional_producer(kafka, transactional_id, **overrides)
        self._calls = BoundedCalls()

    @contextmanager
    def failing(self, call: str) -> Iterator[None]:
        """Convert an error of the block into a TransactionFailed that names the call."""
        try:
            yield
        except SendFailed as failed:
            failure = failed.failure
            refused = failure.refusal
            if failure.error.code() in _PURGED:
                refused = self._refusal_of_purge(sorted({purged.topic for purged in failed.failures}))
            raise TransactionFailed(call, failure.error, self.transactional_id, refused) from failed
        except KafkaException as exception:
            error: KafkaError = exception.args[0]
            refused = refusal(error, user_of(self.client))
            raise TransactionFailed(call, error, self.transactional_id, refused) from exception
        except SystemError as lost:
            raise TransactionFailed(call, str(lost), self.transactional_id) from lost

    def _refusal_of_purge(self, topics: Iterable[str]) -> str | None:
        """Say which permission is missing, if the client purged records to `topics` for lack of one. The client reports
        the reason only for a further call, such as the start of another transaction, and does not name the topic."""
        try:
            self.client.begin_transaction()
        except KafkaException as exception:
            return refusal(exception.args[0], user_of(self.client), " or ".join(topics))
        except SystemError:
            pass  # The client lost a fatal error; the abort that follows fails with it, too.
        return None

    def start(self) -> None:
        """Fence the id's previous writer, and abort its open transaction. Raises TransactionFailed or Stalled."""
        self.call(lambda client, timeout_s: client.init_transactions(timeout_s), "init_transactions", may_abort=False)

    @contextmanager
    def transaction(self, *, commit: bool = True) -> Iterator[Transaction]:
        """Commit the records that the block sends; abort them on an exception or if `commit` is false.

        Raises TransactionFailed, after an abort if one is possible, and Stalled if nothing was aborted; the next start
        under the id then aborts the transaction.
        """
        # A new sender, so that delivery reports of an aborted transaction do not count.
        transaction = Transaction(self, Sender(self.client, transactional=True))
        try:
            self._begin()
            yield transaction
            if commit:
                transaction.check()
                self._commit()
        except TransactionFailed as failed:
            if not failed.fatal or isinstance(failed.__cause__, SystemError):
                self._abort_after(failed)
            raise
        except Stalled:
            raise
        except BaseException:
            try:
                self._abort()
            except (TransactionFailed, Stalled) as failed:
                # The original error matters more.
                event(logger, "transaction_not_aborted", level=logging.WARNING, error=str(failed))
            raise
        if not commit:
            self._abort()

    def _begin(self) -> None:
        with self.failing("begin_transaction"):
            self.client.begin_transaction()

    def _commit(self) -> None:
        self.call(lambda client, timeout_s: client.commit_transaction(timeout_s), "commit_transaction", may_abort=False)

    def _abort_after(self, failed: TransactionFailed) -> None:
        """Abort; raises the error of a failed abort, which is more specific because it reports fencing."""
        try:
            self._abort()
        except TransactionFailed as unaborted:
            # The coordinator does not know a transaction whose first partition was refused.
            if not (failed.refused and unaborted.decision is Decision.RENEW):
                raise

    def _abort(self) -> None:
        # The client may wait forever for an abort; after this time the coordinator has aborted by itself.
        self.call(
            lambda client, timeout_s: client.abort_transaction(timeout_s),
            ABORT,
            may_abort=False,
            for_s=self._abort_for_s,
        )

    def call(
        self,
        call: Callable[[Producer, float], Any],
        name: str,
        *,
        may_abort: bool = True,
        for_s: float | None = None,
    ) -> None:
        """Run `call`, and repeat it after a retriable error. `may_abort` is false for a call that may be complete after
        a timeout, such as a commit; such a call raises Stalled after `for_s`.

        A failing call runs at least twice, because a zombie may have been suspended during the first call and learns
        only from the second that it was fenced.
        """
        for_s = self._retry_for_s if for_s is None else for_s
        deadline = time.monotonic() + for_s
        for attempt in itertools.count(1):
            with self.failing(name):
                try:
                    self._calls.run(lambda: call(self.client, self._call_timeout_s), name, self._call_timeout_s + 1.0)
                    return
                except KafkaException as exception:
                    error: KafkaError = exception.args[0]
                    if decide(error) is not Decision.CALL_AGAIN:
                        raise
                    if attempt > 1 and time.monotonic() > deadline:
                        if may_abort:
                            raise
                        raise Stalled(f"{name} had no answer for {for_s:g} s") from exception
                    event(logger, "transaction_call_retried", level=logging.WARNING, call=name, error=error.str())

    def flush(self, timeout_s: float) -> None:
        """Flush the client's queue; only logs an error."""
        try:
            self.client.flush(timeout_s)
        # SystemError, because the client may lose the exception of a fatal error, such as that of a fenced producer.
        except (KafkaException, SystemError) as error:
            event(logger, "queue_not_emptied", level=logging.WARNING, error=str(error))

    def close(self) -> None:
        """End the thread that runs the calls."""
        self._calls.close()


_DENIED = (KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED)


def transactional_id(run: str, role: str, which: str | int = "") -> str:
    """Return the id of a writer: `{run}/{role}`, or `{run}/{role}/{which}` if the role has several writers."""
    return f"{run}/{role}" if which == "" else f"{run}/{role}/{which}"


def fence(kafka: KafkaConfig, identity: str) -> None:
    """Fence the producer of a transactional id, so that it cannot commit any more, and abort its open transaction.

    This is for ids under which this process does not write. Raises BrokerUnavailable if the broker does not answer, and
    AccessDenied if it refuses.
    """
    producer = clients.transactional_producer(kafka, identity, logger=logger)
    deadline = time.monotonic() + kafka.patience_s
    while True:
        try:
            producer.init_transactions(5.0)
            return
        except KafkaException as exception:
            error: KafkaError = exception.args[0]
            if error.code() in _DENIED:
                raise AccessDenied(
                    f"transactional id {identity} cannot be fenced: {error.str()}; grant this user WRITE on it"
                ) from exception
            if not error.retriable() or time.monotonic() > deadline:
                raise BrokerUnavailable(f"transactional id {identity} cannot be fenced: {error.str()}") from exception
