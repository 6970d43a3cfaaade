"""The recorded work of an earlier core version, put on a broker as its own processes would have left it there: log,
batches, journal under the schema of that time, and the committed offset with its metadata, in one transaction.
"""

import json
from dataclasses import replace

from confluent_kafka import TopicPartition

from rollstream.topics.codec import encode
from rollstream.topics.kafka import clients, provisioning, topic_admin
from rollstream.topics.keys import encode_key
from rollstream.topics.records import BatchIndexEntry
from tests.support.runs import RealRun
from tests.support.topic_settings import change_settings
from tests.support.upgrade import Recorded

_TIMEOUT_S = 60.0


def leave(run: RealRun, recorded: Recorded) -> None:
    """Put everything before the recorded position on the broker, as if none of today's code had run."""
    provisioning.apply(run.kafka, run.topics, run.name)
    # Append times are part of what was recorded.
    stamp(run, "CreateTime")
    feed(run, recorded, 0, recorded.position)
    topic = run.topic("rollouts")
    topic_id = topic_admin.topic_ids(run.kafka, [topic])[topic]
    producer = clients.transactional_producer(run.kafka, f"grouper-{run.name}-0")
    outsider = clients.reader(run.kafka, group=run.grouper.group_id(run.name))
    producer.init_transactions(_TIMEOUT_S)
    producer.begin_transaction()
    for offset in recorded.dead_letters:
        if offset < recorded.position:
            record = recorded.log[offset]
            headers: dict[str, str | bytes | None] = {
                "__streams.errors.topic": topic,
                "__streams.errors.partition": "0",
                "__streams.errors.offset": str(offset),
            }
            producer.produce(run.topic("dead-letters"), record.value, record.key, headers=headers)
    for offset, batch in enumerate(recorded.committed()):
        key = encode_key(batch.batch_id)
        producer.produce(run.topic("batches"), encode(batch), key, 0)
        producer.produce(run.topic("batch-index"), encode(BatchIndexEntry.of(batch, offset)), key, 0)
    snapshot = 0
    for offset, record in enumerate(recorded.journal_records()):
        value = encode(replace(record, topic_id=topic_id), version=1)
        producer.produce(run.topic("journal"), value, encode_key(0), 0)
        snapshot = offset if record.snapshot else snapshot
    metadata = json.dumps({"v": 1, "journal": len(recorded.journal) - 1, "snapshot": snapshot, "oldest": 0})
    committed = [TopicPartition(topic, 0, recorded.position, metadata)]
    producer.send_offsets_to_transaction(committed, outsider.consumer_group_metadata(), _TIMEOUT_S)
    producer.commit_transaction(_TIMEOUT_S)
    outsider.close()


def feed(run: RealRun, recorded: Recorded, first: int, end: int) -> None:
    """Produce records of the log as they were, at their times, and wait for the broker to have them."""
    producer = clients.producer(run.kafka)
    for record in recorded.log[first:end]:
        producer.produce(run.topic("rollouts"), record.value, record.key, 0, timestamp=record.timestamp_ms)
    assert producer.flush(_TIMEOUT_S) == 0


def stamp(run: RealRun, by: str) -> None:
    """Have records of rollouts bear the time of their production (CreateTime) or of the broker (LogAppendTime)."""
    change_settings(run.kafka, run.topic("rollouts"), message__timestamp__type=by)
