"""Decisions on errors of a transaction, in the order fatal, abortable, retriable. Pure.

The order matters: after a fatal error the next call fails with a conflict that is marked retriable, and a rebalance
may appear as an abortable error although the partitions belong to another process already.
"""

from enum import Enum

from confluent_kafka import KafkaError


class Decision(Enum):
    """Decision on an error."""

    LEAVE = "the transactional id was taken over: this process ends"
    RENEW = "the producer is done for, and nobody took its place: another one goes on under the same id"
    GIVE_UP = "the producer is done for: this process ends, and whoever starts it again goes on"
    RESTORE = "abort; partitions may belong to another process by now: restore what is still ours"
    RESEND = "abort, and send the same again"
    CALL_AGAIN = "the same call again: it may have been done"


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
        # An abort of a transaction unknown to the coordinator, as after a broker's restart. The coordinator compares
        # epochs first, so no rival caused it.
        return Decision.RENEW if code == KafkaError.INVALID_TXN_STATE else Decision.GIVE_UP
    # After a fatal error, every further call fails with a conflict that is marked retriable.
    if patient and error.retriable() and not error.txn_requires_abort() and code != KafkaError._CONFLICT:
        return Decision.CALL_AGAIN
    return Decision.RESTORE if code in _NOT_OURS else Decision.RESEND
