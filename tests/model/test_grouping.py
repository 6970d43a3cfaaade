"""Grouping on a real broker: exactly once through kills, nothing visible before its commit, bad input on record."""

import hashlib
import json
import logging
import os
import random
import signal
import time
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollstream.consumers.batch_reader import BatchReader
from rollstream.consumers.grouping.makers.batch_maker import FifoBatchMaker, SealedGroup
from rollstream.consumers.grouping.process.bootstrap import committed_offsets, initialise, recover
from rollstream.consumers.grouping.process.mark_writer import drain
from rollstream.pipeline.audit.ledger import ledger
from rollstream.pipeline.audit.verification import verify
from rollstream.pipeline.run.observer import RunObserver
from rollstream.topics.errors import StateRefused
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.groups import GroupMember
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.records import JournalRecord, Mark, Metrics, TrainingBatch
from rollstream.topics.records.fates import DROPPED
from rollstream.topics.wire.codec import decode_as, encode
from rollstream.topics.wire.keys import encode_key
from rollstream.topics.wire.rl_examples import RLExample
from tests.support.restoring import restore_tasks
from tests.support.runs import RealRun, rollout
from tests.support.settled import settled
from tests.support.waiting import eventually


def groups(first: int, count: int) -> list:
    return [rollout(f"x{example}", member) for example in range(first, first + count) for member in range(4)]


def read_batches(run: RealRun, rollouts: int, timeout_s: float = 60.0) -> list[TrainingBatch]:
    """Batches in index order until they hold that many rollouts."""
    collected: list[TrainingBatch] = []

    def enough() -> bool:
        read = reader.poll(0.5)
        if read is not None:
            collected.append(read.batch)
        return sum(map(len, collected)) >= rollouts

    with BatchReader(run.kafka, run.name) as reader:
        eventually(enough, timeout_s, f"{rollouts} rollouts in batches of run {run.name}")
    return collected


def test_rollouts_become_batches_that_name_their_offsets(real_run: RealRun) -> None:
    real_run.prepare()
    real_run.start("group")
    real_run.send(groups(0, 16))
    batches = read_batches(real_run, 64)
    assert sum(map(len, batches)) == 64
    for batch in batches:
        for row, uid in enumerate(batch.uids):
            assert batch.rewards[row] == (int(uid.split("-")[1]) % 2 == 0)
            assert batch.advantages[batch.splits[row]] == pytest.approx((2 * batch.rewards[row] - 1) * 2 / 3, abs=1e-6)
    sources = {(b.partition, int(o)) for b in batches for o in b.source_offsets}
    assert len(sources) == 64
    result = ledger(real_run.kafka, real_run.name)
    assert result.balanced, result.problems
    assert (result.batched, result.rollouts) == (64, 64)
    assert verify(real_run.kafka, real_run.name).mismatches == []


def test_a_batch_appears_only_when_its_transaction_commits(real_run: RealRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """An open transaction holds a batch, journal and index record; none of it is read before the commit."""
    from rollstream.consumers.grouping.core.grouping_task import TaskCommit
    from rollstream.consumers.grouping.process.committer import TransactionPublisher
    from rollstream.consumers.grouping.process.restoration import records_of

    real_run.topics = type(real_run.topics)(partitions=1)
    real_run.prepare()
    real_run.send(groups(0, 4))
    topic = real_run.topic("rollouts")
    member = GroupMember(real_run.kafka, real_run.grouper.group_id(real_run.name), "tester", topic)
    build, seen = clients.transactional_producer, list[int]()

    class Watched:
        """A producer that looks at the topics at the moment before a commit."""

        def __init__(self, *arguments: Any, **settings: Any) -> None:
            self.producer = build(*arguments, **settings)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.producer, name)

        def __len__(self) -> int:
            return len(self.producer)

        def commit_transaction(self, timeout_s: float) -> None:
            seen.append(len(real_run.read("batches")) + len(real_run.read("batch-index")))
            seen.append(len(real_run.read("batches", "read_uncommitted")))
            self.producer.commit_transaction(timeout_s)

    monkeypatch.setattr(clients, "transactional_producer", Watched)
    publisher = TransactionPublisher(real_run.kafka, real_run.name, real_run.grouper.group_id(real_run.name), 0, member)
    publisher.start()
    topic_id = topic_admin.topic_ids(real_run.kafka, [topic])[topic]
    [(fold, journal)] = restore_tasks(real_run.kafka, real_run.name, [0], 1, topic_id, real_run.grouper)
    for message in read_to_end(real_run.kafka, topic):
        fold.apply(records_of(message))
    fold.apply(records_of_mark(fold.position, fold.stream_time_ms, version=0))
    part = TaskCommit(fold.prepare_commit(), journal)
    assert part.effects.batches
    seen.clear()
    publisher.publish([part])
    member.close()
    assert seen == [0, len(part.effects.batches)]
    assert len(read_batches(real_run, 16)) == len(part.effects.batches)


