"""States of the workers' mixtures on the topic `control`: a worker's next process continues from the newest state.

A state is written every few seconds, so a worker that was killed repeats the prompts of its last seconds. Writing never
disturbs the worker: a state that cannot be written is replaced by the next state.
"""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Sequence

from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.control.named_records import named
from rollstream.topics.errors import DeadlineExceeded, DeliveryError, RecordError, TopicError
from rollstream.topics.kafka.follower import TopicFollower
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.records import BEGINNING, KafkaRecord
from rollstream.topics.kafka.recovering_sender import RecoveringSender
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.logs import event
from rollstream.topics.records import EnvironmentState, MixtureState
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key

logger = logging.getLogger(__name__)
MIXTURE = "mixture"
"""First part of the key of a worker's state; the second is the worker's name."""
_CURRENT_S = 600.0
"""Age at which another worker's state no longer counts; running workers write every few seconds."""
_CLOSE_S = 5.0


class MixtureStates(Closing):
    """Reads the states of all workers, and writes the state of one. Its methods block, so do not call them in an event
    loop's thread; they are thread-safe."""

    def __init__(self, kafka: KafkaConfig, run: str, worker_id: str) -> None:
        """Read the topic to its end. Raises TopicError or BrokerUnavailable."""
        self._topic = topic_name(run, "control")
        self._worker_id = worker_id
        self._states: dict[str, MixtureState] = {}
        self._skipped = SkippedRecords(logged=False)
        self._lock = threading.Lock()
        self._follower = TopicFollower(kafka, {(self._topic, 0): BEGINNING})
        try:
            while (self._topic, 0) not in self._follower.caught_up:
                self._read(0.1)
            self._sender = RecoveringSender(kafka, on_failure=lambda failure: self._lose(failure.reason))
        except BaseException:
            self._follower.close()
            raise

    @property
    def own(self) -> MixtureState | None:
        """The newest state of this worker; None if it never wrote one."""
        return self._states.get(self._worker_id)

    def others(self) -> list[MixtureState]:
        """Read new records, and return the newest states of the other running workers."""
        with self._lock:
            self._read(0.0)
        since = time.time() - _CURRENT_S
        return [s for name, s in self._states.items() if name != self._worker_id and s.wall_time >= since]

    def write(self, environments: Sequence[EnvironmentState]) -> None:
        """Send this worker's state."""
        state = MixtureState(worker_id=self._worker_id, environments=tuple(environments), wall_time=time.time())
        try:
            self._sender.send(self._topic, encode(state), encode_key(MIXTURE, self._worker_id), timeout_s=0.0)
        except (DeliveryError, DeadlineExceeded, RecordError) as error:
            self._lose(str(error))

    def close(self) -> None:
        """Wait briefly until the states sent are written."""
        self._sender.waiting(_CLOSE_S)
        with self._lock:
            self._follower.close()

    def _read(self, wait_s: float) -> None:
        for message in self._follower.poll(500, wait_s):
            _note(self._states, message, self._skipped)

    def _lose(self, reason: str) -> None:
        event(logger, "mixture_state_lost", level=logging.WARNING, worker_id=self._worker_id, error=reason)


def newest_states(kafka: KafkaConfig, run: str) -> dict[str, MixtureState]:
    """Return the newest state of each worker, by its name; empty before the first state or without the topic."""
    states: dict[str, MixtureState] = {}
    skipped = SkippedRecords(logged=False)
    with contextlib.suppress(TopicError):
        for message in read_to_end(kafka, topic_name(run, "control")):
            _note(states, message, skipped)
    return states


def environments_played(kafka: KafkaConfig, run: str) -> set[str]:
    """Return the names of the environments in the newest states of all workers; none before the first state."""
    return {each.environment for state in newest_states(kafka, run).values() for each in state.environments}


def _note(states: dict[str, MixtureState], message: KafkaRecord, skipped: SkippedRecords) -> None:
    """Note the state in a record of `control`; other kinds of records and invalid states change nothing."""
    _kind, _name, state = named(message, {MIXTURE: MixtureState}, skipped) or ("", "", None)
    if state is not None and all(map(_is_valid, state.environments)):
        states[state.worker_id] = state


def _is_valid(state: EnvironmentState) -> bool:
    return state.drawn >= 0 and 0.0 <= state.successes <= state.trials < math.inf
