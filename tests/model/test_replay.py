"""A learner that draws from a rollout buffer, on a real broker: kill -9 costs only time, and all is on record."""

from rollstream.consumers.learner.checkpoint_paths import LearnerPosition
from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.records.step_recorder import StepParams, StepRecorder
from rollstream.consumers.weights.step_log import read_steps
from rollstream.topics.kafka import provisioning
from rollstream.topics.records import BatchUse
from tests.support.runs import RealRun
from tests.support.waiting import eventually


def test_skips_that_are_heard_of_too_late_do_not_replace_the_step_they_belong_to(real_run: RealRun) -> None:
    provisioning.apply(real_run.kafka, real_run.topics, real_run.name)
    skipped = (BatchUse(batch_id="0-0", index_offset=0, rows=16, use="skipped", reason="old"),)
    trained = (*skipped, BatchUse(batch_id="0-1", index_offset=2, rows=16, use="trained"))
    with StepRecorder(LearnerConfig(), real_run.kafka, real_run.name, "{}") as recorder:
        progress = LearnerPosition()
        for step, uses in ((0, ()), (1, trained)):
            record = recorder.record(step, uses, 3, {}, StepParams(f"{step}.checksum", None), progress)
            progress = progress.after(record)
        recorder.record_skips(1, skipped, progress)
        recorder.record_skips(2, skipped, progress)
    eventually(lambda: 2 in read_steps(real_run.kafka, real_run.name, "default"), 60, "the last record is visible")
    steps = read_steps(real_run.kafka, real_run.name, "default")
    assert steps[1].uses == trained
    assert [bool(steps[step].params_digest) for step in range(3)] == [True, True, False]
