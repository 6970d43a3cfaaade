"""Senders whose producer loses all brokers, at moments that a real client reaches only by chance, or gives up."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import DeadlineExceeded
from rollstream.topics.kafka import clients, connection
from rollstream.topics.kafka.recovering_sender import RecoveringSender
from rollstream.topics.kafka.sender import Failure, SendFailed
from tests.support.waiting import eventually


class Message:
    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return 7

    def timestamp(self) -> tuple[int, int]:
        return 1, 0


class Client:
    """The parts of a producer that a sender uses; `reaches` says whether it reaches a broker."""

    def __init__(self, reaches: bool, room: int = 100) -> None:
        self.reaches, self.room = reaches, room
        self.queue: list[Callable[..., None]] = []
        self.reports: list[tuple[Callable[..., None], KafkaError | None]] = []
        self.late_reports = 0
        """Calls that process no report after a purge."""
        self.fatal: KafkaError | None = None
        """Error after which the client takes no record any more; `poll` raises it once."""
        self.untold = True

    def __len__(self) -> int:
        return len(self.queue) + len(self.reports)

    def produce(self, *_record: Any, on_delivery: Callable[..., None], **_options: Any) -> None:
        if self.fatal is not None:
            raise KafkaException(KafkaError(KafkaError._FATAL, "gave up", fatal=True))
        if len(self) >= self.room:
            raise BufferError
        self.queue.append(on_delivery)

    def poll(self, _timeout_s: float) -> int:
        if self.fatal is not None and self.untold:
            self.untold = False
            raise KafkaException(self.fatal)
        if self.reaches:
            self.report(None)
        if self.late_reports:
            self.late_reports -= 1
            return 0
        reports, self.reports = self.reports, []
        for report, error in reports:
            report(error, Message())
        return len(reports)

    def flush(self, timeout_s: float) -> int:
        self.poll(timeout_s)
        return len(self)

    def report(self, error: KafkaError | None) -> None:
        self.reports += [(report, error) for report in self.queue]
        self.queue.clear()

    def purge(self) -> None:
        self.report(KafkaError(KafkaError._PURGE_QUEUE))

    def list_topics(self, _topic: str, timeout: float) -> None:
        assert timeout > 0
        if not self.reaches:
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))


class Brokers:
    """The clients of a process, the first of which reaches none of the brokers, which run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, silent_s: float = 0.0, room: int = 100) -> None:
        self.first = Client(reaches=False, room=room)
        self.producers: list[Client] = []
        monkeypatch.setattr(connection, "SILENT_S", silent_s)
        monkeypatch.setattr(clients, "bare", lambda _kafka: Client(reaches=True))
        monkeypatch.setattr(clients, "producer", self._producer)
        self.failures: list[Failure] = []
        self.sender = RecoveringSender(KafkaConfig(), on_failure=self.failures.append)

    def forbid(self) -> None:
        """Let the present producer give up, because its user may write nothing."""
        self.producers[-1].reaches = False
        self.producers[-1].fatal = KafkaError(KafkaError.CLUSTER_AUTHORIZATION_FAILED, "denied", fatal=True)

    def _producer(self, _kafka: KafkaConfig, **_settings: Any) -> Client:
        self.producers.append(Client(reaches=True) if self.producers else self.first)
        return self.producers[-1]

    def send(self, name: str) -> list[object]:
        delivered: list[object] = []
        self.sender.send("run.rollouts", b"value", name=name, on_delivery=delivered.append)
        return delivered


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def examine(brokers: Brokers) -> None:
    """Let the sender look once, and wait until its examination has ended."""
    brokers.sender.poll()
    eventually(lambda: "examine-producer" not in threads(), 30, "the examination")


def test_a_producer_that_fails_three_examinations_is_replaced_before_the_next_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    brokers = Brokers(monkeypatch)
    brokers.send("first")
    for _ in range(3):
        assert brokers.failures == []
        examine(brokers)
    delivered = brokers.send("second")
    brokers.sender.flush()
    assert (len(brokers.producers), len(delivered)) == (2, 1)
    [failure] = brokers.failures
    assert (failure.name, failure.reason) == ("first", "the client had lost all brokers")


def test_a_producer_that_connects_again_between_examinations_keeps_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    brokers = Brokers(monkeypatch)
    delivered = brokers.send("first")
    for _ in range(3):
        brokers.first.reaches = False
        examine(brokers)
        brokers.first.reaches = True  # its backoff has passed
        brokers.sender.poll()
        delivered += brokers.send("another")
    brokers.sender.flush()
    assert (brokers.producers, brokers.failures) == ([brokers.first], [])


