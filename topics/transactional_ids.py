"""Transactional ids: who may commit for a run. Each is the id of one writer of one run alone.

The run comes first and "/" is in no run's name, so that no run's ids begin as another's do: an access rule for the
prefix `exp/` covers run `exp` and not run `exp-lr`.
"""

import logging
import time

from confluent_kafka import KafkaError, KafkaException

from topics import clients
from topics.config import KafkaConfig
from topics.errors import BrokerUnavailable
from topics.logs import event

logger = logging.getLogger(__name__)
_NOT_OURS = (KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED)


def transactional_id(run: str, role: str, which: str | int = "") -> str:
    """The id of a writer: `{run}/{role}`, or `{run}/{role}/{which}` where a run has several of the role."""
    return f"{run}/{role}" if which == "" else f"{run}/{role}/{which}"


def earlier_id(run: str, role: str, which: str | int) -> str:
    """The id that earlier releases gave the same writer, `{role}-{run}-{which}`, which another may have had too."""
    return f"{role}-{run}-{which}"


def fence(kafka: KafkaConfig, identity: str) -> None:
    """See that whoever writes under a transactional id commits nothing from now on; what it left open is aborted.

    For ids that this process does not write under itself. Does nothing where it may not use the id, as an access rule
    for the ids of this release alone has it. Raises BrokerUnavailable where the broker does not answer.
    """
    producer = clients.transactional_producer(kafka, identity, logger=logger)
    deadline = time.monotonic() + kafka.patience_s
    while True:
        try:
            producer.init_transactions(5.0)
            return
        except KafkaException as exception:
            error: KafkaError = exception.args[0]
            if error.code() in _NOT_OURS:
                event(logger, "id_not_fenced", level=logging.WARNING, transactional_id=identity, error=error.str())
                return
            if not error.retriable() or time.monotonic() > deadline:
                raise BrokerUnavailable(f"transactional id {identity} cannot be fenced: {error.str()}") from exception
