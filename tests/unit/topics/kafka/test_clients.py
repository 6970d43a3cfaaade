"""Settings of the clients that are built."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError, admin

from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.groups import GroupMember


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings of the client that was built."""
    built: dict[str, Any] = {}
    monkeypatch.setattr(clients, "Consumer", built.update)
    for owner, name in ((clients, "NamedProducer"), (clients, "Producer"), (admin, "AdminClient")):
        monkeypatch.setattr(owner, name, lambda made: built.update(made) or Unconnected())
    return built


class Unconnected:
    """A producer without brokers."""

    def list_topics(self, topic: str, timeout: float) -> None:
        pass


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


@pytest.mark.parametrize(("client", "linger"), [({}, "0"), ({"linger.ms": "50"}, "50")])
def test_a_delay_that_the_user_sets_applies_in_transactions(
    settings: dict[str, Any], client: dict[str, str], linger: str
) -> None:
    clients.transactional_producer(KafkaConfig(client=client, transaction_timeout_s=20.0), "main/group/0")
    assert settings["linger.ms"] == linger
    assert settings["delivery.timeout.ms"] == settings["transaction.timeout.ms"] == 20_000


def test_a_reader_takes_small_pieces_of_partitions_unless_the_user_sets_their_size(settings: dict[str, Any]) -> None:
    clients.reader(KafkaConfig(), partition_bytes=1024)
    assert settings["max.partition.fetch.bytes"] == 1024
    clients.reader(KafkaConfig(client={"max.partition.fetch.bytes": "2048"}), partition_bytes=1024)
    assert settings["max.partition.fetch.bytes"] == "2048"


def test_an_error_that_repeats_is_logged_every_ten_seconds_whatever_its_times_and_counts(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clients.reader(KafkaConfig())
    now_s = 1e6
    monkeypatch.setattr(time, "monotonic", lambda: now_s)

    def report(address: str, rest: str) -> None:
        text = f"{address}/bootstrap: Connect to ipv4#10.0.0.1:9092 failed: Connection refused ({rest})"
        settings["error_cb"](KafkaError(KafkaError._TRANSPORT, text))

    for suppressed in range(20):
        report("a:9092", f"after {suppressed}ms in state CONNECT, {suppressed} identical error(s) suppressed")
        report("b:9092", f"after {suppressed}ms in state CONNECT")
        now_s += 1
    assert caplog.messages == ["kafka_error"] * 4, "twice of each of the two"


@pytest.mark.parametrize(
    "build",
    [
        clients.admin,
        clients.bare,
        clients.producer,
        clients.reader,
        lambda kafka: clients.transactional_producer(kafka, "main/group/0"),
        lambda kafka: clients.group_member(kafka, "g", "m"),
    ],
    ids=["admin", "bare", "producer", "reader", "transactional", "member"],
)
def test_no_client_has_brokers_create_the_topics_that_it_asks_for(
    settings: dict[str, Any], build: Callable[[KafkaConfig], object]
) -> None:
    build(KafkaConfig())
    assert settings["allow.auto.create.topics"] == "false"
