"""The tailer finds the newest journal records behind transaction markers, and follows from there."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from confluent_kafka import Producer, TopicPartition

from rollstream.producers.config import CapacityConfig
from rollstream.producers.flow.flow_control import FlowControl, PartitionProgress, RunProgress
from rollstream.producers.flow.tailers import JournalTailer
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import TopicError
from rollstream.topics.kafka import clients
from rollstream.topics.records import BatchIndexEntry, FateCount, JournalRecord, LearnerStep, Mark
from rollstream.topics.wire import codec
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.keys import encode_key
from tests.support.journal_records import journal_record
from tests.support.waiting import eventually

ROLLOUTS = 4


@pytest.fixture
def writer(kafka: KafkaConfig, run_name: str) -> Producer:
    """A transactional producer."""
    producer = clients.transactional_producer(kafka, f"{run_name}.writer")
    producer.init_transactions(120)
    return producer


@contextmanager
def transaction(writer: Producer, *, commit: bool = True) -> Iterator[None]:
    writer.begin_transaction()
    yield
    writer.flush(120)
    if commit:
        writer.commit_transaction(120)
    else:
        writer.abort_transaction(120)


def journal(partition: int, position: int) -> JournalRecord:
    return journal_record(
        partition=partition,
        position=position,
        watermark=position,
        counts=(FateCount(environment="add", fate="dropped:late", rollouts=1, tokens=0),),
        produced=(FateCount(environment="add", fate="read", rollouts=position, tokens=0),),
    )


def entry(offset: int) -> BatchIndexEntry:
    return BatchIndexEntry(
        batch_id=f"{offset % 2}-{offset // 2}",
        partition=offset % 2,
        offset=offset,
        rollouts=ROLLOUTS,
        tokens=0,
        trained_tokens=0,
        lowest_version=0,
        highest_version=0,
        size_bytes=0,
        digest="",
    )


def step(number: int, position: int, trained: int, skipped: int = 0, learner: str = "main") -> LearnerStep:
    return LearnerStep(
        learner=learner,
        step=number,
        input_run="",
        uses=(),
        position=position,
        policy_version=number,
        params_digest="",
        trained_total=trained,
        skipped_total=skipped,
    )


def put_journal(writer: Producer, run: str, partition: int, position: int) -> None:
    value = codec.encode(journal(partition, position))
    writer.produce(topic_name(run, "journal"), value, encode_key(partition), partition)


def put_step(writer: Producer, run: str, record: LearnerStep) -> None:
    writer.produce(topic_name(run, "steps"), codec.encode(record), encode_key(record.learner, record.step), 0)


def put_entries(kafka: KafkaConfig, run: str, first: int, end: int) -> None:
    """Write entries at the offsets they are named for, without a transaction, whose marker would take an offset."""
    producer = clients.producer(kafka)
    for offset in range(first, end):
        producer.produce(topic_name(run, "batch-index"), codec.encode(entry(offset)), b"key", 0)
    assert producer.flush(120) == 0


def seen(position: int) -> PartitionProgress:
    return PartitionProgress(position=position, produced=position, finished_untrained=1)


def overall(tailer: JournalTailer) -> RunProgress:
    """Progress of all environments together."""
    return replace(tailer.progress, by_environment={})


def test_an_empty_run_is_at_its_start(kafka: KafkaConfig, run_name: str) -> None:
    with JournalTailer(kafka, run_name) as tailer:
        assert overall(tailer) == RunProgress()
        assert tailer.progress.outstanding == 0
        assert tailer.rollout_ends == {0: 0, 1: 0}


def test_the_newest_records_count_at_start_and_later_ones_follow(
    kafka: KafkaConfig, run_name: str, writer: Producer
) -> None:
    for position in range(1, 60):
        with transaction(writer):
            put_journal(writer, run_name, position % 2, position)
    put_entries(kafka, run_name, 0, 6)
    with transaction(writer):
        for number, (trained, skipped) in enumerate([(4, 0), (8, 4)]):
            put_step(writer, run_name, step(number + 1, 1 + 2 * number, trained, skipped))
    with JournalTailer(kafka, run_name) as tailer:
        assert overall(tailer) == RunProgress({0: seen(58), 1: seen(59)}, consumed=12)
        assert tailer.progress.outstanding == 58 + 59 - 2 - 12
        assert sum(tailer.progress.by_environment.values()) == 58 + 59 - 2, "no batch is on record"
        with transaction(writer):
            put_journal(writer, run_name, 0, 80)
            put_step(writer, run_name, step(3, 5, 16, 4))
        expected = RunProgress({0: seen(80), 1: seen(59)}, consumed=20)
        eventually(lambda: overall(tailer) == expected, 60, "what was written since")
        # A learner that resumed writes an old step again.
        with transaction(writer):
            put_step(writer, run_name, step(2, 3, 8, 4))
            put_journal(writer, run_name, 1, 90)
        expected = RunProgress({0: seen(80), 1: seen(90)}, consumed=20)
        eventually(lambda: overall(tailer) == expected, 60, "the old step changes nothing")


def test_counts_are_those_since_the_last_snapshot_however_far_back_it_is(
    kafka: KafkaConfig, run_name: str, writer: Producer
) -> None:
    def put(name: str, position: int, *, snapshot: bool = False) -> None:
        """A record that holds the counts of one environment alone."""
        record = journal(0, position)
        counts, produced = ((replace(count, environment=name),) for (count,) in (record.counts, record.produced))
        record = replace(record, snapshot=snapshot, counts=counts, produced=produced)
        writer.produce(topic_name(run_name, "journal"), codec.encode(record), encode_key(0), 0)

    def counted(position: int, produced: int) -> PartitionProgress:
        return PartitionProgress(position=position, produced=produced, finished_untrained=2)

    with transaction(writer):
        put("before", 900)
        put("add", 5, snapshot=True)
    for position in range(6, 60):
        with transaction(writer, commit=position % 3 != 0):
            put("sort", position)
    with JournalTailer(kafka, run_name) as tailer:
        assert overall(tailer) == RunProgress({0: counted(59, 5 + 59)})
        with transaction(writer):
            put("add", 70)
        eventually(lambda: overall(tailer) == RunProgress({0: counted(70, 59 + 70)}), 60, "the counts that changed")


def test_after_a_prune_a_learner_of_a_new_name_makes_room_for_workers_again(
    kafka: KafkaConfig, run_name: str, writer: Producer
) -> None:
    """The new learner's totals begin at zero, and never reach those of the learner before it."""
    put_entries(kafka, run_name, 0, 10)
    with transaction(writer):
        put_step(writer, run_name, step(1, 8, 8 * ROLLOUTS, learner="old"))
    admin = clients.admin(kafka)
    for future in admin.delete_records([TopicPartition(topic_name(run_name, "batch-index"), 0, 6)]).values():
        future.result(300)
    with JournalTailer(kafka, run_name) as tailer:
        assert tailer.progress.consumed == 8 * ROLLOUTS
        with transaction(writer):
            put_step(writer, run_name, step(0, 0, 0, learner="new"))
        eventually(lambda: tailer.progress.consumed == 6 * ROLLOUTS, 60, "it has yet to read what the index holds")
        with transaction(writer):
            put_step(writer, run_name, step(2, 10, 4 * ROLLOUTS, learner="new"))
        eventually(lambda: tailer.progress.consumed == 10 * ROLLOUTS, 60, "it has read all there is")
    with JournalTailer(kafka, run_name) as anew:
        assert anew.progress.consumed == 10 * ROLLOUTS


