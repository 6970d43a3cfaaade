"""Exclusion on a real broker: rollouts not yet batched are dropped and counted; batches are named with their steps."""

import json
from collections.abc import Iterator
from typing import Any, cast

from rollstream.pipeline.audit.verification import verify
from rollstream.topics.config import TopicsConfig
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.records import (
    BatchIndexEntry,
    BatchUse,
    ExcludedBatch,
    LearnerStep,
    PolicyManifest,
    Rollout,
    RolloutMetadata,
)
from rollstream.topics.wire.codec import encode
from rollstream.topics.wire.keys import encode_key
from tests.support.runs import RealRun, rollout
from tests.support.settled import settled


def answer(run: RealRun, *words: str) -> Any:
    done = run.said(*words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def group(example: str, members: int = 4, worker: str = "w0", **changes: object) -> Iterator[Rollout]:
    metadata = RolloutMetadata(worker_id=worker, timestamp=1.0)
    return (rollout(example, member, metadata=metadata, **changes) for member in range(members))


def offset_of(run: RealRun, uid: str) -> int:
    messages = read_to_end(run.kafka, run.topic("rollouts"))
    [offset] = [m.offset for m in messages if uid.encode() in (m.value or b"")]
    return offset or 0


def train(run: RealRun) -> None:
    """Write a learner's step on every batch there is, and publish version 3 after it."""
    entries = [entry for entry in run.read("batch-index") if isinstance(entry, BatchIndexEntry)]
    uses = tuple(
        BatchUse(batch_id=entry.batch_id, index_offset=0, rows=entry.rollouts, use="trained") for entry in entries
    )
    step = LearnerStep(
        learner="main",
        step=3,
        input_run=run.name,
        uses=uses,
        position=1,
        policy_version=3,
        params_digest="ab" * 32,
        trained_total=sum(use.rows for use in uses),
        skipped_total=0,
    )
    run.send_bytes("steps", encode(step), encode_key("main", 3))
    manifest = PolicyManifest(version=3, learner="main", step=3, epoch="e", tensors=(), chunks=(), digest="cd" * 32)
    run.send_bytes("policies", encode(manifest), encode_key(3))


def test_what_is_excluded_by_environment_worker_or_offset_leaves_and_stays_out(real_run: RealRun) -> None:
    run = real_run
    run.topics = TopicsConfig(partitions=1)
    run.grouping = type(run.grouping)(batch_rollouts=8, max_batch_age_s=600.0)
    run.prepare()
    process = run.start("group")
    run.send([*group("bad0", environment="bad"), *group("good0")])
    run.send(group("bad1", environment="bad"))
    run.send(group("half", 2, worker="broken"))
    settled(run, batched=8, in_flight=6)
    train(run)

    tried = answer(run, "exclude", "--env", "bad", "--dry-run")
    assert (tried["generation"], tried["rollouts"]) == (0, {"batched": 4, "in_flight": 4})
    assert settled(run, in_flight=6).dropped == {}
    reply = answer(run, "exclude", "--env", "bad")
    assert (reply["generation"], reply["rollouts"]) == (1, {"batched": 4, "dropped: excluded": 4})
    use = {"learner": "main", "step": 3, "use": "trained", "reason": "", "policy_version": 3}
    assert reply["batches"] == [{"batch_id": "0-0", "excluded": 4, "rollouts": 8, "uses": [use]}]
    assert reply["touched"] == [{"learner": "main", "steps": [3], "first_policy_version": 3}]
    [left_out] = run.read("control")
    assert isinstance(left_out, ExcludedBatch)
    assert (left_out.batch_id, left_out.reason, left_out.generation) == ("0-0", "environment bad", 1)
    assert answer(run, "exclude", "--env", "bad") == reply, "what is excluded already is reported again, and no more"

    # By worker: the group goes once it is complete, with the members that others sent.
    reply = answer(run, "exclude", "--worker", "broken")
    assert (reply["generation"], reply["rollouts"], reply["batches"]) == (2, {"in_flight": 2}, [])
    run.send(rollout("half", member) for member in (2, 3))
    settled(run, in_flight=0, dropped={"excluded": 8})
    reply = answer(run, "exclude", "--worker", "broken")
    assert (reply["rollouts"], reply["dropped_along"]) == ({"dropped: excluded": 2}, 2)

    # By offset: the sealed group of one member.
    run.send(group("good1"))
    settled(run, in_flight=4)
    offset = offset_of(run, "good1-2")
    reply = answer(run, "exclude", "--offsets", f"0:{offset}")
    assert (reply["generation"], reply["rollouts"], reply["dropped_along"]) == (3, {"dropped: excluded": 1}, 3)
    assert reply["settings"] == {
        "grouping.exclude_environments": ["bad"],
        "grouping.exclude_workers": ["broken"],
        "grouping.exclude_offsets": [f"0:{offset}"],
    }

    # Killed and started again with the configuration of generation 0, grouping follows the log.
    process.kill()
    process.wait()
    process = run.start("group")
    run.send([*group("bad2", environment="bad"), *group("good2"), *group("good3")])
    book = settled(run, in_flight=0, batched=16, dropped={"excluded": 16})
    assert book.balanced, book.problems
    assert verify(run.kafka, run.name).mismatches == []
    done = run.said("exclude", "--env", "bad", "--worker", "broken")
    assert done.returncode == 0, done.stderr
    assert "environment bad, worker broken excluded by generation 3" in done.stdout
    assert "policy versions 3 and later are affected" in done.stdout

    # A replay leaves out what a setting excludes from the beginning on, in place of what the log says: without good0,
    # bad1 is batched before its environment is excluded, and good1 stays.
    replayed = answer(run, "replay", "--set", f'grouping.exclude_offsets=["0:{offset_of(run, "good0-1")}"]')["replayed"]
    assert replayed["dropped"] == {"excluded": len(["good0", "half", "bad2"]) * 4}
    assert (replayed["rollouts"], replayed["in_flight"]) == (16, 4)

    # Without a grouping process no mark is read in time, but learners leave out the batches that there are.
    process.kill()
    process.wait()
    done = run.said("exclude", "--worker", "w0", "--timeout", "0.2")
    assert done.returncode == 2
    assert "run this again: until then, learners may train on excluded rollouts" in done.stderr
    assert {cast(ExcludedBatch, record).batch_id for record in run.read("control")} == {"0-0", "0-1"}


def test_an_environment_that_no_rollout_is_of_is_said_at_once_and_nothing_is_written(real_run: RealRun) -> None:
    """This holds whether the run's rollouts are grouped already or not yet read."""
    real_run.grouping = type(real_run.grouping)(batch_rollouts=16, max_batch_age_s=600.0)
    run = real_run.prepare()
    process = run.start("group")
    run.send(group("x", environment="sorting"))
    settled(run, in_flight=4)
    process.terminate()
    process.wait(300)
    run.send(group("y", environment="addition"))
    written = len(run.read("rollouts"))
    for name, hint in (
        ("sortign", "did you mean sorting?"),
        ("adition", "did you mean addition?"),
        ("z", "addition, s"),
    ):
        done = run.said("exclude", "--env", "sorting", "--env", name)
        assert (done.returncode, done.stdout) == (2, ""), done
        assert f"--env {name}: run {run.name} has no rollout of that environment" in done.stderr
        assert hint in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert len(run.read("rollouts")) == written
    run.start("group")
    assert answer(run, "exclude", "--env", "z", "--unseen")["generation"] == 1
    known = answer(run, "exclude", "--env", "sorting", "--env", "addition", "--env", "z")
    assert known["generation"] == 2, "z is excluded already"


def test_an_exclusion_that_nobody_reads_says_so_and_stands(real_run: RealRun) -> None:
    run = real_run.prepare()
    done = run.said("exclude", "--env", "bad", "--unseen", "--timeout", "0.5")
    assert done.returncode == 2
    assert "the exclusion is on the log as generation 1, but partitions [0, 1]" in done.stderr
    assert "start `rollstream role group`" in done.stderr
    run.start("group")
    reply = answer(run, "exclude", "--env", "bad")
    assert (reply["generation"], reply["rollouts"]) == (1, {})
    for words, text in (
        ((), "there is nothing to exclude"),
        (("--offsets", "0-9"), "is not a range of offsets; write PARTITION:FIRST-LAST"),
        (("--offsets", "2:0-9"), "has partitions 0 to 1"),
    ):
        done = run.said("exclude", *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert text in done.stderr
