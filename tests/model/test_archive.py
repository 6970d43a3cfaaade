"""The archive of a run on a real broker: its writer killed and continued, its records read, its topics restored."""

import csv
import json
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from confluent_kafka import Producer, TopicPartition

from rollstream.consumers.archive import manifest as manifests
from rollstream.consumers.archive import restorer
from rollstream.consumers.archive.archiver import TOPICS, Archiver
from rollstream.consumers.archive.restorer import restore
from rollstream.consumers.archive.tables import ArchivedRecord
from rollstream.consumers.archive.writer import records
from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.process.bootstrap import recover
from rollstream.pipeline.audit.ledger import ledger
from rollstream.pipeline.audit.verification import verify
from rollstream.pipeline.tools.prune import read_positions
from rollstream.topics.errors import StateRefused
from rollstream.topics.files.stores import LocalStore, Store, open_store
from rollstream.topics.kafka import clients, provisioning, sender, topic_admin
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.sender import Delivery
from rollstream.topics.records import BatchUse, LearnerStep, TrainingBatch
from rollstream.topics.wire.catalogue import PRUNED, topic_name
from rollstream.topics.wire.codec import decode_as, encode
from rollstream.topics.wire.keys import encode_key
from tests.support.batches import indexed_batches
from tests.support.runs import RealRun, rollout
from tests.support.settled import settled
from tests.support.waiting import eventually

Held = dict[str, list[ArchivedRecord]]


def of_topics(run: RealRun, name: str) -> Held:
    """Every record of a run's topics in the form of an archive, but read from the topics."""
    collected: Held = {}
    for topic in TOPICS:
        messages = read_to_end(run.kafka, topic_name(name, topic))
        collected[topic] = sorted(
            (
                ArchivedRecord(
                    topic,
                    m.partition,
                    m.offset,
                    m.timestamp_ms,
                    m.key,
                    m.value,
                    m.headers or None,
                )
                for m in messages
            ),
            key=lambda e: (e.partition, e.offset),
        )
    return collected


def of_archive(store: Store, run: str) -> Held:
    current = manifests.newest(store, run)
    assert current is not None
    return {
        name: [entry for p in sorted(topic.position) for entry in records(store, current, name, p)]
        for name, topic in current.topics.items()
    }


def steps_as(held: Held, name: str) -> Held:
    """The same records, but their steps use batches of run `name`, as in a restored run."""
    return {
        **held,
        "steps": [
            e._replace(value=encode(replace(decode_as(LearnerStep, e.value), input_run=name))) for e in held["steps"]
        ],
    }


def made(run: RealRun) -> list[TrainingBatch]:
    """Make a run at rest: nine groups batched, one without variance, a duplicate, a dead letter, a step."""
    run.grouping = GroupingConfig(batch_rollouts=8, max_batch_age_s=0.5)
    run.prepare()
    process = run.start("group", kafka__compression="none")
    run.send(rollout(f"x{n}", member) for n in range(8) for member in range(4))
    run.send(rollout("twice", member) for member in (0, 1, 0, 2, 3))
    run.send(rollout("same", member, reward=1.0) for member in range(4))
    run.send_bytes("rollouts", b"\xc3\x01 not a record", encode_key("env", "x0"))

    settled(run, batched=36, in_flight=0)
    process.terminate()
    assert process.wait(300) == 0
    batches = [read.batch for read in indexed_batches(run.kafka, run.name)]
    first = batches[0]
    use = BatchUse(batch_id=first.batch_id, index_offset=0, rows=len(first), use="trained")
    step = LearnerStep(
        learner="main", step=1, input_run=run.name, uses=(use,), position=1, policy_version=1, params_digest="ab" * 32,
        trained_total=len(first), skipped_total=0,
    )  # fmt: skip
    run.send_bytes("steps", encode(step), encode_key("main", 1))
    return batches


