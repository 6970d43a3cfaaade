"""A partition that is paused on a real broker: others go on, restarts change nothing, and no batch differs for it."""

import json
import signal
from typing import Any

from rollstream.consumers.grouping.config import GroupingConfig
from rollstream.consumers.grouping.core.effects import CORE_VERSION
from rollstream.pipeline.audit.ledger import ledger
from rollstream.pipeline.audit.verification import verify
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.records import Mark, Metrics
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from tests.support.runs import RealRun, rollout
from tests.support.waiting import eventually


def shown(run: RealRun) -> Any:
    return json.loads(run.told("top", "--once", "--json"))


def send(run: RealRun, name: str) -> None:
    """Eight groups of four, of which both partitions get some."""
    run.send(rollout(f"{name}{example}", member) for example in range(8) for member in range(4))


def on_partition(run: RealRun, partition: int) -> list[int]:
    """Offsets of the rollouts of a partition."""
    records = read_to_end(run.kafka, run.topic("rollouts"), partitions=[partition])
    return [record.offset for record in records if record.key and b"mark" not in record.key]


def batched(run: RealRun) -> dict[int, int]:
    """Rollouts in batches, by partition."""
    counts = {0: 0, 1: 0}
    for batch in run.read("batches"):
        counts[batch.partition] += len(batch.uids)  # type: ignore[attr-defined]
    return counts


def reported(run: RealRun, name: str) -> list[float]:
    """Values that grouping wrote about partition 0."""
    records = [record for record in run.read("metrics") if isinstance(record, Metrics)]
    return [r.values[name] for r in records if r.labels.get("partition") == "0" and name in r.values]


def test_a_paused_partition_waits_over_restarts_and_others_go_on(real_run: RealRun) -> None:
    run = real_run
    run.grouping = GroupingConfig(batch_rollouts=4, max_batch_age_s=2.0)
    run.prepare()
    process = run.start("group", grouper__metrics_interval_s=0.5)
    send(run, "before")
    eventually(lambda: sum(batched(run).values()) == 32, 60, "all in batches")
    before = batched(run)
    assert min(before.values()) > 0, "both partitions have groups"

    assert run.said("group", "pause", "0").returncode == 2, "a reason is asked for"
    assert "not 7" in run.said("group", "pause", "7", "--reason", "x").stderr
    assert "not paused" in run.said("group", "resume", "0").stderr
    assert "until `rollstream role group resume 0" in run.told("group", "pause", "0", "--reason", "a look at it")
    eventually(lambda: '"partition_paused"' in run.log_of(process), 60, "the process pauses")
    send(run, "meanwhile")
    expected = len(on_partition(run, 1))
    eventually(lambda: batched(run)[1] == expected, 60, "the other partition goes on")
    assert batched(run)[0] == before[0]

    process.send_signal(signal.SIGKILL)
    process.wait()
    process = run.start("group", grouper__metrics_interval_s=0.5)
    send(run, "restarted")
    expected = len(on_partition(run, 1))
    eventually(lambda: batched(run)[1] == expected, 60, "the other partition goes on after a restart")
    assert batched(run)[0] == before[0]
    waiting = len(on_partition(run, 0)) - before[0]
    eventually(lambda: reported(run, "lag")[-1] >= waiting and reported(run, "paused")[-1] == 1, 60, "lag on metrics")
    assert (shown(run)["paused"], shown(run)["unread"] >= waiting) == ([0], True)

    run.told("group", "resume", "0")
    eventually(lambda: sum(batched(run).values()) == 96, 60, "everything in batches")
    assert shown(run)["paused"] == []
    book = ledger(run.kafka, run.name)
    assert (book.batched, book.dropped, book.problems) == (96, {}, [])
    assert verify(run.kafka, run.name).mismatches == []


def test_a_record_that_ends_grouping_stops_its_partition_alone_and_is_skipped_without_a_restart(
    real_run: RealRun,
) -> None:
    run = real_run
    run.grouping = GroupingConfig(batch_rollouts=4, max_batch_age_s=2.0)
    run.prepare()
    values = json.loads(GroupingConfig(generation=1).to_json()) | {"core_version": CORE_VERSION + 1}
    foreign = Mark(kind="configuration", generation=1, configuration=json.dumps(values))
    run.send_bytes("rollouts", encode(foreign), encode_key("mark", foreign.kind), 0)
    stopped = run.start("group")
    assert stopped.wait(300) == 2
    place = run.log_of(stopped).rpartition("group skip ")[2].split()[0]

    run.told("group", "pause", "0", "--reason", f"a mark of newer code at {place}")
    process = run.start("group")
    send(run, "x")
    eventually(lambda: batched(run)[1] == len(on_partition(run, 1)) > 0, 60, "the other partition goes on")
    assert batched(run)[0] == 0
    run.told("group", "skip", place, "--reason", "nobody here wrote it")
    run.told("group", "resume", "0")
    eventually(lambda: sum(batched(run).values()) == 32, 60, "everything in batches")
    assert process.poll() is None, "it was not started again"
    book = ledger(run.kafka, run.name)
    assert (book.batched, book.dropped, book.dead_lettered, book.problems) == (32, {}, 1, [])
    verification = verify(run.kafka, run.name)
    assert (verification.mismatches, verification.drops) == ([], 0)
