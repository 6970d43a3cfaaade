"""Groups and their positions are asked for again while a broker is starting; an incomplete list is none."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import BrokerUnavailable
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.groups import group_positions

LOADING = KafkaError(KafkaError.COORDINATOR_LOAD_IN_PROGRESS)
INVALID = KafkaError(KafkaError.INVALID_REQUEST)


@dataclass
class Listing:
    """One group of each broker that answered, and the errors of the others."""

    valid: list[Any] = field(default_factory=list)
    errors: list[KafkaError] = field(default_factory=list)


@dataclass
class Group:
    group_id: str


class Admin:
    """Gives its answers in order; an answer that is an error fails the request."""

    def __init__(self, *answers: Listing | KafkaError) -> None:
        self.answers = list(answers)

    def _next(self) -> Future[Any]:
        future, answer = Future[Any](), self.answers.pop(0)
        if isinstance(answer, KafkaError):
            future.set_exception(KafkaException(answer))
        else:
            future.set_result(answer)
        return future

    def list_consumer_groups(self, *, request_timeout: float) -> Future[Any]:
        assert request_timeout > 0
        return self._next()


Connect = Callable[[Admin], None]


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Connect:
    return lambda admin: monkeypatch.setattr(clients, "admin", lambda _kafka: admin)


def test_groups_of_a_broker_that_is_starting_are_waited_for(connect: Connect) -> None:
    connect(Admin(Listing([Group("a")], [LOADING]), Listing([Group("b"), Group("a")])))
    assert topic_admin.group_names(KafkaConfig()) == ["a", "b"]


def test_a_list_that_stays_incomplete_is_an_error(connect: Connect) -> None:
    connect(Admin(Listing([Group("a")], [INVALID])))
    with pytest.raises(BrokerUnavailable, match=r"^listing consumer groups: .*INVALID_REQUEST"):
        topic_admin.group_names(KafkaConfig())


class Consumer:
    """A consumer whose first request for positions meets a coordinator that is loading."""

    def __init__(self) -> None:
        self.failures = 1

    def committed(self, places: list[TopicPartition], _timeout_s: float) -> list[TopicPartition]:
        if self.failures:
            self.failures -= 1
            raise KafkaException(LOADING)
        return [TopicPartition(place.topic, place.partition, 7 if place.partition == 0 else -1001) for place in places]

    def close(self) -> None:
        pass


def test_positions_of_a_group_whose_coordinator_moves_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = Consumer()
    monkeypatch.setattr(clients, "reader", lambda *_settings, **_more: consumer)
    assert [place.offset for place in group_positions(KafkaConfig(), "g", {"t": [0, 1]})] == [7]
    assert consumer.failures == 0