def test_an_archive_survives_kill_9_answers_and_becomes_a_run_that_verifies(real_run: RealRun) -> None:
    batches = made(real_run)
    store = LocalStore(real_run.directory / "archive")
    process = real_run.start("archive", "--follow", "--every", "0.05", "--arrays")
    eventually(lambda: manifests.newest(store, real_run.name), 60, "the first manifest")
    sent = 0

    def works() -> bool:
        current = manifests.newest(store, real_run.name)
        assert process.poll() is None, real_run.log_of(process)
        return current is not None and current.rows("evals") >= 200 and current.generation > 2

    # Send until the archive has committed several times and is at work.
    while not works() and sent < 4000:
        producer = clients.producer(real_run.kafka)
        for _ in range(100):
            producer.produce(real_run.topic("evals"), encode(rollout(f"e{sent}", sent)), encode_key("env", f"e{sent}"))
            sent += 1
        assert producer.flush(120) == 0
    eventually(works, 60, "commits of the archive")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert sent > 200
    (store.root / f"run={real_run.name}" / "table=log" / "left.parquet").write_bytes(b"half a file")

    printed = json.loads(real_run.told("archive", "--json"))
    assert of_archive(store, real_run.name) == of_topics(real_run, real_run.name)
    with Archiver(real_run.kafka, real_run.name, store) as archiver:
        assert archiver.once().records == 0
    assert "left.parquet" not in "".join(store.names(""))
    assert printed["tables"]["evals"]["rows"] == sent

    rows = list(csv.reader(real_run.told("sql", "select reason, drops from drops_by_reason", "--csv").splitlines()))
    assert sorted(rows[1:]) == [["duplicate_uid", "1"], ["zero_variance", "4"]]

    current = manifests.newest(store, real_run.name)
    assert current is not None
    again = f"{real_run.name}-again"
    restore(real_run.kafka, real_run.topics, store, current, again)
    assert of_topics(real_run, again) == steps_as(of_topics(real_run, real_run.name), again)
    assert verify(real_run.kafka, again).as_dict() == verify(real_run.kafka, real_run.name).as_dict()
    book, before = ledger(real_run.kafka, again), ledger(real_run.kafka, real_run.name)
    assert book.balanced, book.problems
    assert (book.batched, book.trained, book.dead_lettered) == (36, len(batches[0]), 1)
    assert book.as_dict() == before.as_dict()
    assert [r.batch.digest for r in indexed_batches(real_run.kafka, again)] == [batch.digest for batch in batches]
    with pytest.raises(StateRefused, match="exists; restore into a run of another name"):
        restore(real_run.kafka, real_run.topics, store, current, again)


