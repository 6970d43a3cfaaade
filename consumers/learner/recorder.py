"""The books of a learner: each step on record with the batches it used and the policy version it led to, in one
transaction.

A step executed again must be as it is on record; a version that is published already is not published again.
"""

import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import Any

import numpy as np

from consumers.closing import Closing
from consumers.learner.config import LearnerConfig
from consumers.learner.intake import rows_of
from consumers.learner.progress import Progress
from consumers.learner.step_log import StepLog, read_steps
from consumers.weights.layout import params_digest
from consumers.weights.publisher import WeightsPublisher, read_manifests
from topics.config import KafkaConfig
from topics.errors import StateRefused
from topics.logs import event
from topics.records import BatchUse, LearnerStep, PolicyManifest

logger = logging.getLogger(__name__)


class Recorder(Closing):
    """Writes the steps of one learner. Building it fences every earlier learner of the run."""

    def __init__(self, config: LearnerConfig, kafka: KafkaConfig, run: str, model: str) -> None:
        self._config = config
        self._kafka = kafka
        self._run = run
        self._input_run = config.input_run or run
        self._stack = ExitStack()
        # The log comes first: once it has fenced every earlier learner of the run, what is on the topics is final.
        self._log = self._stack.enter_context(closing(StepLog(kafka, run, config.name, take_over=config.take_over)))
        self._publisher = self._stack.enter_context(
            closing(WeightsPublisher(kafka, run, config.name, model, config.weights))
        )
        # A record without a digest is of a step that was never made.
        recorded = read_steps(kafka, run, config.name)
        self._recorded = {step: record for step, record in recorded.items() if record.params_digest}
        self._made = -1
        self.same_bits = True
        """Whether steps executed again must come out with the digests on record: not on other hardware."""

    @property
    def last_recorded(self) -> int:
        """The highest step on record, -1 before the first."""
        return max(self._recorded, default=-1)

    @property
    def steps(self) -> tuple[LearnerStep, ...]:
        """Every step that was on record when this learner began, in order."""
        return tuple(self._recorded[step] for step in sorted(self._recorded))

    def resend(self, steps: tuple[LearnerStep, ...]) -> None:
        """Write again what a checkpoint says was on record."""
        if steps:
            self._log.commit([self._log.record(record) for record in steps])
        self._recorded |= {record.step: record for record in steps}

    def recorded(self, step: int) -> LearnerStep | None:
        """A step as it is on record."""
        return self._recorded.get(step)

    def decided(self, step: int, batch_id: str) -> tuple[BatchUse, ...]:
        """What a step on record did with a batch; nothing where nothing is on record of the two.

        What was excluded or published since the step was made does not change it.
        """
        recorded = self._recorded.get(step)
        return () if recorded is None else tuple(use for use in recorded.uses if use.batch_id == batch_id)

    def version_steps(self, version: int) -> dict[int, int]:
        """Learner step of every policy version of the run whose batches are read, `version` among them if it is there.

        Our own are known without asking, but for one that was committed an instant ago.
        """
        if self._input_run == self._run and version in (own := self._publisher.versions):
            return own
        return {version: manifest.step for version, manifest in read_manifests(self._kafka, self._input_run).items()}

    def record(
        self,
        step: int,
        uses: tuple[BatchUse, ...],
        position: int,
        metrics: Mapping[str, float],
        arrays: Mapping[str, np.ndarray[Any, Any]],
        progress: Progress,
        *,
        oldest: int = -1,
        stream_time_ms: int = -1,
    ) -> LearnerStep:
        """Commit the record of a step just made, together with a new policy version where one is due.

        `arrays` are the parameters after it, `oldest` and `stream_time_ms` as in `Taken`. Raises StateRefused where the
        step is on record and differs.
        """
        started = time.monotonic()
        digest = params_digest(arrays)
        self.compare(step, digest, uses)
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
            trained_total=progress.trained_total + rows_of(uses, "trained"),
            skipped_total=progress.skipped_total + rows_of(uses, "skipped"),
            metrics={**metrics, "time/broadcast_weights": time.monotonic() - started},
            timestamp=time.time(),
            oldest=oldest,
            stream_time_ms=stream_time_ms,
        )
        self._log.commit([self._log.record(record)] + ([self._publisher.record(staged)] if staged else []))
        self._made = step
        if staged is not None:
            self._publisher.committed(staged)
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

    def record_skips(self, step: int, uses: tuple[BatchUse, ...], progress: Progress) -> None:
        """Put skipped batches on record before the step they belong to is made.

        Workers hold back until their rollouts are trained or skipped: a learner that skipped all there is and recorded
        it only with its next step would wait for ever. The record has no digest; the step's own replaces it. Of a step
        that is made nothing is written: what was heard too late is in its record.
        """
        if step in self._recorded or step <= self._made:
            return
        record = LearnerStep(
            learner=self._config.name,
            step=step,
            input_run=self._input_run,
            uses=uses,
            position=progress.position,
            policy_version=-1,
            params_digest="",
            trained_total=progress.trained_total,
            skipped_total=progress.skipped_total + rows_of(uses, "skipped"),
            timestamp=time.time(),
            oldest=progress.oldest,
        )
        self._log.commit([self._log.record(record)])

    def compare(self, step: int, digest: str, uses: tuple[BatchUse, ...]) -> None:
        """A step just made must be as it is on record, if it is. Raises StateRefused naming both."""
        recorded = self._recorded.get(step)
        if recorded is None or (recorded.params_digest, recorded.uses) == (digest, uses):
            return
        if recorded.uses == uses and not self.same_bits:
            event(logger, "step_differs", level=logging.WARNING, step=step, recorded=recorded.params_digest, now=digest)
            return
        raise StateRefused(
            f"step {step} of learner {self._config.name!r}, executed again, gives parameters {digest[:16]} from "
            f"batches {_named(uses)}; on record are {recorded.params_digest[:16]} from {_named(recorded.uses)}. "
            "Restore the settings, software and thread count of the first execution, or give another learner.name"
        )

    def close(self) -> None:
        """Close both producers."""
        self._stack.close()


def _named(uses: tuple[BatchUse, ...]) -> str:
    return ", ".join(f"{item.batch_id} {item.use}" for item in uses) or "none"
