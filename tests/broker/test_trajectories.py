"""Trajectories on a real broker: sent in order, labeled exactly once whoever dies, filled into buffers from where they
stand."""

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from confluent_kafka import KafkaException, TopicPartition

from rollstream.consumers.buffers.slices.buffer import EpisodeSliceBuffer
from rollstream.consumers.buffers.trajectories.buffer import TrajectoryReplayBuffer
from rollstream.consumers.buffers.trajectories.filler import Place, TrajectoryFiller
from rollstream.consumers.grouping.process.bootstrap import committed_offsets, members
from rollstream.consumers.labeling.config import LabelingConfig
from rollstream.consumers.labeling.positions import SOURCE, LabelingProgress, ensure_positions
from rollstream.consumers.labeling.process import LabelingProcess, PartitionOutcomes
from rollstream.consumers.labeling.recovery import recover
from rollstream.consumers.transactions import ExactlyOnce, OwnershipLost
from rollstream.pipeline.audit.ledger import ledger
from rollstream.producers.record_sender import RolloutDelivery
from rollstream.producers.trajectories.producer import TrajectoryProducer
from rollstream.topics.codec import decode, encode
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError, RecordError, RecordTooLarge, StateRefused, TopicError
from rollstream.topics.kafka import clients, provisioning, topic_admin
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.kafka.transactional_ids import transactional_id
from rollstream.topics.keys import encode_key, partition_of
from rollstream.topics.records import NamedArray, RolloutMetadata, TrajectoryRecord, same
from rollstream.topics.trajectories import Trajectory, from_record, to_record
from tests.support.paths import ROOT
from tests.support.runs import RealRun
from tests.support.trajectories import HOLD_AT, double, number_of, numbered
from tests.support.waiting import eventually

HOSTILE = encode(
    TrajectoryRecord(
        uid="u", environment="e", arrays={"rewards": NamedArray(dtype="<f4", shape=(1,) * 65, data=bytes(4))}
    )
)
"""An array of more dimensions than numpy can hold."""


@pytest.fixture
def run(real_run: RealRun) -> RealRun:
    real_run.kafka = KafkaConfig(bootstrap_servers=real_run.kafka.bootstrap_servers, max_record_bytes=50_000)
    provisioning.apply(real_run.kafka, real_run.topics, real_run.name)
    return real_run


def send(run: RealRun, trajectories: list[Trajectory], topic: str = "trajectories") -> list[RolloutDelivery]:
    deliveries: list[RolloutDelivery] = []
    with TrajectoryProducer(run.kafka, run.name, topic=topic, on_delivery=deliveries.append) as producer:  # type: ignore[arg-type]
        for trajectory in trajectories:
            producer.send(trajectory)
    return deliveries


def messages(run: RealRun, topic: str) -> Iterator[KafkaRecord]:
    return read_to_end(run.kafka, run.topic(topic))


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


