"""A rebalance in the middle of a poll: no message is read twice. A coordinator that moves: no partition is left."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from confluent_kafka import KafkaError, TopicPartition

from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.groups import GroupMember, MembershipLost
from rollstream.topics.kafka.records import COMMITTED


@dataclass(frozen=True)
class Fetched:
    """A message of the topic `t`."""

    number: int
    at: int

    def topic(self) -> str:
        return "t"

    def partition(self) -> int:
        return self.number

    def offset(self) -> int:
        return self.at

    def timestamp(self) -> tuple[int, int]:
        return 1, 0

    def error(self) -> None:
        return None

    def nothing(self) -> None:
        return None

    key = value = headers = leader_epoch = nothing


@dataclass
class Rebalanced:
    """A consumer that is assigned partition 0 again between the first message of a poll and the rest."""

    answers: list[list[Fetched]]
    on_assign: Callable[..., None] = print
    on_revoke: Callable[..., None] = print
    assigned: list[tuple[int, int]] = field(default_factory=list)

    def subscribe(self, _topics: list[str], *, on_assign: Any, on_revoke: Any, on_lost: Any) -> None:
        self.on_assign, self.on_revoke = on_assign, on_revoke
        self.on_assign(self, [TopicPartition("t", 0), TopicPartition("t", 1)])

    def assign(self, places: list[TopicPartition]) -> None:
        self.assigned += [(place.partition, place.offset) for place in places]

    def consume(self, _most: int, _wait_s: float) -> list[Fetched]:
        if len(self.answers) == 1:
            self.on_revoke(self, [TopicPartition("t", 0)])
            self.on_assign(self, [TopicPartition("t", 0)])
        return self.answers.pop(0)


@pytest.mark.parametrize(("first", "expected"), [(0, [(1, 4), (0, 9)]), (1, [(1, 3), (1, 4), (0, 9)])])
def test_a_message_of_a_partition_that_is_assigned_again_meanwhile_is_not_read_twice(
    monkeypatch: pytest.MonkeyPatch, first: int, expected: list[tuple[int, int]]
) -> None:
    consumer = Rebalanced([[Fetched(first, 9 if first == 0 else 3)], [Fetched(1, 4), Fetched(0, 9)]])
    monkeypatch.setattr(clients, "group_member", lambda *_words, **_settings: consumer)
    member = GroupMember(KafkaConfig(), "g", "m", "t")
    member.join(lambda partitions: dict.fromkeys(partitions, 9), lambda _gone: None, lambda _gone: None)
    assert [(record.partition, record.offset) for record in member.poll(10, 1.0).records] == expected
    assert consumer.assigned == [(0, 9), (1, 9), (0, 9)]


@dataclass(frozen=True)
class Failed:
    """An error of a whole request, which names no partition."""

    code: int

    def error(self) -> KafkaError:
        return KafkaError(self.code)

    def nothing(self) -> None:
        return None

    topic = partition = offset = nothing


@pytest.mark.parametrize("code", [KafkaError.NOT_COORDINATOR, KafkaError._TIMED_OUT_QUEUE])
def test_a_member_joins_again_if_the_coordinator_told_it_no_position_and_else_goes_on(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    consumer: Any = Rebalanced([])
    consumer.consume = lambda _most, _wait_s: [Failed(code)]
    monkeypatch.setattr(clients, "group_member", lambda *_words, **_settings: consumer)
    member = GroupMember(KafkaConfig(), "g", "m", "t")
    member.join(lambda _numbers: {0: 9, 1: 9}, lambda _gone: None, lambda _gone: None)
    assert not member.poll(10, 0.0).records
    member = GroupMember(KafkaConfig(), "g", "m", "t")
    member.join(lambda _numbers: {0: 9, 1: COMMITTED}, lambda _gone: None, lambda _gone: None)
    with pytest.raises(MembershipLost, match="an assigned partition has no position") as raised:
        member.poll(10, 0.0)
    assert not raised.value.fenced
