"""Waits at the start of a role until a broker answers, so that an outage does not use up the restarts of the role."""

from rollstream.pipeline.run.role_process import PHASE, announce_progress
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import AccessDenied, BrokerUnavailable
from rollstream.topics.kafka import clients


def wait_for_broker(kafka: KafkaConfig) -> None:
    """Return once a broker answers. Raises AccessDenied if the brokers refuse this client.

    Raises BrokerUnavailable if no broker answers within ten seconds and this process has no supervisor, which would go
    on waiting for it, or was asked to stop.
    """
    while True:
        try:
            clients.check_broker(kafka)
            return
        except AccessDenied:
            raise
        except BrokerUnavailable as error:
            if PHASE.name == "draining" or not announce_progress(f"no broker answers yet: {error}"):
                raise
