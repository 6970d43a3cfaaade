"""Transactional ids. Each belongs to exactly one writer of one run.

The run comes first, and no run's name contains "/", so that ids of different runs have different prefixes: an access
rule for the prefix `exp/` covers run `exp` and not run `exp-lr`.
"""

import logging
import time

from confluent_kafka import KafkaError, KafkaException

from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import AccessDenied, BrokerUnavailable
from rollstream.topics.kafka import clients

logger = logging.getLogger(__name__)
_DENIED = (KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED)


def transactional_id(run: str, role: str, which: str | int = "") -> str:
    """Return the id of a writer: `{run}/{role}`, or `{run}/{role}/{which}` if the role has several writers."""
    return f"{run}/{role}" if which == "" else f"{run}/{role}/{which}"


def fence(kafka: KafkaConfig, identity: str) -> None:
    """Fence the producer of a transactional id, so that it cannot commit any more, and abort its open transaction.

    This is for ids under which this process does not write. Raises BrokerUnavailable if the broker does not answer, and
    AccessDenied if it refuses.
    """
    producer = clients.transactional_producer(kafka, identity, logger=logger)
    deadline = time.monotonic() + kafka.patience_s
    while True:
        try:
            producer.init_transactions(5.0)
            return
        except KafkaException as exception:
            error: KafkaError = exception.args[0]
            if error.code() in _DENIED:
                raise AccessDenied(
                    f"transactional id {identity} cannot be fenced: {error.str()}; grant this user WRITE on it"
                ) from exception
            if not error.retriable() or time.monotonic() > deadline:
                raise BrokerUnavailable(f"transactional id {identity} cannot be fenced: {error.str()}") from exception
