"""Trajectories on a real broker: sent in order, filled into buffers from their positions on, pruned once they are
read, and all of them in the ledger."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from confluent_kafka import TopicPartition

from rollstream.consumers.buffers.slices.buffer import EpisodeSliceBuffer
from rollstream.consumers.buffers.trajectories.buffer import TrajectoryReplayBuffer
from rollstream.consumers.buffers.trajectories.filler import Place, TrajectoryFiller, filler_positions
from rollstream.consumers.labeling.positions import SOURCE
from rollstream.pipeline.audit.ledger import ledger
from rollstream.producers.record_sender import RolloutDelivery
from rollstream.producers.trajectories.producer import TrajectoryProducer
from rollstream.topics.codec import decode
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError, RecordError, RecordTooLarge, TopicError
from rollstream.topics.kafka import clients, provisioning, topic_admin
from rollstream.topics.keys import encode_key, partition_of
from rollstream.topics.records import RolloutMetadata, same
from rollstream.topics.trajectories import Trajectory, from_record, to_record
from tests.support.command_line import answer_of
from tests.support.paths import ROOT
from tests.support.runs import RealRun
from tests.support.trajectories import number_of, numbered
from tests.support.trajectory_runs import HOSTILE, for_trajectories, labeled_of, messages, position, send
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


def prune(run: RealRun, *words: str) -> dict[tuple[str, int], dict[str, Any]]:
    """The plan of `rollstream prune` for the two topics of trajectories."""
    rows = asked(run, "prune", *words)["plan"]
    return {(row["topic"], row["partition"]): row for row in rows}


def asked(run: RealRun, *words: str) -> dict[str, Any]:
    """Answer of a command of rollstream."""
    done = answer_of(run.directory, *run.command(*words, "--json")[4:])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.long
def test_prune_deletes_what_fillers_and_labeling_have_read_and_nothing_else(run: RealRun, tmp_path: Path) -> None:
    send(run, of_two(range(1, 10)), "unlabelled")
    labeler = run.start("label", "tests.support.trajectories:double")
    eventually(lambda: len(labeled_of(run)) == 9, 60, "they are labeled")
    labeler.terminate()
    assert labeler.wait(300) == 0
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
        filler.fill(300)
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
        filler.fill(300)
        filler.close()
        assert filler.counts == (9 + 6, 0)
    run.start("label", "tests.support.trajectories:double")
    eventually(lambda: len(labeled_of(run)) == 6 + 4, 60, "labeling goes on where it was")


@pytest.mark.long  # planted lies say it over the model
def test_the_ledger_says_what_became_of_unlabelled_and_how_far_fillers_have_read(run: RealRun) -> None:
    send(run, [numbered(number) for number in (10, 11, 12, 13, 55)], "unlabelled")
    run.send_bytes("unlabelled", b"no trajectory", b"key", partition=1)
    labeler = run.start("label", "tests.support.trajectories:double")
    eventually(lambda: len(list(messages(run, "dead-letters"))) == 2, 60, "two are refused")
    eventually(lambda: len(labeled_of(run)) == 3, 60, "three are labeled")
    labeler.terminate()
    assert labeler.wait(300) == 0
    send(run, [numbered(number) for number in range(20, 24)], "unlabelled")
    filler = TrajectoryFiller(run.kafka, run.name, [Kept()])
    filler.fill(300)
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
        producer.flush(120)
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
    # Transaction markers lie between them, and their number varies.
    third = [message.offset for message in messages(run, "trajectories")][2]
    client = clients.admin(run.kafka)
    for future in client.delete_records([TopicPartition(run.topic("trajectories"), partition, third)]).values():
        future.result(300)
    book = ledger(run.kafka, run.name)
    assert not book.balanced
    assert book.problems == [
        f"unlabelled[{partition}]: 3 records are labeled according to the topics, but 5 according to the counts "
        "committed with the position",
        f"unlabelled[{partition}]: 2 records are left out according to the topics, but 0 according to the counts "
        "committed with the position",
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
        filler.fill(300)
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
    # All are of one worker, so in one partition: several would be read in an order that differs each time.
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
