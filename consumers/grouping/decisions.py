"""What an error of a transaction means, in the order fatal, abortable, retriable. Pure.

The order matters: after a fatal error the next call fails with a conflict that calls itself retriable, and a rebalance
may come as an error that asks for an abort and belongs to another process's partitions all the same.
"""

from enum import Enum

from confluent_kafka import KafkaError


class Decision(Enum):
    """What is to be done about an error."""

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
    # Of a static member that is joining anew, too: if it is a rival's doing, the abort that follows is fenced.
    KafkaError.FENCED_INSTANCE_ID,
    KafkaError._ASSIGNMENT_LOST,
)


def decide(error: KafkaError, *, patient: bool = True) -> Decision:
    """What to do about an error of a transactional call or of a delivery within a transaction.

    `patient` is false once calling again has gone on for too long, or where there is no call to repeat.
    """
    code = error.code()
    if code in _TAKEN_OVER:
        return Decision.LEAVE
    if error.fatal():
        # An abort of what the coordinator never heard of, as after a broker's restart. It compares epochs first: no
        # rival is behind it.
        return Decision.RENEW if code == KafkaError.INVALID_TXN_STATE else Decision.GIVE_UP
    # After a fatal error another call is a conflict, which is called retriable, and never ends.
    if patient and error.retriable() and not error.txn_requires_abort() and code != KafkaError._CONFLICT:
        return Decision.CALL_AGAIN
    return Decision.RESTORE if code in _NOT_OURS else Decision.RESEND
