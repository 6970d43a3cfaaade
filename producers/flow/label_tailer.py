"""Follows how far labeling has read `unlabelled`, in a separate thread, for the flow control of a worker.

It reads the committed positions of the labeling processes, so it costs two requests a second, however many rollouts are
labeled.
"""

import logging
from collections.abc import Callable
from contextlib import closing

from rollstream.producers.flow.flow_control import LabelingPosition
from rollstream.producers.flow.tailer import Tailer
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import BrokerUnavailable
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.labeling_progress import LabelingProgress
from rollstream.topics.kafka.reader import Reader
from rollstream.topics.logs import event
from rollstream.topics.wire.catalogue import topic_name

logger = logging.getLogger(__name__)
_INTERVAL_S = 0.5


class LabelTailer(Tailer):
    """Keeps `positions` up to date."""

    def __init__(self, kafka: KafkaConfig, run: str, group: str) -> None:
        """`group` is the full name of the consumer group of the labeling processes."""
        super().__init__(kafka, "label-tailer")
        self._group = group
        self._topic = topic_name(run, "unlabelled")
        self._positions: dict[int, LabelingPosition] = {}
        self.waiting: dict[int, range] = {}
        """Offsets that waited for a label when the tailer started, by partition."""

    def start(self) -> None:
        """Read the positions once and start the thread. Raises TopicError, BrokerUnavailable."""
        # Read the ends first, so that rollouts labeled before the positions are read do not count as waiting.
        bounds = topic_admin.bounds(self._kafka, self._topic)
        with closing(Reader(self._kafka, group=self._group)) as reader:
            self._positions = self._read(reader, len(bounds))
        for partition, (begin, end) in bounds.items():
            labeled = self._positions.get(partition)
            self.waiting[partition] = range(max(begin, labeled.position if labeled else begin), end)
        super().start()

    @property
    def positions(self) -> dict[int, LabelingPosition]:
        """The newest positions, by partition; none before labeling has begun. Raises the error that stopped the
        thread, if any."""
        self._check()
        return self._positions

    def _follow(self) -> None:
        with closing(Reader(self._kafka, group=self._group)) as reader:
            while not self._stop.wait(_INTERVAL_S):
                self._update(lambda: self._read(reader, len(self.waiting)))

    def _update(self, read: Callable[[], dict[int, LabelingPosition]]) -> None:
        try:
            self._positions = read()
        except BrokerUnavailable as error:
            # An open transaction hides the positions; old positions only make the worker wait longer.
            event(logger, "labeling_positions_not_read", level=logging.WARNING, error=str(error))

    def _read(self, reader: Reader, partitions: int) -> dict[int, LabelingPosition]:
        places = reader.committed(self._topic, range(partitions), f"reading offsets of group {self._group}")
        return {
            place.partition: LabelingPosition(place.offset, LabelingProgress.decode(place).written)
            for place in places
            if place.offset >= 0
        }
