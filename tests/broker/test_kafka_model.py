"""The model of Kafka in tests/simulation answers as a real broker does: one script on both, the same outcome.

A script notes the facts that our code relies on: its decision on each error, what readers of either isolation level
see, the ends and the committed offsets.
"""

import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, NewPartitions, NewTopic, ResourceType

from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RollstreamError
from rollstream.topics.kafka import clients, groups, open_transactions, topic_admin
from rollstream.topics.kafka.reader import Reader, read_to_end
from rollstream.topics.kafka.records import BEGINNING, GroupPosition
from rollstream.topics.kafka.transactions import decide
from tests.simulation.cluster import Cluster
from tests.simulation.installation import World, installed
from tests.simulation.scheduler import Process, Scheduler
from tests.support.waiting import eventually

TOPIC, GROUP = "records", "readers"
SESSION_S = 6.0
TIMEOUT_S = 2.0


class Stage:
    """A topic of two partitions, a group, and what a script notes."""

    def __init__(self, kafka: KafkaConfig, name: str) -> None:
        self.kafka, self.topic, self.group, self.identity = (
            kafka,
            f"{name}.{TOPIC}",
            f"{name}.{GROUP}",
            f"{name}/writer",
        )
        self.notes: list[object] = []
        self.members: list[Member] = []

    def producer(self, timeout_s: float = 60.0) -> Producer:
        settings = {"transaction.timeout.ms": int(timeout_s * 1000), "delivery.timeout.ms": int(timeout_s * 1000)}
        producer = clients.transactional_producer(self.kafka, self.identity, **settings)
        producer.init_transactions(60)
        return producer

    def write(self, producer: Producer, *values: bytes, partition: int = 0) -> None:
        for value in values:
            producer.produce(self.topic, value, b"key", partition)
        producer.flush(60)

    def outsider(self) -> object:
        """Group metadata of a consumer that is no member."""
        with Reader(self.kafka, group=self.group) as reader:
            return reader.group_metadata()

    def send_offset(self, producer: Producer, offset: int, who: object) -> None:
        self.attempt(lambda: producer.send_offsets_to_transaction([TopicPartition(self.topic, 0, offset)], who, 60))

    def attempt(self, call: Callable[[], Any]) -> None:
        """Note what our code decides on a call's error, or that there is none."""
        try:
            call()
            self.notes.append("done")
        except KafkaException as error:
            self.notes.append(decide(error.args[0]).name)
        except RollstreamError as error:
            self.notes.append(type(error))

    def look(self, position_s: float = 60.0) -> None:
        """Note what readers see, and the position of the group, or that it is pending for `position_s`."""
        for isolation in ("read_committed", "read_uncommitted"):
            records = read_to_end(self.kafka, self.topic, isolation=isolation)
            self.notes.append(sorted((record.partition, record.offset, record.value) for record in records))
        with Reader(self.kafka, group=self.group) as reader:
            self.notes.append(reader.bounds(self.topic, [0, 1]))
        with closing(clients.reader(self.kafka, group=self.group)) as consumer:
            try:
                [place] = consumer.committed([TopicPartition(self.topic, 0)], position_s)
                self.notes.append(max(place.offset, -1))
            except KafkaException:
                self.notes.append("pending")

    def settle(self) -> None:
        """Wait until no transaction hides anything of the partitions."""
        with Reader(self.kafka) as committed, Reader(self.kafka, isolation="read_uncommitted") as all_records:
            deadline = time.monotonic() + 300
            while committed.bounds(self.topic) != all_records.bounds(self.topic):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        with Reader(self.kafka, group=self.group) as reader:
            reader.committed(self.topic, [0], "waiting for pending offsets", 300)

    def member(self, instance: str) -> "Member":
        member = Member(self, instance)
        self.members.append(member)
        return member

    def turn(self, until: Callable[[], bool]) -> None:
        """Poll the members that there are until something holds."""
        deadline = time.monotonic() + 300
        while not until():
            assert time.monotonic() < deadline
            for member in self.members:
                member.poll()

    def close(self) -> None:
        for member in self.members:
            member.consumer.close()


