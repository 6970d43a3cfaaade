"""`rollstream migrate` into a run on a real broker: exactly what was read, however often it is started or killed."""

import io
import json
import os
import re
from collections import Counter
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

import fastavro
import pytest
from confluent_kafka.admin import NewTopic

from rollstream.consumers.buffers.groups.view import GroupStore
from rollstream.pipeline.cli import main
from rollstream.pipeline.tools import migrate as migrate_tool
from rollstream.topics.avro_files import read_rollouts, write_rollouts
from rollstream.topics.codec import encode, schemas, values_of
from rollstream.topics.config import KafkaConfig, TopicsConfig
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.kafka.open_transactions import await_decided
from rollstream.topics.records import Mark, OldMetadata, Rollout, RolloutBatch, TrainingBatch
from rollstream.topics.rollout_batch_upcast import downcast, upcast
from tests.support.runs import RealRun, rollout
from tests.support.waiting import eventually


def old_batch(name: str, groups: int = 4) -> RolloutBatch:
    members = [[rollout(f"{name}-{g}", m) for m in range(4)] for g in range(groups)]
    return downcast(members, OldMetadata(worker_id="w", timestamp=1.0, weight_step=0))


def migrate(run: RealRun, source: str, code: int = 0, target: str = "") -> dict[str, Any]:
    _python, _safe, _m, _pipeline, *words = run.command("migrate", source, target or f"run:{run.name}", "--json")
    with redirect_stdout(io.StringIO()) as out:
        assert main(words) == code, out.getvalue()
    report: dict[str, Any] = json.loads(out.getvalue())
    return report


def write(path: Path, *batches: RolloutBatch) -> None:
    out = io.BytesIO()
    fastavro.writer(out, schemas()["RolloutBatch"][-1].parsed, [values_of(b) for b in batches])
    path.write_bytes(out.getvalue())


class OldTopic:
    """A topic of the old form, of one partition."""

    def __init__(self, run: RealRun) -> None:
        self.kafka, self.name = run.kafka, f"{run.name}.old"
        self.source = f"topic:{self.name}"
        self.create()

    def create(self) -> None:
        client = clients.admin(self.kafka)

        def created() -> bool:
            client.create_topics([NewTopic(self.name, 1, 1)])[self.name].result(60)
            return True

        # The broker may still be deleting a topic of the name.
        eventually(created, 60, "the new topic")

    def send(self, *batches: RolloutBatch) -> None:
        producer = clients.producer(self.kafka)
        for each in batches:
            producer.produce(self.name, encode(each), partition=0)
        assert producer.flush(60) == 0

    def create_again(self, *batches: RolloutBatch) -> None:
        assert topic_admin.delete_topics(self.kafka, [self.name]) == {}
        self.create()
        self.send(*batches)


def uids(run: RealRun) -> list[str]:
    return [r.uid for r in run.read("rollouts") if isinstance(r, Rollout)]


def _trained_on(run: RealRun) -> list[str]:
    return [uid for b in run.read("batches") if isinstance(b, TrainingBatch) for uid in b.uids]


def test_old_files_and_an_old_topic_become_rollouts_of_a_run_once_and_are_trained_on(real_run: RealRun) -> None:
    real_run.prepare()
    old = real_run.directory / "old"
    old.mkdir()
    write(old / "one.avro", old_batch("a"), old_batch("b"))
    report = migrate(real_run, str(old))
    assert report["complete"]
    assert report["total"] == {"read": 32, "refused": 0, "there_before": 0, "written": 32, "in_target": 32}
    write(old / "two.avro", old_batch("c"))
    assert migrate(real_run, str(old))["total"] == {
        "read": 48,
        "refused": 0,
        "there_before": 32,
        "written": 16,
        "in_target": 48,
    }
    # Any topic can hold the old form: here it is that of evaluations, with a bad record in between.
    for value in (encode(old_batch("d")), b"poison", encode(old_batch("e"))):
        real_run.send_bytes("evals", value, b"[]", 0)
    report = migrate(real_run, f"topic:{real_run.topic('evals')}", code=1)
    assert (report["total"]["read"], report["total"]["written"]) == (33, 32)
    [refused] = report["refused"]
    assert re.fullmatch(rf"{real_run.topic('evals')}@[^:]+:0:1", refused["place"])
    assert len(uids(real_run)) == len(set(uids(real_run))) == 80

    real_run.start("group")
    eventually(lambda: len(_trained_on(real_run)) == 80, 60, "every group is whole, and batched")
    assert sorted(_trained_on(real_run)) == sorted(uids(real_run))
    _a_store_follows_the_run(real_run)


def _a_store_follows_the_run(run: RealRun) -> None:
    with GroupStore(run.directory / "store") as store:
        assert store.fill(run.kafka, run.name) >= 80
        assert store.environments["env"].size() == 20
    # Write a mark by hand, as a grouping task does at the end of its partition.
    run.send_bytes("rollouts", encode(Mark(kind="deadline")), b"[]", 0)
    run.send(rollout("late", m) for m in range(4))
    again = GroupStore(run.directory / "store")
    assert again.position == store.position
    assert again.fill(run.kafka, run.name) >= 5
    assert again.environments["env"].size() == 21
    rebuilt = GroupStore(run.directory / "rebuilt")
    rebuilt.fill(run.kafka, run.name)
    assert sorted(rebuilt.environments["env"].group_ids()) == sorted(again.environments["env"].group_ids())
    assert again.fill(run.kafka, run.name, "batches") >= 5, "below the same root"
    assert len(list((run.directory / "store" / "batches").glob("batch_*.parquet"))) >= 5
    seen = GroupStore(run.directory / "store", read_only=True)
    assert (seen.size(), seen.position_of("batches")) == (21, again.position_of("batches"))


