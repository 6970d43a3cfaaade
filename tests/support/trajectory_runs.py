"""For tests of trajectories on a real broker: topics of small records, and what lies on them."""

from collections.abc import Iterator

from rollstream.consumers.grouping.process.bootstrap import committed_offsets
from rollstream.producers.record_sender import RolloutDelivery
from rollstream.producers.trajectories.collecting import TrajectoryProducer
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import provisioning
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.records import NamedArray, TrajectoryRecord
from rollstream.topics.wire.codec import decode, encode
from rollstream.topics.wire.trajectory_arrays import Trajectory
from tests.support.runs import RealRun

HOSTILE = encode(
    TrajectoryRecord(
        uid="u", environment="e", arrays={"rewards": NamedArray(dtype="<f4", shape=(1,) * 65, data=bytes(4))}
    )
)
"""An array of more dimensions than numpy can hold."""


def for_trajectories(run: RealRun) -> RealRun:
    """Create the topics of a run, whose records may have 50 kB."""
    run.kafka = KafkaConfig(bootstrap_servers=run.kafka.bootstrap_servers, max_record_bytes=50_000)
    provisioning.apply(run.kafka, run.topics, run.name)
    return run


def send(run: RealRun, trajectories: list[Trajectory], topic: str = "trajectories") -> list[RolloutDelivery]:
    """Send trajectories as a collector would, and return their places."""
    deliveries: list[RolloutDelivery] = []
    with TrajectoryProducer(run.kafka, run.name, topic=topic, on_delivery=deliveries.append) as producer:  # type: ignore[arg-type]
        for trajectory in trajectories:
            producer.send(trajectory)
    return deliveries


def messages(run: RealRun, topic: str) -> Iterator[KafkaRecord]:
    """Every committed record of a topic."""
    return read_to_end(run.kafka, run.topic(topic))


def labeled_of(run: RealRun) -> list[str]:
    """Uids of the trajectories on the log."""
    return [decode(message.value).uid for message in messages(run, "trajectories")]


def position(run: RealRun, group: str, topic: str) -> dict[int, int]:
    """Offsets that a group of the run committed."""
    committed = committed_offsets(run.kafka, f"{run.name}.{group}", run.topic(topic), run.topics.partitions)
    return {tp.partition: tp.offset for tp in committed}
