"""Errors of a client: those of a lost broker end once another broker leads; all others are raised at once."""

import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import AccessDenied, BrokerUnavailable
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.client_calls import (
    BoundedCalls,
    Stalled,
    answer_of,
    description_of,
    fatal_error,
    raise_for,
    refusal,
    retrying,
)
from rollstream.topics.kafka.groups import members
from tests.support.waiting import eventually


class Call:
    """Fails with an error a few times."""

    def __init__(self, code: int, failures: int) -> None:
        self._code, self._left = code, failures
        self.made = 0

    def __call__(self) -> str:
        self.made += 1
        if self._left:
            self._left -= 1
            raise KafkaException(KafkaError(self._code))
        return "answered"


GONE = [KafkaError._DESTROY_BROKER, KafkaError._RESOLVE, KafkaError._TRANSPORT]
LEADERS = [KafkaError.FENCED_LEADER_EPOCH, KafkaError.UNKNOWN_LEADER_EPOCH, KafkaError.OFFSET_NOT_AVAILABLE]
COORDINATORS = [
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
]
SLOW = [KafkaError._TIMED_OUT, KafkaError._TIMED_OUT_QUEUE, KafkaError.REQUEST_TIMED_OUT, KafkaError.NETWORK_EXCEPTION]
PASSING = [*GONE, *LEADERS, *COORDINATORS, *SLOW, KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError._UNKNOWN_PARTITION]


@pytest.mark.parametrize("code", PASSING)
def test_a_question_to_a_broker_that_went_away_or_knows_too_little_is_asked_again(code: int) -> None:
    call = Call(code, failures=3)
    assert retrying(call, "asking") == "answered"
    assert call.made == 4


@pytest.mark.parametrize("code", [*GONE, *LEADERS, *COORDINATORS, *SLOW])
def test_a_consumer_goes_on_while_a_broker_is_gone_or_slow_or_a_coordinator_moves(code: int) -> None:
    assert raise_for(KafkaError(code), "reading") is None  # type: ignore[func-returns-value]


def test_a_partition_that_stays_unknown_is_told_before_the_time_for_leaders_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: sum(slept))
    monkeypatch.setattr(time, "sleep", slept.append)
    with pytest.raises(BrokerUnavailable, match=r"^asking: .*\(_UNKNOWN_PARTITION\)"):
        retrying(Call(KafkaError._UNKNOWN_PARTITION, failures=10_000), "asking", timeout_s=300.0)
    assert 1 < sum(slept) < 30


def seconds_until_given_up(monkeypatch: pytest.MonkeyPatch, *codes: int) -> float:
    """Virtual seconds after which 30 s of patience end, with these errors a second each, the last one for ever."""
    slept = [0.0]
    errors = [KafkaException(KafkaError(code)) for code in codes]

    def fail() -> str:
        slept.append(1.0)
        raise errors.pop(0) if len(errors) > 1 else errors[0]

    with monkeypatch.context() as patched:
        patched.setattr(time, "monotonic", lambda: sum(slept))
        patched.setattr(time, "sleep", slept.append)
        with pytest.raises(BrokerUnavailable):
            retrying(fail, "asking", timeout_s=30.0)
    return sum(slept)


