"""A transaction that nobody ends is named by every process that waits for it, and mended; then the run goes on."""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.process.bootstrap import committed_offsets
from rollstream.infra.broker.broker import LocalBroker
from rollstream.infra.config import BrokerConfig
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import BrokerUnavailable, DeadlineExceeded
from rollstream.topics.kafka import clients, hanging_transactions, topic_admin
from rollstream.topics.kafka.open_transactions import await_decided, undecided
from rollstream.topics.kafka.reader import record_at, records_between
from tests.support.command_line import answer_of
from tests.support.hanging import NO_VERIFICATION, UNKNOWN_PRODUCER, hang, hang_offsets
from tests.support.runs import RealRun, rollout
from tests.support.settled import settled
from tests.support.waiting import eventually

HANGS = rf"a transaction hangs: {{}} from offset {{}} on, of producer {UNKNOWN_PRODUCER} epoch 0, silent for \d+ s"


class Hurried(KafkaConfig):
    """Waits a second where others wait a minute."""

    @property
    def patience_s(self) -> float:
        return 1.0


@pytest.fixture(scope="module")
def trusting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBroker]:
    """A broker that does not verify who writes in a transaction."""
    config = BrokerConfig(data_dir=tmp_path_factory.mktemp("trusting"), properties=NO_VERIFICATION)
    with LocalBroker.start(config=config, bound_to_parent=True) as broker:
        yield broker


@pytest.fixture
def run(trusting: LocalBroker, run_name: str, tmp_path: Path) -> Iterator[RealRun]:
    kafka = KafkaConfig(bootstrap_servers=trusting.bootstrap_servers, transaction_timeout_s=2.0)
    run = RealRun(kafka, run_name, tmp_path, grouping=GroupingConfig(batch_rollouts=4, max_batch_age_s=1.0))
    yield run.prepare()
    run.stop()


def mend(run: RealRun, *flags: str) -> tuple[int, str]:
    """`rollstream broker mend`: exit code, and what it printed."""
    words = run.command("broker", "mend", *flags, kafka__transaction_timeout_s=2.0)
    done = answer_of(run.directory, *words[4:])
    assert done.stderr == ""
    return done.returncode, done.stdout


def end_of(run: RealRun, partition: int) -> int:
    """End offset of a journal partition on which a transaction hangs."""
    return undecided(run.kafka, run.topic("journal"))[partition].end


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    assert process.wait(300) == 0


def test_a_run_whose_journal_and_offsets_hang_is_mended_and_goes_on(run: RealRun) -> None:
    group, rollouts = run.grouper.group_id(run.name), run.topic("rollouts")
    process = run.start("group")  # its transaction timeout is enough on a busy machine
    run.send(rollout("before", member) for member in range(4))
    settled(run, batched=4)
    [batch] = run.read("batches")
    place = batch.partition  # type: ignore[attr-defined]
    start = hang(run.kafka, run.topic("journal"), place)
    # The process writes on, after the hanging transaction, until it is started again.
    run.send(rollout("before", member, uid=f"again-{member}", policy_version=1) for member in range(4))
    run.publish_version(1)
    # A journal record and its marker at least: one transaction may take all that was sent.
    eventually(lambda: end_of(run, place) >= start + 3, 60, "it writes on")
    stop(process)
    hang_offsets(run.kafka, group, rollouts, place, topic_admin.partitions_of(run.kafka, hanging_transactions.OFFSETS))

    end = end_of(run, place)
    journal = rf"{run.topic('journal')}\[{place}\]"
    hurried = Hurried(bootstrap_servers=run.kafka.bootstrap_servers, transaction_timeout_s=0.1)
    with pytest.raises(DeadlineExceeded, match="did not reach offset .* 1 s; " + HANGS.format(journal, start)):
        list(records_between(hurried, run.topic("journal"), place, 0, end))
    with pytest.raises(DeadlineExceeded, match=HANGS.format(journal, start) + r"\. It .*rollstream broker mend"):
        await_decided(run.kafka, run.topic("journal"), "nothing was done", 0.5)
    pending = HANGS.format(rf"{hanging_transactions.OFFSETS}\[\d+\]", r"\d+")
    with pytest.raises(BrokerUnavailable, match=f"reading offsets of group {group}: .*; {pending}"):
        committed_offsets(hurried, group, rollouts, 2)

    eventually(
        lambda: len(hanging_transactions.hanging(run.kafka, run.name)) == 2, 60, "both have been silent for long enough"
    )
    code, text = mend(run)
    assert code == 1
    assert f"{run.topic('journal')}[{place}] from offset {start} on" in text
    assert "nothing was changed" in text
    code, text = mend(run, "--yes", "--json")
    ended = json.loads(text)["hanging"]
    assert (code, len(ended)) == (0, 2)
    assert {(row["topic"], row["ended"], row["ends_as"]) for row in ended} == {
        (run.topic("journal"), True, "aborted"),
        (hanging_transactions.OFFSETS, True, "aborted"),
    }
    assert mend(run) == (0, f"no transaction of run {run.name} hangs at {run.kafka.bootstrap_servers}\n")
    assert undecided(run.kafka, run.topic("journal")) == {}

    process = run.start("group")
    run.send(rollout("after", member, policy_version=1) for member in range(4))
    book = settled(run, batched=12)
    stop(process)
    assert book.balanced, book.problems


