"""StepWriter and publish_version on a real broker: a step, its position and its version are one fact, made once."""

import time
from contextlib import closing

import numpy as np
import pytest

from rollstream.consumers.batch_reader import BatchReader, ReadBatch
from rollstream.consumers.trainers.step_writer import StepWriter, publish_version
from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.follower import WeightsFollower
from rollstream.consumers.weights.rollback import roll_back
from rollstream.consumers.weights.step_log import StepLog
from rollstream.pipeline.tools.prune import read_positions
from rollstream.producers.flow.tailers import JournalTailer
from rollstream.topics.errors import ConfigurationError, Fenced, Lapsed, RecordTooLarge, StateRefused
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.transactions import fence, transactional_id
from rollstream.topics.records import LearnerStep, PolicyManifest
from rollstream.topics.wire.keys import decode_key
from tests.support.batches import random_batch, send_batches
from tests.support.runs import RealRun, with_batches
from tests.support.versions import visible_manifests
from tests.support.waiting import eventually

BATCHES, ROWS = 6, 16


@pytest.fixture
def run(real_run: RealRun) -> RealRun:
    return with_batches(real_run, BATCHES)


def params(value: float) -> dict[str, object]:
    return {"dense": {"kernel": np.full((4, 3), value, np.float32)}}


def reads_of(run: RealRun, start: int, count: int, *, process: int = 0, processes: int = 1) -> list[ReadBatch]:
    with BatchReader(run.kafka, run.name, start=start, process=process, processes=processes) as reader:
        reads = [reader.poll(300) for _ in range(count)]
    return [read for read in reads if read is not None]


def steps_of(run: RealRun) -> list[LearnerStep]:
    return [record for record in run.read("steps") if isinstance(record, LearnerStep)]


def manifests_of(run: RealRun) -> list[PolicyManifest]:
    return [record for record in run.read("policies") if isinstance(record, PolicyManifest)]


def test_a_record_above_the_limit_is_refused_at_once_with_its_settings(real_run: RealRun) -> None:
    run, began = real_run.prepare(), time.monotonic()
    log, before = StepLog(run.kafka, run.name, "main", take_over=True), manifests_of(run)
    noise = np.random.default_rng(0).bytes(2 * run.kafka.max_record_bytes)
    with closing(log), pytest.raises(RecordTooLarge, match=r"kafka\.max_record_bytes.*learner\.weights\.chunk_bytes"):
        log.commit([(run.topic("policies"), b"key", noise)])
    assert time.monotonic() - began < 30, "it was not sent again and again"
    assert manifests_of(run) == before


def test_a_version_is_published_once_under_the_number_that_is_said(run: RealRun) -> None:
    assert publish_version(run.kafka, run.name, params(0.5), version=0) == 0
    assert publish_version(run.kafka, run.name, params(0.5), version=0) == 0, "said again it is the same"
    with pytest.raises(StateRefused, match=r"policy version 0 .* other parameters; the next one is 1"):
        publish_version(run.kafka, run.name, params(1.5), version=0)
    with pytest.raises(StateRefused, match=r"policy version 7 .* would leave a gap; the next one is 1"):
        publish_version(run.kafka, run.name, params(1.5), version=7)
    assert publish_version(run.kafka, run.name, params(1.5)) == 1
    assert publish_version(run.kafka, run.name, digest="checkpoint-2") == 2
    assert publish_version(run.kafka, run.name, digest="checkpoint-2", version=2) == 2
    with pytest.raises(ConfigurationError, match="digest"):
        publish_version(run.kafka, run.name, params(1.5), digest="mine")
    visible_manifests(run, 2)
    assert [(m.version, m.kind, m.learner) for m in manifests_of(run)] == [
        (0, "full", "trainer"),
        (1, "full", "trainer"),
        (2, "external", "trainer"),
    ]
    with WeightsFollower(run.kafka, run.name) as follower:
        version, arrays = follower.wait_for(1, 300)
    assert (version, float(arrays["dense/kernel"][0, 0])) == (1, 1.5), "an external version is not on the log"


