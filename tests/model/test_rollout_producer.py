"""Writing rollouts to a real Kafka: where they land, what is refused, how failures come to light."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from rollstream.producers.record_sender import RolloutDelivery
from rollstream.producers.rollout_producer import RolloutProducer
from rollstream.topics.config import KafkaConfig, TopicsConfig
from rollstream.topics.errors import (
    ConfigurationError,
    DeadlineExceeded,
    DeliveryError,
    RecordError,
    RecordTooLarge,
    TopicError,
)
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.provisioning import apply
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.records import GroupCancelled, Rollout, SamplingParams, same
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import decode, decode_as
from rollstream.topics.wire.keys import encode_key, partition_of
from rollstream.topics.wire.validation import cancellation_problems
from tests.support.untold_offsets import tell_no_offsets
from tests.support.waiting import eventually

PARTITIONS = 2


@pytest.fixture
def kafka(broker: str, run_name: str) -> KafkaConfig:
    """A broker with the topics of the test's run."""
    config = KafkaConfig(bootstrap_servers=broker, max_record_bytes=100_000)
    apply(config, TopicsConfig(partitions=PARTITIONS), run_name)
    return config


def make_rollout(number: int = 0, *, length: int = 6, environment: str = "dsort3") -> Rollout:
    mask = np.arange(length) >= 2
    return Rollout(
        uid=f"w.1.{number}",
        group_id=f"w.1.{number // 4}",
        group_size=4,
        environment=environment,
        example_id=f"é{number // 4}",
        policy_version=3,
        lowest_version=3,
        highest_version=4,
        tokens=np.arange(length, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        reward=0.25,
        reward_components={"exact": 0.0},
    )


def test_an_acknowledgement_without_an_offset_ends_nothing(
    kafka: KafkaConfig, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell_no_offsets(monkeypatch, topic_name(run_name, "rollouts"))
    deliveries: list[RolloutDelivery] = []
    with RolloutProducer(kafka, run_name, on_delivery=deliveries.append) as producer:
        for number in range(4):
            producer.send(make_rollout(number))
    assert [(delivery.uid, delivery.offset) for delivery in deliveries] == [(f"w.1.{n}", -1) for n in range(4)]
    assert len(list(read_to_end(kafka, topic_name(run_name, "rollouts")))) == 4


def test_rollouts_land_where_their_key_says_and_come_back_equal(kafka: KafkaConfig, run_name: str) -> None:
    deliveries: list[RolloutDelivery] = []
    sent = {rollout.uid: rollout for rollout in map(make_rollout, range(40))}
    with RolloutProducer(kafka, run_name, on_delivery=deliveries.append) as producer:
        for rollout in sent.values():
            producer.send(rollout)
    collected = {}
    for message in read_to_end(kafka, topic_name(run_name, "rollouts")):
        rollout = decode_as(Rollout, message.value)
        assert message.key == encode_key(rollout.environment, rollout.example_id)
        assert message.partition == partition_of(message.key, PARTITIONS)
        assert same(rollout, sent[rollout.uid])
        collected[rollout.uid] = RolloutDelivery(rollout.uid, message.partition, message.offset, rollout.environment)
    assert {delivery.uid: delivery for delivery in deliveries} == collected
    assert set(collected) == set(sent)
    assert {delivery.partition for delivery in deliveries} == {0, 1}


def test_a_cancellation_lands_on_its_groups_partition(kafka: KafkaConfig, run_name: str) -> None:
    rollout = make_rollout()
    cancelled = GroupCancelled(
        environment=rollout.environment,
        example_id=rollout.example_id,
        policy_version=3,
        group_size=4,
        uids=("w.1.1", "w.1.2"),
        group_id=rollout.group_id,
        reason="the server went away",
    )
    with RolloutProducer(kafka, run_name) as producer:
        producer.send(rollout)
        producer.cancel(cancelled)
        with pytest.raises(RecordError, match="uids"):
            producer.cancel(replace(cancelled, uids=()))
    first, second = read_to_end(kafka, topic_name(run_name, "rollouts"))
    assert first.partition == second.partition
    assert same(decode(second.value), cancelled)


def test_a_cancellation_of_more_uids_than_a_record_may_hold_goes_out_in_several(
    kafka: KafkaConfig, run_name: str
) -> None:
    uids = tuple(f"w.1.{number}" for number in range(10_000))
    cancelled = GroupCancelled(environment="env", example_id="0", policy_version=0, group_size=10_000, uids=uids)
    with RolloutProducer(kafka, run_name) as producer:
        producer.cancel(cancelled)
    messages = read_to_end(kafka, topic_name(run_name, "rollouts"))
    records = [decode_as(GroupCancelled, message.value) for message in messages]
    assert [cancellation_problems(record) for record in records] == [[], [], []]
    assert tuple(uid for record in records for uid in record.uids) == uids


def test_evaluations_have_a_topic_of_their_own_without_cancellations(kafka: KafkaConfig, run_name: str) -> None:
    with RolloutProducer(kafka, run_name, topic="evals") as producer:
        producer.send(make_rollout())
        with pytest.raises(ConfigurationError, match="rollouts only"):
            producer.cancel(
                GroupCancelled(environment="e", example_id="x", policy_version=0, group_size=1, uids=("u",))
            )
    assert len(list(read_to_end(kafka, topic_name(run_name, "evals")))) == 1
    assert list(read_to_end(kafka, topic_name(run_name, "rollouts"))) == []


def test_a_senseless_rollout_is_refused_with_every_reason(kafka: KafkaConfig, run_name: str) -> None:
    bad = replace(make_rollout(), reward=float("nan"), policy_version=-1)
    filtered = replace(make_rollout(), sampling=SamplingParams(top_p=0.9))
    with RolloutProducer(kafka, run_name) as producer:
        with pytest.raises(RecordError, match=r"w\.1\.0.*reward is nan.*policy_version is -1"):
            producer.send(bad)
        with pytest.raises(RecordError, match="top_p"):
            producer.send(filtered)
    with RolloutProducer(kafka, run_name, allow_filtered_sampling=True) as producer:
        producer.send(filtered)
    assert len(list(read_to_end(kafka, topic_name(run_name, "rollouts")))) == 1


def test_a_value_beyond_the_limit_is_refused_and_one_just_below_is_taken(kafka: KafkaConfig, run_name: str) -> None:
    noise = np.random.default_rng(0)

    def of_length(length: int) -> Rollout:
        # Incompressible, so that the broker counts what the producer counts.
        rollout = make_rollout(length=length)
        return replace(rollout, tokens=noise.integers(0, 2**31 - 1, length, dtype=np.int32))

    with RolloutProducer(kafka, run_name) as producer:
        with pytest.raises(RecordTooLarge, match=r"rollout w\.1\.0 has .* kafka\.max_record_bytes"):
            producer.send(of_length(11_000))  # 9 bytes a token
        producer.send(of_length(10_980))
    assert len(list(read_to_end(kafka, topic_name(run_name, "rollouts")))) == 1


def test_a_missing_topic_is_named_before_anything_is_sent(kafka: KafkaConfig) -> None:
    with pytest.raises(TopicError, match=r"t-none\.rollouts is missing .*topics apply"):
        RolloutProducer(kafka, "t-none")


def test_a_delivery_that_fails_is_raised_on_the_next_call_and_names_the_rollout(
    kafka: KafkaConfig, run_name: str
) -> None:
    overrides = {"delivery.timeout.ms": 2000, "topic.metadata.propagation.max.ms": 1000, "linger.ms": 0}
    producer = RolloutProducer(kafka, run_name, **overrides)
    topic = topic_name(run_name, "rollouts")
    admin = clients.admin(kafka)
    admin.delete_topics([topic])[topic].result(300)
    eventually(lambda: topic not in admin.list_topics(timeout=300).topics, 60, f"{topic} is deleted")
    producer.send(make_rollout(7))
    with pytest.raises(DeliveryError, match=rf"rollout w\.1\.7 was not delivered to {topic}"):
        producer.flush(120)
    # The error is raised only once.
    producer.flush(0)


def test_a_full_queue_blocks_no_longer_than_the_deadline(broker: str, run_name: str) -> None:
    kafka = KafkaConfig(bootstrap_servers=broker)
    apply(kafka, TopicsConfig(partitions=PARTITIONS), run_name)
    # Nothing leaves the queue within linger, so it stays full.
    producer = RolloutProducer(kafka, run_name, **{"queue.buffering.max.messages": 3, "linger.ms": 4000})
    for number in range(3):
        producer.send(make_rollout(number))
    with pytest.raises(DeadlineExceeded, match=r"rollout w\.1\.3 was not sent: .* full for 0.2 s"):
        producer.send(make_rollout(3), timeout_s=0.2)
    producer.send(make_rollout(3), timeout_s=60)
    producer.close()
    uids = Counter(decode_as(Rollout, m.value).uid for m in read_to_end(kafka, topic_name(run_name, "rollouts")))
    assert uids == Counter(f"w.1.{number}" for number in range(4))


def test_an_error_in_the_block_is_not_hidden_and_what_was_sent_is_written(kafka: KafkaConfig, run_name: str) -> None:
    def fail_after_sending() -> None:
        with RolloutProducer(kafka, run_name) as producer:
            producer.send(make_rollout())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_after_sending()
    assert len(list(read_to_end(kafka, topic_name(run_name, "rollouts")))) == 1
