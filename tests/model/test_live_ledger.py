"""The ledger that reads only what is new equals the one that reads everything, whatever happens to it and its file."""

import json
import subprocess
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.pipeline.audit.ledger import LiveLedger, ledger
from rollstream.topics.config import KafkaConfig, TopicsConfig
from rollstream.topics.kafka import provisioning, topic_admin
from rollstream.topics.records import BatchUse, LearnerStep
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from tests.support.batches import indexed_batches
from tests.support.ledgers import in_both_forms, plain
from tests.support.runs import RealRun, rollout
from tests.support.settled import settled
from tests.support.waiting import eventually


@pytest.fixture
def run(broker: str, run_name: str, tmp_path: Path) -> Iterator[RealRun]:
    made = RealRun(KafkaConfig(bootstrap_servers=broker), run_name, tmp_path, TopicsConfig(partitions=2))
    made.grouping = GroupingConfig(batch_rollouts=8, max_batch_age_s=0.5, group_deadline_s=600.0)
    yield made.prepare()
    made.stop()


def send(run: RealRun, name: str, groups: int) -> None:
    run.send(rollout(f"{name}{n}", member, policy_version=0) for n in range(groups) for member in range(4))


def learn(run: RealRun, number: int, use: str, rows: int = 0) -> None:
    """Write a learner's step that used all batches, or the first rows of each."""
    batches = list(indexed_batches(run.kafka, run.name))
    uses = tuple(
        BatchUse(
            batch_id=read.batch.batch_id,
            index_offset=read.index_offset,
            rows=rows or len(read.batch),
            use=use,  # type: ignore[arg-type]
            code="" if use == "trained" else "old",
            row_numbers=tuple(range(rows)),
            again=number > 1,
        )
        for read in batches
    )
    step = LearnerStep(
        learner="main",
        step=number,
        input_run=run.name,
        uses=uses,
        position=batches[-1].index_offset + 1,
        policy_version=-1,
        params_digest="d",
        trained_total=0,
        skipped_total=0,
        resumes_at=batches[-1].index_offset + 1,
    )
    run.send_bytes("steps", encode(step), encode_key("main", number))


@dataclass
class Stored:
    """The file of a live ledger."""

    run: RealRun
    path: Path

    def poll(self) -> tuple[str, dict[str, object]]:
        """Why a reading from the file began anew, and the ledger."""
        with LiveLedger(self.run.kafka, self.run.name, self.path) as reader:
            book = plain(reader.poll())
            return reader.begun_anew, book


@pytest.mark.kafka
def test_a_file_that_cannot_be_gone_on_from_is_thrown_away_and_told(run: RealRun, tmp_path: Path) -> None:
    process = run.start("group")
    send(run, "a", 4)
    settled(run, batched=16)
    process.terminate()
    assert process.wait(300) == 0
    stored = Stored(run, tmp_path / "other" / "file")
    whole = plain(ledger(run.kafka, run.name))
    assert stored.poll() == ("there is no saved ledger", whole)
    assert stored.poll() == ("", whole)
    data = stored.path.read_bytes()
    for bad in (data[:-1], data[:40], data[:100] + b"\0" + data[101:], b"", b"something else", zlib.compress(b"{}")):
        stored.path.write_bytes(bad)
        report, book = stored.poll()
        assert "is damaged, or other code than this has written it" in report
        assert book == whole
        assert stored.poll() == ("", whole)
    # The unfinished file of a killed writer is ignored.
    stored.path.with_name("file.1-x.unfinished").write_bytes(data[:50])
    assert stored.poll() == ("", whole)
    copied = Stored(run.beside("copy").prepare(), stored.path)
    report, book = copied.poll()
    assert f"belongs to run {run.name} and groups" in report
    assert book == plain(ledger(run.kafka, copied.run.name))
    # The topics of the run are created anew, so nothing that was read is there any more.
    stored.poll()
    assert topic_admin.delete_topics(run.kafka, [d.topic for d in provisioning.describe(run.kafka, run.name)]) == {}
    run.prepare()
    report, book = stored.poll()
    assert "deleted and created again since" in report
    assert book == plain(ledger(run.kafka, run.name))
    assert book["batched"] == 0


def test_readings_agree_while_a_run_goes_on_and_its_parts_are_killed(run: RealRun) -> None:
    follower = run.start("ledger", "--follow", "0.2")
    groupers = [run.start("group", "--ordinal=0"), run.start("group", "--ordinal=1")]
    send(run, "a", 8)
    run.send_bytes("rollouts", b"\xc3\x01 not a record", encode_key("env", "poison"), 0)
    settled(run, batched=32)
    eventually(lambda: "batched 32" in run.log_of(follower), 60, "a line of the ledger that follows")
    follower.kill()
    groupers[0].kill()
    follower.wait()
    send(run, "b", 8)
    groupers[1].kill()
    for process in groupers:
        process.wait()
    in_both_forms(run)
    send(run, "a0", 1)
    for topic in ("rollouts", "evals"):
        run.send_bytes(topic, encode(rollout("e", 0)), encode_key("env", "e"), 0)
    in_both_forms(run)
    run.start("group")
    settled(run, batched=68)
    learn(run, 1, "trained", 2)
    assert in_both_forms(run).trained == 2 * len(list(indexed_batches(run.kafka, run.name)))
    learn(run, 2, "skipped", 3)
    in_both_forms(run)
    # A step that is made again replaces its first record.
    learn(run, 1, "skipped", 3)
    book = in_both_forms(run)
    assert (book.trained, book.learners["main"]["steps"]) == (0, 2)
    assert book.selection["env"].lost.rollouts == 3 * len(list(indexed_batches(run.kafka, run.name)))


@pytest.mark.kafka
def test_a_command_reads_on_and_says_what_it_keeps(run: RealRun) -> None:
    process = run.start("group")
    send(run, "a", 2)
    settled(run, batched=8)
    process.terminate()
    assert process.wait(300) == 0

    def told(*words: str) -> str:
        command = run.command("ledger", "--incremental", *words)
        answer = subprocess.run(command, capture_output=True, text=True, cwd=run.directory, check=True, timeout=300)
        return answer.stdout

    assert "read from the beginning (there is no saved ledger)" in told()
    assert "read only new records; the file for the next reading has" in told()
    book = json.loads(told("--json"))
    kept = book.pop("books")
    assert book == json.loads(json.dumps(plain(ledger(run.kafka, run.name))))
    [file] = run.directory.glob(f"runs/{run.name}/ledger/books")
    assert kept == {"bytes": file.stat().st_size, "begun_anew": ""}
    with LiveLedger(run.kafka, run.name, file) as live:
        assert live.offsets("batched") == {}, "nothing is read before the first poll"
        live.poll()
        batched, dropped = live.offsets("batched"), live.offsets("dropped", "late")
    assert sum(last - first + 1 for ranges in batched.values() for first, last in ranges) == 8
    assert dropped == {0: [], 1: []}
    assert zlib.decompress(file.read_bytes()).startswith(b'{"code"')
