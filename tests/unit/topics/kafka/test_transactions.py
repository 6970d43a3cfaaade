"""Errors of brokers and the client, and what is done about them: fatal errors first, then abortable, then retriable."""

import pytest
from confluent_kafka import KafkaError
from hypothesis import given
from hypothesis import strategies as st

from rollstream.topics.kafka.transactions import Decision, decide, transactional_id

FATAL, ABORT, RETRY = {"fatal": True}, {"txn_requires_abort": True}, {"retriable": True}


@pytest.mark.parametrize(
    ("code", "flags", "decision"),
    [
        # A zombie, or a transaction past its timeout, in each of the ways in which it is reported.
        (KafkaError._FENCED, FATAL, Decision.LEAVE),
        (KafkaError.PRODUCER_FENCED, FATAL, Decision.LEAVE),
        (KafkaError.INVALID_PRODUCER_EPOCH, ABORT, Decision.LEAVE),
        # Fatal, whatever else it claims to be.
        (KafkaError._FATAL, FATAL | RETRY, Decision.GIVE_UP),
        (KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, FATAL, Decision.GIVE_UP),
        (KafkaError.CLUSTER_AUTHORIZATION_FAILED, FATAL | ABORT, Decision.GIVE_UP),
        (KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, FATAL | RETRY, Decision.GIVE_UP),
        # An abort of a transaction that the coordinator does not know: a broker restarted, and no rival came.
        (KafkaError.INVALID_TXN_STATE, FATAL, Decision.RENEW),
        (KafkaError.INVALID_TXN_STATE, ABORT, Decision.RESEND),
        # The call after a fatal error; its error is marked retriable, but a retry never succeeds.
        (KafkaError._CONFLICT, RETRY, Decision.RESEND),
        # A rebalance came first.
        (KafkaError.ILLEGAL_GENERATION, ABORT, Decision.RESTORE),
        (KafkaError.UNKNOWN_MEMBER_ID, ABORT, Decision.RESTORE),
        (KafkaError.REBALANCE_IN_PROGRESS, ABORT, Decision.RESTORE),
        (KafkaError.FENCED_INSTANCE_ID, ABORT, Decision.RESTORE),
        (KafkaError.FENCED_MEMBER_EPOCH, {}, Decision.RESTORE),
        (KafkaError._ASSIGNMENT_LOST, ABORT | RETRY, Decision.RESTORE),
        # The consumer protocol: metadata that is requested again may have the new epoch.
        (KafkaError.STALE_MEMBER_EPOCH, RETRY, Decision.CALL_AGAIN),
        (KafkaError.STALE_MEMBER_EPOCH, ABORT, Decision.RESTORE),
        # Below quorum past the transaction's timeout; a delivery that was denied, and the commit after it.
        (KafkaError._TIMED_OUT, ABORT, Decision.RESEND),
        (KafkaError._TIMED_OUT, ABORT | RETRY, Decision.RESEND),
        (KafkaError._INCONSISTENT, ABORT, Decision.RESEND),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, ABORT, Decision.RESEND),
        (KafkaError._PURGE_QUEUE, {}, Decision.RESEND),
        # In a delivery report: below min.insync.replicas.
        (KafkaError._MSG_TIMED_OUT, {}, Decision.RESEND),
        (KafkaError.MSG_SIZE_TOO_LARGE, {}, Decision.RESEND),
        # The coordinator is down, moving or busy.
        (KafkaError._TIMED_OUT, RETRY, Decision.CALL_AGAIN),
        (KafkaError.COORDINATOR_LOAD_IN_PROGRESS, RETRY, Decision.CALL_AGAIN),
        (KafkaError.CONCURRENT_TRANSACTIONS, RETRY, Decision.CALL_AGAIN),
        (KafkaError._TRANSPORT, RETRY, Decision.CALL_AGAIN),
    ],
)
def test_an_error_is_decided_upon(code: int, flags: dict[str, bool], decision: Decision) -> None:
    assert decide(KafkaError(code, "as the broker says", **flags)) is decision


def test_what_was_called_again_for_too_long_is_aborted() -> None:
    assert decide(KafkaError(KafkaError._TIMED_OUT, "", **RETRY), patient=False) is Decision.RESEND
    assert decide(KafkaError(KafkaError.STALE_MEMBER_EPOCH, "", **RETRY), patient=False) is Decision.RESTORE
    assert decide(KafkaError(KafkaError._FENCED, "", **FATAL), patient=False) is Decision.LEAVE


@pytest.mark.parametrize("code", range(-200, 130))
def test_no_fatal_error_is_ever_tried_again(code: int) -> None:
    for others in ({}, ABORT, RETRY, ABORT | RETRY):
        fatal = decide(KafkaError(code, "", **FATAL, **others))
        assert fatal in (Decision.LEAVE, Decision.RENEW, Decision.GIVE_UP)
        if others.get("txn_requires_abort"):
            assert decide(KafkaError(code, "", **others)) is not Decision.CALL_AGAIN
        if not others.get("retriable"):
            assert decide(KafkaError(code, "", **others)) is not Decision.CALL_AGAIN


RUNS = st.text("ab0._-", min_size=1, max_size=6)
ROLES = st.sampled_from(["grouper", "labeller", "learner", "exclude", "redrive", "import", "restore"])
WHICH = st.one_of(st.just(""), st.integers(0, 12), st.just("bootstrap"))
WRITERS = st.tuples(RUNS, ROLES, WHICH)


@given(WRITERS, WRITERS)
def test_different_writers_have_different_ids(
    one: tuple[str, str, str | int], other: tuple[str, str, str | int]
) -> None:
    assert (transactional_id(*one) == transactional_id(*other)) == (one == other)
    assert (one[0] == other[0]) == transactional_id(*one).startswith(f"{other[0]}/")
