"""Settings of the clients that are built."""

from typing import Any

import pytest

from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.group_member import GroupMember


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings of the consumers that were built."""
    built: dict[str, Any] = {}
    monkeypatch.setattr(clients, "Consumer", built.update)
    return built


@pytest.mark.parametrize(
    ("longest_poll_s", "client", "interval"),
    [
        (0.0, {}, None),
        (300.0, {}, None),
        (450.5, {}, 450_500),
        (1e9, {}, 86_400_000),
        (450.5, {"max.poll.interval.ms": "9000"}, "9000"),
    ],
)
def test_a_member_is_expelled_only_after_the_longest_time_between_its_polls(
    settings: dict[str, Any], longest_poll_s: float, client: dict[str, str], interval: object
) -> None:
    GroupMember(KafkaConfig(client=client), "g", "m", "t", longest_poll_s=longest_poll_s)
    assert settings.get("max.poll.interval.ms") == interval
