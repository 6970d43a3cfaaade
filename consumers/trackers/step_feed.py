"""StepFeed: the steps of one learner, with traces of rollouts, in the form that trackers accept.

The content of a step depends only on the log, so a tracker can be filled later, or again, with the same content.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

from rollstream.consumers.archive.log_source import LogSource
from rollstream.consumers.buffers.storage.seeded_draws import generator_at
from rollstream.consumers.trackers.tracker import RolloutTrace, TrackedStep
from rollstream.topics.closing import Closing
from rollstream.topics.errors import ConfigurationError, TopicError
from rollstream.topics.kafka.records import KafkaRecord
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.records import BatchIndexEntry, LearnerStep, Metrics, Rollout, TrainingBatch, Turn
from rollstream.topics.records.learner import trained_rows


class BatchedRollout(NamedTuple):
    """A rollout with its row in a batch."""

    rollout: Rollout
    batch: TrainingBatch
    row: int
    place: str
    """PARTITION:OFFSET on `rollouts`, an argument of `rollstream show`."""
    appended_ms: int

    @property
    def advantage(self) -> float:
        """Advantage of the first sampled token; most estimators give the same advantage to all tokens of a rollout."""
        span = slice(int(self.batch.splits[self.row]), int(self.batch.splits[self.row + 1]))
        sampled = self.batch.advantages[span][self.batch.loss_mask[span]]
        return float(sampled[0]) if len(sampled) else 0.0


def trace_of(batched: BatchedRollout, step: LearnerStep, run: str) -> RolloutTrace:
    """Return the trace of a rollout that a step trained on."""
    rollout = batched.rollout
    return RolloutTrace(
        messages=[{"role": turn.role or "unknown", "content": turn.text} for turn in rollout.turns],
        metadata={
            "run": run,
            "learner": step.learner,
            "step": step.step,
            "place": batched.place,
            "uid": rollout.uid,
            "environment": rollout.environment,
            "example": rollout.example_id,
            "reward": rollout.reward,
            "reward_components": dict(rollout.reward_components),
            "advantage": batched.advantage,
            "policy_version": rollout.policy_version,
            "lowest_version": rollout.lowest_version,
            "highest_version": rollout.highest_version,
            "trained_at_version": step.policy_version,
            "fate": "trained",
            "batch": batched.batch.batch_id,
            "tokens": len(rollout.tokens),
            "sampled": int(rollout.loss_mask.sum()),
            "truncated": rollout.truncated,
            "worker": rollout.metadata.worker_id,
            "appended_ms": batched.appended_ms,
            "status": "truncated" if rollout.truncated else "ok",
        },
        spans=[_span(rollout, number, turn) for number, turn in enumerate(rollout.turns) if turn.has_logprobs],
    )


def _span(rollout: Rollout, number: int, turn: Turn) -> dict[str, Any]:
    """Return the span of one turn that the policy generated."""
    inference = turn.inference
    return {
        "id": f"{rollout.uid}/{number}",
        "name": f"turn {number}",
        "kind": "generation",
        "duration_ms": inference.inference_time_s * 1000,
        "model": f"version {inference.model_version}",
        "output": turn.text,
        "usage": {"input_tokens": turn.start, "output_tokens": turn.stop - turn.start},
    }


R = TypeVar("R")


class StepFeed(Closing):
    """Reads the steps of one learner; each call of `steps` continues where the previous one ended."""

    def __init__(self, log_of: Callable[[str], LogSource], run: str, learner: str, traces: int) -> None:
        """`log_of` opens the log of a run: of this one, and of the run whose batches the learner reads."""
        self._log_of, self._run, self._learner, self._most = log_of, run, learner, traces
        self._logs: dict[str, LogSource] = {}
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
        for message in self._log(self._run).messages("steps", 0, self._steps_position):
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
        messages = self._log(self._run).messages("metrics", 0, self._metrics_position)
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
        entry = self._decoded(BatchIndexEntry, self._record(run, "batch-index", 0, index_offset))
        if entry is None:
            return None
        return self._decoded(TrainingBatch, self._record(run, "batches", entry.partition, entry.offset))

    def _rollout(self, run: str, batch: TrainingBatch, row: int) -> BatchedRollout | None:
        if row >= len(batch):
            return None
        partition, offset = batch.partition, int(batch.source_offsets[row])
        message = self._record(run, "rollouts", partition, offset)
        rollout = self._decoded(Rollout, message)
        if rollout is None or message is None:
            return None
        return BatchedRollout(rollout, batch, row, f"{partition}:{offset}", message.timestamp_ms)

    def _log(self, run: str) -> LogSource:
        if run not in self._logs:
            self._logs[run] = self._log_of(run)
        return self._logs[run]

    def _record(self, run: str, topic: str, partition: int, offset: int) -> KafkaRecord | None:
        with suppress(TopicError, ConfigurationError):  # The record was pruned, or its topic is gone.
            return self._log(run).record(topic, partition, offset)
        return None

    def close(self) -> None:
        """Close the logs."""
        for log in self._logs.values():
            log.close()

    def _decoded(self, cls: type[R], message: KafkaRecord | None) -> R | None:
        return None if message is None else self.skipped.decode(cls, message)
