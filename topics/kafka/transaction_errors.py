"""Decisions on errors of a transaction, in the order fatal, abortable, retriable. Pure.

The order matters: after a fatal error the next call fails with a conflict that is marked retriable, and a rebalance
may appear as an abortable error although the partitions belong to another process already.
"""

from enum import Enum

from confluent_kafka import KafkaError


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
