"""Losses that no count of records shows, planted in real runs: both forms of the ledger name each.

The lies of tests/unit/pipeline/audit/test_planted_lies.py cover every other sentence over the model of Kafka.
"""

import json
import math
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition

from rollstream.consumers.batch_reader import BatchReader, first_offset
from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.process.bootstrap import committed_offsets
from rollstream.infra.broker.broker import LocalBroker
from rollstream.infra.config import BrokerConfig
from rollstream.topics.config import KafkaConfig, TopicsConfig
from rollstream.topics.errors import TopicError
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.records import BatchIndexEntry, BatchUse, LearnerStep
from rollstream.topics.wire.codec import decode_as, encode
from rollstream.topics.wire.keys import encode_key
from tests.support.ledgers import in_both_forms
from tests.support.runs import RealRun, rollout
from tests.support.settled import settled
from tests.support.waiting import eventually

BATCHES = 21


@pytest.fixture
def run(broker: str, run_name: str, tmp_path: Path) -> Iterator[RealRun]:
    made = RealRun(KafkaConfig(bootstrap_servers=broker), run_name, tmp_path)
    yield grouped(made)
    made.stop()


def grouped(run: RealRun) -> RealRun:
    """A run of 21 batches, a group each, whose grouping process has ended."""
    run.topics = TopicsConfig(partitions=1)
    run.grouping = GroupingConfig(batch_rollouts=4, max_batch_age_s=60.0, group_deadline_s=600.0)
    run.prepare()
    process = run.start("group")
    send(run, "old", BATCHES)
    settled(run, batches=BATCHES)
    book = in_both_forms(run)
    process.terminate()
    assert process.wait(300) == 0
    assert (book.batches, book.problems, book.undecided, book.balanced) == (BATCHES, [], [], True)
    return run


def send(run: RealRun, name: str, groups: int) -> None:
    """Send whole groups of four, each in a record batch of its own."""
    for number in range(groups):
        run.send(rollout(f"{name}{number}", member) for member in range(4))


def problems(run: RealRun) -> list[str]:
    book = in_both_forms(run)
    assert book.balanced == (not book.problems)
    return book.problems


def delete(run: RealRun, topic: str, before: int) -> None:
    """Delete the records of partition 0 below an offset."""
    client = clients.admin(run.kafka)
    place = TopicPartition(run.topic(topic), 0, before)
    client.delete_records([place])[place].result(300)


def index(run: RealRun) -> dict[int, BatchIndexEntry]:
    messages = read_to_end(run.kafka, run.topic("batch-index"))
    return {message.offset: decode_as(BatchIndexEntry, message.value) for message in messages}


def put(run: RealRun, entry: BatchIndexEntry) -> None:
    run.send_bytes("batch-index", encode(entry), encode_key(entry.batch_id))


def step(run: RealRun, number: int, entries: dict[int, BatchIndexEntry], position: int) -> None:
    """Write a learner's step that trained on these entries of the index and has this `position`."""
    uses = tuple(
        BatchUse(batch_id=entry.batch_id, index_offset=offset, rows=entry.rollouts, use="trained")
        for offset, entry in entries.items()
    )
    record = LearnerStep(
        learner="main",
        step=number,
        input_run=run.name,
        uses=uses,
        position=position,
        policy_version=-1,
        params_digest="ab" * 32,
        trained_total=0,
        skipped_total=0,
    )
    run.send_bytes("steps", encode(record), encode_key("main", number))


def test_rollouts_deleted_unread_are_named(run: RealRun) -> None:
    read = topic_admin.bounds(run.kafka, run.topic("rollouts"))[0][1]
    send(run, "lost", 25)
    delete(run, "rollouts", read)
    assert problems(run) == [], "what was read may be deleted: it is counted as pruned"
    delete(run, "rollouts", read + 100)
    [named] = problems(run)
    assert named == (
        f"rollouts[0] begins at offset {read + 100}, and the group has read up to {read}: 100 offsets were deleted "
        "unread"
    )


def test_index_entries_deleted_are_named_and_a_reader_of_the_beginning_is_refused(run: RealRun) -> None:
    entries = index(run)
    first_kept = list(entries)[11]
    delete(run, "batch-index", first_kept)
    assert problems(run) == [
        f"11 batches have no entry in batch-index, which begins at offset {first_kept}, so no learner finds them; the "
        "first is 0-0"
    ]
    with pytest.raises(TopicError, match=f"begins at offset {first_kept}, but is to be read from 0: the entries"):
        BatchReader(run.kafka, run.name, start=0)
    assert first_offset(run.kafka, run.name) == first_kept
    with BatchReader(run.kafka, run.name, start=first_kept) as reader:
        read = reader.poll(300)
    assert read is not None
    assert read.entry.batch_id == "0-11"


@pytest.mark.kafka
def test_a_log_cut_off_and_written_again_is_named_and_refused(tmp_path: Path) -> None:
    with LocalBroker.start(config=BrokerConfig(data_dir=tmp_path / "broker"), bound_to_parent=True) as broker:
        run = RealRun(KafkaConfig(bootstrap_servers=broker.bootstrap_servers), "cut", tmp_path)
        grouped(run)
        position = topic_admin.bounds(run.kafka, run.topic("rollouts"))[0][1]
        broker.stop()
        [segment] = broker.data_dir.glob(f"**/{run.topic('rollouts')}-0/*.log")
        first_new = cut_off(segment, position - 40)
        broker.restart()
        assert f"rollouts[0] ends at offset {first_new}, but was read up to {position}" in problems(run)
        send(run, "new", 12)
        named = problems(run)
        assert named == [
            f"rollouts[0] offsets {first_new} to {position - 1} were read as other records: the log was cut off and "
            "written again (its leader epoch differs), and the records there now were never read"
        ]
        process = run.start("group")
        assert process.wait(300) == 2
        assert f"was cut off before offset {position} and written again since it was read" in run.log_of(process)
        done = rollstream(run, "ledger")
        assert done.returncode == 1
        assert named[0] in done.stdout


