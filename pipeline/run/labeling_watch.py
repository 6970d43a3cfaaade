"""Follows, in a separate thread, how many records of `unlabelled` wait for labels, for displays and stall warnings.

Every two seconds it asks for the ends of the topic and for the positions of the labelers. It reads only the last few
offsets, because these may be transaction markers, which never wait for a label.
"""

import logging
import threading
from contextlib import closing, suppress
from typing import NamedTuple

from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import BrokerUnavailable, RollstreamError
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.client_calls import OffsetGone
from rollstream.topics.kafka.reader import Reader, ends_of_records
from rollstream.topics.logs import event
from rollstream.topics.wire.catalogue import topic_name

logger = logging.getLogger(__name__)
_INTERVAL_S = 2.0
_FIRST_S = 5.0
"""Longest wait for the first positions."""
_FEW = 4
"""Most offsets after a position that are read. A finished transaction leaves one marker after its records."""


class LabelingState(NamedTuple):
    """How far labeling has got."""

    waiting: int = 0
    """Records that no labeler has read."""
    read: int = 0
    """Records that labelers have read, including records that were deleted later."""


class LabelingWatch(Closing):
    """Keeps `state` up to date until it is closed."""

    def __init__(self, kafka: KafkaConfig, run: str, group: str) -> None:
        """`group` is the full name of the consumer group of the labelers. Reads the state once."""
        self._kafka, self._group = kafka, group
        self._topic = topic_name(run, "unlabelled")
        self._stop = threading.Event()
        self.state = LabelingState()
        """The newest state; zeros as long as nothing was sent to labelers."""
        self._update(_FIRST_S)
        self._thread = threading.Thread(target=self._run, name="labeling-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, without waiting for a request in progress."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            try:
                self._update(self._kafka.patience_s)
            except RollstreamError as error:
                event(logger, "labeling_not_watched", level=logging.WARNING, error=str(error))
                return

    def _update(self, timeout_s: float) -> None:
        """Read the state; keep the last one if the broker does not answer."""
        try:
            bounds = topic_admin.bounds(self._kafka, self._topic)
            if any(end for _begin, end in bounds.values()):
                self.state = self._read(bounds, timeout_s)
        except BrokerUnavailable as error:
            event(logger, "labeling_positions_not_read", level=logging.WARNING, error=str(error))

    def _read(self, bounds: dict[int, tuple[int, int]], timeout_s: float) -> LabelingState:
        with closing(Reader(self._kafka, group=self._group)) as reader:
            places = reader.committed(self._topic, bounds, f"reading offsets of group {self._group}", timeout_s)
            read = {place.partition: max(bounds[place.partition][0], place.offset) for place in places}
            ends = {partition: end for partition, (_begin, end) in bounds.items()}
            few = {partition: offset for partition, offset in read.items() if 0 < ends[partition] - offset <= _FEW}
            if few:
                with suppress(OffsetGone):  # labeled and deleted in the meantime
                    ends |= ends_of_records(self._kafka, self._topic, few, reader)
        return LabelingState(waiting=max(0, sum(ends.values()) - sum(read.values())), read=sum(read.values()))
