"""Detects clients that will never reach a broker again, although brokers answer.

While brokers are fenced, as after a laptop slept or during a rolling upgrade, their answers about metadata name no
broker. librdkafka then drops all brokers that it knows, and sometimes does not return to bootstrap.servers
(https://github.com/confluentinc/librdkafka/issues/5301). The client stays silent: it reports no error, and its consumer
neither reads nor joins its group. Only a new client helps.
"""

from typing import Any

from confluent_kafka import KafkaException

from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import AccessDenied, BrokerUnavailable
from rollstream.topics.kafka import clients

_ANSWER_S = 2.0


def is_stranded(kafka: KafkaConfig, client: Any, topic: str) -> bool:
    """Whether a client gets no answer about a topic although a new client does. Takes up to a few seconds."""
    return not _answers(client, topic) and _brokers_answer(kafka) and not _answers(client, topic)


def _answers(client: Any, topic: str) -> bool:
    try:
        client.list_topics(topic, timeout=_ANSWER_S)
    except KafkaException:
        return False
    return True


def _brokers_answer(kafka: KafkaConfig) -> bool:
    try:
        clients.check_broker(kafka, _ANSWER_S)
    except (BrokerUnavailable, AccessDenied):
        return False
    return True