def test_a_flush_notices_a_stranded_producer_before_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    brokers = Brokers(monkeypatch, silent_s=0.01)
    brokers.send("first")
    brokers.sender.flush(300)
    assert (len(brokers.producers), [failure.name for failure in brokers.failures]) == (2, ["first"])


def test_a_queue_that_empties_by_failures_is_no_sign_of_a_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    brokers = Brokers(monkeypatch)
    for number in range(30):
        brokers.send(f"record {number}")
        examine(brokers)
        if len(brokers.producers) > 1:
            break
        brokers.first.report(KafkaError(KafkaError._MSG_TIMED_OUT))
        brokers.sender.poll()
    assert len(brokers.producers) == 2


def test_a_flush_waits_for_reports_of_the_producer_before(monkeypatch: pytest.MonkeyPatch) -> None:
    brokers = Brokers(monkeypatch)
    brokers.first.late_reports = 100
    brokers.send("first")
    for _ in range(3):
        examine(brokers)
    delivered = brokers.send("second")
    with pytest.raises(DeadlineExceeded, match=r"1 records to run\.rollouts are still unacknowledged"):
        brokers.sender.flush(0)
    assert not brokers.failures
    brokers.first.late_reports = 0
    brokers.sender.flush(0)
    assert ([failure.name for failure in brokers.failures], len(delivered)) == (["first"], 1)


def test_a_full_queue_makes_room_for_a_record_that_may_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    brokers = Brokers(monkeypatch, silent_s=1000.0, room=1)
    brokers.send("first")
    with pytest.raises(DeadlineExceeded, match="the producer's queue stayed full for 0 s"):
        brokers.sender.send("run.rollouts", b"value", timeout_s=0.0)
    brokers.first.reaches = True
    brokers.sender.send("run.rollouts", b"value", name="third", timeout_s=0.0)
    brokers.sender.flush()
    assert brokers.failures == []


def test_a_producer_that_gave_up_is_replaced_once_it_has_lived_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=100.0)
    clock.monotonic = lambda: clock.now_s
    monkeypatch.setattr("rollstream.topics.kafka.recovering_sender.time", clock)
    brokers = Brokers(monkeypatch, silent_s=1000.0)
    brokers.send("first")
    brokers.forbid()
    for name in ("second", "third"):
        clock.now_s += 2.0
        with pytest.raises(SendFailed, match=f"{name} was not delivered .*may not Write .*nor to any other"):
            brokers.send(name)
    assert len(brokers.producers) == 1
    clock.now_s += 2.0
    delivered = brokers.send("fourth")
    assert len(brokers.producers) == 2
    [failure] = brokers.failures
    assert failure.name == "first"
    assert "may not Write to topic run.rollouts, nor to any other" in failure.reason
    brokers.sender.flush()
    assert (len(delivered), len(brokers.failures)) == (1, 1)


def test_the_error_of_a_producer_that_was_replaced_meanwhile_is_not_the_next_producers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One thread waits in a poll of the producer that gives up, while another thread replaces it."""
    brokers = Brokers(monkeypatch, silent_s=1000.0)
    monkeypatch.setattr("rollstream.topics.kafka.recovering_sender.LEAST_LIFE_S", 0.0)
    brokers.sender = RecoveringSender(KafkaConfig(), on_failure=brokers.failures.append)
    gave_up, waits, replaced = brokers.producers[-1], threading.Event(), threading.Event()
    gave_up.reaches = False
    brokers.send("first")
    brokers.forbid()
    poll = gave_up.poll

    def poll_late(timeout_s: float) -> int:
        if timeout_s > 200.0 and not waits.is_set():
            waits.set()
            assert replaced.wait(30)
            raise KafkaException(KafkaError(KafkaError._FATAL, "gave up", fatal=True))
        return poll(timeout_s)

    gave_up.poll = poll_late  # type: ignore[method-assign]
    polling = threading.Thread(target=brokers.sender.poll, args=(300.0,))
    with pytest.raises(SendFailed):
        brokers.send("second")
    polling.start()
    assert waits.wait(30)
    delivered = brokers.send("third")
    producers = len(brokers.producers)
    replaced.set()
    polling.join(30)
    delivered += brokers.send("fourth")
    brokers.sender.flush()
    assert (len(delivered), [failure.name for failure in brokers.failures]) == (2, ["first"])
    assert (brokers.producers.index(gave_up) + 2, len(brokers.producers)) == (producers, producers)