def records_of_mark(offset: int, time_ms: int, version: int):
    from rollstream.consumers.grouping.core.effects import InputRecord

    return InputRecord(offset, time_ms, None, encode(Mark(kind="policy_version", policy_version=version)))


def test_killing_a_grouping_consumer_loses_and_repeats_nothing(real_run: RealRun) -> None:
    seed = 20
    print(f"seed {seed}")
    rng = random.Random(seed)
    real_run.prepare()
    process = real_run.start("group", "--ordinal=0")
    for part in range(4):
        real_run.send(groups(part * 10, 10))
        # Kill somewhere between the records arriving and their last batch being committed.
        wanted = part * 40 + rng.randrange(1, 40)
        eventually(lambda n=wanted: sum(map(len, real_run.read("batches"))) >= n - 16, 60, f"{wanted} rollouts batched")
        process.send_signal(signal.SIGKILL)
        process.wait()
        process = real_run.start("group", "--ordinal=0")
    settled(real_run, batched=160)
    result = ledger(real_run.kafka, real_run.name)
    assert result.balanced, result.problems
    assert (result.rollouts, result.batched, result.in_flight, result.unread) == (160, 160, 0, 0)
    check = verify(real_run.kafka, real_run.name)
    assert check.mismatches == []
    process.terminate()
    assert process.wait(300) == 0


def test_bad_input_goes_to_dead_letters_or_drops_and_stops_nobody(real_run: RealRun) -> None:
    real_run.prepare()
    real_run.start("group")
    poison = b"\xc3\x01 not a record"
    good = groups(0, 8)
    real_run.send(good[:16])
    real_run.send_bytes("rollouts", poison, encode_key("env", "x0"))
    real_run.send_bytes("rollouts", None, encode_key("env", "x1"))
    real_run.send([rollout("bad", 0, logprobs=good[0].logprobs[:2]), rollout("bad", 1, reward=float("nan"))])
    real_run.send([rollout("bad", 2, policy_version=-3)])
    real_run.send(good[16:])
    read_batches(real_run, 32)
    settled(real_run)
    result = ledger(real_run.kafka, real_run.name)
    assert result.balanced, result.problems
    assert (result.dead_lettered, result.dropped) == (2, {"invalid": 3})
    letters = list(read_to_end(real_run.kafka, real_run.topic("dead-letters")))
    assert sorted((m.value for m in letters), key=str) == sorted([poison, None], key=str)
    headers = dict(letters[0].headers)
    assert headers["__streams.errors.topic"] == real_run.topic("rollouts").encode()
    assert {"__streams.errors.message", "__streams.errors.partition", "__streams.errors.offset"} <= set(headers)
    drops = [d for record in real_run.read("journal") if isinstance(record, JournalRecord) for d in record.drops]
    assert sorted(d.detail for d in drops) == [
        "logprobs has 2 entries for 6 tokens",
        "policy_version is -3",
        "reward is nan",
    ]


def test_a_group_that_stays_incomplete_ends_at_its_deadline_though_nothing_else_arrives(real_run: RealRun) -> None:
    real_run.grouping = type(real_run.grouping)(batch_rollouts=16, max_batch_age_s=1.0, group_deadline_s=1.0)
    real_run.prepare()
    real_run.start("group")
    real_run.send(groups(0, 1)[:3])
    eventually(
        lambda: ledger(real_run.kafka, real_run.name).dropped == {"group_too_small": 3}, 60, "the deadline to pass"
    )
    assert DROPPED == "dropped"


def test_a_drain_cuts_what_is_sealed_and_cancels_what_is_open(real_run: RealRun) -> None:
    real_run.grouping = type(real_run.grouping)(batch_rollouts=400, max_batch_age_s=500.0)
    real_run.prepare()
    real_run.start("group")
    # A group waits for the policy clock to know its version; a drain does not force it.
    eventually(lambda: len(real_run.read("rollouts")) == 2, 60, "marks of policy version 0 on both partitions")
    real_run.send(groups(0, 3) + groups(50, 1)[:2])
    drain(real_run.kafka, real_run.name, real_run.grouper, 60)
    result = ledger(real_run.kafka, real_run.name)
    assert (result.batched, result.in_flight, result.dropped) == (12, 0, {"cancelled": 2}), result.as_dict()


