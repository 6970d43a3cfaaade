"""Single records that would end grouping for good, on a real broker: refused, or skipped by an operator."""

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core.configuration_marks import CORE_STEP
from rollstream.consumers.grouping.core.effects import CORE_VERSION
from rollstream.pipeline.audit.ledger import Ledger, ledger
from rollstream.pipeline.audit.verification import verify
from rollstream.topics.catalogue import topic_name
from rollstream.topics.codec import encode
from rollstream.topics.config import KafkaConfig, TopicsConfig
from rollstream.topics.kafka import clients, topic_admin
from rollstream.topics.keys import encode_key
from rollstream.topics.records import Mark, NamedArray, SamplingParams
from tests.support.command_line import answer_of
from tests.support.runs import RealRun, rollout
from tests.support.topic_settings import change_settings
from tests.support.waiting import eventually


@pytest.fixture
def run(broker: str, run_name: str, tmp_path: Path) -> Iterator[RealRun]:
    made = RealRun(KafkaConfig(bootstrap_servers=broker), run_name, tmp_path, TopicsConfig(partitions=1))
    made.grouping = GroupingConfig(batch_rollouts=4, max_batch_age_s=2.0)
    yield made.prepare()
    made.stop()


def configured(core_version: int = CORE_VERSION, **settings: Any) -> Mark:
    values = json.loads(GroupingConfig(**{"generation": 1, **settings}).to_json())
    text = json.dumps({**values, "core_version": core_version})
    return Mark(kind="configuration", generation=values["generation"], configuration=text)


def mark(run: RealRun, wanted: Mark) -> None:
    run.send_bytes("rollouts", encode(wanted), encode_key("mark", wanted.kind), 0)


def read(run: RealRun, **expected: object) -> Ledger:
    """The ledger, once everything is read and it is as expected."""

    def now() -> Ledger | None:
        book = ledger(run.kafka, run.name)
        same = all(getattr(book, name) == value for name, value in expected.items())
        return book if same and not book.unread else None

    return eventually(now, 60, f"the ledger of {run.name} has {expected}", every_s=0.2)


def said(run: RealRun, *words: str) -> "subprocess.CompletedProcess[str]":
    return answer_of(run.directory, *run.command(*words)[4:])


def group(run: RealRun, example: str, members: int = 4) -> None:
    run.send(rollout(example, member) for member in range(members))


def test_records_that_ended_every_grouping_process_are_invalid_and_the_run_goes_on(run: RealRun) -> None:
    arrays = {
        "deep": NamedArray(dtype="<f4", shape=(6, *(1,) * 64), data=bytes(24)),
        "hollow": NamedArray(dtype="<f4", shape=(6, 2**62, 0), data=b""),
        "reference_log_probs": NamedArray(dtype="<f4", shape=(6, *(1,) * 64), data=bytes(24)),
    }
    run.send(rollout(name, token_arrays={name: array}) for name, array in arrays.items())
    run.send([rollout("cold", sampling=SamplingParams(temperature=1e-40)), rollout("dear", reward=1e10)])
    mark(run, Mark(kind="policy_version", policy_version=2**40))
    mark(run, configured(CORE_VERSION + CORE_STEP + 1))
    mark(run, configured(generation=2**63 - 1))
    mark(run, configured(batch_bytes=2**40))
    group(run, "good")
    run.start("group")
    book = read(run, batched=4)
    assert book.dropped == {"invalid": 9}
    assert book.problems == []
    assert verify(run.kafka, run.name).mismatches == []


@pytest.mark.parametrize("compression", ["gzip", pytest.param("lz4", marks=pytest.mark.long)])
def test_a_bomb_is_a_dead_letter_and_costs_grouping_no_more_memory_than_a_client_may_take(
    run: RealRun, compression: str
) -> None:
    process = run.start("group")
    group(run, "before")
    read(run, batched=4)
    before = peak_bytes(process)
    producer = clients.producer(
        run.kafka,
        **{"compression.type": compression, "message.max.bytes": 100_000_000, "queue.buffering.max.kbytes": 200_000},
    )
    for _ in range(3):
        producer.produce(topic_name(run.name, "rollouts"), bytes(96_000_000), partition=0)
        assert producer.flush(120) == 0
    group(run, "behind")
    book = read(run, batched=8)
    assert book.dead_lettered == 3
    assert book.problems == []
    assert '"event": "record_unreadable"' in run.log_of(process)
    assert peak_bytes(process) - before < 64_000_000


