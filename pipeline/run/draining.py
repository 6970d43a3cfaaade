"""Drains a run when operators ask for it, in a thread of each grouping process.

Workers and gateways follow the same request and begin nothing new, and the learner ends once it has trained on the
whole index. A drainer waits until no producer has anything open and labelers have read everything. It then makes every
partition cut its sealed groups and cancel its incomplete ones until nothing is in flight, and records the end on
`control`. Any grouping process may repeat each of these stages, so a process that is killed during one leaves nothing
to undo.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable

from rollstream.consumers.grouping.config import GrouperConfig
from rollstream.consumers.grouping.process.mark_writer import drain
from rollstream.pipeline.audit.topic_reading import committed_tasks
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.deployment.description import ENV, GATEWAY, counts
from rollstream.pipeline.run.component_metrics import GONE_S, ComponentMetrics, NewestMetrics
from rollstream.pipeline.run.control_run import is_labeling_behind
from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.control import steering
from rollstream.topics.control.named_records import write
from rollstream.topics.control.steering import SteeringFollower
from rollstream.topics.errors import RollstreamError
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.logs import event
from rollstream.topics.records import DrainRequest, Metrics
from rollstream.topics.wire.catalogue import topic_name

logger = logging.getLogger(__name__)
_LOOK_S = 1.0
_AGAIN_S = 5.0
"""Time until a drain that failed is tried again."""
_NEWEST_METRICS = 5000
"""Number of the newest records of each partition of `metrics` to read; components write one every few seconds."""
_QUIET_S = 2.0
"""Time without a new record of `rollouts` after which producers whose metrics show no open work count as ended."""
_UNKNOWN_QUIET_S = GONE_S
"""The same time if the metrics of some producers are not known."""


class Drainer(Closing):
    """Follows requests to drain a run, drains its grouping, and then ends this process as SIGTERM does."""

    def __init__(self, config: RunConfig) -> None:
        """Begin to follow requests. Raises BrokerUnavailable."""
        self._config = config
        self._following = SteeringFollower(config.kafka, config.run)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="draining", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop following requests; a stage in progress may run on until the process ends."""
        self._closing.set()
        self._following.close()

    def _follow(self) -> None:
        while not self._closing.wait(_LOOK_S):
            try:
                if self._wanted:
                    self._drain()
                if self._following.state.drained:
                    event(logger, "run_drained", run=self._config.run)
                    os.kill(os.getpid(), signal.SIGTERM)
                    return
            except RollstreamError as error:
                event(logger, "not_drained", level=logging.WARNING, error=str(error), again_in_s=_AGAIN_S)
                self._closing.wait(_AGAIN_S)

    @property
    def _wanted(self) -> bool:
        state = self._following.state
        return state.draining and not state.drained and not self._closing.is_set()

    def _drain(self) -> None:
        config = self._config
        request = self._following.state.drains[steering.WANTED]
        event(logger, "draining", run=config.run)
        stages: tuple[Callable[[], bool], ...] = (QuietProducers(config), self._are_labels_there, self._is_cut)
        for ended in stages:
            while self._wanted and not ended():
                self._closing.wait(_LOOK_S)
        if self._wanted and self._following.state.drains[steering.WANTED] == request:
            _record_end(config.kafka, config.run, request)

    def _are_labels_there(self) -> bool:
        return not is_labeling_behind(self._config)

    def _is_cut(self) -> bool:
        """Cut the sealed groups, and cancel the incomplete ones; return whether nothing is in flight then. A sealed
        group that waits for its policy version is."""
        config = self._config
        drain(config.kafka, config.run, config.grouper)
        return not is_in_flight(config.kafka, config.run, config.grouper)


def _record_end(kafka: KafkaConfig, run: str, request: DrainRequest) -> None:
    write(kafka, run, steering.DRAIN, {steering.DONE: request})
    event(logger, "drained", run=run)


class QuietProducers:
    """Checks, by metrics and by the log, that no producer of rollouts has open work."""

    def __init__(self, config: RunConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._clock = config, clock
        self._ends: dict[int, int] = {}
        self._since = clock()

    def __call__(self) -> bool:
        """Return whether producers are quiet now. Raises TopicError or BrokerUnavailable."""
        kafka, run = self._config.kafka, self._config.run
        bounds = topic_admin.bounds(kafka, topic_name(run, "rollouts"))
        ends = {partition: end for partition, (_begin, end) in bounds.items()}
        if ends != self._ends:
            self._ends, self._since = ends, self._clock()
        components = newest_components(kafka, run)
        quiet_s = required_quiet_s(self._config, components)
        return not has_open_producers(components) and self._clock() - self._since >= quiet_s


def required_quiet_s(config: RunConfig, components: tuple[ComponentMetrics, ...]) -> float:
    """Return the time without a new rollout after which producers count as ended; a minute if the metrics of workers or
    of gateways do not tell whether they have open work."""
    intervals = {ENV: config.worker.metrics_interval_s, GATEWAY: config.gateway.metrics_interval_s}
    there = {*counts(config), *(component.role for component in components)} & intervals.keys()
    known = {component.role for component in components if component.alive or not component.running}
    known -= {role for role, interval_s in intervals.items() if not 0 < interval_s < GONE_S}
    return _QUIET_S if there and there <= known else _UNKNOWN_QUIET_S


def has_open_producers(components: tuple[ComponentMetrics, ...]) -> bool:
    """Whether a worker plays, or a gateway has a session open, according to their newest metrics."""
    return any(component.alive and (component.role == ENV or _has_open_sessions(component)) for component in components)


def _has_open_sessions(component: ComponentMetrics) -> bool:
    return component.role == GATEWAY and component.values.get("open_sessions", 0) > 0


def newest_components(kafka: KafkaConfig, run: str) -> tuple[ComponentMetrics, ...]:
    """Return the newest metrics of the components of a run. Raises TopicError or BrokerUnavailable."""
    topic, newest, skipped = topic_name(run, "metrics"), NewestMetrics(), SkippedRecords(logged=False)
    bounds = topic_admin.bounds(kafka, topic)
    start = {partition: max(begin, end - _NEWEST_METRICS) for partition, (begin, end) in bounds.items()}
    for _message, record in skipped.records(Metrics, read_to_end(kafka, topic, start=start)):
        newest.add(record)
    return newest.at(time.time())


def is_in_flight(kafka: KafkaConfig, run: str, grouper: GrouperConfig) -> bool:
    """Whether a record that grouping has read has no fate yet. Raises StateRefused as `committed_tasks` does."""
    return any(task.watermark < task.position for _partition, task in committed_tasks(kafka, run, grouper))
