"""StepFeed: the steps of one learner, with traces of rollouts, in the form that trackers accept.

The content of a step depends only on the log, so a tracker can be filled later, or again, with the same content.
"""

from collections.abc import Iterator
from typing import TypeVar
from zlib import crc32

from rollstream.consumers.buffers.storage.seeded_draws import generator_at
from rollstream.consumers.trackers.rollout_traces import BatchedRollout, trace_of
from rollstream.consumers.trackers.run_logs import RunLog
from rollstream.consumers.trackers.tracker import RolloutTrace, TrackedStep
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import BatchIndexEntry, LearnerStep, Metrics, Rollout, TrainingBatch
from rollstream.topics.records.batch_uses import trained_rows

R = TypeVar("R")


class StepFeed:
    """Reads the steps of one learner; each call of `steps` continues where the previous one ended."""

    def __init__(self, log: RunLog, run: str, learner: str, traces: int) -> None:
        self._log, self._run, self._learner, self._most = log, run, learner, traces
        self._steps_position = 0
        self._metrics_position = 0
        self._components: dict[str, float] = {}
        self._unwritten: dict[int, tuple[int, LearnerStep]] = {}
        self.learners: set[str] = set()
        """Every learner of the run that has a step on record."""
        self.skipped = SkippedRecords("sink", logged=False)
        """Invalid records that were skipped."""
        self.missing_rollouts = 0
        """Number of rollouts drawn for traces that are no longer on the log."""

    def newest_step(self) -> int:
        """Read the topic `steps` to its end; return the newest step that `steps()` has not yielded yet, or -1."""
        for message in self._log.messages(self._run, "steps", self._steps_position):
            self._steps_position = message.offset + 1
            step = self.skipped.decode(LearnerStep, message)
            if step is not None:
                self.learners.add(step.learner)
                if step.learner == self._learner and step.made:
                    # If a step was executed again, its last record counts.
                    self._unwritten[step.step] = (message.timestamp_ms, step)
        return max(self._unwritten, default=-1)

    def steps(self, above: int) -> Iterator[TrackedStep]:
        """Yield the steps above a number that are on record by now, each once and in ascending order."""
        if self.newest_step() <= above:
            self._unwritten = {}
            return
        unwritten, self._unwritten = self._unwritten, {}
        # Read after the topic `steps`, so that all metrics appended before the newest step are on the log.
        messages = self._log.messages(self._run, "metrics", self._metrics_position)
        message = next(messages, None)
        for number in sorted(unwritten):
            appended_ms, step = unwritten[number]
            while message is not None and message.timestamp_ms <= appended_ms:
                self._take_metrics(message)
                message = next(messages, None)
            if number > above:
                yield self._tracked(step)

    def _take_metrics(self, message: KafkaRecord) -> None:
        """Store the figures of a record as the newest figures of its component."""
        self._metrics_position = message.offset + 1
        record = self.skipped.decode(Metrics, message)
        if record is not None:
            subject = "/".join((record.component, *(f"{k}={v}" for k, v in sorted(record.labels.items()))))
            self._components |= {f"{subject}/{name}": value for name, value in record.values.items()}

    def _tracked(self, step: LearnerStep) -> TrackedStep:
        return TrackedStep(
            run=self._run,
            learner=step.learner,
            step=step.step,
            policy_version=step.policy_version,
            timestamp=step.timestamp,
            metrics={**self._components, **step.metrics},
            traces=tuple(self._traces(step)),
        )

    def _traces(self, step: LearnerStep) -> Iterator[RolloutTrace]:
        """Traces of some rollouts that the step trained on; the choice is the same whenever the step is read."""
        rows = [(offset, row) for offset, numbers in trained_rows(step.uses).items() for row in numbers]
        draws = generator_at(crc32(step.learner.encode()), step.step).random(len(rows)).argsort()[: self._most]
        batches: dict[int, TrainingBatch | None] = {}
        for draw in sorted(draws.tolist()):
            offset, row = rows[draw]
            if offset not in batches:
                batches[offset] = self._batch(step.input_run, offset)
            batch = batches[offset]
            rollout = self._rollout(step.input_run, batch, row) if batch is not None else None
            if rollout is None:
                self.missing_rollouts += 1
            else:
                yield trace_of(rollout, step, self._run)

    def _batch(self, run: str, index_offset: int) -> TrainingBatch | None:
        """The batch at an offset of the index."""
        entry = self._decoded(BatchIndexEntry, self._log.record(run, "batch-index", 0, index_offset))
        if entry is None:
            return None
        return self._decoded(TrainingBatch, self._log.record(run, "batches", entry.partition, entry.offset))

    def _rollout(self, run: str, batch: TrainingBatch, row: int) -> BatchedRollout | None:
        if row >= len(batch):
            return None
        partition, offset = batch.partition, int(batch.source_offsets[row])
        message = self._log.record(run, "rollouts", partition, offset)
        rollout = self._decoded(Rollout, message)
        if rollout is None or message is None:
            return None
        return BatchedRollout(rollout, batch, row, f"{partition}:{offset}", message.timestamp_ms)

    def _decoded(self, cls: type[R], message: KafkaRecord | None) -> R | None:
        return None if message is None else self.skipped.decode(cls, message)
