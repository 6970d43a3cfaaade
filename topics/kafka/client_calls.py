"""Calls of the Kafka client: its errors as this project's, retries while a coordinator or leader moves, and deadlines.

librdkafka's send_offsets_to_transaction ignores its timeout if the group's coordinator goes away and comes back (its
issues 5456 and 5511). All calls of a `BoundedCalls` run on one daemon thread; a caller whose deadline passes abandons
the thread.
"""

import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException

from rollstream.topics.errors import AccessDenied, BrokerUnavailable, RollstreamError, TopicError

T = TypeVar("T")
_MOVING = (
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.UNSTABLE_OFFSET_COMMIT,
    KafkaError._WAIT_COORD,
    KafkaError._TIMED_OUT,
    KafkaError._TIMED_OUT_QUEUE,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.NETWORK_EXCEPTION,
    # This broker does not know a new topic's leader yet, although another broker does.
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    # The client asks for offsets with the leader epoch that it knows; the new leader may not be known, or not be ready.
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError.REPLICA_NOT_AVAILABLE,
    KafkaError.KAFKA_STORAGE_ERROR,
)
COORDINATOR_REQUEST_S = 3600.0
"""Time limit that an admin client is given for a request to a coordinator, its longest. If a broker answers after the
limit, an assertion of librdkafka ends the process (its issues 3663 and 4605), so callers stop waiting earlier instead.
"""
_LEARNT_S = 5.0
"""Longest time for which a partition may be unknown: a new partition becomes known late, a missing one never."""
_RECOVERED = (
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    # The name of a container that is down cannot be resolved.
    KafkaError._RESOLVE,
    # A broker that is down disappears from the metadata, and the client abandons its requests to that broker.
    KafkaError._DESTROY_BROKER,
)
"""Errors of connections. The client reconnects by itself, to another broker if that is the leader now."""


class OffsetGone(TopicError):
    """The requested offset is not, or no longer, in the log."""


_RIGHTS = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "the topic",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "the consumer group",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "the transactional id",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "any topic, or the cluster",
}
"""Resources on which a permission is missing, by the code of the error."""


def denial(error: KafkaError, doing: str) -> AccessDenied | None:
    """Return the error for a missing permission; None for any other error of the client."""
    resource = _RIGHTS.get(error.code())
    if resource is None:
        return None
    return AccessDenied(
        f"{doing}: this client's user lacks a permission on {resource} ({error.name()}); `rollstream doctor` shows "
        "which, and `rollstream topics acls apply` grants it"
    )


_REFUSED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "Write to {topic}",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "Read as the consumer group",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "Write under its transactional id",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "Write to {topic}, nor to any other",
}
"""Operations of a writer, by the code of the error that refuses them. A producer without transactions may begin only if
its user may write to some topic; brokers report this as a missing right on the cluster."""


def refusal(error: KafkaError, user: str, topic: str = "") -> str | None:
    """Describe the operation that the brokers refuse, the writer's user, and the remedy; None for any other error.

    `user` is empty if the settings do not name it, as with a certificate.
    """
    operation = _REFUSED.get(error.code())
    if operation is None:
        return None
    who = f"user {user}" if user else "this client's user"
    refused = f"{who} may not {operation.format(topic=f'topic {topic}' if topic else 'a topic')} ({error.name()})"
    if error.code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED:
        return f"{refused}; connect as a user that may, such as the user of `operate` (docs/security.md#permissions)"
    return (
        f"{refused}; `rollstream topics acls plan` shows the rule that is missing, and `rollstream topics acls apply` "
        "adds it"
    )


def description_of(error: KafkaError) -> str:
    """Return the client's text for an error, or the name of its code: some answers of brokers come without a text."""
    return error.str() or error.name()


def fatal_error(raised: BaseException) -> KafkaError | None:
    """Return the fatal error behind an exception that a client raised; None if the client can continue.

    If a callback runs while the client raises a fatal error, Python raises SystemError instead. The fatal error is then
    its cause, or is lost.
    """
    lost = isinstance(raised, SystemError)
    cause = raised.__cause__ if lost else raised
    if isinstance(cause, KafkaException) and cause.args[0].fatal():
        error: KafkaError = cause.args[0]
        return error
    return KafkaError(KafkaError._FATAL, f"the client gave up: {raised}", fatal=True) if lost else None


def answer_of(request: "Future[T]", timeout_s: float) -> T:
    """Return the answer to a request of an admin client. Raises KafkaException, also if none comes within `timeout_s`.

    The client itself gives up some requests only later, and its error can come too late for an equal time limit.
    """
    try:
        return request.result(timeout_s)
    except TimeoutError as error:
        reason = f"no answer within {timeout_s:g} s; check that every broker is up and can be reached"
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, reason)) from error