def peak_bytes(process: "subprocess.Popen[bytes]") -> int:
    """Peak memory of a process so far."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def test_a_record_that_ends_grouping_at_every_start_is_skipped_on_the_record(run: RealRun) -> None:
    group(run, "before", 2)
    mark(run, configured(CORE_VERSION + 1))
    group(run, "behind")
    for _ in range(2):
        stopped = run.start("group")
        assert stopped.wait(300) == 2
        assert "have the record left out: `rollstream role group skip 0:" in run.log_of(stopped)
    place = run.log_of(stopped).rpartition("group skip ")[2].split()[0]
    offset = int(place.partition(":")[2])

    assert said(run, "group", "skip", place).returncode == 2, "a reason is asked for"
    assert "there is no record 900 yet" in said(run, "group", "skip", "0:900", "--reason", "x").stderr
    skipped = said(run, "group", "skip", place, "--reason", "nobody here wrote it")
    assert skipped.returncode == 0, skipped.stderr

    going = run.start("group")
    book = read(run, batched=4)
    assert book.dropped == {"skipped": 1}
    going.send_signal(signal.SIGKILL)
    going.wait()
    run.start("group")
    run.send(rollout("before", member) for member in (2, 3))
    book = read(run, batched=8)
    assert (book.dropped, book.problems) == ({"skipped": 1}, [])
    verification = verify(run.kafka, run.name)
    assert (verification.mismatches, verification.batches, verification.drops) == ([], 2, 1)
    replayed = said(run, "replay", "--set", "grouping.batch_rollouts=8", "--json")
    assert json.loads(replayed.stdout)["replayed"]["dropped"] == {"skipped": 1}
    late = said(run, "group", "skip", f"0:{offset}", "--reason", "again")
    assert (late.returncode, "was read up to" in late.stderr) == (2, True)


BOMB_BYTES = 300_000_000


def bomb(run: RealRun) -> str:
    """Send one gzip record batch of 1/3 MB, stored as sent; return its offsets in the form of `group skip`."""
    topic = run.topic("rollouts")
    change_settings(run.kafka, topic, compression__type="producer")
    settings = {
        "compression.type": "gzip",
        "linger.ms": "60000",  # flush does not wait for it
        "batch.size": 1_000_000_000,
        "message.max.bytes": 1_000_000_000,
        "queue.buffering.max.kbytes": 2_000_000,
    }
    producer = clients.producer(run.kafka, **settings)
    begin = topic_admin.bounds(run.kafka, topic)[0][1]
    for _ in range(BOMB_BYTES // 1_000_000):
        producer.produce(topic, bytes(1_000_000), partition=0)
    assert producer.flush(120) == 0
    return f"0:{begin}-{topic_admin.bounds(run.kafka, topic)[0][1] - 1}"


MEASURED = """
import sys
from pathlib import Path
from rollstream.pipeline.cli import main

code = main()
sys.stderr.write(Path("/proc/self/status").read_text())
sys.exit(code)
"""


def measured(run: RealRun, *words: str) -> str:
    """Run a command, check that it takes less memory than the bomb, and return its output."""
    command = run.command(*words)
    command[2:4] = ["-c", MEASURED]
    done = subprocess.run(command, cwd=run.directory, env=run.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "record_unreadable" not in done.stderr
    assert int(done.stderr.rsplit("VmHWM:", 1)[1].split()[0]) * 1024 < BOMB_BYTES, words
    return done.stdout


def assert_tools_never_fetch(run: RealRun, place: str) -> None:
    """Every tool that reads `rollouts` answers for the records around the bomb, within the memory of a small run."""
    first, last = place.removeprefix("0:").split("-")
    answers = {}
    for words in (
        ("cat", "rollouts"),
        ("cat", "rollouts", "-o", "-2"),
        ("lineage", "--rollout", "before-3"),
        ("lineage", "--offset", f"0:{int(first) - 1}"),
        ("lineage", "--offset", f"0:{first}"),
        ("archive",),
        ("restore", "archive", "--into", f"{run.name}-again"),
        ("cat", f"{run.name}-again.rollouts"),
        ("top", "--once", "--json"),
        ("groups", "groups", "--json"),
    ):
        answers[words[0], words[-1]] = measured(run, *words)
    offsets = [int(line.split()[1]) for line in answers["cat", "rollouts"].splitlines()]
    assert min(offsets) < int(first)
    assert max(offsets) > int(last)
    assert not set(offsets) & set(range(int(first), int(last) + 1))
    assert [int(line.split()[1]) for line in answers["cat", "-2"].splitlines()] == offsets[-2:]
    again = [int(line.split()[1]) for line in answers["cat", f"{run.name}-again.rollouts"].splitlines()]
    assert again == offsets
    assert "dropped: skipped" in answers["lineage", f"0:{first}"]
    assert "rollout before-2" in answers["lineage", f"0:{int(first) - 1}"]
    assert "batch 0-1" in answers["lineage", "before-3"]
    shown = json.loads(answers["top", "--json"])
    assert (shown["rollouts"], shown["batched"], shown["dropped"]) == (8, 8, {"skipped": 300})
    assert (shown["unread"], shown["records_skipped"]) == (0, 0)
    assert json.loads(answers["groups", "--json"])["environments"]["env"]["groups"] == 2


@pytest.mark.long
def test_a_bomb_that_lies_in_the_topic_as_it_came_is_skipped_and_never_fetched(run: RealRun) -> None:
    group(run, "before", 3)
    place = bomb(run)
    group(run, "behind")
    met = run.start("group")
    eventually(lambda: peak_bytes(met) > BOMB_BYTES, 60, "the client inflates the bomb")
    met.kill()
    met.wait()

    skipped = said(run, "group", "skip", place, "--reason", "a bomb")
    assert skipped.returncode == 0, skipped.stderr
    shown = json.loads(measured(run, "top", "--once", "--json"))
    assert (shown["rollouts"], shown["records_skipped"], shown["history_left"]) == (7, 0, 0)
    assert shown["unread"] > 300, "they count before grouping passes them"
    for number in range(2):
        going = run.start("group")
        book = read(run, batched=4)
        assert (book.dropped, book.dead_lettered, book.problems) == ({"skipped": 300}, 0, [])
        assert peak_bytes(going) < BOMB_BYTES, f"start {number}"
        going.kill()
        going.wait()
    run.start("group")
    run.send([rollout("before", 3)])
    book = read(run, batched=8)
    assert (book.dropped, book.problems) == ({"skipped": 300}, [])
    assert_tools_never_fetch(run, place)
    verification = verify(run.kafka, run.name)
    assert (verification.mismatches, verification.batches, verification.drops) == ([], 2, 300)