def test_a_version_said_again_removes_nothing_that_the_trainer_keeps(run: RealRun) -> None:
    """As a script does that begins with it: its StepWriter keeps more versions than the default."""
    config = WeightsConfig(keep_versions=8, anchor_every=1)
    with StepWriter(run.kafka, run.name, config=config) as steps:
        for version in range(8):
            assert steps.publish_version(params(version)) == version
    visible_manifests(run, 7)
    assert publish_version(run.kafka, run.name, params(0.0), version=0) == 0
    assert publish_version(run.kafka, run.name, params(8.0), version=8, config=config) == 8
    visible_manifests(run, 8)
    with StepWriter(run.kafka, run.name, config=config) as steps:
        assert steps.version == 8
    live = read_to_end(run.kafka, run.topic("weights"), isolation="read_uncommitted")
    tombstoned = {decode_key(record.key or b"")[0] for record in live if record.value is None}
    assert tombstoned == {0}, "eight versions are kept"


def test_a_learner_that_was_replaced_publishes_no_more_after_a_rollback_to_one_of_its_versions(run: RealRun) -> None:
    with StepWriter(run.kafka, run.name, learner="first") as first:
        first.publish_version(params(0.0))
    with StepWriter(run.kafka, run.name, learner="second", take_over=True) as second:
        second.publish_version(params(1.0))
    visible_manifests(run, 1)
    roll_back(run.kafka, run.name, 0, reason="worse", take_over=True)
    visible_manifests(run, 2)
    with pytest.raises(StateRefused, match="learner 'second' publishes into run"):
        StepWriter(run.kafka, run.name, learner="first")
    with StepWriter(run.kafka, run.name, learner="second") as second:
        assert second.version == 2


def test_a_run_has_one_publisher_whoever_trains(run: RealRun) -> None:
    with StepWriter(run.kafka, run.name, learner="one") as one:
        assert one.publish_version(params(0.0)) == 0
        with pytest.raises(StateRefused, match=r"learner 'one' publishes into run .*take_over"):
            StepWriter(run.kafka, run.name, learner="other")
        with pytest.raises(StateRefused, match="learner 'one' publishes into run"):
            publish_version(run.kafka, run.name, params(1.0), learner="other")
        reads = reads_of(run, one.position, 1)
        with StepWriter(run.kafka, run.name, learner="other", take_over=True) as other:
            assert other.publish_version(params(1.0)) == 1
            with pytest.raises(Fenced, match="was taken over") as fenced:
                one.record(reads, params(2.0))
            assert fenced.value.exit_code == 3
            fence(run.kafka, transactional_id(run.name, "learner"))
            with pytest.raises(Lapsed, match="outlived kafka") as lapsed:
                other.publish_version(params(3.0))
            assert lapsed.value.exit_code == 2
    assert steps_of(run) == [], "what was fenced left nothing"
    assert [m.version for m in manifests_of(run)] == [0, 1]


def test_steps_go_on_from_the_log_and_name_each_batch_once(run: RealRun) -> None:
    with StepWriter(run.kafka, run.name) as steps:
        steps.publish_version(params(0.0), version=0)
        first = steps.record(reads_of(run, steps.position, 2), params(1.0), metrics={"loss": np.float32(0.5)})
    with StepWriter(run.kafka, run.name) as steps:
        assert (steps.step, steps.position, steps.version) == (1, first.position, 1)
        reads = reads_of(run, steps.position, 3)
        second = steps.record(reads, params(2.0), skipped={reads[1].entry.batch_id: "too old"})
        third = steps.record(reads_of(run, steps.position, 1), digest="elsewhere", publish=False)
    assert [use.use for use in second.uses] == ["trained", "skipped", "trained"]
    assert second.uses[1].reason == "too old"
    assert (first.metrics, first.policy_version) == ({"loss": 0.5}, 1)
    assert (third.params_digest, third.policy_version) == ("elsewhere", -1)
    assert (third.trained_total, third.skipped_total) == (5 * ROWS, ROWS)
    records = eventually(lambda: steps_of(run)[2:] and steps_of(run), 60, "three steps are visible")
    assert records == [first, second, third]
    assert [use.batch_id for record in records for use in record.uses] == [f"{n % 2}-{n}" for n in range(BATCHES)]