def commit_one(run: RealRun, topic: str, name: str) -> Any:
    """Commit a transaction of one record under a transactional id; return its coordinator's description of it."""
    producer = clients.transactional_producer(run.kafka, name)
    producer.init_transactions(120)
    producer.begin_transaction()
    producer.produce(topic, b"seen", partition=0)
    producer.flush(120)
    producer.commit_transaction(120)
    with hanging_transactions.admin_client(run.kafka) as client:
        return client.describe_transactions([name])[name]


def test_what_its_coordinator_counts_as_committed_is_committed(run: RealRun) -> None:
    topic, name = run.topic("batches"), f"{run.name}/grouper/0"
    committed = commit_one(run, topic, name)
    # This partition looks as if the marker of the transaction had been lost on it.
    producer = (committed.producer_id, committed.producer_epoch)
    began_s = committed.transaction_start_time_ms / 1000
    hang(run.kafka, topic, 1, producer=producer, value=b"hidden", written_at_s=began_s - 0.003)
    assert record_at(run.kafka, topic, 1, 0) is None
    eventually(lambda: hanging_transactions.hanging(run.kafka, run.name), 60, "its timeout is over")
    # A record is queued before its transaction begins at the coordinator, by another clock: nobody can tell which of
    # the producer's transactions hangs.
    code, text = mend(run, "--yes")
    assert code == 1
    assert f"({name}, CompleteCommit)" in text
    assert "hangs, to be committed or aborted" in text
    assert "--yes --commit" in text
    assert record_at(run.kafka, topic, 1, 0) is None
    code, text = mend(run, "--yes", "--commit")
    assert code == 0
    assert text.rstrip().endswith(": committed")
    hidden = record_at(run.kafka, topic, 1, 0)
    assert hidden is not None
    assert hidden.value == b"hidden"


def test_what_its_coordinator_aborted_is_aborted_though_a_later_one_was_committed(run: RealRun) -> None:
    topic, name = run.topic("batches"), f"{run.name}/grouper/0"
    committed = commit_one(run, topic, name)
    producer = (committed.producer_id, committed.producer_epoch)
    hang(run.kafka, topic, 1, producer=producer, written_at_s=committed.transaction_start_time_ms / 1000 - 60)
    [open_one] = hanging_transactions.hanging(run.kafka, run.name)
    assert not open_one.committed
    assert hanging_transactions.end(run.kafka, [open_one]) == []
    assert undecided(run.kafka, topic) == {}
    assert record_at(run.kafka, topic, 1, 0) is None


def test_a_transaction_that_somebody_may_still_end_is_left_alone(run: RealRun) -> None:
    with run.open_transaction("journal") as producer:
        text = hanging_transactions.open_on(run.kafka, run.topic("journal"), [0, 1])
        assert text.startswith(f"a transaction is open: {run.topic('journal')}[0] from offset 2 on, of producer ")
        assert f"({run.name}-foreign, Ongoing)" in text
        assert "after its timeout (300 s)" in text
        # Its coordinator will end it, however long it has been silent.
        impatient = replace(run.kafka, transaction_timeout_s=0.0)
        assert hanging_transactions.hanging(impatient, run.name) == []
        assert mend(run, "--yes")[0] == 0
        producer.produce(run.topic("journal"), b"more", b"foreign", 0)
        producer.commit_transaction(120)
        producer.begin_transaction()
    assert hanging_transactions.open_on(run.kafka, run.topic("journal"), [0, 1]) == "no transaction is open there now"

    # So is what hangs, until it is older than the timeout.
    start = hang(run.kafka, run.topic("journal"))
    patient = replace(run.kafka, transaction_timeout_s=600.0)
    assert hanging_transactions.hanging(patient, run.name) == []
    assert "a transaction is open" in hanging_transactions.open_on(patient, run.topic("journal"), [0])
    [open_one] = hanging_transactions.hanging(run.kafka, run.name)
    assert open_one.start == start


@pytest.mark.long
def test_where_nobody_answers_the_error_says_that_it_could_not_look() -> None:
    nobody = KafkaConfig(bootstrap_servers="127.0.0.1:1")
    assert "cannot be determined (no Kafka broker answers" in hanging_transactions.open_on(nobody, "main.journal", [0])
