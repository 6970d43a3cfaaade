"""Decisions of operators about a run in progress, on its topic `control`; the newest record of a decision is valid.

A tombstone withdraws a decision. Processes that act on decisions follow the topic, so that a decision reaches every
machine, and also processes that start later.
"""

import logging
import math
import threading
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.control.named_records import ControlWatch, named, put
from rollstream.topics.errors import RollstreamError
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.logs import event
from rollstream.topics.records import (
    DesiredProcesses,
    DrainRequest,
    EvaluationRequest,
    MixtureWeight,
    PausedEnvironment,
    RequestAnswer,
    RunSupervisor,
    StopRequest,
)
from rollstream.topics.wire.catalogue import topic_name

logger = logging.getLogger(__name__)

WORKERS = "env"
"""Role whose desired number is the number of workers."""
SERVERS = "infer"
"""Role whose desired number is the number of inference servers."""

PROCESSES = "processes"
"""First part of the key of a desired number of processes; the second is what is counted, such as a role."""
PAUSED = "environment"
"""First part of the key of a paused environment; the second is its name."""
WEIGHT = "weight"
"""First part of the key of an environment's weight; the second is its name."""
STOP = "stop"
"""First part of the key of a request to stop; the second is `AT_STEP`."""
AT_STEP = "at-step"
DRAIN = "drain"
"""First part of the key of a request to end with nothing in flight; the second is `WANTED` or `DONE`."""
WANTED, DONE = "wanted", "done"
EVALUATE = "evaluate"
"""First part of the key of a version to evaluate; the second is `NOW`."""
NOW = "now"
ANSWER = "answer"
"""First part of the key of an answer to a request; the second is the key of the request, joined by a colon."""
SUPERVISOR = "supervisor"
"""First part of the key of a process that supervises the run; the second is its identity."""


@dataclass
class DesiredState:
    """The decisions about a run that are in force."""

    processes: dict[str, DesiredProcesses] = field(default_factory=dict)
    """Desired numbers of processes, by what is counted."""

    paused: dict[str, PausedEnvironment] = field(default_factory=dict)
    """Environments for which no group is begun, by name."""
    weighed: dict[str, MixtureWeight] = field(default_factory=dict)
    """Weights that replace the configured weights, by environment."""

    stops: dict[str, StopRequest] = field(default_factory=dict)
    """Requests to stop, by kind."""
    drains: dict[str, DrainRequest] = field(default_factory=dict)
    """The request to end with nothing in flight under `WANTED`, and its answer under `DONE`."""
    evaluations: dict[str, EvaluationRequest] = field(default_factory=dict)
    """The version to evaluate, by kind."""
    answers: dict[str, RequestAnswer] = field(default_factory=dict)
    """Answers of the process that supervises the run, by request."""
    supervisors: dict[str, RunSupervisor] = field(default_factory=dict)
    """Processes that supervise the run, or were killed while they did, by identity."""

    def note(self, message: KafkaRecord, skipped: SkippedRecords) -> None:
        """Update the state from a record of `control`; other kinds of records change nothing."""
        if found := named(message, _TYPES, skipped):
            kind, name, record = found
            put(getattr(self, _KINDS[kind][0]), name, record)

    @property
    def numbers(self) -> dict[str, int]:
        """Desired numbers of processes; a number below zero, which no command writes, is left out."""
        return {name: record.processes for name, record in self.processes.items() if record.processes >= 0}

    @property
    def weights(self) -> dict[str, float]:
        """Weights by environment; a weight that is not a positive number, which no command writes, is left out."""
        return {name: record.weight for name, record in self.weighed.items() if 0.0 < record.weight < math.inf}

    @property
    def last_step(self) -> int | None:
        """Step after which learners end; None if their settings decide."""
        return self.stops[AT_STEP].at_step if AT_STEP in self.stops else None

    @property
    def draining(self) -> bool:
        """Whether the run is to end with nothing in flight, so that nothing more is begun."""
        return WANTED in self.drains

    @property
    def drained(self) -> bool:
        """Whether grouping has answered the present drain request, which means that it has nothing more to deliver."""
        return self.draining and self.drains.get(DONE) == self.drains[WANTED]

    @property
    def supervisor(self) -> RunSupervisor | None:
        """The process that supervises the run, unless it was killed; None if none does."""
        return max(self.supervisors.values(), key=lambda record: record.rank, default=None)

    @property
    def evaluation_request(self) -> EvaluationRequest | None:
        """The newest request to evaluate a version although it is not due."""
        return self.evaluations.get(NOW)


_KINDS: Mapping[str, tuple[str, type]] = {
    PROCESSES: ("processes", DesiredProcesses),
    PAUSED: ("paused", PausedEnvironment),
    WEIGHT: ("weighed", MixtureWeight),
    STOP: ("stops", StopRequest),
    DRAIN: ("drains", DrainRequest),
    EVALUATE: ("evaluations", EvaluationRequest),
    ANSWER: ("answers", RequestAnswer),
    SUPERVISOR: ("supervisors", RunSupervisor),
}
"""Field of the state and type of its records, by the first part of a key."""


_TYPES = {kind: record_type for kind, (_name, record_type) in _KINDS.items()}


class SteeringWatch(ControlWatch[Any]):
    """Follows the decisions about a run."""

    def __init__(self, kafka: KafkaConfig, run: str) -> None:
        """Read the present state. Raises TopicError or BrokerUnavailable."""
        self.state = DesiredState()
        """The decisions in force, as far as they were read."""
        super().__init__(kafka, run, "", object)

    def _note(self, message: KafkaRecord) -> None:
        self.state.note(message, self.skipped)


def desired_state(kafka: KafkaConfig, run: str) -> DesiredState:
    """Return the decisions in force about a run. Raises TopicError or BrokerUnavailable."""
    state, skipped = DesiredState(), SkippedRecords(logged=False)
    for message in read_to_end(kafka, topic_name(run, "control")):
        state.note(message, skipped)
    return state


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