def test_generation_0_is_written_once_and_lost_offsets_are_refused_until_recovered(real_run: RealRun) -> None:
    real_run.prepare()
    assert initialise(real_run.kafka, real_run.name, real_run.grouping, real_run.grouper) is False
    process = real_run.start("group")
    real_run.send(groups(0, 8))
    read_batches(real_run, 32)
    process.terminate()
    assert process.wait(300) == 0
    group = real_run.grouper.group_id(real_run.name)
    admin = clients.admin(real_run.kafka)
    eventually(lambda: admin.delete_consumer_groups([group])[group].result(300) is None, 60, "the group to be deleted")
    with pytest.raises(StateRefused, match="group recover"):
        initialise(real_run.kafka, real_run.name, real_run.grouping, real_run.grouper)
    refused = real_run.start("group")
    assert refused.wait(300) == 2
    assert "rollstream role group recover" in real_run.log_of(refused)
    # A static member stays in the group until its session times out.
    positions = eventually(
        lambda: recover(real_run.kafka, real_run.name, real_run.grouper), 60, "the group to be without members"
    )
    assert sum(positions.values()) > 0
    committed = committed_offsets(real_run.kafka, group, real_run.topic("rollouts"), 2)
    assert all(tp.offset >= 0 for tp in committed)
    real_run.start("group")
    real_run.send(groups(8, 8))
    read_batches(real_run, 64)
    assert ledger(real_run.kafka, real_run.name).balanced


def test_losing_the_longest_is_reported_while_it_happens_and_in_the_ledger(
    real_run: RealRun, caplog: pytest.LogCaptureFixture
) -> None:
    real_run.grouping = type(real_run.grouping)(batch_rollouts=64, max_batch_age_s=1.0, group_deadline_s=1.0)
    real_run.prepare()
    process = real_run.start("group", grouper__metrics_interval_s=0.2)

    def of_length(length: int) -> dict[str, object]:
        tokens = np.zeros(length, "<i4")
        return {"tokens": tokens, "loss_mask": np.ones(length, bool), "logprobs": tokens.astype("<f4") - 1}

    for wave in range(4):
        # One member in ten is ten times as long, and does not come before the deadline: its group is lost.
        short = [rollout(f"{wave}-{n}", m, **of_length(10)) for n in range(60) for m in range(4)]
        torn = [rollout(f"{wave}-t{n}", m, **of_length(100)) for n in range(12) for m in range(3)]
        real_run.send(short + torn)

    result = settled(real_run, in_flight=0)
    assert (result.batched, result.dropped) == (960, {"group_too_small": 144})
    assert result.selection["env"].alerts() == ("length",)
    assert result.as_dict()["selection"]["env"]["lost"]["mean_length"] == 100.0
    with closing(RunObserver(real_run.kafka, real_run.name)) as observer, caplog.at_level(logging.WARNING):
        observer.catch_up()
        for _ in range(3):
            observer.poll(0.1)
    [warned] = [r for r in caplog.records if r.getMessage() == "selection_biased"]
    assert warned.levelno == logging.WARNING
    # The grouping process looks at what it owns, which is all of it here.
    eventually(lambda: "selection_biased" in real_run.log_of(process), 60, "the grouping process to warn")
    assert (warned.rollstream_fields["environment"], warned.rollstream_fields["figure"]) == ("env", "length")  # type: ignore[attr-defined]