@pytest.mark.parametrize("code", [*LEADERS, *COORDINATORS, KafkaError.NOT_LEADER_FOR_PARTITION])
def test_patience_begins_anew_once_when_a_broker_is_back_but_no_coordinator_or_leader_yet(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    outage = [KafkaError._TRANSPORT] * 25
    assert 55 < seconds_until_given_up(monkeypatch, *outage, code) < 59
    assert 55 < seconds_until_given_up(monkeypatch, *outage, *[code, KafkaError._TRANSPORT] * 40) < 59, "once"


@pytest.mark.parametrize("code", [*GONE, *SLOW[:2], KafkaError.UNSTABLE_OFFSET_COMMIT])
def test_patience_is_not_longer_for_silence_or_an_open_transaction(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    assert 29 < seconds_until_given_up(monkeypatch, KafkaError._TRANSPORT, code) < 33


def test_what_time_does_not_mend_is_told_at_once() -> None:
    call = Call(KafkaError.TOPIC_AUTHORIZATION_FAILED, failures=1)
    with pytest.raises(AccessDenied, match=r"^asking: .*TOPIC_AUTHORIZATION_FAILED"):
        retrying(call, "asking")
    assert call.made == 1


def test_a_refusal_names_user_operation_topic_and_remedy() -> None:
    denied = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    text = refusal(denied, "main-env", "main.rollouts")
    assert text is not None
    assert text.startswith("user main-env may not Write to topic main.rollouts (TOPIC_AUTHORIZATION_FAILED); ")
    assert "`rollstream topics acls plan`" in text
    assert (refusal(denied, "") or "").startswith("this client's user may not Write to a topic (")
    assert "transactional id" in (refusal(KafkaError(KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED), "u") or "")
    assert "nor to any other" in (refusal(KafkaError(KafkaError.CLUSTER_AUTHORIZATION_FAILED), "u", "t") or "")
    assert refusal(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), "u", "t") is None


def test_an_error_without_a_text_is_described_by_its_name() -> None:
    assert description_of(KafkaError(KafkaError.UNSUPPORTED_VERSION, "")) == "UNSUPPORTED_VERSION"
    assert description_of(KafkaError(KafkaError.UNSUPPORTED_VERSION, "too old")) == "too old"


def test_a_fatal_error_is_found_behind_what_a_callback_raised_or_said_to_be_lost() -> None:
    fatal = KafkaError(KafkaError.CLUSTER_AUTHORIZATION_FAILED, "no", fatal=True)
    hidden = SystemError("a callback returned a result with an exception set")
    hidden.__cause__ = KafkaException(fatal)
    assert fatal_error(KafkaException(fatal)) is fatal
    assert fatal_error(hidden) is fatal
    assert fatal_error(KafkaException(KafkaError(KafkaError._TRANSPORT))) is None
    lost = fatal_error(SystemError("returned NULL without setting an exception"))
    assert lost is not None
    assert lost.code() == KafkaError._FATAL


def test_a_request_of_an_admin_client_is_answered_or_fails_as_the_client_fails() -> None:
    answered, failed, silent = Future[str](), Future[str](), Future[str]()
    answered.set_result("an answer")
    failed.set_exception(KafkaException(KafkaError(KafkaError.GROUP_ID_NOT_FOUND)))
    assert answer_of(answered, 0.0) == "an answer"
    for request, code in ((failed, KafkaError.GROUP_ID_NOT_FOUND), (silent, KafkaError._TIMED_OUT)):
        with pytest.raises(KafkaException) as raised:
            answer_of(request, 0.0)
        assert raised.value.args[0].code() == code


def test_a_question_that_no_broker_answers_ends_with_a_message_that_says_so() -> None:
    nobody = KafkaConfig(bootstrap_servers="127.0.0.1:1", transaction_timeout_s=-44.9)
    assert nobody.patience_s == pytest.approx(0.1)
    message = r"^describing group g: no answer within 0\.1 s; check that every broker is up and can be reached"
    with pytest.raises(BrokerUnavailable, match=message):
        members(nobody, "g")


def test_a_record_of_the_largest_allowed_size_fits_into_the_queue_of_its_producer() -> None:
    kafka = KafkaConfig(bootstrap_servers="127.0.0.1:1", max_record_bytes=100 * 2**20)
    clients.producer(kafka).produce("t", bytes(70 * 2**20))


STOPPED = """
import sys
from rollstream.topics.kafka.client_calls import BoundedCalls
calls = BoundedCalls()

def wait():
    print("waiting", flush=True)
    return sys.stdin.readline()

print(calls.run(wait, "wait", 1.0), flush=True)
"""


def test_what_a_call_returns_or_raises_comes_through() -> None:
    calls = BoundedCalls()
    assert calls.run(lambda: 3, "three", 5.0) == 3

    def fail() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        calls.run(fail, "fail", 5.0)
    assert calls.run(lambda: 4, "four", 5.0) == 4
    calls.close()


class EndsAfterWait(Future[Any]):
    """The result of a call that ends right after a wait for it has given up."""

    def result(self, timeout: float | None = None) -> Any:
        if self.done():
            return super().result(timeout)
        self.set_result("ended")
        raise FutureTimeoutError


def test_a_call_that_ends_right_after_a_wait_has_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = BoundedCalls()
    monkeypatch.setattr(calls, "submit", lambda _call: EndsAfterWait())
    assert calls.run(lambda: "ended", "slow", 5.0) == "ended"
    calls.close()


def test_a_call_that_does_not_come_back_is_left() -> None:
    calls, release, left = BoundedCalls(), threading.Event(), threading.Event()

    def hang() -> None:
        release.wait(300)
        left.set()

    with pytest.raises(Stalled, match=r"hang did not return within 0\.05 s"):
        calls.run(hang, "hang", 0.05)
    assert not left.is_set()
    calls.close()
    release.set()
    assert left.wait(300)


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGSTOP)
        since = time.monotonic()
        eventually(lambda: time.monotonic() - since > 1.5, 60, "it was stopped for longer than it waits")
        process.stdin.write("came back\n")
        process.stdin.flush()
        process.send_signal(signal.SIGCONT)
        assert process.stdout.read().startswith("came back")
    assert process.returncode == 0
