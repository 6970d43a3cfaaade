"""The gauges of a run's grouping, followed on topic `metrics`: lag and position of each partition.

Processes serve the same gauges as rollstream_grouping_lag and rollstream_grouping_position. A partition keeps its last
values while it moves from one process to another, so the total does not dip.
"""

from rollstream.consumers.grouping.config import GrouperConfig
from rollstream.topics.config import KafkaConfig
from rollstream.topics.decimal_numbers import decimal_number
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.follower import TopicFollower
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import Metrics
from rollstream.topics.wire.catalogue import topic_name

_AT_ONCE = 1000


class GroupingGauges:
    """The newest lag and position of each partition."""

    def __init__(self, group: str) -> None:
        """`group` is the full name of the consumer group."""
        self._group = group
        self._lags: dict[int, float] = {}
        self._positions: dict[int, float] = {}

    def add(self, record: Metrics) -> None:
        """Add the next record of the topic; records about anything else are ignored."""
        partition = decimal_number(record.labels.get("partition", ""))
        if record.labels.get("consumergroup") != self._group or partition is None:
            return
        for name, newest in (("lag", self._lags), ("position", self._positions)):
            if record.values.get(name, -1.0) >= 0:
                newest[partition] = record.values[name]

    @property
    def partitions(self) -> int:
        """Number of partitions whose lag is known."""
        return len(self._lags)

    @property
    def lag(self) -> int:
        """Number of records that wait, over all partitions with known lag."""
        return int(sum(self._lags.values()))

    @property
    def position(self) -> int:
        """Number of records read since the run began, over all partitions with a known position."""
        return int(sum(self._positions.values()))


class GaugeFollower:
    """Follows the gauges of a run from now on."""

    def __init__(self, kafka: KafkaConfig, run: str, grouper: GrouperConfig) -> None:
        topic = topic_name(run, "metrics")
        self._skipped = SkippedRecords("autoscaler")
        self._follower = TopicFollower(
            kafka, {(topic, partition): end for partition, (_low, end) in topic_admin.bounds(kafka, topic).items()}
        )
        self.gauges = GroupingGauges(grouper.group_id(run))

    def poll(self) -> None:
        """Process the records that have arrived, without waiting. Raises TopicError or BrokerUnavailable."""
        for message in self._follower.poll(_AT_ONCE, 0.0):
            record = self._skipped.decode(Metrics, message)
            if record is not None:
                self.gauges.add(record)

    def close(self) -> None:
        self._follower.close()
