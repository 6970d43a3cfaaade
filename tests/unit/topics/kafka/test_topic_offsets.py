"""Topics and offsets are asked for again while a broker is down, or a leader does not know yet that it leads."""

from collections.abc import Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import AccessDenied
from rollstream.topics.kafka import clients, topic_admin


class Admin:
    """Answers that each partition ends at 7, after it has failed a few times."""

    def __init__(self, code: int, failures: int) -> None:
        self._code, self._left = code, failures
        self.asked = 0

    def list_offsets(self, wanted: Mapping[TopicPartition, Any], **_options: Any) -> dict[TopicPartition, Future[Any]]:
        self.asked += 1
        answers: dict[TopicPartition, Future[Any]] = {place: Future() for place in wanted}
        for answer in answers.values():
            if self.asked <= self._left:
                answer.set_exception(KafkaException(KafkaError(self._code)))
            else:
                answer.set_result(SimpleNamespace(offset=7, timestamp=5))
        return answers


def test_a_leader_that_does_not_know_yet_that_it_leads_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    admin = Admin(KafkaError.NOT_LEADER_FOR_PARTITION, failures=3)
    monkeypatch.setattr(clients, "admin", lambda _kafka: admin)
    ends = topic_admin.offsets(KafkaConfig(), [("new", 0), ("new", 1)], "latest")
    assert ends == {("new", 0): (7, 5), ("new", 1): (7, 5)}
    assert admin.asked == 4


def test_a_missing_permission_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    admin = Admin(KafkaError.TOPIC_AUTHORIZATION_FAILED, failures=99)
    monkeypatch.setattr(clients, "admin", lambda _kafka: admin)
    with pytest.raises(AccessDenied, match="asking where new ends"):
        topic_admin.offsets(KafkaConfig(), [("new", 0)], "latest")
    assert admin.asked == 1


class Listing:
    """Lists one topic with two partitions, after its broker went down a few times."""

    def __init__(self, failures: int) -> None:
        self._left = failures

    def list_topics(self, _topic: str | None, *, timeout: float) -> Any:
        assert timeout > 0
        self._left -= 1
        if self._left >= 0:
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))
        return SimpleNamespace(topics={"main.rollouts": SimpleNamespace(error=None, partitions={0: None, 1: None})})


def test_topics_are_listed_again_if_a_broker_goes_down_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "admin", lambda _kafka: Listing(failures=2))
    assert topic_admin.partitions_of(KafkaConfig(), "main.rollouts") == 2
    assert topic_admin.topic_names(KafkaConfig()) == ["main.rollouts"]
    assert topic_admin.runs(KafkaConfig()) == {"main": {"rollouts": 2}}
