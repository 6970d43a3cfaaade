"""Trajectories on a real broker: sent in order, filled into buffers from their positions on, pruned once they are
read, and all of them in the ledger."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from confluent_kafka import TopicPartition

from rollstream.consumers.buffers.trajectories.filler import Place, TrajectoryFiller, filler_positions
from rollstream.producers.record_sender import RolloutDelivery
from rollstream.producers.trajectories.collecting import TrajectoryProducer
from rollstream.topics.errors import ConfigurationError, RecordError, RecordTooLarge, TopicError
from rollstream.topics.kafka import clients, provisioning, topic_admin
from rollstream.topics.records import RolloutMetadata, same
from rollstream.topics.wire.codec import decode
from rollstream.topics.wire.keys import encode_key, partition_of
from rollstream.topics.wire.trajectory_arrays import Trajectory, from_record, to_record
from tests.support.runs import RealRun
from tests.support.trajectories import number_of, numbered
from tests.support.trajectory_runs import HOSTILE, for_trajectories, messages, send
from tests.support.waiting import eventually


@pytest.fixture
def run(real_run: RealRun) -> RealRun:
    return for_trajectories(real_run)


def test_those_of_a_worker_lie_in_order_where_its_key_says_and_come_back_equal(run: RealRun) -> None:
    sent = [numbered(number, worker=f"w{number % 3}") for number in range(30)]
    deliveries = {delivery.uid: delivery for delivery in send(run, sent)}
    by_uid = {trajectory.uid: trajectory for trajectory in sent}
    newest: dict[str, int] = {}
    for message in messages(run, "trajectories"):
        record = decode(message.value)
        worker = record.metadata.worker_id
        assert message.key == encode_key("cart", worker)
        assert message.partition == partition_of(message.key, run.topics.partitions)
        assert deliveries.pop(record.uid) == RolloutDelivery(record.uid, message.partition, message.offset)
        assert same(record, to_record(by_uid[record.uid]))
        number = number_of(from_record(record))
        assert number > newest.get(worker, -1)
        newest[worker] = number
    assert not deliveries
    assert newest == {"w0": 27, "w1": 28, "w2": 29}


def test_what_cannot_be_read_again_is_not_sent(run: RealRun) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (4, 2, 6000), np.uint8)
    with TrajectoryProducer(run.kafka, run.name) as producer:
        with pytest.raises(RecordError, match="names no worker"):
            producer.send(numbered(0, metadata=RolloutMetadata()))
        with pytest.raises(RecordError, match=r"w0-1.*rewards has shape"):
            producer.send(numbered(1, arrays={"rewards": np.zeros(3)}))
        with pytest.raises(RecordTooLarge, match=r"trajectory w0-2 has .*max_bytes.*kafka\.max_record_bytes"):
            producer.send(numbered(2, arrays={"actions": noise, "more": noise}))
        producer.send(numbered(3, arrays={"actions": noise}))
        assert producer.limit_bytes < 50_000
    assert len(list(messages(run, "trajectories"))) == 1


class Kept:
    """A buffer that keeps uids and its position."""

    def __init__(self, position: Mapping[int, int] | None = None) -> None:
        self._position = dict(position or {})
        self.uids: list[str] = []

    @property
    def position(self) -> Mapping[int, int]:
        return dict(self._position)

    def add(self, trajectory: Trajectory, /, *, at: Place) -> None:
        self.uids.append(trajectory.uid)
        self.skip(at)

    def skip(self, at: Place, /) -> None:
        self._position[at[0]] = at[1] + 1


def uids(numbers: range) -> list[str]:
    return sorted(f"w{number % 2}-{number}" for number in numbers)


def of_two(numbers: range) -> list[Trajectory]:
    return [numbered(number, worker=f"w{number % 2}") for number in numbers]


def test_a_filler_goes_on_where_each_of_its_buffers_stands(run: RealRun, tmp_path: Path) -> None:
    identity = tmp_path / "topic.json"
    send(run, of_two(range(20)))
    run.send_bytes("trajectories", b"no trajectory", b"key", partition=0)
    run.send_bytes("trajectories", HOSTILE, b"key", partition=1)
    first = Kept()
    filler = TrajectoryFiller(run.kafka, run.name, [first], identity_file=identity)
    filler.fill(300)
    filler.close()
    assert sorted(first.uids) == uids(range(20))
    assert filler.counts == (20, 2)
    ends = {p: end for p, (_begin, end) in topic_admin.bounds(run.kafka, run.topic("trajectories")).items()}
    assert first.position == ends

    send(run, of_two(range(20, 30)))
    again, fresh = Kept(first.position), Kept()
    with TrajectoryFiller(run.kafka, run.name, [again, fresh], identity_file=identity) as going:
        eventually(lambda: len(fresh.uids) == 30, 60, "the empty one has everything")
        send(run, of_two(range(30, 34)))
        eventually(lambda: len(fresh.uids) == 34, 60, "what comes meanwhile, too")
        going.check()
        with pytest.raises(ConfigurationError, match="its own thread"):
            going.poll()
    assert sorted(again.uids) == uids(range(20, 34)), "nothing twice, and nothing left out"
    assert sorted(fresh.uids) == uids(range(34))


def test_two_fillers_of_one_name_are_told_so(run: RealRun) -> None:
    first, second = Kept(), Kept()
    one = TrajectoryFiller(run.kafka, run.name, [first])
    send(run, of_two(range(4)))
    other = TrajectoryFiller(run.kafka, run.name, [second])
    other.fill(30)
    with pytest.raises(ConfigurationError, match=r"another filler committed.*a different name"):
        one.fill(30)


def test_a_filler_continues_when_the_brokers_forgot_its_positions(run: RealRun) -> None:
    """Brokers forget them after offsets.retention.minutes; deleting the group has the same effect at once."""
    buffer = Kept()
    filler = TrajectoryFiller(run.kafka, run.name, [buffer])
    send(run, of_two(range(4)))
    filler.fill(30)
    group = f"{run.name}.filler-default"
    client = clients.admin(run.kafka)
    eventually(lambda: client.delete_consumer_groups([group])[group].result(300) is None, 60, "the group to be deleted")
    assert filler_positions(run.kafka, run.name) == {}
    send(run, of_two(range(4, 8)))
    filler.fill(30)
    assert {p: n for p, n in filler_positions(run.kafka, run.name)["default"].items() if n} == buffer.position
    filler.close()


def test_a_log_that_is_not_the_one_a_buffer_was_filled_from_is_refused(run: RealRun, tmp_path: Path) -> None:
    identity = tmp_path / "topic.json"
    topic = run.topic("trajectories")
    send(run, of_two(range(10)))
    buffer = Kept()
    TrajectoryFiller(run.kafka, run.name, [buffer], identity_file=identity).fill(30)
    ahead = Kept({0: 10_000})
    with pytest.raises(TopicError, match="created again; use an empty buffer"):
        TrajectoryFiller(run.kafka, run.name, [ahead])

    client = clients.admin(run.kafka)
    for future in client.delete_records([TopicPartition(topic, p, end) for p, end in buffer.position.items()]).values():
        future.result(300)
    TrajectoryFiller(run.kafka, run.name, [buffer]).fill(30)
    with pytest.raises(TopicError, match="were deleted; use an empty buffer"):
        TrajectoryFiller(run.kafka, run.name, [Kept(dict.fromkeys(buffer.position, 0))])

    for future in client.delete_topics([topic]).values():
        future.result(300)
    eventually(lambda: topic not in client.list_topics(timeout=300).topics, 60, "the topic is gone")
    provisioning.apply(run.kafka, run.topics, run.name)
    send(run, of_two(range(20)))
    with pytest.raises(TopicError, match=r"with id .* use empty buffers"):
        TrajectoryFiller(run.kafka, run.name, [buffer], identity_file=identity)
    empty = Kept()
    TrajectoryFiller(run.kafka, run.name, [empty], identity_file=identity).fill(30)
    assert sorted(empty.uids) == uids(range(20))
