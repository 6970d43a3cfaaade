"""The learner on a real broker: kill -9 costs only time, a name belongs to one learner, stale batches are on record."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from confluent_kafka import TopicPartition

from rollstream.consumers.weights.follower import WeightsFollower
from rollstream.consumers.weights.manifests import read_manifests
from rollstream.consumers.weights.step_log import read_steps
from rollstream.infra.broker.ports import free_port
from rollstream.pipeline.command_line.cli import COMMANDS, build_parser
from rollstream.pipeline.process.role_process import TERMINATED
from rollstream.topics.kafka import clients, provisioning, topic_admin
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.records import LearnerStep, TrainingBatch
from rollstream.topics.wire.params_digest import params_digest
from rollstream.topics.wire.rl_examples import batch_digest
from tests.support.batches import random_batch, send_batches
from tests.support.probes import scrape
from tests.support.runs import RealRun, exclude, with_batches
from tests.support.waiting import eventually

SETTINGS = {
    "learner__rollouts_per_step": 32,
    "learner__max_steps": 8,
    "learner__max_policy_lag": 1000,
    "learner__microbatch_rows": 8,
    "learner__sequence_length": 32,
    "learner__warm_start__steps": 3,
    "learner__checkpoint__every_steps": 3,
    "learner__threads": 1,
    "learner__model__num_hidden_layers": 1,
    "learner__model__hidden_size": 32,
    # The capacity rule's arithmetic, which needs no producer here, must still add up.
    "grouping__batch_rollouts": 8,
    "worker__group_size": 4,
}

COUNTING = """
import os, sys
os.environ["NPROC"] = "1"  # what learner.threads does, too late here, where JAX is imported first
from rollstream.consumers.learner.training.snapshot import Snapshots
from rollstream.pipeline.command_line.cli import main

take = Snapshots.take

def counting(*args, **options):
    with open("snapshots", "a") as out:
        print("taken", file=out)
    return take(*args, **options)