def cut_off(segment: Path, offset: int) -> int:
    """Cut a segment off at the first record batch from `offset` on (length at byte 8); returns its first offset."""
    data, at = segment.read_bytes(), 0
    while int.from_bytes(data[at : at + 8], "big") < offset:
        at += 12 + int.from_bytes(data[at + 8 : at + 12], "big")
    segment.write_bytes(data[:at])
    for suffix in (".index", ".timeindex"):  # They may name what is cut off; Kafka rebuilds them.
        segment.with_suffix(suffix).unlink()
    return int.from_bytes(data[at : at + 8], "big")


# ---------------------------------------------------------------------- what is not decided yet


@pytest.mark.parametrize(
    "topics",
    [
        ("dead-letters", "batch-index", "batches"),
        pytest.param(("journal",), marks=pytest.mark.long),
        pytest.param(("rollouts",), marks=pytest.mark.long),
    ],
)
def test_what_an_open_transaction_hides_is_undecided(
    broker: str, run_name: str, tmp_path: Path, topics: tuple[str, ...]
) -> None:
    run = RealRun(KafkaConfig(bootstrap_servers=broker), run_name, tmp_path, TopicsConfig(partitions=1))
    run.grouping = GroupingConfig(batch_rollouts=4, max_batch_age_s=60.0, group_deadline_s=600.0)
    run.prepare()
    try:
        process = run.start("group")
        send(run, "before", 1)
        eventually(lambda: in_both_forms(run).batched == 4, 60, "a batch")
        with run.open_transaction(topics[0]) as foreign:
            for topic in topics[1:]:
                foreign.produce(run.topic(topic), b"foreign", b"foreign", 0)
            assert foreign.flush(120) == 0
            run.send_bytes("rollouts", b"\xc3\x01 not a record", encode_key("env", "poison"), 0)
            send(run, "behind", 1)
            if "rollouts" not in topics:
                eventually(lambda: position(run) > 9, 60, "all nine to be read")
            process.terminate()
            assert process.wait(300) == 0
            hides = "\n".join(undecided(run))
            for topic in topics:
                assert f"a transaction is open on {topic}[0] from offset" in hides
            done = rollstream(run, "ledger")
            assert done.returncode == 4, done.stdout
            assert "every record is in exactly one place, as far as it is decided yet" in done.stdout
        # The next process reads the records that were unread when this one was asked to end.
        run.start("group")
        eventually(lambda: in_both_forms(run).batched == 8, 60, "the other batch")
        book = in_both_forms(run)
        assert (book.problems, book.undecided, book.dead_lettered) == ([], [], 1)
        assert rollstream(run, "ledger").returncode == 0
    finally:
        run.stop()


def position(run: RealRun) -> int:
    return committed_offsets(run.kafka, run.grouper.group_id(run.name), run.topic("rollouts"), 1)[0].offset


def undecided(run: RealRun) -> list[str]:
    book = in_both_forms(run)
    assert book.problems == []
    return book.undecided


def rollstream(run: RealRun, *words: str) -> "subprocess.CompletedProcess[str]":
    return run.said(*words)


# ---------------------------------------------------------------------- records that cannot be read


def test_records_that_make_no_sense_are_skipped_counted_and_named(run: RealRun) -> None:
    sound = {"split": "heldout", "phase": "greedy", "prompts": "2"}
    bad = {
        "many": rollout("many", extra={**sound, "prompts": "many"}),
        "endless": rollout("endless", reward=math.inf, extra=sound),
        "exact": rollout("exact", reward_components={"exact": math.nan}, extra=sound),
    }
    for made in (*bad.values(), rollout("sound", extra=sound)):
        run.send_bytes("evals", encode(made), encode_key("env", made.example_id), 0)
    [(_at, entry), *_] = index(run).items()
    put(run, replace(entry, batch_id="nonsense"))
    step(run, 1, {0: replace(entry, batch_id="nonsense")}, 0)
    topics = ("steps", "evals", "control", "batch-index", "batches", "journal", "dead-letters", "policies")
    for topic in topics:
        for value in (b"junk", None):
            run.send_bytes(topic, value, b"no key", 0)
    done = rollstream(run, "ledger", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    book = json.loads(done.stdout, parse_constant=pytest.fail)
    assert book["problems"] == []
    # Two records of each of six topics; the ledger does not count those of control and policies.
    assert book["records_skipped"] == len(bad) + 2 + 2 * 6
    named = "\n".join(book["unreadable"])
    assert "prompts is 'many', which is not a number of prompts" in named
    assert "reward is inf" in named
    assert f"{run.topic('steps')}[0] offset 1: " in named
    assert (book["evals"], book["evaluations"][0]["reward"]) == (1, 1.0)
    assert "records could not be read and were ignored" in rollstream(run, "ledger").stdout