def test_junk_in_steps_and_in_the_index_is_passed_over(kafka: KafkaConfig, run_name: str, writer: Producer) -> None:
    put_entries(kafka, run_name, 0, 2)
    with transaction(writer):
        for topic in ("steps", "batch-index"):
            for value in (b"not a record", None):
                writer.produce(topic_name(run_name, topic), value, b"key", 0)
        nameless = codec.encode(replace(entry(4), batch_id="no numbers"))
        writer.produce(topic_name(run_name, "batch-index"), nameless, b"key", 0)
        put_step(writer, run_name, step(1, 2, 8))
    with JournalTailer(kafka, run_name) as tailer:
        assert overall(tailer) == RunProgress({}, consumed=2 * ROLLOUTS, skipped=4)


def test_the_last_record_is_found_behind_a_long_run_of_aborted_transactions(
    kafka: KafkaConfig, run_name: str, writer: Producer
) -> None:
    with transaction(writer):
        put_journal(writer, run_name, 0, 7)
    for _ in range(30):
        with transaction(writer, commit=False):
            put_journal(writer, run_name, 0, 1000)
    writer.begin_transaction()
    put_journal(writer, run_name, 0, 8)
    writer.flush(120)
    with JournalTailer(kafka, run_name) as tailer:
        assert overall(tailer) == RunProgress({0: seen(7)})
        writer.commit_transaction(120)
        eventually(
            lambda: overall(tailer) == RunProgress({0: seen(8)}), 60, "the open transaction's record, once committed"
        )


