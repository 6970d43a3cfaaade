"""Followers of topics to which records come one by one, as they may from a busy broker."""

import pytest

from rollstream.topics.kafka.follower import TopicFollower
from rollstream.topics.kafka.records import KafkaRecord


def poll_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every follower of this process return at most one record a poll."""
    poll = TopicFollower.poll

    def one(follower: TopicFollower, _most: int, wait_s: float) -> list[KafkaRecord]:
        return poll(follower, 1, wait_s)

    monkeypatch.setattr(TopicFollower, "poll", one)