Snapshots.take = counting
sys.exit(main(sys.argv[1:]))
"""


def steps_of(run: RealRun) -> dict[int, LearnerStep]:
    return read_steps(run.kafka, run.name, "default")


def printed(log: str) -> list[str]:
    """Lines for people, that is, those that are not of the structured log."""
    return [line for line in log.splitlines() if not line.startswith("{")]


def finish(run: RealRun, process, timeout_s: float = 300.0) -> None:
    assert process.wait(timeout_s) == 0, run.log_of(process)[-3000:]


@pytest.mark.long
def test_a_learner_killed_between_checkpoints_ends_with_the_bits_of_an_uninterrupted_one(
    real_run: RealRun, tmp_path: Path
) -> None:
    whole = with_batches(real_run, 16)
    killed = with_batches(whole.beside("killed"), 16)
    to = {"tracker__to": "jsonl", "tracker__directory": tmp_path / "figures"}
    try:
        uninterrupted, process = whole.start("learn", **SETTINGS), killed.start("learn", **SETTINGS)
        sink = killed.start("sink", "--follow", "--every", "0.2", **to)
        eventually(lambda: max(steps_of(killed), default=-1) >= 4, 90, "step 4 of 8, checkpoints at 3 and 6")
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        os.kill(sink.pid, signal.SIGKILL)
        finish(killed, killed.start("learn", **SETTINGS))
        finish(whole, uninterrupted)
        finish(killed, killed.start("sink", **to))
    finally:
        killed.stop()

    expected, steps = steps_of(whole), steps_of(killed)
    assert sorted(steps) == list(range(9))
    for step, record in expected.items():
        assert steps[step].params_digest == record.params_digest, step
        assert steps[step].uses == record.uses
        assert steps[step].policy_version == record.policy_version == step
        assert steps[step].trained_total == record.trained_total == 32 * step
        if step:
            assert {"time/snapshot", "time/wait_for_snapshot", "time/wait_for_recording"} <= record.metrics.keys()
    manifests = read_manifests(killed.kafka, killed.name)
    assert {version: manifest.step for version, manifest in manifests.items()} == {n: n for n in range(9)}
    assert all({"snapshot_s", "send_s", "stored_bytes"} <= m.figures.keys() for m in manifests.values())
    lines = (tmp_path / "figures" / killed.name / "default.jsonl").read_text().splitlines()
    actual = [(line["step"], line["trained/reward"]) for line in map(json.loads, lines) if line["step"]]
    assert actual == [(step, steps[step].metrics["trained/reward"]) for step in range(1, 9)], "each step once"


@pytest.mark.long
def test_a_learner_that_begins_anew_begins_where_the_index_does(real_run: RealRun) -> None:
    run = with_batches(real_run, 12)
    entries = [message.offset for message in read_to_end(run.kafka, run.topic("batch-index"))]
    place = TopicPartition(run.topic("batch-index"), 0, entries[4])
    client = clients.admin(run.kafka)
    client.delete_records([place])[place].result(300)
    finish(run, run.start("learn", **{**SETTINGS, "learner__max_steps": 1}))
    steps = steps_of(run)
    assert steps[0].position == entries[4]
    assert steps[1].uses[0].index_offset == entries[4]


@pytest.mark.long
def test_a_checkpoint_of_topics_that_were_created_again_is_refused_before_it_writes(real_run: RealRun) -> None:
    """Its steps would be taken for those of the new topics, whose batches would then count as read."""
    run = with_batches(real_run, 8)
    finish(run, run.start("learn", **{**SETTINGS, "learner__max_steps": 2}))
    assert topic_admin.delete_topics(run.kafka, [d.topic for d in provisioning.describe(run.kafka, run.name)]) == {}
    eventually(lambda: not provisioning.describe(run.kafka, run.name), 300, "no topics")
    with_batches(run, 2)
    process = run.start("learn", **SETTINGS)
    assert process.wait(300) == 2, run.log_of(process)
    assert re.search(r"the newest checkpoint in .* read to offset \d+, but it ends at \d+", run.log_of(process))
    assert steps_of(run) == {}


@pytest.mark.long
def test_killed_again_and_again_at_any_moment_it_ends_with_the_same_bits(
    real_run: RealRun,
) -> None:
    """Kills fall into the start, compilation, steps, checkpoints and commits alike."""
    steps, seed = 40, random.randrange(2**32)
    print(f"seed {seed}")
    moments = random.Random(seed)
    settings = {**SETTINGS, "learner__max_steps": steps, "learner__checkpoint__every_steps": 2}
    whole = with_batches(real_run, 2 * steps)
    killed = with_batches(whole.beside("killed"), 2 * steps)
    try:
        finish(whole, whole.start("learn", **settings))
        kills = 0
        while kills < 8:
            process, before = killed.start("learn", **settings), len(steps_of(killed))
            eventually(lambda p=process, n=before: len(steps_of(killed)) > n or p.poll() is not None, 60, "a step")
            with contextlib.suppress(subprocess.TimeoutExpired):
                finish(killed, process, moments.uniform(0.0, 0.6))
                break
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
        assert kills, "the learner was done before it was ever killed"
        finish(killed, killed.start("learn", **settings))
    finally:
        killed.stop()
    expected, actual = steps_of(whole), steps_of(killed)
    assert sorted(actual) == list(range(steps + 1))
    assert {step: record.params_digest for step, record in actual.items()} == {
        step: record.params_digest for step, record in expected.items()
    }
    assert [actual[step].policy_version for step in sorted(actual)] == list(range(steps + 1))
    assert sorted(read_manifests(killed.kafka, killed.name)) == list(range(steps + 1))


@pytest.mark.long
def test_a_second_learner_of_a_name_fences_the_first_which_exits_with_one_line(real_run: RealRun) -> None:
    run = with_batches(real_run, 6)
    first = run.start("learn", **SETTINGS)
    eventually(lambda: 3 in steps_of(run), 90, "the first learner used up the batches")
    second = run.start("learn", **SETTINGS)
    eventually(lambda: '"learner_resumed"' in run.log_of(second), 90, "the second learner took over")
    send_batches(run.kafka, run.name, [random_batch(number) for number in range(6, 16)])

    assert first.wait(300) == 3, run.log_of(first)[-2000:]
    finish(run, second)
    (line,) = printed(run.log_of(first))
    assert f"learner 'default' of run {run.name} was taken over" in line
    assert sorted(steps_of(run)) == list(range(9))

    other = run.start("learn", **SETTINGS, learner__name="other")
    assert other.wait(300) == 2
    (line,) = printed(run.log_of(other))
    assert f"learner 'default' publishes into run {run.name} (newest policy version 8)" in line
    assert "learner 'other' is refused" in line
    assert max(read_manifests(run.kafka, run.name)) == 8


@pytest.mark.long
def test_sigterm_saves_a_checkpoint_and_steps_executed_again_must_come_out_as_recorded(real_run: RealRun) -> None:
    run, settings = with_batches(real_run, 8), {**SETTINGS, "learner__publish_every_steps": 3}
    process = run.start("learn", script=COUNTING, **settings)
    eventually(lambda: 4 in steps_of(run), 90, "step 4 of 8, and no more batches")
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == TERMINATED, run.log_of(process)[-3000:]
    taken = (run.directory / "snapshots").read_text().splitlines()
    assert len(taken) == 2, "a step that publishes nothing copies no parameters to the host"

    port = free_port("127.0.0.1")
    resumed = run.start("learn", **settings, service__port=port)
    eventually(lambda: '"learner_resumed"' in run.log_of(resumed), 90, "the learner waits for batches")
    served, _places = scrape(f"http://127.0.0.1:{port}")
    assert served["rollstream_learner_step"] == {(): 4}
    assert served["rollstream_learner_policy_version"] == {(): 1}, "step 3 published it, and step 4 nothing"
    assert served["rollstream_learner_step_timestamp_seconds"] == {(): steps_of(run)[4].timestamp}

    send_batches(run.kafka, run.name, [random_batch(number) for number in range(8, 16)])
    finish(run, resumed)
    assert '"steps_again": 0' in run.log_of(resumed)
    steps = steps_of(run)
    assert [steps[step].policy_version for step in range(9)] == [0, -1, -1, 1, -1, -1, 2, -1, -1]
    with WeightsFollower(run.kafka, run.name) as follower:
        version, arrays = follower.wait_for(2, 300)
        manifest = follower.manifest
    assert manifest is not None
    assert (version, manifest.dtype, manifest.params_digest) == (2, "bfloat16", steps[6].params_digest)
    assert manifest.digest == params_digest(arrays) != manifest.params_digest
    assert {array.dtype.name for array in arrays.values()} == {"bfloat16"}

    # Without its checkpoints a learner begins again from the log, and what it then makes must equal the record.
    elsewhere = {"learner__checkpoint__directory": run.directory / "elsewhere"}
    process = run.start("learn", **settings, **elsewhere, learner__optimizer__learning_rate=0.01)
    assert process.wait(300) == 2
    (line,) = printed(run.log_of(process))
    assert "step 1 of learner 'default', executed again" in line
    assert steps[1].params_digest[:16] in line
    assert steps_of(run) == steps


@pytest.mark.long
def test_a_batch_that_is_too_stale_is_skipped_on_record_and_replaced(real_run: RealRun) -> None:
    """Version 0 belongs to step 0: with a lag of 2 allowed, step 4 may not use it any more."""
    run = with_batches(real_run, 8)
    process = run.start("learn", **{**SETTINGS, "learner__max_steps": 4, "learner__max_policy_lag": 2})

    def skipped_on_record() -> LearnerStep | None:
        record = steps_of(run).get(4)
        return record if record is not None and record.skipped_total else None

    waiting = eventually(skipped_on_record, 90, "the skip is on record before its step is made")
    assert (waiting.params_digest, waiting.policy_version, waiting.trained_total) == ("", -1, 96)
    assert [use.use for use in waiting.uses] == ["skipped", "skipped"]
    assert "policy version 0 is 3 steps old" in waiting.uses[0].reason

    send_batches(run.kafka, run.name, [random_batch(number, version=3) for number in range(8, 10)])
    finish(run, process)
    made = steps_of(run)[4]
    assert [(use.batch_id, use.use) for use in made.uses] == [
        ("0-6", "skipped"),
        ("1-7", "skipped"),
        ("0-8", "trained"),
        ("0-9", "trained"),
    ]
    assert (made.skipped_total, made.trained_total, made.policy_version) == (32, 128, 4)


@pytest.mark.long
def test_bad_rollouts_are_left_out_on_record_and_steps_made_again_leave_out_the_same(
    real_run: RealRun, tmp_path: Path
) -> None:
    """Two steps hold bad rollouts; without its checkpoints a learner makes both again, even with other settings."""
    batches = [random_batch(number, partition=number % 2) for number in range(4)]
    tokens, long = batches[0].tokens.copy(), random_batch(2, answers=(1, 40))
    tokens[batches[0].splits[3]] = 10**6
    batches[0] = resealed(replace(batches[0], tokens=tokens))
    batches[1] = resealed(replace(batches[1], temperatures=np.full(16, 1e-40)))
    batches[2] = long
    too_long = tuple(np.flatnonzero(np.diff(long.splits) > 32).tolist())
    assert 0 < len(too_long) < 16
    provisioning.apply(real_run.kafka, real_run.topics, real_run.name)
    send_batches(real_run.kafka, real_run.name, batches)
    settings = {**SETTINGS, "learner__max_steps": 2, "learner__minibatches": 2}
    process = real_run.start("learn", **settings)
    finish(real_run, process)

    steps = steps_of(real_run)
    assert [(use.batch_id, use.use, use.reason.partition(":")[0], use.row_numbers) for use in steps[1].uses] == [
        ("0-0", "trained", "", (0, 1, 2, *range(4, 16))),
        ("0-0", "skipped", "left out as vocabulary", (3,)),
        ("1-1", "skipped", "left out as temperature", ()),
    ]
    assert [(use.use, use.row_numbers) for use in steps[2].uses if use.batch_id == "0-2"] == [
        ("trained", tuple(row for row in range(16) if row not in too_long)),
        ("skipped", too_long),
    ]
    assert (steps[2].trained_total, steps[2].skipped_total) == (47 - len(too_long), 17 + len(too_long))
    assert steps[1].metrics["left_out/vocabulary"] == 1.0
    assert steps[1].metrics["left_out/temperature"] == 16.0
    assert steps[1].metrics["trained/rollouts"] == 15.0
    assert steps[1].metrics["optim/skipped"] == 0.0
    assert steps[2].metrics["left_out/too_long"] == len(too_long)
    assert real_run.log_of(process).count('"rollouts_left_out"') == 3

    elsewhere = {"learner__checkpoint__directory": tmp_path / "elsewhere", "learner__advantage_limit": 0.5}
    finish(real_run, again := real_run.start("learn", **settings, **elsewhere))
    assert '"steps_again": 2' in real_run.log_of(again)
    for step, record in steps_of(real_run).items():
        assert {name: value for name, value in record.metrics.items() if name.startswith("left_out/")} == {
            name: value for name, value in steps[step].metrics.items() if name.startswith("left_out/")
        }
    assert {step: (record.params_digest, record.uses) for step, record in steps_of(real_run).items()} == {
        step: (record.params_digest, record.uses) for step, record in steps.items()
    }


def resealed(batch: TrainingBatch) -> TrainingBatch:
    """A batch whose digest fits what is in it."""
    return replace(batch, digest=batch_digest(batch))


@pytest.mark.long
def test_a_step_without_a_token_to_train_on_is_an_error_that_says_why(real_run: RealRun) -> None:
    run = with_batches(real_run, 4)
    short = {"learner__sequence_length": 3, "learner__too_long": "skip", "learner__warm_start__steps": 0}
    process = run.start("learn", **{**SETTINGS, **short})
    assert process.wait(300) == 2
    (line,) = printed(run.log_of(process))
    assert "step 1 of learner 'default' has no token to train on" in line
    assert "32 left out as too_long: longer than learner.sequence_length 3" in line
    assert sorted(steps_of(run)) == sorted(read_manifests(run.kafka, run.name)) == [0]
    # The remedy consists of commands that take these flags.
    looks_up, excludes = (quoted.split() for quoted in re.findall(r"`rollstream ([^`]+)`", line))
    parser = build_parser(load=COMMANDS)
    assert parser.parse_args(looks_up).batch == "ID"
    assert parser.parse_args(excludes).offsets == ["P:A-B"]


@pytest.mark.long
def test_excluded_batches_are_left_out_and_steps_on_record_stay_as_they_were(real_run: RealRun) -> None:
    """A killed learner repeats its steps with the batches on record, whatever was excluded before or after them."""
    run, settings = with_batches(real_run, 10), {**SETTINGS, "learner__max_steps": 6}
    exclude(run, "0-2")
    process = run.start("learn", **settings)
    eventually(lambda: 4 in steps_of(run), 90, "step 4 of 6, and too few batches for the next")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = steps_of(run)
    exclude(run, "1-7", "1-9", "1-11")

    # Without its checkpoints, so that every step is made again from what is on record.
    process = run.start("learn", **settings, learner__checkpoint__directory=run.directory / "elsewhere")
    eventually(lambda: 5 in steps_of(run), 90, "the batch left out of step 5 is on record")
    send_batches(run.kafka, run.name, [random_batch(number, partition=number % 2) for number in range(10, 16)])
    finish(run, process)

    steps = steps_of(run)
    assert {step: steps[step].params_digest for step in before} == {s: r.params_digest for s, r in before.items()}
    assert {step: steps[step].uses for step in before} == {step: record.uses for step, record in before.items()}
    left_out = {u.batch_id: u.reason for record in steps.values() for u in record.uses if u.use == "skipped"}
    assert left_out == dict.fromkeys(("0-2", "1-9", "1-11"), "excluded: worker w")
    trained = [u.batch_id for step in sorted(steps) for u in steps[step].uses if u.use == "trained"]
    assert [int(batch_id[2:]) for batch_id in trained] == [0, 1, 3, 4, 5, 6, 7, 8, 10, 12, 13, 14]
    assert (steps[6].trained_total, steps[6].skipped_total) == (6 * 32, 3 * 16)
