"""Detects clients that will never reach a broker again, although brokers answer.

While brokers are fenced, as after a laptop slept or during a rolling upgrade, their answers about metadata name no
broker. librdkafka then drops all brokers that it knows, and sometimes does not return to bootstrap.servers
(https://github.com/confluentinc/librdkafka/issues/5301). The client stays silent: it reports no error, and its consumer
neither reads nor joins its group. Only a new client helps.
"""

from contextlib import suppress
from typing import Any

from confluent_kafka import KafkaException

from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import clients

SILENT_S = 30.0
"""Time without any sign of a broker after which a client is examined, and between examinations."""
_ANSWER_S = 2.0
_EXAMINATIONS = 3


class StrandedCheck:
    """Examines a client that hears nothing from brokers, until it is known to be stranded.

    A healthy client may fail one examination: after an outage it waits up to ten seconds before it connects again
    (librdkafka's reconnect.backoff.max.ms), or thirty for a connection to be made (socket.connection.setup.timeout.ms),
    and up to sixty for an answer on a connection that is dead (socket.timeout.ms). So only a client that fails three in
    a row, SILENT_S apart, is stranded.
    """

    def __init__(self) -> None:
        self._failed = 0

    def clear(self) -> None:
        """Note that the client has heard from a broker."""
        self._failed = 0

    def is_stranded(self, kafka: KafkaConfig, client: Any, topic: str) -> bool:
        """Examine the client, which may take four seconds, and return whether it is known to be stranded."""
        silent = not _answers(client, topic) and _answers(clients.bare(kafka), clients.FIRST_TOPIC)
        self._failed = self._failed + 1 if silent else 0
        return self._failed >= _EXAMINATIONS


def _answers(client: Any, topic: str) -> bool:
    with suppress(KafkaException):
        client.list_topics(topic, timeout=_ANSWER_S)
        return True
    return False
