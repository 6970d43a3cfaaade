"""Readers wait for the end of a transaction as long as one may stand open, and not for a fixed time."""

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields

import pytest
from confluent_kafka import TopicPartition

from rollstream.consumers.grouping.config import GrouperConfig
from rollstream.consumers.grouping.process.bootstrap import committed_offsets
from rollstream.consumers.grouping.process.restoration import Restoration, reader_of_restores
from rollstream.pipeline.audit.ledger import ledger
from rollstream.pipeline.audit.verification import verify
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import BrokerUnavailable, DeadlineExceeded
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.reader import Reader
from rollstream.topics.kafka.skipped_records import SkippedRecords
from tests.model.test_bootstrap import pausing_grouper
from tests.support.restoring import restore_tasks
from tests.support.runs import RealRun, rollout
from tests.support.waiting import eventually


class Impatient(KafkaConfig):
    """A configuration that expects transactions to end soon."""

    patience_s = 1.0  # type: ignore[assignment]


def impatient(kafka: KafkaConfig) -> Impatient:
    return Impatient(**{f.name: getattr(kafka, f.name) for f in fields(kafka)})


def batched(run: RealRun) -> int:
    return sum(len(batch.uids) for batch in run.read("batches"))  # type: ignore[attr-defined]


@contextmanager
def offsets_pending(run: RealRun, partitions: Sequence[int] = (0, 1)) -> Iterator[None]:
    """Somebody else's open transaction that has sent offsets of the run's grouping group."""
    with run.open_transaction("evals") as producer:
        outsider = clients.reader(run.kafka, group=run.grouper.group_id(run.name))
        places = [TopicPartition(run.topic("rollouts"), p, 0) for p in partitions]
        producer.send_offsets_to_transaction(places, outsider.consumer_group_metadata(), 30)
        outsider.close()
        yield


def reading_committed_offsets(run: RealRun) -> None:
    committed_offsets(impatient(run.kafka), run.grouper.group_id(run.name), run.topic("rollouts"), 2)


def restoring(run: RealRun) -> None:
    kafka = impatient(run.kafka)
    topic_id = topic_admin.topic_ids(kafka, [run.topic("rollouts")])[run.topic("rollouts")]
    restore_tasks(kafka, run.name, [0], 2, topic_id, GrouperConfig())


def asking_a_member(run: RealRun) -> None:
    with Reader(impatient(run.kafka), group=run.grouper.group_id(run.name)) as reader:
        reader.committed(run.topic("rollouts"), [0], "asking")


@pytest.mark.parametrize("waiting", [reading_committed_offsets, restoring, asking_a_member])
def test_offsets_of_an_open_transaction_are_waited_for_as_the_configuration_says(
    real_run: RealRun, waiting: Callable[[RealRun], None]
) -> None:
    run = real_run.prepare()
    with offsets_pending(run):
        began = time.monotonic()
        with pytest.raises(BrokerUnavailable):
            waiting(run)
        assert 1.0 <= time.monotonic() - began < 45, "the minute and more of the default"
    waiting(run)


def test_a_restore_waits_for_pending_offsets_of_its_own_partition_alone_and_in_short_steps(real_run: RealRun) -> None:
    run = real_run.prepare()
    topic_id = topic_admin.topic_ids(run.kafka, [run.topic("rollouts")])[run.topic("rollouts")]
    with reader_of_restores(run.kafka, run.name, GrouperConfig()) as reader:

        def restoration(partition: int) -> Restoration:
            place = (run.kafka, run.name, partition, 2, topic_id)
            return Restoration(*place, GrouperConfig(), SkippedRecords(), reader)

        with offsets_pending(run, [0]):
            other, own = restoration(1), restoration(0)
            while not other.step(5.0):
                assert other.progress.seconds < 30, "it waits for the offsets of the other partition"
            began = time.monotonic()
            assert not own.step(0.1)
            assert time.monotonic() - began < run.kafka.patience_s / 2, "the process could not poll meanwhile"
        eventually(lambda: own.step(0.1), 60, "the partition is restored")


def test_a_journal_that_an_open_transaction_hides_is_waited_for_as_the_configuration_says(real_run: RealRun) -> None:
    run = real_run.prepare()
    with run.open_transaction("journal"):
        run.send(rollout(f"x{example}", member) for example in range(16) for member in range(4))
        process = run.start("group")
        eventually(lambda: '"batch"' in run.log_of(process), 60, "a batch that is journaled behind what is open")
        process.terminate()
        assert process.wait(300) == 0
        with pytest.raises(DeadlineExceeded, match=r"journal\[0\] did not reach offset \d+ within 1 s"):
            restoring(run)
    restoring(run)


def test_batches_whose_index_entries_an_open_transaction_hides_are_no_mismatch(real_run: RealRun) -> None:
    run = real_run.prepare()
    with run.open_transaction("batch-index"):
        run.send(rollout(f"x{example}", member) for example in range(16) for member in range(4))
        process = run.start("group")
        eventually(lambda: batched(run) == 64, 60, "batches whose index entries nobody sees")
        process.terminate()
        assert process.wait(300) == 0
        verifying = run.start("verify")
        # This is longer than it would take if nothing were hidden.
        with pytest.raises(subprocess.TimeoutExpired):
            verifying.wait(6)
        with pytest.raises(DeadlineExceeded, match=r"^not verified: a transaction has been open on .*batch-index\[0\]"):
            verify(impatient(run.kafka), run.name)
    assert verifying.wait(300) == 0, run.log_of(verifying)


@pytest.mark.long
@pytest.mark.kafka  # its neighbour stops itself
def test_a_grouper_outlives_a_neighbour_whose_transaction_stands_open_for_longer_than_half_a_minute(
    real_run: RealRun,
) -> None:
    run = real_run.prepare()
    settings = {"kafka__transaction_timeout_s": 40.0, "kafka__session_timeout_s": 2.0}
    run.send(rollout(f"x{example}", member) for example in range(16) for member in range(4))
    pausing_grouper(run, **settings).kill()
    neighbour = run.start("group", "--ordinal=1", **settings)
    eventually(lambda: neighbour.poll() is not None or batched(run) == 64, 90, "the neighbour goes on, or ends")
    assert neighbour.poll() is None, run.log_of(neighbour)
    assert run.log_of(neighbour).count('"seek_put_off"') <= 2
    neighbour.terminate()
    assert neighbour.wait(300) == 0
    assert ledger(run.kafka, run.name).batched == 64
