"""The learner: trains on batches in index order and publishes a policy version after each step.

Whatever kills it, a restart ends with the bits an uninterrupted one would have: the checkpoint holds the position, and
steps executed again must have the digests on record.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace

import numpy as np
from numpy.typing import NDArray

from consumers.batch_reader import BatchReader
from consumers.learner.checkpoint import Checkpoints, Progress
from consumers.learner.config import LearnerConfig
from consumers.learner.environment import fingerprint
from consumers.learner.exclusions import EXCLUDED, Exclusions
from consumers.learner.intake import Intake, Taken, rows_of, trained_metrics
from consumers.learner.packing import TrainingSequence, pack, sequences_of
from consumers.learner.step import Metrics, TrainStep
from consumers.learner.step_log import StepLog, read_steps
from consumers.weights.layout import params_digest
from consumers.weights.publisher import WeightsPublisher, as_numpy, read_manifests
from topics.config import KafkaConfig
from topics.errors import StateRefused
from topics.logs import event
from topics.records import BatchUse, LearnerStep, PolicyManifest

logger = logging.getLogger(__name__)

Example = tuple[NDArray[np.int32], NDArray[np.bool_]]
"""Tokens and loss mask of one supervised example, both [tokens]."""


def learn(
    config: LearnerConfig,
    kafka: KafkaConfig,
    run: str,
    *,
    warm_start_examples: Callable[[], Sequence[Example]],
    stop: threading.Event,
    on_step: Callable[[LearnerStep], None] | None = None,
) -> LearnerStep:
    """Train until `max_steps` or until `stop` is set; returns the record of the last completed step.

    `warm_start_examples` is called when no checkpoint exists. `on_step` hears of each step once it is committed, step 0
    (version 0) included. When this returns, a checkpoint of the last step is on disk.

    Raises Fenced when another learner of the name takes over, StateRefused when a step executed again differs from
    its record.
    """
    with ExitStack() as stack:
        learner = _Learner(config, kafka, run, stack, on_step or (lambda _step: None))
        learner.start(warm_start_examples)
        return learner.run(stop)


class _Learner:
    """What the parts of one learner share. `start` comes first, then `run`."""

    def __init__(
        self,
        config: LearnerConfig,
        kafka: KafkaConfig,
        run: str,
        stack: ExitStack,
        on_step: Callable[[LearnerStep], None],
    ) -> None:
        self._config = config
        self._kafka = kafka
        self._input_run = config.input_run or run
        self._run = run
        self._stack = stack
        self._on_step = on_step
        # The log comes first: once it has fenced every earlier learner of the name, what is on the topics is final.
        self._log = stack.enter_context(closing(StepLog(kafka, run, config.name)))
        model = json.dumps(asdict(config.model))
        self._publisher = stack.enter_context(closing(WeightsPublisher(kafka, run, config.name, model, config.weights)))
        recorded = read_steps(kafka, run, config.name)
        # A record without a digest is of a step that was never made.
        self._recorded = {step: record for step, record in recorded.items() if record.params_digest}
        self._checkpoints = stack.enter_context(Checkpoints(config.checkpoint, run, config.name))
        self._train_step = TrainStep(config)
        self._fingerprint = fingerprint(config)
        self._state = self._train_step.initial_state()
        self._progress = Progress(position=0, trained_total=0, skipped_total=0, recent_steps=())

    def start(self, warm_start_examples: Callable[[], Sequence[Example]]) -> None:
        """Restore the newest checkpoint, or make one of step 0; then have that step and its version on record."""
        restored = self._checkpoints.restore(self._state)
        metrics: Metrics = {}
        if restored is None:
            self._state, metrics = self._train_step.warm_start(self._state, _supervised(warm_start_examples()))
            self._checkpoint()
            self._checkpoints.wait()
        else:
            self._state, self._progress = restored.state, restored.progress
            self._warn_of_changes(restored.fingerprint)
            if self._progress.recent_steps:
                self._log.commit([self._log.record(record) for record in self._progress.recent_steps])
            self._recorded |= {record.step: record for record in self._progress.recent_steps}
        recorded = self._recorded.get(int(self._state.step))
        if recorded is None:
            self._last = self._record((), self._progress.position, metrics)
        else:
            self._compare_with_record(params_digest(as_numpy(self._state.params)), recorded.uses)
            self._last = recorded
        self._on_step(self._last)
        event(
            logger,
            "learner_started" if restored is None else "learner_resumed",
            learner=self._config.name,
            step=self._last.step,
            policy_version=self._last.policy_version,
            position=self._progress.position,
            steps_again=max([*self._recorded, self._last.step]) - self._last.step,
        )

    def run(self, stop: threading.Event) -> LearnerStep:
        """Steps until the last one or until `stop`; a checkpoint is complete when it returns."""
        reader = self._stack.enter_context(BatchReader(self._kafka, self._input_run, start=self._progress.position))
        self._exclusions = self._stack.enter_context(Exclusions(self._kafka, self._input_run))
        # While the first rollouts of this version are being made.
        self._train_step.warm_up(self._state)
        intake = Intake(
            reader,
            rollouts_per_step=self._config.rollouts_per_step,
            max_policy_lag=self._config.max_policy_lag,
            read_version_steps=self._read_version_steps,
            skipped=self._record_skips,
            excluded=self._why_excluded,
        )
        while (step := int(self._state.step)) < self._config.max_steps:
            taken = intake.take(step, stop)
            if taken is None:
                break
            self._step(taken)
            if (step + 1) % self._config.checkpoint.every_steps == 0:
                self._checkpoint()
        self._checkpoint()
        self._checkpoints.wait()
        event(logger, "learner_finished", learner=self._config.name, step=self._last.step, stopped=stop.is_set())
        return self._last

    def _why_excluded(self, step: int, batch_id: str) -> str:
        """Why a step leaves out a batch that is excluded, "" where it does not.

        A step on record left out what was excluded when it was made; what was excluded since does not change it.
        """
        recorded = self._recorded.get(step)
        if recorded is None:
            return self._exclusions.reason(batch_id)
        return next((u.reason for u in recorded.uses if u.batch_id == batch_id and u.reason.startswith(EXCLUDED)), "")

    def _step(self, taken: Taken) -> None:
        """Train, publish and record one step."""
        started = time.monotonic()
        sequences = [sequence for read in taken.trained for sequence in sequences_of(read.batch)]
        packed = pack(
            sequences,
            rows=self._config.microbatch_rows,
            sequence_length=self._config.sequence_length,
            loss=self._config.loss,
        )
        self._state, metrics = self._train_step.train(self._state, packed)
        step_s = time.monotonic() - started
        metrics |= trained_metrics(taken)
        metrics |= {
            "packing/microbatches": float(len(packed.microbatches)),
            "packing/padding_fraction": packed.padding_fraction,
            "perf/throughput": packed.tokens / (step_s + taken.wait_s),
            "time/step": step_s,
        }
        self._last = self._record(taken.uses, taken.position, metrics)
        self._on_step(self._last)

    def _record(self, uses: tuple[BatchUse, ...], position: int, metrics: Metrics) -> LearnerStep:
        """Commit the record of the step just made, together with a new policy version where one is due."""
        started = time.monotonic()
        step = int(self._state.step)
        arrays = as_numpy(self._state.params)
        digest = params_digest(arrays)
        self._compare_with_record(digest, uses)
        manifest = self._publisher.published(step, digest)
        staged: PolicyManifest | None = None
        if manifest is None and step % self._config.publish_every_steps == 0:
            manifest = staged = self._publisher.stage(step, arrays)
        record = LearnerStep(
            learner=self._config.name,
            step=step,
            input_run=self._input_run,
            uses=uses,
            position=position,
            policy_version=-1 if manifest is None else manifest.version,
            params_digest=digest,
            trained_total=self._progress.trained_total + rows_of(uses, "trained"),
            skipped_total=self._progress.skipped_total + rows_of(uses, "skipped"),
            metrics={**metrics, "time/broadcast_weights": time.monotonic() - started},
            timestamp=time.time(),
        )
        self._log.commit([self._log.record(record)] + ([self._publisher.record(staged)] if staged else []))
        if staged is not None:
            self._publisher.committed(staged)
        self._progress = Progress(
            position=position,
            trained_total=record.trained_total,
            skipped_total=record.skipped_total,
            recent_steps=(*self._progress.recent_steps, record),
        )
        event(
            logger,
            "step",
            step=step,
            policy_version=record.policy_version,
            trained=rows_of(uses, "trained"),
            skipped=rows_of(uses, "skipped"),
            reward=round(metrics.get("trained/reward", 0.0), 4),
            step_s=round(metrics.get("time/step", 0.0), 4),
            wait_s=round(metrics.get("time/wait_for_batch", 0.0), 4),
        )
        return record

    def _record_skips(self, uses: tuple[BatchUse, ...]) -> None:
        """Put skipped batches on record before the step they belong to is made.

        Workers hold back until their rollouts are trained or skipped: a learner that skipped all there is and recorded
        it only with its next step would wait for ever. The record has no digest; the step's own replaces it.
        """
        step = int(self._state.step) + 1
        if step in self._recorded:
            return
        record = LearnerStep(
            learner=self._config.name,
            step=step,
            input_run=self._input_run,
            uses=uses,
            position=self._progress.position,
            policy_version=-1,
            params_digest="",
            trained_total=self._progress.trained_total,
            skipped_total=self._progress.skipped_total + rows_of(uses, "skipped"),
            timestamp=time.time(),
        )
        self._log.commit([self._log.record(record)])

    def _compare_with_record(self, digest: str, uses: tuple[BatchUse, ...]) -> None:
        """The step just made must be as it is on record, if it is. Raises StateRefused naming both."""
        step = int(self._state.step)
        recorded = self._recorded.get(step)
        if recorded is not None and (recorded.params_digest, recorded.uses) != (digest, uses):
            raise StateRefused(
                f"step {step} of learner {self._config.name!r}, executed again, gives parameters {digest[:16]} from "
                f"batches {_named(uses)}; on record are {recorded.params_digest[:16]} from {_named(recorded.uses)}. "
                "Restore the settings, software and thread count of the first execution, or give another learner.name"
            )

    def _warn_of_changes(self, saved: dict[str, str]) -> None:
        changed = {
            name: {"saved": saved.get(name), "now": self._fingerprint.get(name)}
            for name in sorted({*saved, *self._fingerprint})
            if saved.get(name) != self._fingerprint.get(name)
        }
        if changed:
            event(logger, "environment_changed", level=logging.WARNING, changed=changed)

    def _checkpoint(self) -> None:
        """Begin a checkpoint of where we stand; recent steps count from it."""
        self._checkpoints.save(self._state, self._progress, self._fingerprint)
        self._progress = replace(self._progress, recent_steps=())

    def _read_version_steps(self) -> dict[int, int]:
        if self._input_run == self._run:
            return self._publisher.versions
        return {version: manifest.step for version, manifest in read_manifests(self._kafka, self._input_run).items()}


def _supervised(examples: Sequence[Example]) -> list[TrainingSequence]:
    return [
        TrainingSequence(
            tokens=np.asarray(tokens, np.int32),
            loss_mask=np.asarray(mask, bool),
            advantages=np.zeros(len(tokens), np.float32),
            generator_log_probs=np.zeros(len(tokens), np.float32),
        )
        for tokens, mask in examples
    ]


def _named(uses: Sequence[BatchUse]) -> str:
    return ", ".join(f"{item.batch_id} {item.use}" for item in uses) or "none"