def test_what_a_topic_no_longer_has_stays_in_the_file_and_new_batches_are_added(real_run: RealRun) -> None:
    topic, target = OldTopic(real_run), real_run.directory / "new"
    topic.send(*(old_batch(name) for name in "abcd"))
    assert migrate(real_run, topic.source, target=str(target))["total"]["written"] == 64
    topic_admin.delete_records(real_run.kafka, {(topic.name, 0): 3})
    assert migrate(real_run, topic.source, target=str(target))["total"]["there_before"] == 16
    assert examples(target) == {f"{name}-{g}": 4 for name in "abcd" for g in range(4)}
    topic.send(old_batch("e"))
    report = migrate(real_run, topic.source, target=str(target))
    assert report["complete"]
    assert report["total"] == {"read": 32, "refused": 0, "there_before": 16, "written": 16, "in_target": 32}
    assert examples(target) == {f"{name}-{g}": 4 for name in "abcde" for g in range(4)}


def test_a_topic_that_was_created_again_is_another_source(real_run: RealRun) -> None:
    real_run.prepare()
    topic, target = OldTopic(real_run), real_run.directory / "new"
    topic.send(old_batch("a"))
    for where in ("", str(target)):
        assert migrate(real_run, topic.source, target=where)["total"]["written"] == 16
    topic.create_again(old_batch("b"))
    for where in ("", str(target)):
        report = migrate(real_run, topic.source, target=where)
        assert (report["complete"], report["total"]["there_before"], report["total"]["written"]) == (True, 0, 16)
    both = {f"{name}-{g}": 4 for name in "ab" for g in range(4)}
    assert examples(target) == both
    assert Counter(r.example_id for r in real_run.read("rollouts") if isinstance(r, Rollout)) == both


def test_what_an_earlier_release_migrated_without_the_topics_id_is_not_migrated_twice(real_run: RealRun) -> None:
    real_run.prepare()
    topic, target = OldTopic(real_run), real_run.directory / "new"
    topic.send(old_batch("a"))
    place = f"{topic.name}:0:0"
    former = upcast(old_batch("a"), place).rollouts
    real_run.send(former)
    file = target / topic.name / "0-0.avro"
    file.parent.mkdir(parents=True)
    with file.open("wb") as out:
        write_rollouts(out, former, {"rollstream.source": f"{topic.name}/0-0.avro@{place}-{place}"})
    for where in ("", str(target)):
        report = migrate(real_run, topic.source, target=where)
        assert (report["complete"], report["total"]["there_before"], report["total"]["written"]) == (True, 16, 0)
    # The record at the same place of another topic is another one.
    topic.create_again(old_batch("b"))
    for where in ("", str(target)):
        report = migrate(real_run, topic.source, target=where)
        assert (report["complete"], report["total"]["there_before"], report["total"]["written"]) == (True, 0, 16)
    assert examples(target) == {f"{name}-{g}": 4 for name in "ab" for g in range(4)}


def examples(directory: Path) -> Counter[str]:
    """Number of rollouts in files, by example."""
    files = [read_rollouts(path.read_bytes()) for path in directory.rglob("*.avro")]
    return Counter(each.example_id for rollouts in files for each in rollouts)


@pytest.mark.long
def test_a_migration_that_is_killed_is_finished_by_the_next_and_doubles_nothing(real_run: RealRun) -> None:
    real_run.prepare()
    old = real_run.directory / "old"
    old.mkdir()
    for number in range(4):
        write(old / f"{number}.avro", *(old_batch(f"{number}-{b}", groups=40) for b in range(6)))
    process = real_run.start("migrate", "old", f"run:{real_run.name}")
    eventually(lambda: len(uids(real_run)) >= 960, 60, "a transaction of it")
    os.kill(process.pid, 9)
    process.wait()
    report = migrate(real_run, str(old))
    assert report["complete"]
    assert report["total"]["read"] == report["total"]["in_target"] == 3840
    assert report["total"]["there_before"] >= 960
    assert len(uids(real_run)) == len(set(uids(real_run))) == 3840


def test_rollouts_that_another_transaction_hides_at_first_are_counted(
    real_run: RealRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_run.topics = TopicsConfig(partitions=1)
    real_run.prepare()
    write(real_run.directory / "old.avro", old_batch("a"))
    with ExitStack() as foreign:

        def decided(kafka: KafkaConfig, topic: str, doing: str) -> None:
            foreign.close()
            await_decided(kafka, topic, doing)
            foreign.enter_context(real_run.open_transaction("rollouts"))

        monkeypatch.setattr(migrate_tool, "await_decided", decided)
        report = migrate(real_run, str(real_run.directory / "old.avro"))
    assert report["complete"]
    assert (report["total"]["written"], report["total"]["in_target"]) == (16, 16)
