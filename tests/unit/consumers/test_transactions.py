"""A process that writes in transactions ends with one line where no broker answers."""

from collections.abc import Sequence

import pytest
from confluent_kafka import TopicPartition

from consumers import transactions
from consumers.transactions import ExactlyOnce
from topics import clients
from topics.config import KafkaConfig
from topics.errors import DeliveryError


class Writer(ExactlyOnce[None]):
    """Writes nothing."""

    def _write(self, parts: Sequence[None]) -> list[TopicPartition]:
        return []


def test_a_producer_that_nobody_answers_is_given_up_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "_RETRY_FOR_S", 0.5)
    nobody = KafkaConfig(bootstrap_servers="127.0.0.1:1", transaction_timeout_s=1.0)
    consumer = clients.reader(nobody)
    writer = Writer(nobody, "main", "main.grouper", "grouper", 0, consumer, "main.rollouts")
    with pytest.raises(DeliveryError, match=r"init_transactions had no answer for 0\.5 s; are the brokers up\?"):
        writer._initialise()
    consumer.close()
