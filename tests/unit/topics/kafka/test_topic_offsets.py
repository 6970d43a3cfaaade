"""Offsets of partitions whose leader does not know yet that it leads: they are asked for again."""

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