def test_a_broker_that_acknowledges_without_offsets_is_believed_if_the_partition_ends_where_it_should(
    real_run: RealRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker may do so when a record was sent twice because its first acknowledgement was lost."""
    run = real_run.prepare()
    run.send(rollout(f"x{n}", member) for n in range(4) for member in range(4))
    store = open_store(f"memory://{run.name}")
    with Archiver(run.kafka, run.name, store) as archiver:
        current = archiver.once().manifest
    intruders: list[str] = []

    def without_offset(topic: str, partition: int, _offset: int, timestamp_ms: int, stamped: bool) -> Delivery:
        if intruders and topic.endswith("rollouts"):
            producer = clients.producer(run.kafka)
            producer.produce(topic, intruders.pop().encode(), partition=partition)
            producer.flush(30)
        return Delivery(topic, partition, None, timestamp_ms, stamped)

    monkeypatch.setattr(sender, "Delivery", without_offset)
    again = f"{run.name}-again"
    restore(run.kafka, run.topics, store, current, again)
    assert of_topics(run, again) == steps_as(of_topics(run, run.name), again)
    intruders.append("of another process")
    with pytest.raises(StateRefused, match=r"rollouts\[\d\] ends at \d+, but \d+ was expected"):
        restore(run.kafka, run.topics, store, current, f"{run.name}-disturbed")


def test_an_archiver_does_not_go_on_with_a_topic_that_was_created_again(real_run: RealRun) -> None:
    run, store = real_run.prepare(), LocalStore(real_run.directory / "archive")
    run.send([rollout("before", 0)])
    with Archiver(run.kafka, run.name, store) as archiver:
        archived = archiver.once().manifest
        assert topic_admin.delete_topics(run.kafka, [run.topic("rollouts")]) == {}

        def created() -> bool:
            provisioning.apply(run.kafka, run.topics, run.name)
            return topic_admin.topic_ids(run.kafka, [run.topic("rollouts")])[run.topic("rollouts")] not in {
                topic.topic_id for topic in archived.topics.values()
            }

        eventually(created, 60, "the new topic")
        run.send([rollout("after", member) for member in range(4)])
        with pytest.raises(
            StateRefused, match=r"rollouts with id .* was deleted and created again since; archive to another place"
        ):
            archiver.once()
    assert manifests.newest(store, run.name) == archived


def test_a_restored_run_is_grouped_further_with_the_groups_that_were_open(real_run: RealRun) -> None:
    run = real_run
    run.grouping = GroupingConfig(batch_rollouts=8, max_batch_age_s=0.5, group_deadline_s=3600.0)
    run.prepare()
    process = run.start("group")
    run.send([*(rollout(f"x{n}", member) for n in range(6) for member in range(4)), rollout("open", 0)])
    settled(run, batched=24, in_flight=1)
    process.terminate()
    assert process.wait(300) == 0
    store = open_store(f"memory://{run.name}")
    with Archiver(run.kafka, run.name, store) as archiver:
        current = archiver.once().manifest
    again, beyond = (replace(run, name=f"{run.name}-{name}", processes=run.processes) for name in ("again", "beyond"))
    for other in (again, beyond):
        restore(run.kafka, run.topics, store, current, other.name)
    before = ledger(run.kafka, run.name).as_dict()

    # The journal does not contain this batch, so grouping would make it again.
    beyond.send_bytes("batches", b"a batch", encode_key("0-999"), partition=0)
    with pytest.raises(StateRefused, match="holds batch 0-999, which its journal does not contain"):
        recover(run.kafka, beyond.name, run.grouper, restored=True)

    adopted = again.start("group", "adopt")
    assert adopted.wait(300) == 0, again.log_of(adopted)
    assert ledger(run.kafka, again.name).as_dict() == before
    process = again.start("group")
    again.send(rollout("open", member) for member in (1, 2, 3))
    again.send(rollout(f"y{n}", member) for n in range(6) for member in range(4))
    book = settled(again, batched=52, in_flight=0)
    process.terminate()
    assert process.wait(300) == 0
    assert (book.balanced, book.produced) == (True, before["produced"] + 3 + 24 + book.control - before["control"])
    verification = verify(run.kafka, again.name)
    assert (verification.mismatches, verification.unverifiable, verification.batches) == ([], 0, book.batches)
    names = [entry.batch_id for entry in again.read("batch-index")]  # type: ignore[attr-defined]
    assert len(set(names)) == len(names) == book.batches > before["batches"]


def transaction(producer: Producer, records: Sequence[tuple[str, int]], end: Callable[[float], object]) -> None:
    producer.begin_transaction()
    for topic, partition in records:
        producer.produce(topic, b"in a transaction", partition=partition)
    assert producer.flush(120) == 0
    end(30.0)


@pytest.mark.kafka
@pytest.mark.long
@pytest.mark.parametrize("at_once", [restorer.GAP_AT_ONCE, 3], ids=["whole gaps", "parts of gaps"])
def test_what_lies_between_records_lies_there_again(
    real_run: RealRun, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(restorer, "GAP_AT_ONCE", at_once)
    real_run.prepare()
    rollouts, steps, letters = (real_run.topic(name) for name in ("rollouts", "steps", "dead-letters"))
    plain = clients.producer(real_run.kafka)
    other = clients.transactional_producer(real_run.kafka, f"{real_run.name}-test")
    other.init_transactions(120)

    def send(topic: str, partition: int, count: int) -> None:
        for n in range(count):
            value = None if n == 1 else b"x" * n
            headers = [("h", b"1"), ("h", None)] if n % 2 else None
            plain.produce(topic, value, None if n == 2 else b"k", partition, timestamp=1_000_000 + n, headers=headers)
        assert plain.flush(120) == 0

    send(rollouts, 0, 7)
    transaction(other, [(rollouts, 0)] * 1 + [(rollouts, 1)] * 3, other.commit_transaction)
    transaction(other, [(rollouts, 0)] * 1 + [(letters, 0)] * 2, other.abort_transaction)
    send(rollouts, 0, 600)
    transaction(other, [(rollouts, 0)] * 3 + [(steps, 0)], other.abort_transaction)
    transaction(other, [(rollouts, 0)] * 200 + [(rollouts, 1)], other.commit_transaction)
    send(letters, 0, 3)
    transaction(other, [(letters, 0)], other.abort_transaction)
    send(letters, 0, 1)
    transaction(other, [(letters, 0)], other.commit_transaction)
    admin = clients.admin(real_run.kafka)
    for future in admin.delete_records([TopicPartition(rollouts, 0, 5), TopicPartition(rollouts, 1, 3)]).values():
        future.result(300)

    store = open_store(f"memory://{real_run.name}")
    with Archiver(real_run.kafka, real_run.name, store, flush_bytes=20_000) as archiver:
        first = archiver.once()
        assert archiver.once().records == 0
        assert archiver.once().manifest.generation == first.manifest.generation
    send(rollouts, 0, 1)
    # The janitor knows what is archived, and keeps the rest.
    known = read_positions(real_run.kafka, real_run.name, real_run.grouper.group_id(real_run.name)).groups
    _low, end = topic_admin.bounds(real_run.kafka, rollouts)[0]
    archived = known[f"{real_run.name}.archive"]
    assert archived["rollouts", 0] == end - 1
    assert {topic for topic, _partition in archived} == set(PRUNED)
    with Archiver(real_run.kafka, real_run.name, store) as archiver:
        second = archiver.once()
    assert second.records == 1
    # Brokers forget positions; an archiver without new records commits them again.
    group = f"{real_run.name}.archive"
    admin.delete_consumer_groups([group])[group].result(60)
    with Archiver(real_run.kafka, real_run.name, store) as archiver:
        assert archiver.once().records == 0
    known = read_positions(real_run.kafka, real_run.name, real_run.grouper.group_id(real_run.name)).groups
    assert {topic for topic, _partition in known[group]} == set(PRUNED)
    again = f"{real_run.name}-again"
    assert restore(real_run.kafka, real_run.topics, store, second.manifest, again) == first.records + 1
    assert of_topics(real_run, again) == of_topics(real_run, real_run.name) == of_archive(store, real_run.name)

    def latest_timestamps(run: str) -> set[str]:
        return {t.settings["message.timestamp.after.max.ms"] for t in provisioning.describe(real_run.kafka, run)}

    # A broker shows a change some time after it was made.
    eventually(lambda: latest_timestamps(again) == latest_timestamps(real_run.name), 60, "the brokers' limit")
    for name in TOPICS:
        was, now = (topic_admin.bounds(real_run.kafka, topic_name(run, name)) for run in (real_run.name, again))
        assert {p: end for p, (_low, end) in was.items()} == {p: end for p, (_low, end) in now.items()}
    assert topic_admin.bounds(real_run.kafka, topic_name(again, "rollouts"))[0][0] == 5


FAILING = """
import sys
from rollstream.pipeline.command_line.cli import main
from tests.support.faulty_store import SLOW_DOWN, faulty_store

with faulty_store() as files:
    files.faults["write:bucket/archive/run="].extend(["", SLOW_DOWN])  # of the first file of records
    files.faults["read:"].append(SLOW_DOWN)  # of the manifest, when the archive is opened again
    sys.exit(main(sys.argv[1:]))
"""
"""An archiver whose store fails twice; it keeps objects in the memory of its process."""


@pytest.mark.kafka
def test_an_archiver_that_follows_a_run_outlives_faults_of_the_store(real_run: RealRun) -> None:
    run = real_run.prepare()
    run.send(rollout(f"g{number}", 0) for number in range(20))
    words = ("archive", "faulty://bucket/archive", "--follow", "--every", "0.05", "--json")
    process = run.start(*words, script=FAILING)

    def archived() -> bool:
        assert process.poll() is None, run.log_of(process)
        answers = [json.loads(line) for line in run.log_of(process).splitlines() if line.startswith('{"archive"')]
        return any(answer["tables"].get("rollouts", {}).get("rows") == 20 for answer in answers)

    eventually(archived, 120, "the rollouts after both faults")
    log = run.log_of(process)
    assert log.count('"not_archived"') == log.count("503 Slow Down") == 2, log[-3000:]
    assert "password" not in log