class Member:
    """A static member of the group."""

    def __init__(self, stage: Stage, instance: str) -> None:
        self.assigned: list[int] | None = None
        self.lost = False
        self.consumer: Consumer = clients.group_member(stage.kafka, stage.group, instance)
        self.consumer.subscribe([stage.topic], on_assign=self._assign, on_revoke=self._revoke, on_lost=self._revoke)

    def _assign(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        self.assigned = sorted(place.partition for place in places)
        consumer.assign([TopicPartition(place.topic, place.partition, 0) for place in places])

    def _revoke(self, _consumer: Consumer, _places: list[TopicPartition]) -> None:
        self.assigned = None

    def poll(self) -> None:
        try:
            for message in self.consumer.consume(1, 0.05):
                error = message.error()
                if error is not None and error.code() in (KafkaError._FATAL, KafkaError.FENCED_INSTANCE_ID):
                    self.lost = True
        except KafkaException:
            self.lost = True

    @property
    def metadata(self) -> object:
        return self.consumer.consumer_group_metadata()


def until(condition: Callable[[], bool]) -> None:
    """Wait for what the brokers know later than their controller."""
    eventually(condition, 300, "the brokers know")


# ---------------------------------------------------------------------- scripts


def commits(stage: Stage) -> None:
    producer = stage.producer()
    producer.begin_transaction()
    stage.write(producer, b"a", b"b")
    stage.write(producer, b"c", partition=1)
    stage.send_offset(producer, 7, stage.outsider())
    stage.look(position_s=1.0)
    stage.attempt(lambda: producer.commit_transaction(60))
    stage.settle()
    stage.look()


def aborts_and_goes_on(stage: Stage) -> None:
    producer = stage.producer()
    producer.begin_transaction()
    stage.write(producer, b"a", b"b")
    stage.send_offset(producer, 7, stage.outsider())
    stage.attempt(lambda: producer.abort_transaction(60))
    stage.settle()
    stage.look()
    producer.begin_transaction()
    stage.write(producer, b"c")
    stage.send_offset(producer, 8, stage.outsider())
    stage.attempt(lambda: producer.commit_transaction(60))
    stage.settle()
    stage.look()


def is_fenced_before_its_commit(stage: Stage) -> None:
    first = stage.producer()
    first.begin_transaction()
    stage.write(first, b"a")
    stage.send_offset(first, 7, stage.outsider())
    second = stage.producer()
    stage.attempt(lambda: first.commit_transaction(60))
    stage.settle()
    stage.look()
    second.begin_transaction()
    stage.write(second, b"b")
    stage.attempt(lambda: second.commit_transaction(60))
    stage.settle()
    stage.look()


def is_fenced_before_its_offsets(stage: Stage) -> None:
    first = stage.producer()
    first.begin_transaction()
    stage.write(first, b"a")
    stage.producer()
    stage.send_offset(first, 7, stage.outsider())
    stage.settle()
    stage.look()


def outlives_its_timeout(stage: Stage) -> None:
    producer = stage.producer(TIMEOUT_S)
    producer.begin_transaction()
    stage.write(producer, b"a")
    stage.send_offset(producer, 7, stage.outsider())
    stage.settle()  # the coordinator aborts it
    stage.attempt(lambda: producer.commit_transaction(60))
    stage.look()


def is_a_member_of_an_earlier_generation(stage: Stage) -> None:
    first = stage.member("first")
    stage.turn(lambda: first.assigned is not None)
    before = first.metadata
    second = stage.member("second")
    stage.turn(lambda: first.assigned is not None and second.assigned is not None)
    stage.notes.append([first.assigned, second.assigned])
    producer = stage.producer()
    producer.begin_transaction()
    stage.write(producer, b"a")
    stage.send_offset(producer, 7, before)
    stage.attempt(lambda: producer.abort_transaction(60))
    producer.begin_transaction()
    stage.write(producer, b"b")
    stage.send_offset(producer, 8, first.metadata)
    stage.attempt(lambda: producer.commit_transaction(60))
    stage.settle()
    stage.look()


def is_replaced_under_its_name(stage: Stage) -> None:
    first = stage.member("first")
    stage.turn(lambda: first.assigned is not None)
    before = first.metadata
    second = stage.member("first")
    stage.turn(lambda: second.assigned is not None and first.lost)
    producer = stage.producer()
    producer.begin_transaction()
    stage.write(producer, b"a")
    stage.send_offset(producer, 7, before)
    stage.attempt(lambda: producer.abort_transaction(60))
    producer.begin_transaction()
    stage.send_offset(producer, 8, second.metadata)
    stage.attempt(lambda: producer.commit_transaction(60))
    stage.settle()
    stage.look()


def is_expelled(stage: Stage) -> None:
    first = stage.member("first")
    stage.turn(lambda: first.assigned is not None)
    before = first.metadata
    first.consumer.close()  # a static member does not leave: its session ends
    stage.members.clear()
    second = stage.member("second")
    stage.turn(lambda: second.assigned == [0, 1])
    producer = stage.producer()
    producer.begin_transaction()
    stage.write(producer, b"a")
    stage.send_offset(producer, 7, before)
    stage.attempt(lambda: producer.abort_transaction(60))
    stage.settle()
    stage.look()


def commits_within_a_rebalance(stage: Stage) -> None:
    first = stage.member("first")
    stage.turn(lambda: first.assigned is not None)
    second = stage.member("second")
    for _ in range(20):
        second.poll()  # the first does not poll, so the rebalance waits for it
    stage.notes.append(second.assigned)
    producer = stage.producer()
    producer.begin_transaction()
    stage.write(producer, b"a")
    stage.send_offset(producer, 7, first.metadata)
    stage.attempt(lambda: producer.commit_transaction(60))
    stage.settle()
    stage.look()


def is_administered(stage: Stage) -> None:
    """Topics as an admin client sees them, and what is left of them after deletions."""
    client, other = clients.admin(stage.kafka), f"{stage.topic}.other"
    for factor, settings in ((3, {}), (1, {"retention.ms": "7200000"}), (1, {})):
        topic = NewTopic(other, 3, factor, config=settings)
        stage.attempt(client.create_topics([topic], operation_timeout=60)[other].result)
    # The controller has the topic; a broker learns of it a moment later.
    until(lambda: other in topic_admin.topic_names(stage.kafka))
    stage.notes.append(topic_admin.partitions_of(stage.kafka, other))
    stage.attempt(client.create_partitions([NewPartitions(other, 5)])[other].result)
    until(lambda: topic_admin.partitions_of(stage.kafka, other) == 5)
    stage.attempt(lambda: topic_admin.partitions_of(stage.kafka, f"{stage.topic}.none"))
    until(lambda: topic_admin.retention_s(stage.kafka, other) == 7200)
    change = [ConfigEntry("retention.ms", None, incremental_operation=AlterConfigOpType.DELETE)]
    resource = ConfigResource(ResourceType.TOPIC, other, incremental_configs=change)
    stage.attempt(client.incremental_alter_configs([resource])[resource].result)
    until(lambda: topic_admin.retention_s(stage.kafka, other) == 7 * 24 * 3600)
    stage.notes.append(topic_admin.delete_topics(stage.kafka, [other]))
    until(lambda: other not in topic_admin.topic_names(stage.kafka))


def writes_by_key_and_deletes(stage: Stage) -> None:
    """Records without a transaction: partitions of keys, times, and an offset that is out of range."""
    producer = clients.producer(stage.kafka)
    for number in range(20):
        producer.produce(stage.topic, str(number).encode(), f"key {number}".encode(), timestamp=1000 + number)
    producer.flush(60)
    stage.look()
    places = [(stage.topic, partition) for partition in (0, 1)]
    for which in ("earliest", "latest", "max_timestamp"):
        stage.notes.append([*topic_admin.offsets(stage.kafka, places, which).values()])
    with Reader(stage.kafka) as reader:
        for at_ms in (0, 1010, 9999):
            stage.notes.append(reader.offsets_at(stage.topic, [0, 1], at_ms))
    topic_admin.delete_records(stage.kafka, {places[0]: 3})
    stage.attempt(lambda: topic_admin.delete_records(stage.kafka, {places[0]: 99}))
    for start in (BEGINNING, 3, 2, 99):
        stage.attempt(
            lambda start=start: stage.notes.append(len(list(read_to_end(stage.kafka, stage.topic, start=start))))
        )  # type: ignore[misc]
    stage.look()


def lists_its_groups(stage: Stage) -> None:
    """A group and its members, before and after it has any."""
    stage.notes.append(groups.members(stage.kafka, stage.group))
    first, second = stage.member("first"), stage.member("second")
    stage.turn(lambda: first.assigned == [0] and second.assigned == [1])
    stage.notes.append(groups.members(stage.kafka, stage.group))
    until(lambda: groups.group_assignment(stage.kafka, stage.group, stage.topic, 60) == (frozenset(), []))
    stage.notes.append(stage.group in topic_admin.group_names(stage.kafka))
    client = clients.admin(stage.kafka)
    with pytest.raises(KafkaException, match="group is not empty"):
        client.delete_consumer_groups([stage.group])[stage.group].result(60)
    for member in stage.members:
        member.consumer.close()
    stage.members.clear()
    # A static member does not leave: its session ends.
    until(lambda: client.delete_consumer_groups([stage.group])[stage.group].result(60) is None)
    stage.notes.append(groups.members(stage.kafka, stage.group))


def waits_for_open_transactions(stage: Stage) -> None:
    """What is undecided while a transaction is open, and after it."""
    producer = stage.producer()
    producer.begin_transaction()
    stage.write(producer, b"a", b"b")
    stage.notes.append(open_transactions.undecided(stage.kafka, stage.topic))
    producer.abort_transaction(60)
    open_transactions.await_decided(stage.kafka, stage.topic, "waiting")
    stage.notes.append(open_transactions.undecided(stage.kafka, stage.topic))


def forgets_records_and_groups(stage: Stage) -> None:
    """Deletions that a compacted topic and a group with members refuse, and where a partition begins after one."""
    client, compacted = clients.admin(stage.kafka), f"{stage.topic}.compacted"
    topic = NewTopic(compacted, 1, 1, config={"cleanup.policy": "compact"})
    client.create_topics([topic], operation_timeout=60)[compacted].result(60)
    producer = clients.producer(stage.kafka)
    for name in (compacted, stage.topic):
        producer.produce(name, b"a", b"key", 0)
    producer.flush(60)

    def note(answer: Callable[[], Any]) -> None:
        try:
            stage.notes.append(answer())
        except KafkaException as error:
            stage.notes.append(error.args[0].name())

    for place in (TopicPartition(compacted, 0, 1), TopicPartition(stage.topic, 0, 1)):
        note(lambda place=place: client.delete_records([place])[place].result(60).low_watermark)  # type: ignore[misc]
    with Reader(stage.kafka, group=stage.group) as reader:
        reader.commit([GroupPosition(stage.topic, 0, 1)], "committing")
    for expected in (1, -1001):
        with Reader(stage.kafka, group=stage.group) as reader:
            stage.notes.append(reader.committed(stage.topic, [0], "asking")[0].offset == expected)
        note(client.delete_consumer_groups([stage.group])[stage.group].result)
    first = stage.member("first")
    stage.turn(lambda: first.assigned is not None)
    note(client.delete_consumer_groups([stage.group])[stage.group].result)


def fills_its_queue(stage: Stage) -> None:
    """Records that wait for others, in a queue that has room for two."""
    producer = clients.producer(stage.kafka, **{"queue.buffering.max.messages": 2, "linger.ms": 60_000})
    for number in range(4):
        try:
            producer.produce(stage.topic, b"%d" % number, b"key", 0)
        except BufferError:
            stage.notes.append(number)
            producer.poll(0.1)
    stage.notes.append(len(producer))
    producer.flush(60)
    producer.produce(stage.topic, b"last", b"key", 0)
    producer.flush(60)
    stage.look()


SCRIPTS = (
    forgets_records_and_groups,
    fills_its_queue,
    is_administered,
    writes_by_key_and_deletes,
    lists_its_groups,
    waits_for_open_transactions,
    commits,
    aborts_and_goes_on,
    is_fenced_before_its_commit,
    is_fenced_before_its_offsets,
    outlives_its_timeout,
    is_a_member_of_an_earlier_generation,
    is_replaced_under_its_name,
    is_expelled,
    commits_within_a_rebalance,
)


def on_the_model(script: Callable[[Stage], None], seed: int) -> list[object]:
    world, scheduler = World(), Scheduler(seed)
    world.cluster = Cluster(scheduler)
    with installed(world):
        stage = Stage(KafkaConfig(bootstrap_servers="model:1", session_timeout_s=SESSION_S), "t")
        world.cluster.create(stage.topic, 2, {})
        actor = scheduler.spawn(Process("script"), "script", lambda: script(stage))
        scheduler.run(lambda: actor.done)
        if actor.error is not None:
            raise actor.error
    return stage.notes


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_the_model_answers_as_a_real_broker_does(broker: str, run_name: str, script: Callable[[Stage], None]) -> None:
    kafka = KafkaConfig(bootstrap_servers=broker, session_timeout_s=SESSION_S)
    stage = Stage(kafka, run_name)
    admin = clients.admin(kafka)
    admin.create_topics([NewTopic(stage.topic, 2, 1, config={"retention.ms": "-1"})])[stage.topic].result(60)
    script(stage)
    stage.close()
    for seed in range(5):
        assert on_the_model(script, seed) == stage.notes