def test_a_labeler_killed_again_and_again_labels_everything_exactly_once(
    run: RealRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = [numbered(number, worker=f"w{number % 4}") for number in range(160)]
    send(run, sent, "unlabelled")
    run.send_bytes("unlabelled", b"no trajectory", b"key", partition=1)
    run.send_bytes("unlabelled", HOSTILE, b"key", partition=0)
    total = 160 + 2

    def done() -> int:
        return sum(1 for _ in messages(run, "trajectories"))

    def settled() -> bool:
        consumer = clients.reader(run.kafka, group=f"{run.name}.labeller")
        try:
            topic = run.topic("unlabelled")
            committed = consumer.committed([TopicPartition(topic, p) for p in range(2)], 10.0)
        finally:
            consumer.close()
        return sum(max(tp.offset, 0) for tp in committed) == total

    # Killed at any moment before it is held, or while it is, of which it cannot come to the end.
    for least, hold_at in ((1, 60), (30, 140)):
        monkeypatch.setenv(HOLD_AT, str(hold_at))
        labeler = run.start("label", "tests.support.trajectories:held", labeling__max_poll_records=2)
        eventually(lambda least=least: done() >= least, 60, f"{least} trajectories are labeled")
        labeler.kill()
        labeler.wait()
    assert done() < 140, "it was killed at work"
    labeler = run.start("label", "tests.support.trajectories:double", labeling__metrics_interval_s=0.2)
    eventually(settled, 60, "every record is settled")
    eventually(lambda: [m for m in run.read("metrics") if m.values["lag"] == 0], 60, "figures say that nothing waits")  # type: ignore[attr-defined]
    labeler.terminate()
    assert labeler.wait(60) == 0
    figures = run.read("metrics")[-1]
    assert figures.component == f"labeller-{run.name}-0"  # type: ignore[attr-defined]
    assert figures.values["dead_lettered_total"] <= 4  # type: ignore[attr-defined]
    assert 0 < figures.values["labelled_total"] < len(sent)  # type: ignore[attr-defined]

    expected = {t.uid: made for t in sent if number_of(t) != 55 and number_of(t) != 155 and (made := double(t))}
    newest: dict[str, int] = {}
    sources = {(m.partition, m.offset): m for m in messages(run, "unlabelled")}
    for message in messages(run, "trajectories"):
        record = decode(message.value)
        assert same(record, to_record(expected.pop(record.uid))), "each once, and nothing else"
        number = number_of(from_record(record))
        worker = record.metadata.worker_id
        assert number > newest.get(worker, -1), "in the order of their sources"
        newest[worker] = number
        partition, offset = map(int, dict(message.headers)[SOURCE].decode().split(":"))
        source = sources[partition, offset]
        assert decode(source.value).uid == record.uid
        assert (message.partition, message.key) == (source.partition, source.key)
    assert not expected
    letters = list(messages(run, "dead-letters"))
    reasons = sorted(dict(letter.headers)["__streams.errors.message"].decode()[:15] for letter in letters)
    assert reasons == ["an array of sha", "not an Avro sin", "number 155 cann", "number 55 canno"]
    for letter in letters:
        headers = {name: value.decode() for name, value in letter.headers}
        assert headers["__streams.errors.topic"] == run.topic("unlabelled")
        place = (int(headers["__streams.errors.partition"]), int(headers["__streams.errors.offset"]))
        assert letter.value == sources[place].value


class Kept:
    """A buffer that keeps uids, and its position beside them."""

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
    filler.fill(30)
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
        with pytest.raises(ConfigurationError, match="thread of its own"):
            going.poll()
    assert sorted(again.uids) == uids(range(20, 34)), "nothing twice, and nothing left out"
    assert sorted(fresh.uids) == uids(range(34))


def prune(run: RealRun, *words: str) -> dict[tuple[str, int], dict[str, Any]]:
    """The plan of `rollstream prune` for the two topics of trajectories."""
    rows = asked(run, "prune", *words)["plan"]
    return {(row["topic"], row["partition"]): row for row in rows}


def asked(run: RealRun, *words: str) -> dict[str, Any]:
    """Answer of a command of rollstream."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = run.command(*words, "--json")
    done = subprocess.run(command, env=environment, cwd=run.directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def position(run: RealRun, group: str, topic: str) -> dict[int, int]:
    """Offsets that a group of the run committed."""
    committed = committed_offsets(run.kafka, f"{run.name}.{group}", run.topic(topic), run.topics.partitions)
    return {tp.partition: tp.offset for tp in committed}


def test_prune_deletes_what_fillers_and_labeling_have_read_and_nothing_else(run: RealRun, tmp_path: Path) -> None:
    send(run, of_two(range(1, 10)), "unlabelled")
    labeler = run.start("label", "tests.support.trajectories:double")
    eventually(lambda: len(labeled_of(run)) == 9, 60, "they are labeled")
    labeler.terminate()
    assert labeler.wait(60) == 0
    labeled = position(run, "labeller", "unlabelled")
    send(run, of_two(range(11, 15)), "unlabelled")
    held = prune(run, "--dry-run")
    assert {row["to"] for (topic, _), row in held.items() if topic == "trajectories"} == {0}
    assert held["trajectories", 0]["kept_for"] == "no filler on record"
    assert {p: held["unlabelled", p]["to"] for p in labeled} == labeled

    buffer = TrajectoryReplayBuffer(auto_save=True, auto_save_path=tmp_path / "windows")
    late = EpisodeSliceBuffer(tmp_path / "slices", capacity=1000, slice_len=2)
    with buffer, late:
        TrajectoryFiller(run.kafka, run.name, [late], name="late").close()
        filler = TrajectoryFiller(run.kafka, run.name, [buffer])
        filler.fill(30)
        read = dict(buffer.position)
        assert position(run, "filler-default", "trajectories") == read
        assert set(position(run, "filler-late", "trajectories").values()) == {0}, "it has nothing, and is waited for"
        assert prune(run, "--dry-run")["trajectories", 0]["to"] == 0
        with TrajectoryFiller(run.kafka, run.name, [late], name="late") as going:
            eventually(lambda: dict(late.position) == read, 60, "the other has it, too")
            going.check()

        send(run, of_two(range(20, 26)))
        done = prune(run, "--yes")
        assert {p: done["trajectories", p]["to"] for p in read} == read
        for topic, read_to in (("trajectories", read), ("unlabelled", labeled)):
            assert {p: low for p, (low, _end) in topic_admin.bounds(run.kafka, run.topic(topic)).items()} == read_to
        filler.fill(30)
        filler.close()
        assert filler.counts == (9 + 6, 0)
    run.start("label", "tests.support.trajectories:double")
    eventually(lambda: len(labeled_of(run)) == 6 + 4, 60, "labeling goes on where it was")


def test_the_ledger_says_what_became_of_unlabelled_and_how_far_fillers_have_read(run: RealRun) -> None:
    send(run, [numbered(number) for number in (10, 11, 12, 13, 55)], "unlabelled")
    run.send_bytes("unlabelled", b"no trajectory", b"key", partition=1)
    labeler = run.start("label", "tests.support.trajectories:double")
    eventually(lambda: len(list(messages(run, "dead-letters"))) == 2, 60, "two are refused")
    eventually(lambda: len(labeled_of(run)) == 3, 60, "three are labeled")
    labeler.terminate()
    assert labeler.wait(60) == 0
    send(run, [numbered(number) for number in range(20, 24)], "unlabelled")
    filler = TrajectoryFiller(run.kafka, run.name, [Kept()])
    filler.fill(30)
    filler.close()
    send(run, of_two(range(30, 32)))
    run.send_bytes("trajectories", b"no trajectory", b"key")
    book = asked(run, "ledger")
    fates = {"labeled": 3, "left_out": 1, "dead_lettered": 2, "pending": 4, "undecided": 0, "pruned": 0}
    assert book["unlabelled"] == {"produced": 10, **fates}
    assert (book["trajectories"]["records"], book["trajectories"]["fillers"]["default"]["waiting"]) == (6, 3)
    assert book["trajectories"]["fillers"]["default"]["positions"] == {
        str(p): offset for p, offset in position(run, "filler-default", "trajectories").items()
    }
    assert (book["balanced"], book["records_skipped"]) == (True, 1)

    # A record that an open transaction may have labeled is neither pending nor labeled.
    partition = partition_of(encode_key("cart", "w0"), run.topics.partitions)
    first_pending = position(run, "labeller", "unlabelled")[partition]
    with run.open_transaction("metrics") as producer:
        headers = {SOURCE: f"{partition}:{first_pending}"}
        producer.produce(run.topic("trajectories"), b"labeled", b"key", partition, headers=headers)
        producer.flush(30)
        open_book = ledger(run.kafka, run.name)
        assert open_book.balanced
        assert open_book.undecided[0].startswith(f"label of unlabelled[{partition}] offset {first_pending}: a trans")
        assert open_book.unlabelled == book["unlabelled"] | {"pending": 3, "undecided": 1}

    # LabelingCounts outlive what was pruned, and a trajectory that is lost is a problem.
    assert prune(run, "--yes")["unlabelled", partition]["offsets"] > 0
    after = ledger(run.kafka, run.name)
    assert after.unlabelled == book["unlabelled"] | {"pruned": 6}
    assert after.balanced, after.problems


def test_the_ledger_names_a_labeled_trajectory_that_is_lost(run: RealRun) -> None:
    send(run, [numbered(number) for number in range(1, 6)], "unlabelled")
    labeler = run.start("label", "tests.support.trajectories:double")
    eventually(lambda: len(labeled_of(run)) == 5, 60, "they are labeled")
    labeler.terminate()
    labeler.wait()
    filler = TrajectoryFiller(run.kafka, run.name, [Kept()])
    partition = partition_of(encode_key("cart", "w0"), run.topics.partitions)
    # Between them lie the markers of as many transactions as it took.
    third = [message.offset for message in messages(run, "trajectories")][2]
    client = clients.admin(run.kafka)
    for future in client.delete_records([TopicPartition(run.topic("trajectories"), partition, third)]).values():
        future.result(60)
    book = ledger(run.kafka, run.name)
    assert not book.balanced
    assert book.problems == [
        f"unlabelled[{partition}]: 3 records are labeled by the topics, 5 by what was committed with the position",
        f"unlabelled[{partition}]: 2 records are left out by the topics, 0 by what was committed with the position",
        f"trajectories[{partition}] begins at offset {third}, and filler default has read up to 0: {third} offsets "
        "were deleted unread",
    ]
    filler.close()


def test_two_fillers_of_one_name_are_told_so(run: RealRun) -> None:
    first, second = Kept(), Kept()
    one = TrajectoryFiller(run.kafka, run.name, [first])
    send(run, of_two(range(4)))
    other = TrajectoryFiller(run.kafka, run.name, [second])
    other.fill(30)
    with pytest.raises(ConfigurationError, match=r"another filler committed.*a name of its own"):
        one.fill(30)


def test_a_log_that_is_not_the_one_a_buffer_was_filled_from_is_refused(run: RealRun, tmp_path: Path) -> None:
    identity = tmp_path / "topic.json"
    topic = run.topic("trajectories")
    send(run, of_two(range(10)))
    buffer = Kept()
    TrajectoryFiller(run.kafka, run.name, [buffer], identity_file=identity).fill(30)
    ahead = Kept({0: 10_000})
    with pytest.raises(TopicError, match="created again; take an empty buffer"):
        TrajectoryFiller(run.kafka, run.name, [ahead])

    client = clients.admin(run.kafka)
    for future in client.delete_records([TopicPartition(topic, p, end) for p, end in buffer.position.items()]).values():
        future.result(60)
    TrajectoryFiller(run.kafka, run.name, [buffer]).fill(30)
    with pytest.raises(TopicError, match="were deleted; take an empty buffer"):
        TrajectoryFiller(run.kafka, run.name, [Kept(dict.fromkeys(buffer.position, 0))])

    for future in client.delete_topics([topic]).values():
        future.result(60)
    eventually(lambda: topic not in client.list_topics(timeout=60).topics, 60, "the topic is gone")
    provisioning.apply(run.kafka, run.topics, run.name)
    send(run, of_two(range(20)))
    with pytest.raises(TopicError, match=r"with id .* take empty buffers"):
        TrajectoryFiller(run.kafka, run.name, [buffer], identity_file=identity)
    empty = Kept()
    TrajectoryFiller(run.kafka, run.name, [empty], identity_file=identity).fill(30)
    assert sorted(empty.uids) == uids(range(20))


def test_labeling_begins_once_and_positions_that_are_lost_or_of_another_topic_are_refused(run: RealRun) -> None:
    group, topic = f"{run.name}.labeller", run.topic("unlabelled")
    topic_id = ensure_positions(run.kafka, run.name, group)
    assert ensure_positions(run.kafka, run.name, group) == topic_id
    committed = committed_offsets(run.kafka, group, topic, 2)
    assert {(tp.offset, LabelingProgress.decode(tp).topic_id) for tp in committed} == {(0, topic_id)}

    def commit(other: str, metadata: str) -> None:
        producer = clients.transactional_producer(run.kafka, f"test-{run.name}")
        producer.init_transactions(30)
        producer.begin_transaction()
        consumer = clients.reader(run.kafka, group=other)
        places = [TopicPartition(topic, 0, 3, metadata)]
        producer.send_offsets_to_transaction(places, consumer.consumer_group_metadata(), 30)
        producer.produce(run.topic("trajectories"), b"labeled", headers={SOURCE: "0:2"})
        producer.commit_transaction(30)
        consumer.close()

    commit(group, "another-id")
    with pytest.raises(StateRefused, match=r"id another-id, which was deleted"):
        ensure_positions(run.kafka, run.name, group)
    with pytest.raises(StateRefused, match=r"0:2 was labeled: they were lost.*label recover"):
        ensure_positions(run.kafka, run.name, f"{run.name}.never-began")
    commit(f"{run.name}.half", topic_id)
    with pytest.raises(StateRefused, match=r"no positions in partitions \[1\]"):
        ensure_positions(run.kafka, run.name, f"{run.name}.half")


def test_lost_positions_of_labeling_are_committed_again_from_what_was_labeled(run: RealRun) -> None:
    send(run, [numbered(number) for number in (11, 10, 12, 55, 20)], "unlabelled")
    group, partition = f"{run.name}.labeller", partition_of(encode_key("cart", "w0"), run.topics.partitions)
    first = run.start("label", "tests.support.trajectories:double", kafka__session_timeout_s=6)
    eventually(lambda: position(run, "labeller", "unlabelled")[partition] == 5, 60, "all are judged")
    with pytest.raises(StateRefused, match=r"has members; stop them"):
        recover(run.kafka, run.name, LabelingConfig())
    first.terminate()
    assert first.wait(60) == 0
    eventually(lambda: not members(run.kafka, group), 60, "it is no member any more")
    client = clients.admin(run.kafka)
    client.delete_consumer_groups([group])[group].result(60)
    with pytest.raises(StateRefused, match=r"label recover"):
        ensure_positions(run.kafka, run.name, group)

    # A process that was paused in its transaction is fenced: what it would write later is no label any more.
    paused = clients.transactional_producer(run.kafka, transactional_id(run.name, "labeller", 0))
    paused.init_transactions(30)
    paused.begin_transaction()
    headers: list[tuple[str, str | bytes | None]] = [(SOURCE, f"{partition}:4")]
    paused.produce(run.topic("trajectories"), b"late", b"key", partition, headers=headers)
    paused.flush(30)
    told = subprocess.run(
        run.command("label", "recover"),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=run.directory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    assert f"partition {partition}: labeling goes on at offset 4" in told.stdout
    with pytest.raises(KafkaException):
        paused.commit_transaction(30)
    send(run, [numbered(13)], "unlabelled")
    run.start("label", "tests.support.trajectories:double")
    eventually(lambda: len(labeled_of(run)) == 3, 60, "labeling goes on")
    book = ledger(run.kafka, run.name)
    fates = {"labeled": 3, "left_out": 2, "dead_lettered": 1, "pending": 0, "undecided": 0, "pruned": 0}
    assert book.unlabelled == {"produced": 6, **fates}
    assert book.balanced, book.problems


def labeled_of(run: RealRun) -> list[str]:
    return [decode(message.value).uid for message in messages(run, "trajectories")]


@pytest.mark.long
def test_labelers_that_come_and_go_share_the_work_and_label_everything_exactly_once(run: RealRun) -> None:
    """Partitions move while they are at work: one joins, one is killed and stays away, one is told to stop."""
    sent = [numbered(number, worker=f"w{number % 4}") for number in range(1000)]
    expected = sorted(t.uid for t in sent if number_of(t) % 100 != 55 and number_of(t) % 10)
    settings = {"labeling__max_poll_records": 1, "kafka__session_timeout_s": 6}

    def labeler(ordinal: int) -> subprocess.Popen[bytes]:
        return run.start("label", "tests.support.trajectories:double", "--ordinal", str(ordinal), **settings)

    send(run, sent[:400], "unlabelled")
    first = labeler(0)
    eventually(lambda: len(labeled_of(run)) > 20, 60, "the first is at work")
    second = labeler(1)
    eventually(lambda: "assigned" in run.log_of(second), 60, "the second has a share")
    send(run, sent[400:700], "unlabelled")
    second.kill()
    send(run, sent[700:], "unlabelled")
    third = labeler(2)
    eventually(lambda: len(labeled_of(run)) > 500, 60, "they go on")
    first.terminate()
    assert first.wait(60) == 0
    eventually(lambda: len(labeled_of(run)) >= len(expected), 60, "everything is labeled")
    third.terminate()
    assert third.wait(60) == 0
    assert sorted(labeled_of(run)) == expected
    assert len(list(messages(run, "dead-letters"))) == 10


@pytest.mark.long
def test_what_was_aborted_is_read_and_labeled_again(run: RealRun, monkeypatch: pytest.MonkeyPatch) -> None:
    send(run, [numbered(number, worker=f"w{number % 4}") for number in range(1, 200)], "unlabelled")
    config = LabelingConfig(max_poll_records=4)
    commit, calls = ExactlyOnce.publish, itertools.count()

    def lost_now_and_then(publisher: ExactlyOnce[PartitionOutcomes], parts: Sequence[PartitionOutcomes]) -> None:
        if next(calls) % 3 == 1:
            raise OwnershipLost("as after an abort")
        commit(publisher, parts)

    monkeypatch.setattr(ExactlyOnce, "publish", lost_now_and_then)
    process = LabelingProcess(double, run.kafka, run.name, config, 0, lambda: None)
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(process.run, stop)
        expected = sorted(f"w{n % 4}-{n}" for n in range(1, 200) if n % 10 and n % 100 != 55)
        try:
            eventually(lambda: len(labeled_of(run)) >= len(expected), 60, "everything is labeled")
        finally:
            stop.set()
        counts = running.result(60)
    assert sorted(labeled_of(run)) == expected
    assert counts == (len(expected), 19, 2)
    assert len(list(messages(run, "dead-letters"))) == 2


@pytest.mark.long
def test_a_second_labeler_of_an_ordinal_fences_the_first(run: RealRun) -> None:
    first = run.start("label", "tests.support.trajectories:double")
    eventually(lambda: "assigned" in run.log_of(first), 60, "the first has its partitions")
    run.start("label", "tests.support.trajectories:double")
    assert first.wait(60) == 3
    assert "only one" in run.log_of(first)
    send(run, [numbered(number) for number in range(1, 10)], "unlabelled")
    eventually(lambda: len(labeled_of(run)) == 9, 60, "the second labels")


FILL = """
import sys
from pathlib import Path

from tests.broker.test_trajectories import filled

filled(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
"""


def filled(bootstrap_servers: str, run: str, directory: Path) -> dict[str, Any]:
    """Fill both buffers of a directory with all there is, and draw from them."""
    kafka = KafkaConfig(bootstrap_servers=bootstrap_servers)
    windows = TrajectoryReplayBuffer(auto_save=True, auto_save_path=directory / "windows")
    with windows, EpisodeSliceBuffer(directory / "slices", capacity=100_000, slice_len=3) as slices:
        filler = TrajectoryFiller(kafka, run, [windows, slices], identity_file=directory / "topic.json")
        filler.fill(60)
        filler.close()
        return {
            "positions": (dict(windows.position), dict(slices.position)),
            "sizes": (len(windows), windows.total_samples, slices.stats()["num_episodes"], slices.size()),
            "drawn": [windows.sample(64)["actions"].tolist(), slices.sample(16)["actions"].tolist()],
        }


@pytest.mark.long
def test_buffers_killed_while_they_are_filled_are_in_the_end_as_if_they_had_not_been(
    run: RealRun, tmp_path: Path
) -> None:
    # All are of one worker: records of several partitions are read in an order that differs each time.
    send(run, [numbered(number, arrays=full(number)) for number in range(1500)])
    killed, whole = tmp_path / "killed", tmp_path / "whole"

    def written() -> int:
        return sum(path.stat().st_size for path in killed.rglob("*") if path.is_file() and path.suffix != ".lock")

    kills = 0
    for _ in range(4):
        before = written() if killed.exists() else 0
        arguments = [sys.executable, "-c", FILL, run.kafka.bootstrap_servers, run.name, str(killed)]
        child = subprocess.Popen(arguments, env={**os.environ, "PYTHONPATH": str(ROOT)})
        at_work = partial(lambda child, least: child.poll() is not None or written() > least, child, before + 30_000)
        eventually(at_work, 60, "it writes")
        kills += child.poll() is None
        child.kill()
        child.wait()
    assert kills >= 2, "it was killed at work"
    after = filled(run.kafka.bootstrap_servers, run.name, killed)
    assert after == filled(run.kafka.bootstrap_servers, run.name, whole)
    assert after["sizes"][0] == after["sizes"][2] == 1500


def full(number: int) -> dict[str, np.ndarray]:
    values = np.full((4, 1), number, np.int64)
    return {"actions": values, "rewards": values.astype(np.float32), "obs": np.full((4, 1, 200), number, np.int32)}


@pytest.mark.long
def test_what_a_labeler_refused_is_sent_again_once_it_is_mended(run: RealRun) -> None:
    send(run, [numbered(number) for number in (54, 55, 155)], "unlabelled")
    run.send_bytes("unlabelled", b"no trajectory", b"key")

    def letters() -> list[KafkaRecord]:
        return [letter for letter in messages(run, "dead-letters") if letter.value is not None]

    before = run.start("label", "tests.support.trajectories:double")
    eventually(lambda: len(letters()) == 3, 60, "three are refused")
    before.terminate()
    before.wait()
    for sent in (2, 0):
        done = subprocess.run(
            run.command("dlq", "redrive", "--json"),
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=run.directory,
            capture_output=True,
            text=True,
            check=False,
        )
        answer = json.loads(done.stdout)
        assert (len(answer["redriven"]), len(answer["left"])) == (sent, 1), "each once, and poison never"
    run.start("label", "tests.support.trajectories:mended")
    eventually(lambda: sorted(labeled_of(run)) == ["w0-155", "w0-54", "w0-55"], 60, "they are labeled")
    assert len(letters()) == 3