def test_a_step_made_again_is_the_one_on_record_or_gets_a_version_of_its_own(run: RealRun) -> None:
    with StepWriter(run.kafka, run.name) as steps:
        for value in (1.0, 2.0):
            steps.record(reads_of(run, steps.position, 1), params(value))
    with StepWriter(run.kafka, run.name, after_step=0) as steps:
        written = len(run.read("steps"))
        reads = reads_of(run, steps.position, 1)
        with pytest.raises(StateRefused, match=r"step 1 .* executed again, has batches 0-0 skipped, but .* on record"):
            steps.record(reads, params(1.0), skipped={"0-0": "too old"})
        assert steps.record(reads, params(1.0)).policy_version == 0
        assert (len(run.read("steps")), steps.version) == (written, 1), "nothing is written twice"
        again = steps.record(reads_of(run, steps.position, 1), params(2.5))
        assert again.policy_version == 2, "other parameters are another version"
    visible_manifests(run, 2)
    assert [(m.version, m.step) for m in manifests_of(run)] == [(0, 1), (1, 2), (2, 2)]
    with pytest.raises(StateRefused, match="step 3 of learner 'trainer' is not on record"):
        StepWriter(run.kafka, run.name, after_step=3)


def test_batches_between_steps_are_not_lost_in_silence(run: RealRun) -> None:
    reads = reads_of(run, 0, 4)
    with StepWriter(run.kafka, run.name) as steps:
        steps.record(reads[:1], params(1.0))
        for wrong in ([reads[2]], [reads[1], reads[3]], [reads[0]]):
            with pytest.raises(StateRefused, match="give every batch once and in order"):
                steps.record(wrong, params(2.0))
        with pytest.raises(ConfigurationError, match="1-5 are not in the step"):
            steps.record(reads[1:2], params(2.0), skipped={"1-5": "too old"})
        with pytest.raises(ConfigurationError, match="at least one batch"):
            steps.record([], params(2.0))
        assert steps.record(reads[1:], params(2.0)).step == 2


def test_one_process_of_several_puts_the_batches_of_all_on_record(run: RealRun) -> None:
    with StepWriter(run.kafka, run.name) as steps:
        lead = reads_of(run, steps.position, 1, process=0, processes=3)
        record = steps.record(lead, params(1.0))
        [other] = reads_of(run, 0, 1, process=2, processes=3)
        assert other.round == lead[0].round
        assert [use.batch_id for use in record.uses] == ["0-0", "1-1", "0-2"]
        assert steps.record(reads_of(run, steps.position, 1), params(2.0)).uses[0].batch_id == "1-3"


def test_workers_count_what_was_trained_or_skipped_as_consumed(run: RealRun) -> None:
    with JournalTailer(run.kafka, run.name) as tailer, StepWriter(run.kafka, run.name) as steps:
        assert tailer.progress.consumed == 0
        reads = reads_of(run, steps.position, 3)
        steps.record(reads, params(1.0), skipped={reads[0].entry.batch_id: "too old"})
        eventually(lambda: tailer.progress.consumed == 3 * ROWS, 60, "the step is seen by workers")


@pytest.mark.long
def test_prune_keeps_what_the_trainer_may_read_again(real_run: RealRun) -> None:
    run = real_run.prepare()
    send_batches(run.kafka, run.name, [random_batch(number, partition=number % 2) for number in range(BATCHES)])

    def kept() -> dict[str, int]:
        group = run.grouper.group_id(run.name)
        return dict(read_positions(run.kafka, run.name, group).learners)

    with StepWriter(run.kafka, run.name, take_over=True) as steps:
        first = steps.record(reads_of(run, steps.position, 1), params(1.0))
        assert kept() == {"learner trainer": 0}
        second = steps.record(reads_of(run, steps.position, 1), params(2.0), oldest_checkpoint=1)
        assert kept() == {"learner trainer": first.position}
        steps.record(reads_of(run, steps.position, 1), params(3.0), oldest_checkpoint=3)
        assert kept() == {"learner trainer": steps.position}
        assert steps.position > second.position > first.position
        with pytest.raises(ConfigurationError, match="oldest_checkpoint 9 is not a step"):
            steps.record(reads_of(run, steps.position, 1), params(4.0), oldest_checkpoint=9)
