"""Follows the decisions about a run in a separate thread, which continues after outages of the brokers."""

import logging
import threading
from copy import deepcopy

from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.control.steering import DesiredState, SteeringWatch
from rollstream.topics.errors import RollstreamError
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)
_POLL_S = 0.5
_PAUSE_S = 10.0
"""Time until a topic that could not be read is read again."""


class SteeringFollower(Closing):
    """The decisions about a run. `state` is replaced whenever the decisions change, and never altered."""

    def __init__(self, kafka: KafkaConfig, run: str) -> None:
        """Read the decisions in force, and begin to follow the topic. Raises BrokerUnavailable."""
        self._kafka, self._run = kafka, run
        self._watch: SteeringWatch | None = SteeringWatch(kafka, run)
        self.state: DesiredState = deepcopy(self._watch.state)
        """The decisions in force, as last read."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="steering", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop following."""
        self._closing.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._closing.is_set():
            try:
                self._read_on()
            except RollstreamError as error:
                event(logger, "steering_not_followed", level=logging.WARNING, error=str(error), again_in_s=_PAUSE_S)
                self._forget_watch()
                self._closing.wait(_PAUSE_S)
        self._forget_watch()

    def _read_on(self) -> None:
        if self._watch is None:
            self._watch = SteeringWatch(self._kafka, self._run)
            self._take(self._watch.state)
        elif self._watch.poll(_POLL_S):
            self._take(self._watch.state)

    def _take(self, state: DesiredState) -> None:
        if state != self.state:
            self.state = deepcopy(state)

    def _forget_watch(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None
