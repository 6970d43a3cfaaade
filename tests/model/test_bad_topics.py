"""Bad records on the topics that a run follows: each is passed over, counted and named, and no reader ends."""

import json
import uuid
from contextlib import closing

import pytest

from rollstream.consumers.batch_reader import BatchReader, IndexReader
from rollstream.consumers.grouping.process.bootstrap import recover
from rollstream.consumers.learner.input.batch_selection import index_between
from rollstream.consumers.learner.input.followed_topics import Exclusions
from rollstream.consumers.weights.follower import WeightsFollower
from rollstream.consumers.weights.step_log import read_steps
from rollstream.pipeline.run.observer import RunObserver
from rollstream.producers.flow.policy_versions import PolicyFollower
from rollstream.producers.flow.tailers import JournalTailer
from rollstream.topics.errors import StateRefused
from rollstream.topics.records import Mark, Metrics
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from tests.model.test_journal_tailer import ROLLOUTS, entry, step
from tests.support.runs import RealRun, exclude, rollout
from tests.support.waiting import eventually

BAD = (b"junk", None, encode(Mark(kind="drain")), encode(rollout())[:40])
FOREIGN = (b"junk", None)
"""Bytes that cannot be a record of ours."""


def spoil(run: RealRun, topic: str, values: tuple[bytes | None, ...] = BAD, partition: int = 0) -> None:
    for value in values:
        # Each record has its own key, because compaction would remove all but the last.
        run.send_bytes(topic, value, uuid.uuid4().hex.encode(), partition)


def whole_groups(first: int, count: int) -> list:
    return [rollout(f"x{example}", member) for example in range(first, first + count) for member in range(4)]


def batched(run: RealRun, rollouts: int) -> None:
    count = 0
    with BatchReader(run.kafka, run.name) as reader:

        def enough() -> bool:
            nonlocal count
            read = reader.poll(0.5)
            count += 0 if read is None else len(read.batch)
            return count >= rollouts

        eventually(enough, 60, f"{rollouts} rollouts in batches")


def test_grouping_goes_on_over_bad_policies_and_a_bad_journal_and_names_them(real_run: RealRun) -> None:
    run = real_run.prepare()
    spoil(run, "policies")
    spoil(run, "journal", FOREIGN)
    process = run.start("group", grouper__metrics_interval_s=0.2)
    run.publish_version(1)
    run.send(whole_groups(0, 16))
    batched(run, 64)

    def skipped() -> float:
        metrics = [r for r in run.read("metrics") if isinstance(r, Metrics) and "transactions_total" in r.values]
        return metrics[-1].values["records_skipped_total"] if metrics else 0

    eventually(lambda: skipped() == 4, 60, "the bad records of policies in the figures")
    spoil(run, "policies", (b"junk",))
    eventually(lambda: skipped() == 5, 60, "one that came while it ran")
    process.terminate()
    assert process.wait(300) == 0
    events = [json.loads(line) for line in run.log_of(process).splitlines() if '"record_skipped"' in line]
    assert {(e["reader"], e["topic"], e["partition"]) for e in events} == {
        (f"grouper-{run.name}-0", run.topic("policies"), 0)
    }
    # Version 0 is at offset 0, and version 1 at offset 5.
    assert [e["offset"] for e in events] == [1, 2, 3, 4, 6]

    spoil(run, "journal", FOREIGN)
    process = run.start("group")
    run.send(whole_groups(100, 16))
    batched(run, 128)
    process.terminate()
    assert process.wait(300) == 0


def test_every_reader_of_a_run_passes_over_bad_records(real_run: RealRun) -> None:
    run = real_run.prepare()
    for topic in ("policies", "steps", "batch-index", "control"):
        spoil(run, topic)
    spoil(run, "control", BAD, 0)
    run.send_bytes("control", b"junk", encode_key("excluded", "0-0"))
    run.send_bytes("steps", b"junk", encode_key("default", 1))
    spoil(run, "journal", FOREIGN)
    assert recover(run.kafka, run.name, run.grouper) == {0: 0, 1: 0}
    spoil(run, "journal", BAD[2:])
    with pytest.raises(StateRefused, match=r"journal\[0\] offset \d+ cannot be read"):
        recover(run.kafka, run.name, run.grouper)
    run.publish_version(1)
    run.send_bytes("batch-index", encode(entry(4)), b"key")
    run.send_bytes("steps", encode(step(1, 5, 2)), encode_key("main", 1))

    with JournalTailer(run.kafka, run.name) as tailer:
        assert (tailer.progress.consumed, tailer.progress.skipped) == (ROLLOUTS, 4 + 9 + 8)
        assert tailer.progress.partitions.keys() == {0, 1}, "generation 0 lies before them"
        spoil(run, "steps")
        eventually(lambda: tailer.progress.skipped == 25, 60, "what came since")
    with closing(RunObserver(run.kafka, run.name)) as observer:
        observer.catch_up()
        assert (observer.skipped.total, observer.steps) == (4 + 9 + 4 + 4, 1)
        assert observer.snapshot(10).policy_version == 1
    with PolicyFollower(run.kafka, run.name) as policies:
        eventually(lambda: policies.read().steps == {0: 0, 1: 1}, 60, "manifests")
        assert policies.skipped.total == 4
    with WeightsFollower(run.kafka, run.name) as follower:
        eventually(lambda: follower.skipped.total == 4, 60, "the follower to pass them over")
        assert follower.get_state(-1) is None
    with IndexReader(run.kafka, run.name) as index:
        eventually(lambda: index.poll(0.1) is None and index.at_end, 60, "the index to its end")
        assert index.skipped.total == 4
    assert [indexed.batch_id for indexed in index_between(run.kafka, run.name, 0, 1000).values()] == [entry(4).batch_id]
    exclude(run, "0-1")
    with Exclusions(run.kafka, run.name) as exclusions:
        assert [exclusions.reason(name) for name in ("0-0", "0-1")] == ["", "excluded: worker w"]
        assert [s.offset for s in exclusions.skipped.first] == list(range(9))
        spoil(run, "control", (b"junk",))
        assert eventually(lambda: exclusions.reason("0-0") or exclusions.skipped.total == 10, 60, "one more")
        exclude(run, "0-0")
        eventually(lambda: exclusions.reason("0-0") == "excluded: worker w", 60, "the exclusion to be heard of")
    assert read_steps(run.kafka, run.name, "default") == {}
    assert read_steps(run.kafka, run.name, "main").keys() == {1}


def test_top_shows_a_run_with_bad_records_and_how_many_they_are(real_run: RealRun) -> None:
    run = real_run.prepare()
    spoil(run, "steps")
    done = run.said("top", "--once")
    assert done.returncode == 0, done.stderr
    assert "4 unreadable" in done.stdout
