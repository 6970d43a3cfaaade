"""A process that writes in transactions ends with a one-line error if no broker answers."""

from collections.abc import Sequence

import pytest

from rollstream.consumers import transactions
from rollstream.consumers.transactions import ExactlyOnce
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import DeliveryError
from rollstream.topics.kafka.reader import Reader
from rollstream.topics.kafka.records import GroupPosition
from rollstream.topics.kafka.transactions import Transaction


class Writer(ExactlyOnce[None]):
    """Writes nothing."""

    def _write(self, transaction: Transaction, parts: Sequence[None]) -> list[GroupPosition]:
        return []


def test_a_producer_that_nobody_answers_is_given_up_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "RETRY_FOR_S", 0.5)
    nobody = KafkaConfig(bootstrap_servers="127.0.0.1:1", transaction_timeout_s=1.0)
    reader = Reader(nobody)
    writer = Writer(nobody, "main", "main.grouper", "grouper", 0, reader, "main.rollouts")
    with pytest.raises(DeliveryError, match=r"init_transactions had no answer for 0\.5 s; are the brokers up\?"):
        writer.start_producer()
    reader.close()
