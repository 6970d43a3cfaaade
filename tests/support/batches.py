"""Training batches for tests of trainers: deterministic ones, put on a run's topics as a grouping consumer would."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rollstream.consumers.batch_reader import BatchReader, ReadBatch
from rollstream.topics.config import KafkaConfig
from rollstream.topics.kafka import clients
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.records import BatchGroup, BatchIndexEntry, TrainingBatch
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from rollstream.topics.wire.rl_examples import batch_digest


def random_batch(
    number: int,
    *,
    rows: int = 16,
    partition: int = 0,
    version: int = 0,
    seed: int = 0,
    answers: tuple[int, int] = (1, 6),
) -> TrainingBatch:
    """A batch of ragged rows (prompts of 3 to 5 tokens, answers of `answers`) with advantages around zero."""
    draw = np.random.default_rng((seed, number))
    prompts, completions = draw.integers(3, 6, rows), draw.integers(answers[0], answers[1] + 1, rows)
    lengths = prompts + completions
    splits = np.concatenate([[0], np.cumsum(lengths)]).astype("<i8")
    mask = np.concatenate([np.arange(n) >= p for n, p in zip(lengths, prompts, strict=True)])
    rewards = draw.random(rows)
    advantages = np.repeat((rewards - rewards.mean()) / rewards.std(), lengths)
    batch = TrainingBatch(
        batch_id=f"{partition}-{number}",
        partition=partition,
        number=number,
        core_version=1,
        generation=0,
        cut="size",
        cut_ms=number,
        groups=(
            BatchGroup(
                environment="env",
                example_id=str(number),
                policy_version=version,
                group_id="",
                size=rows,
                opened_ms=0,
                sealed_ms=0,
            ),
        ),
        group_index=np.zeros(rows, "<i4"),
        source_offsets=np.arange(number * rows, (number + 1) * rows, dtype="<i8"),
        uids=tuple(f"{number}-{row}" for row in range(rows)),
        splits=splits,
        tokens=draw.integers(2, 98, int(splits[-1])).astype("<i4"),
        loss_mask=mask,
        logprobs=np.where(mask, -draw.random(int(splits[-1])) * 6, 0).astype("<f4"),
        advantages=np.where(mask, advantages, 0).astype("<f4"),
        rewards=rewards,
        truncated=np.zeros(rows, bool),
        lowest_versions=np.full(rows, version, "<i8"),
        highest_versions=np.full(rows, version, "<i8"),
        temperatures=np.ones(rows),
        logprobs_processed=np.ones(rows, bool),
        weight_steps=np.full(rows, -1, "<i8"),
        timestamps=np.zeros(rows),
    )
    return replace(batch, digest=batch_digest(batch))


def indexed_batches(kafka: KafkaConfig, run: str, start: int = 0) -> list[ReadBatch]:
    """Read every batch that the index names now, from an offset of the index on."""
    named = [message for message in read_to_end(kafka, topic_name(run, "batch-index")) if message.offset >= start]
    with BatchReader(kafka, run, start) as reader:
        batches = [reader.poll(60.0) for _ in named]
    return [batch for batch in batches if batch is not None]


def index_entry(number: int) -> BatchIndexEntry:
    """An entry for batch `number` of partition 0, which no batch backs."""
    return BatchIndexEntry(
        batch_id=f"0-{number}",
        partition=0,
        offset=number,
        rollouts=1,
        tokens=2,
        trained_tokens=1,
        lowest_version=0,
        highest_version=0,
        size_bytes=100,
        digest="digest",
    )


def patient(kafka: KafkaConfig) -> KafkaConfig:
    """For transactions of a test's own process: beside other work of a busy machine, a broker may be silent for longer
    than the default lets a transaction last."""
    return replace(kafka, transaction_timeout_s=120.0)


def send_batches(kafka: KafkaConfig, run: str, batches: Sequence[TrainingBatch], *, together: bool = False) -> None:
    """Write each batch and its index entry in a transaction of its own, or `together` in one, in the order given."""
    producer = clients.transactional_producer(patient(kafka), f"test-batches-{run}")
    producer.init_transactions(120)
    for number, batch in enumerate(batches):
        delivered: list[tuple[Any, Any]] = []
        value, key = encode(batch), encode_key(batch.batch_id)
        if not (together and number):
            producer.begin_transaction()
        producer.produce(
            topic_name(run, "batches"),
            value,
            key,
            batch.partition,
            on_delivery=lambda error, message, delivered=delivered: delivered.append((error, message)),
        )
        assert producer.flush(120) == 0
        [(error, message)] = delivered
        assert error is None, error
        entry = BatchIndexEntry(
            batch_id=batch.batch_id,
            partition=batch.partition,
            offset=message.offset(),
            rollouts=len(batch),
            tokens=len(batch.tokens),
            trained_tokens=int(batch.loss_mask.sum()),
            lowest_version=int(batch.lowest_versions.min()),
            highest_version=int(batch.highest_versions.max()),
            size_bytes=len(value),
            digest=batch.digest,
        )
        producer.produce(topic_name(run, "batch-index"), encode(entry), key)
        if not together or batch is batches[-1]:
            producer.commit_transaction(120)
