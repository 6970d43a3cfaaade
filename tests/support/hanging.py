"""Transactions that hang for real: written with a producer id whose coordinator will not end them.

Since Kafka 3.6 (KIP-890) brokers ask the coordinator about every transactional write, so a broker that accepts these is
started without that (`transaction.partition.verification.enable`). The partition is then as a lost marker leaves it.
"""

import time
from typing import Any

from kafka import TopicPartition
from kafka.protocol.producer import ProduceRequest, TxnOffsetCommitRequest
from kafka.record.default_records import DefaultRecordBatchBuilder

from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import hanging_transactions

UNKNOWN_PRODUCER = 10**9
NO_VERIFICATION = {"transaction.partition.verification.enable": "false"}


def hang(
    kafka: KafkaConfig,
    topic: str,
    partition: int = 0,
    *,
    producer: tuple[int, int] = (UNKNOWN_PRODUCER, 0),
    value: bytes = b"foreign",
    written_at_s: float | None = None,
) -> int:
    """Leave a record in an open transaction of `producer`, an id and an epoch; returns the offset.

    The record's timestamp is a minute ago or, if given, `written_at_s` in seconds since 1970.
    """
    batch = DefaultRecordBatchBuilder(2, 0, True, *producer, 0, 1 << 20)
    at_s = time.time() - 60 if written_at_s is None else written_at_s
    batch.append(0, int(at_s * 1000), b"foreign", value, [])
    Topic = ProduceRequest.TopicProduceData
    written = Topic.PartitionProduceData(index=partition, records=bytes(batch.build()))
    request = ProduceRequest(
        transactional_id="hanging",
        acks=-1,
        timeout_ms=10_000,
        topic_data=[Topic(name=topic, partition_data=[written])],
        max_version=9,
    )
    answer = _send(kafka, request, TopicPartition(topic, partition)).responses[0].partition_responses[0]
    assert answer.error_code == 0, answer
    return int(answer.base_offset)


def hang_offsets(kafka: KafkaConfig, group: str, topic: str, partition: int, partitions: int) -> None:
    """Leave an offset of a group pending; `partitions` is the number of partitions of the offsets topic."""
    Topic = TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic
    offset = Topic.TxnOffsetCommitRequestPartition(
        partition_index=partition, committed_offset=0, committed_leader_epoch=-1, committed_metadata=""
    )
    request = TxnOffsetCommitRequest(
        transactional_id="hanging",
        group_id=group,
        producer_id=UNKNOWN_PRODUCER,
        producer_epoch=0,
        generation_id=-1,
        member_id="",
        group_instance_id=None,
        topics=[Topic(name=topic, partitions=[offset])],
        max_version=3,
    )
    place = TopicPartition(hanging_transactions.OFFSETS, hanging_transactions.offsets_partition(group, partitions))
    answer = _send(kafka, request, place).topics[0].partitions[0]
    assert answer.error_code == 0, answer


def _send(kafka: KafkaConfig, request: Any, place: TopicPartition) -> Any:
    with hanging_transactions.admin_client(kafka) as client:

        async def send() -> Any:
            [leader] = await client._async_get_leader_for_partitions([place])
            return await client._manager.send(request, node_id=leader)

        return client._manager.run(send)
