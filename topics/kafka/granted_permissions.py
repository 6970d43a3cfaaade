"""Permissions of this client's user as the brokers report them; nothing is changed on the brokers."""

from collections.abc import Iterable
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection, libversion

from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import BrokerUnavailable
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.access_control import operation_name
from rollstream.topics.kafka.client_errors import COORDINATOR_REQUEST_S, answer_of, description_of
from rollstream.topics.kafka.hanging_transactions import admin_client

_TIMEOUT_S = 30.0
_NO_SUCH_PRODUCER = 2**62
_TRANSACTIONAL_ID_DENIED = 53
_DENIED = (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.GROUP_AUTHORIZATION_FAILED)
_ABSENT = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.GROUP_ID_NOT_FOUND)


def topic_operations(kafka: KafkaConfig, topics: Iterable[str]) -> dict[str, frozenset[str] | None]:
    """Return the operations that the user may do on each topic, such as Read; None for a topic that does not exist.

    The set of a topic on which the user lacks Describe is empty. Raises BrokerUnavailable.
    """
    client, names = clients.admin(kafka), list(topics)
    answers = client.describe_topics(TopicCollection(names), include_authorized_operations=True) if names else {}
    return {name: _operations(answer, f"topic {name}") for name, answer in answers.items()}


def group_operations(kafka: KafkaConfig, groups: Iterable[str]) -> dict[str, frozenset[str] | None]:
    """Return the operations that the user may do on each consumer group, whether it exists or not."""
    client, names = clients.admin(kafka), list(groups)
    if not names:
        return {}
    answers = client.describe_consumer_groups(
        names, include_authorized_operations=True, request_timeout=COORDINATOR_REQUEST_S
    )
    return {name: _operations(answer, f"group {name}") for name, answer in answers.items()}


def cluster_operations(kafka: KafkaConfig) -> frozenset[str]:
    """Return the operations that the user may do on the cluster."""
    client = clients.admin(kafka)
    return _operations(client.describe_cluster(include_authorized_operations=True), "the cluster") or frozenset()


def writable_ids(kafka: KafkaConfig, ids: Iterable[str]) -> dict[str, bool]:
    """Return whether the user may write under each transactional id.

    Asks a broker to abort a transaction of a producer that cannot exist; the reason for the refusal shows the
    permission. Fences no producer. Raises as `admin_client` does, and BrokerUnavailable if the request fails.
    """
    from kafka.errors import KafkaError as OtherKafkaError
    from kafka.protocol.producer.transaction import EndTxnRequest

    allowed = {}
    with admin_client(kafka) as client:
        for name in ids:
            request = EndTxnRequest(
                transactional_id=name, producer_id=_NO_SUCH_PRODUCER, producer_epoch=0, committed=False
            )
            try:
                # Brokers check the permission first, so any broker can answer.
                response: Any = client._manager.run(_sent, client, request)
            except (OtherKafkaError, OSError, ValueError) as error:
                raise BrokerUnavailable(f"asking about transactional id {name}: {error}") from error
            allowed[name] = response.error_code != _TRANSACTIONAL_ID_DENIED
    return allowed


async def _sent(client: Any, request: Any) -> Any:
    return await client._manager.send(request)


def client_version() -> str:
    """Return the version of librdkafka."""
    return libversion()[0]


def broker_version(kafka: KafkaConfig) -> str:
    """Return the version of a broker, such as 4.2, as its supported requests show it."""
    with admin_client(kafka) as client:
        return ".".join(map(str, client._manager.broker_version_data.broker_version[:2]))


def _operations(answer: Any, what: str) -> frozenset[str] | None:
    try:
        described = answer_of(answer, _TIMEOUT_S)
    except KafkaException as exception:
        error: KafkaError = exception.args[0]
        code = error.code()
        if code in _DENIED:
            return frozenset()
        if code in _ABSENT:
            return None
        raise BrokerUnavailable(f"asking about {what}: {description_of(error)}") from exception
    return frozenset(map(operation_name, described.authorized_operations or ()))
