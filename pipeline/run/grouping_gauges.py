"""The gauges of a run's grouping, followed on topic `metrics`: lag and position of each partition.

They are what processes serve as rollstream_grouping_lag and rollstream_grouping_position. A partition that moves from
one process to another keeps its last values meanwhile, so the total does not dip.
"""

from rollstream.consumers.grouping.config import GrouperConfig
from rollstream.topics.catalogue import topic_name
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.follower import TopicFollower
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import Metrics

_AT_ONCE = 1000


class GroupingGauges:
    """The newest lag and position of each partition."""

    def __init__(self, group: str) -> None:
        """`group` is the full name of the consumer group."""
        self._group = group
        self._lags: dict[int, float] = {}
        self._positions: dict[int, float] = {}

    def add(self, record: Metrics) -> None:
        """Take the next record of the topic; records about anything else are left out."""
        partition = record.labels.get("partition", "")
        if record.labels.get("consumergroup") != self._group or not partition.isdecimal():
            return
        for name, newest in (("lag", self._lags), ("position", self._positions)):
            if record.values.get(name, -1.0) >= 0:
                newest[int(partition)] = record.values[name]

    @property
    def partitions(self) -> int:
        """Number of partitions whose lag is known."""
        return len(self._lags)

    @property
    def lag(self) -> int:
        """Records that wait, over all partitions known."""
        return int(sum(self._lags.values()))

    @property
    def position(self) -> int:
        """Records that were read since the run began, over all partitions known."""
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
        """Take what has arrived; waits for nothing. Raises TopicError or BrokerUnavailable."""
        for message in self._follower.poll(_AT_ONCE, 0.0):
            record = self._skipped.decode(Metrics, message)
            if record is not None:
                self.gauges.add(record)

    def close(self) -> None:
        self._follower.close()
