"""Waits at the start of a role until a broker answers, so that an outage does not use up the restarts of the role."""

import logging
import os
import threading
import time

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.process.role_process import PHASE, READY_VARIABLE, announce_progress
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import AccessDenied, BrokerUnavailable
from rollstream.topics.kafka import clients
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)
LOOK_S = 10.0
"""How often a role that is not ready looks whether a broker still answers."""
_WAITS = "no broker answers yet"


def wait_for_broker(config: RunConfig) -> None:
    """Return once a broker answers. Raises AccessDenied if the brokers refuse this client.

    A supervisor is told of the wait, and goes on waiting for this role, also if the brokers are lost again before it
    is ready. Raises BrokerUnavailable if this process was asked to stop, or if it has no supervisor and no broker
    answers within `supervisor.ready_timeout_s`.
    """
    deadline, logged = time.monotonic() + config.supervisor.ready_timeout_s, False
    while True:
        try:
            clients.check_broker(config.kafka)
            break
        except AccessDenied:
            raise
        except BrokerUnavailable as error:
            if PHASE.name == "draining":
                raise
            if announce_progress(f"{_WAITS}: {error}"):
                continue
            if time.monotonic() >= deadline:
                raise
            if not logged:
                limit_s = config.supervisor.ready_timeout_s
                event(logger, "waits_for_broker", level=logging.WARNING, timeout_s=limit_s, problem=str(error))
                logged = True
    if READY_VARIABLE in os.environ:
        threading.Thread(target=_report_outages, args=(config.kafka,), name="outages", daemon=True).start()


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