def test_a_dead_letter_that_would_not_fit_keeps_headers_digest_and_source_offset(real_run: RealRun) -> None:
    """zstd makes a record small enough for `rollouts`; uncompressed, its key or value exceeds the record limit."""
    real_run.topics = type(real_run.topics)(partitions=1)
    real_run.prepare()
    limit = real_run.kafka.max_record_bytes
    large, key = b"\x01" * (limit - 1000), encode_key("env", "x")
    producer = clients.producer(real_run.kafka, **{"message.max.bytes": 4 * limit})
    for value, its_key in ((large, key), (b"small", large), (large[:-5000], key)):
        producer.produce(real_run.topic("rollouts"), value, its_key, 0)
        assert producer.flush(120) == 0
    real_run.start("group")
    real_run.send(groups(0, 8))
    read_batches(real_run, 32)
    letters = {}
    for message in read_to_end(real_run.kafka, real_run.topic("dead-letters")):
        headers = {name: (value or b"").decode() for name, value in message.headers}
        letters[int(headers["__streams.errors.offset"])] = (message.key, message.value, headers)
    assert letters.keys() == {0, 1, 2}
    assert letters[0][:2] == (key, None)
    assert letters[0][2] == {
        "__streams.errors.exception": "rollstream.topics.errors.RecordError",
        "__streams.errors.message": letters[0][2]["__streams.errors.message"],
        "__streams.errors.stacktrace": "",
        "__streams.errors.topic": real_run.topic("rollouts"),
        "__streams.errors.partition": "0",
        "__streams.errors.offset": "0",
        "rollstream.value.sha256": hashlib.sha256(large).hexdigest(),
        "rollstream.value.size_bytes": str(len(large)),
    }
    assert "not an Avro single-object frame" in letters[0][2]["__streams.errors.message"]
    assert letters[1][:2] == (None, b"small")
    assert letters[1][2]["rollstream.key.sha256"] == hashlib.sha256(large).hexdigest()
    assert letters[2][:2] == (key, large[:-5000])
    result = ledger(real_run.kafka, real_run.name)
    assert result.balanced, result.problems
    assert result.dead_lettered == 3


def test_drops_of_one_transaction_that_no_record_holds_are_journaled_in_parts(real_run: RealRun) -> None:
    """The record limit is the smallest allowed; one record of so many drops would take more."""
    real_run.topics = type(real_run.topics)(partitions=1)
    real_run.kafka = replace(real_run.kafka, max_record_bytes=1024 * 1024)
    real_run.grouping = replace(real_run.grouping, batch_bytes=100_000)
    real_run.prepare()
    settings = {"kafka__max_record_bytes": 1024 * 1024, "learner__weights__chunk_bytes": 500_000}
    process = real_run.start("group", **settings)
    # These groups are sealed, and wait for the policy clock until their environment is excluded.
    waiting = [
        rollout(f"an example of a name of some length {n}", m, policy_version=1, highest_version=1, lowest_version=1)
        for n in range(3_500)
        for m in range(4)
    ]
    real_run.send(waiting)
    settled(real_run, in_flight=14_000)
    config = replace(real_run.grouping, generation=1, exclude_environments=("env",))
    mark = Mark(kind="configuration", generation=1, configuration=config.to_json())
    real_run.send_bytes("rollouts", encode(mark), encode_key("mark", "configuration"), 0)
    settled(real_run, in_flight=0)
    process.send_signal(signal.SIGKILL)
    process.wait()
    real_run.start("group", **settings)
    real_run.send([rollout(f"y{n}", m, environment="other") for n in range(4) for m in range(4)])
    read_batches(real_run, 16)
    result = ledger(real_run.kafka, real_run.name)
    assert result.balanced, result.problems
    assert (result.dropped, result.batched) == ({"excluded": 14_000}, 16)
    journal = [record for record in real_run.read("journal") if isinstance(record, JournalRecord)]
    parted = [record for record in journal if record.parts > 1]
    assert len(parted) == parted[0].parts > 2
    assert sum(len(record.drops) for record in parted) == 14_000
    assert sum(len(encode(record)) for record in parted) > 1024 * 1024
    assert [record.sequence for record in journal] == list(range(len(journal)))
    assert verify(real_run.kafka, real_run.name).mismatches == []


class PonderingMaker(FifoBatchMaker):
    """Takes as long with each rollout as ROLLSTREAM_TEST_PONDER_S says."""

    def add_rollout(self, rollout: RLExample, group: SealedGroup) -> None:
        end = time.monotonic() + float(os.environ.get("ROLLSTREAM_TEST_PONDER_S", "0"))
        while time.monotonic() < end:
            pass
        super().add_rollout(rollout, group)