def test_the_ends_of_rollouts_are_those_at_start(kafka: KafkaConfig, run_name: str) -> None:
    producer = clients.producer(kafka)
    for _ in range(3):
        producer.produce(topic_name(run_name, "rollouts"), codec.encode(Mark(kind="drain")), b"[]", 1)
    assert producer.flush(120) == 0
    with JournalTailer(kafka, run_name) as tailer:
        assert tailer.rollout_ends == {0: 0, 1: 3}


def test_markers_behind_the_last_rollout_are_nobodys_rollouts(
    kafka: KafkaConfig, run_name: str, writer: Producer
) -> None:
    value = codec.encode(Mark(kind="drain"))
    with transaction(writer):
        writer.produce(topic_name(run_name, "rollouts"), value, b"[]", 1)
        put_journal(writer, run_name, 1, 1)
    for _ in range(20):
        with transaction(writer, commit=False):
            writer.produce(topic_name(run_name, "rollouts"), value, b"[]", 1)
    for written, mine_unseen in ((0, 0), (1, 42)):
        for _ in range(written):
            with transaction(writer):
                writer.produce(topic_name(run_name, "rollouts"), value, b"[]", 1)
        with JournalTailer(kafka, run_name) as tailer:
            flow = FlowControl(CapacityConfig(), tailer.rollout_ends)
            flow.observe(tailer.progress)
            assert flow.mine_unseen == mine_unseen


def test_a_run_without_topics_is_named(kafka: KafkaConfig) -> None:
    with pytest.raises(TopicError, match=r"t-none\.journal is missing"):
        JournalTailer(kafka, "t-none")


def test_a_record_that_is_no_journals_is_passed_over_and_the_newest_before_it_counts(
    kafka: KafkaConfig, run_name: str, writer: Producer
) -> None:
    def junk() -> None:
        writer.produce(topic_name(run_name, "journal"), b"not a record", b"0", 1)

    with transaction(writer):
        put_journal(writer, run_name, 1, 7)
    for _ in range(30):
        with transaction(writer):
            junk()
    with JournalTailer(kafka, run_name) as tailer:
        assert tailer.progress.partitions == {1: seen(7)}
        assert tailer.skipped.total == 30
        with transaction(writer):
            junk()
            put_journal(writer, run_name, 1, 8)
        expected = RunProgress({1: seen(8)}, skipped=31)
        eventually(lambda: overall(tailer) == expected, 60, "what came after it")
        assert str(tailer.skipped.first[0]).startswith(f"{run_name}.journal[1] offset ")
