"""Ends the roles of a run that is split: none starts, and one that runs stops as after SIGTERM."""

import logging
import os
import signal
import threading
import time
from contextlib import closing

from rollstream.topics.catalogue import topic_name
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RollstreamError, TopicError
from rollstream.topics.kafka.follower import TopicFollower
from rollstream.topics.kafka.records import BEGINNING
from rollstream.topics.logs import event
from rollstream.topics.run_splits import SUCCESSOR_KEY, check_open

logger = logging.getLogger(__name__)
_POLL_S = 1.0
_REST_S = 5.0


def end_with_split(kafka: KafkaConfig, run: str) -> None:
    """Stop this process by SIGTERM once its run is split. Raises StateRefused if it is already, or is being filled."""
    check_open(kafka, run)
    threading.Thread(target=_follow, args=(kafka, run), name="split", daemon=True).start()


def _follow(kafka: KafkaConfig, run: str) -> None:
    while True:
        try:
            if _is_split(kafka, run):
                os.kill(os.getpid(), signal.SIGTERM)
            return
        except TopicError:
            return  # A run of an earlier release has no topic `control`.
        except RollstreamError:
            time.sleep(_REST_S)


def _is_split(kafka: KafkaConfig, run: str) -> bool:
    """Wait until the run is split; the return value is always true."""
    with closing(TopicFollower(kafka, {(topic_name(run, "control"), 0): BEGINNING})) as follower:
        while True:
            for message in follower.poll(100, _POLL_S):
                if message.key == SUCCESSOR_KEY and message.value is not None:
                    event(logger, "run_split", run=run)
                    return True