@pytest.mark.kafka
def test_a_restore_longer_than_a_member_may_go_without_polling_keeps_its_partition(
    real_run: RealRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = f"{__name__}:PonderingMaker"
    real_run.topics = type(real_run.topics)(partitions=1)
    real_run.grouping = replace(real_run.grouping, batch_rollouts=400, max_batch_age_s=600.0, maker=maker)
    real_run.prepare()
    settings = {"grouper__makers": f'["{maker}"]', "grouper__metrics_interval_s": 0.5}
    process = real_run.start("group", **settings)
    # Groups that came before it would all be released by this one record.
    eventually(lambda: len(real_run.read("rollouts")) == 1, 60, "the mark of policy version 0")
    real_run.send(groups(0, 90))
    settled(real_run, in_flight=360)
    process.send_signal(signal.SIGKILL)
    process.wait()
    # 360 rollouts, 20 ms each: a second more than the client lets a member be silent.
    monkeypatch.setenv("ROLLSTREAM_TEST_PONDER_S", "0.02")
    flags = ["--set=kafka.client.max.poll.interval.ms=6100", "--set=kafka.client.session.timeout.ms=6000"]
    process = real_run.start("group", *flags, **settings)
    eventually(lambda: "task_restored" in real_run.log_of(process), 60, "the task to be restored")
    monkeypatch.delenv("ROLLSTREAM_TEST_PONDER_S")
    log = [json.loads(line) for line in real_run.log_of(process).splitlines() if line.startswith("{")]
    events = [line["event"] for line in log]
    [restored] = [line for line in log if line["event"] == "task_restored"]
    assert restored["seconds"] > 6.5
    assert "task_restoring" in events
    assert not {"max_poll_exceeded", "lost", "revoked"} & set(events)
    drain(real_run.kafka, real_run.name, real_run.grouper)
    result = ledger(real_run.kafka, real_run.name)
    assert (result.batched, result.in_flight, result.balanced) == (360, 0, True)
    metrics = [record.values for record in real_run.read("metrics") if isinstance(record, Metrics)]
    read = [values["restore_records_read"] for values in metrics if "restore_records_read" in values]
    assert read == sorted(read)
    assert len(set(read)) > 3
    assert {values["restore_records_to_read"] for values in metrics if values.get("restore_records_read")} == {360.0}


def test_figures_of_grouping_are_on_the_metrics_topic_and_add_up(real_run: RealRun) -> None:
    real_run.prepare()
    real_run.start("group", grouper__metrics_interval_s=0.2)
    real_run.send(groups(0, 16) + groups(100, 1)[:3] + [rollout("bad", 0, reward=float("nan"))])
    read_batches(real_run, 64)

    def whole() -> dict[str, float]:
        metrics = [r for r in real_run.read("metrics") if isinstance(r, Metrics) and "transactions_total" in r.values]
        return dict(metrics[-1].values) if metrics else {}

    eventually(lambda: whole().get("batched_total") == 64 and whole()["lag"] == 0, 60, "figures of all of it")
    values = whole()
    assert (values["in_flight"], values["open_groups"], values["dropped_total"]) == (3, 1, 1)
    assert values["finished_groups_total"] == 16
    assert (values["partitions"], values["partitions_restoring"]) == (2, 0)
    assert values["held_bytes"] > 0

    def newest() -> dict[str, Metrics]:
        latest: dict[str, Metrics] = {}
        for message in read_to_end(real_run.kafka, real_run.topic("metrics")):
            record = decode_as(Metrics, message.value)
            assert message.key == encode_key(f"grouper-{real_run.name}-0")
            assert record.component == f"grouper-{real_run.name}-0"
            assert record.labels["consumergroup"] == real_run.grouper.group_id(real_run.name)
            latest[record.labels.get("partition", record.labels.get("environment", ""))] = record
        return latest

    # The positions of one moment are in several records.
    def positions_fit() -> bool:
        latest = newest()
        return latest["0"].values["position"] + latest["1"].values["position"] == len(real_run.read("rollouts"))

    eventually(positions_fit, 60, "positions at the end of rollouts")
    latest = newest()
    assert latest.keys() == {"", "0", "1", "env"}
    assert (latest["env"].values["batched_rollouts"], latest["env"].values["batched_mean_length"]) == (64, 3)
    assert any("commit_seconds_max" in r.values for r in real_run.read("metrics") if isinstance(r, Metrics))


def test_grouping_goes_on_where_its_figures_cannot_be_written(real_run: RealRun) -> None:
    real_run.prepare()
    admin = clients.admin(real_run.kafka)
    topic = real_run.topic("metrics")
    admin.delete_topics([topic])[topic].result(300)
    process = real_run.start("group", grouper__metrics_interval_s=0.05)
    real_run.send(groups(0, 16))
    read_batches(real_run, 64)
    eventually(lambda: "metrics_lost" in real_run.log_of(process), 60, "the loss to be logged")
    real_run.send(groups(100, 16))
    read_batches(real_run, 128)
    process.terminate()
    assert process.wait(300) == 0
