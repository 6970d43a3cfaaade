"""Waits at the start of a role until a broker answers, so that an outage does not use up the restarts of the role."""

import os
import threading
import time

from rollstream.pipeline.process.role_process import PHASE, READY_VARIABLE, announce_progress
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import AccessDenied, BrokerUnavailable
from rollstream.topics.kafka import clients

LOOK_S = 10.0
"""How often a role that is not ready looks whether a broker still answers."""
_WAITS = "no broker answers yet"


def wait_for_broker(kafka: KafkaConfig) -> None:
    """Return once a broker answers. Raises AccessDenied if the brokers refuse this client.

    If the brokers are lost again before this role is ready, its supervisor is told so, and goes on waiting for it.
    Raises BrokerUnavailable if no broker answers within ten seconds and this process has no supervisor, which would go
    on waiting for it, or was asked to stop.
    """
    while True:
        try:
            clients.check_broker(kafka)
            break
        except AccessDenied:
            raise
        except BrokerUnavailable as error:
            if PHASE.name == "draining" or not announce_progress(f"{_WAITS}: {error}"):
                raise
    if READY_VARIABLE in os.environ:
        threading.Thread(target=_report_outages, args=(kafka,), name="outages", daemon=True).start()


def _report_outages(kafka: KafkaConfig) -> None:
    """Report progress as long as no broker answers and this role is not ready: a request may wait for a minute, and a
    role makes several before it is ready."""
    supervised = True
    while supervised and PHASE.name == "starting":
        time.sleep(LOOK_S)
        try:
            clients.check_broker(kafka)
        except AccessDenied:
            return
        except BrokerUnavailable as error:
            supervised = announce_progress(f"{_WAITS}: {error}")