def retrying(call: Callable[[], T], doing: str, timeout_s: float = 30.0) -> T:
    """Return the result of `call`, repeated while a coordinator or leader is starting, moving or out of reach.

    Raises AccessDenied for a missing permission. Raises BrokerUnavailable if this takes longer than `timeout_s`,
    earlier if a partition stays unknown, and at once for any other error. When a broker answers after an outage that
    it is not the coordinator or leader yet, the time begins again, once: a broker that has just started needs seconds.
    """
    began, answered = time.monotonic(), False
    while True:
        try:
            return call()
        except KafkaException as exception:
            error: KafkaError = exception.args[0]
            if denied := denial(error, doing):
                raise denied from exception
            if not answered and is_moving(error) and _is_of_broker(error):
                began, answered = time.monotonic(), True
            unknown = error.code() == KafkaError._UNKNOWN_PARTITION
            patience_s = min(timeout_s, _LEARNT_S) if unknown else timeout_s
            if not (unknown or is_moving(error) or error.code() in _RECOVERED) or time.monotonic() > began + patience_s:
                raise BrokerUnavailable(f"{doing}: {error.str()} ({error.name()})") from exception
            time.sleep(0.05)


def _is_of_broker(error: KafkaError) -> bool:
    """Whether a broker answered with this error about a coordinator or leader. An unstable offset is none: it waits for
    an open transaction, whose time is bounded."""
    return error.code() > 0 and error.code() != KafkaError.UNSTABLE_OFFSET_COMMIT


def is_moving(error: KafkaError) -> bool:
    """Whether a coordinator or leader is starting, moving or slow. Errors of a consumer are not marked retriable."""
    return error.code() in _MOVING


def is_unanswered(error: KafkaError) -> bool:
    """Whether no broker has told the client where a partition begins or ends, which is not to say that it is gone.

    The client reports the broker's own error next, such as a missing permission. Only the text distinguishes this case.
    """
    return error.code() == KafkaError._AUTO_OFFSET_RESET and error.str().startswith("failed to query logical offset")


def is_fenced(error: KafkaError) -> bool:
    """Whether topics were not created because controllers have fenced brokers, which are back after their next
    heartbeat.

    The same code says that there are fewer brokers than replicas. Only the text distinguishes this case.
    """
    return error.code() == KafkaError.INVALID_REPLICATION_FACTOR and "fenced" in error.str()


def raise_for(error: KafkaError, doing: str) -> None:
    """Raise the matching error for a consumer's error, unless the client recovers from it by itself."""
    code = error.code()
    if code in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION):
        raise TopicError(f"{doing}: the topic or partition is missing; create it with `rollstream topics apply`")
    if denied := denial(error, doing):
        raise denied
    if code in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
        raise OffsetGone(
            f"{doing}: the position is no longer in the log ({error.str()}); records were deleted, or the topic was "
            "recreated"
        )
    if error.fatal() or not (error.retriable() or is_moving(error) or code in _RECOVERED):
        raise BrokerUnavailable(f"{doing}: {error.str()} ({error.name()})")


_SLICE_S = 0.25


class Stalled(RollstreamError):
    """A call did not return in time; its thread and its client must not be used any more."""


class BoundedCalls:
    """Runs calls one after another on its own thread."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        # A daemon thread, so that a call that never returns does not keep the process from ending.
        threading.Thread(target=self._serve, name="bounded-calls", daemon=True).start()

    def run(self, call: Callable[[], Any], name: str, timeout_s: float) -> Any:
        """Return what `call` returns, or raise its exception. Raises Stalled if it runs for more than `timeout_s`.

        Time during which the process was suspended does not count. A zombie that resumes must learn that it was
        replaced; it must not mistake the suspension for a call that stalled, and fence its replacement.
        """
        future = self.submit(call)
        for _ in range(math.ceil(timeout_s / _SLICE_S)):
            try:
                return future.result(min(_SLICE_S, timeout_s))
            except FutureTimeoutError:
                # The call may have ended just after this wait, or have raised a TimeoutError itself.
                if future.done():
                    return future.result()
        raise Stalled(f"{name} did not return within {timeout_s:g} s")

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Queue `call` behind the calls submitted before it."""
        future: Future[Any] = Future()
        self._waiting.put((call, future))
        return future

    def close(self) -> None:
        """End the thread once its current call returns."""
        self._waiting.put(None)

    def _serve(self) -> None:
        while (item := self._waiting.get()) is not None:
            call, future = item
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            # This frame must not keep the client of the last call alive while the thread is idle.
            del call, future, item
