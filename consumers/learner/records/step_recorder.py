"""StepRecorder: puts each step on record with the batches it used and the version it published, in one transaction.

A step executed again must match its record; a version that is already published is not published again, unless nobody
can fetch it any more.
"""

import logging
import math
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from rollstream.consumers.learner.checkpoint_paths import LearnerPosition
from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.pretrained import published_dtype
from rollstream.consumers.learner.records.served_metrics import serve
from rollstream.consumers.learner.user_objectives import code_of
from rollstream.consumers.weights.content import Arrays, converted
from rollstream.consumers.weights.manifests import none_whole, read_manifests
from rollstream.consumers.weights.publisher import WeightsPublisher
from rollstream.consumers.weights.shard_barrier import Channel
from rollstream.consumers.weights.step_log import StepLog, read_steps
from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.control.named_records import FORKED, read_named
from rollstream.topics.errors import StateRefused
from rollstream.topics.logs import event
from rollstream.topics.records import BatchUse, ForkedLearner, LearnerStep, PolicyManifest
from rollstream.topics.records.learner import names_of, rows_of
from rollstream.topics.traces.stages import step_recorded

logger = logging.getLogger(__name__)
MEASURES = ("loss", "entropy/mean", "optim/grad_norm")
"""Metrics by which a step executed again is compared with its record: the digests only show whether bits differ."""
_LEAST = 1e-3
"""Least divisor of a relative difference, because losses are close to 0."""


class StepParams(NamedTuple):
    """The parameters after a step."""

    digest: str
    """Checksum of the parameters, computed on their devices."""
    arrays: Arrays | None
    """Copies of the parameters that this process publishes, in the published dtype or to be converted to it; None if
    the step publishes no version."""
    seconds: float = 0.0
    """Seconds spent on the digest and the copies."""


def earlier_steps(manifests: Iterable[PolicyManifest], learner: str, first_step: int) -> dict[int, int]:
    """Steps after which other learners of a run published their versions, counted in the steps of `learner`.

    Each learner counts from its own first step. The last step of a learner that was replaced counts as the step of
    `learner` at that time, which is `first_step` unless it published before. So a version of an earlier learner is at
    least as old as the replacement, and the steps may be negative. They change only when another learner takes over.
    A rollback publishes earlier parameters again, and is as old as these.
    """
    originals: dict[tuple[str, str], int] = {}
    rollbacks: dict[int, int] = {}
    in_order: list[PolicyManifest] = []
    for manifest in sorted(manifests, key=lambda manifest: manifest.version):
        digest = manifest.params_digest
        original = originals.setdefault((manifest.learner, digest), manifest.version) if digest else manifest.version
        if original == manifest.version:
            in_order.append(manifest)
        else:
            rollbacks[manifest.version] = original
    steps: dict[int, int] = {}
    reached = first_step
    for name, following in groupby(in_order, key=lambda manifest: manifest.learner):
        published = {manifest.version: manifest.step for manifest in following}
        *_earlier, last = published.values()
        if name == learner:
            reached = max(reached, last)
        else:
            # Steps that were executed again may have lower numbers than the steps before.
            steps |= {version: reached - max(0, last - step) for version, step in published.items()}
    return steps | {version: steps[original] for version, original in rollbacks.items() if original in steps}


class StepRecorder(Closing):
    """Records the steps of one learner. Creating it fences every earlier learner of the run."""

    def __init__(
        self, config: LearnerConfig, kafka: KafkaConfig, run: str, model: str, channel: Channel | None = None
    ) -> None:
        """`channel` connects to the learner's other processes, which send their tensors of each version."""
        self._config = config
        self._kafka = kafka
        self._run = run
        self._input_run = config.input_run or run
        self._stack = ExitStack()
        # Open the log first: this fences every earlier learner of the run, so the topics no longer change.
        self._log = self._stack.enter_context(closing(StepLog(kafka, run, config.name, take_over=config.take_over)))
        self._dtype = published_dtype(config)
        self._code = code_of(config)
        forked = read_named(kafka, run, FORKED, ForkedLearner).get(config.name)
        first = 0 if forked is None else forked.first_version
        publisher = WeightsPublisher(
            kafka, run, config.name, model, config.weights, channel=channel, first_version=first
        )
        self._publisher = self._stack.enter_context(closing(publisher))
        # A record without a digest holds skips of a step that was never completed.
        recorded = read_steps(kafka, run, config.name)
        self._recorded = {step: record for step, record in recorded.items() if record.params_digest}
        self._newest = recorded[max(recorded)] if recorded else None
        self._resumes_at = 0
        self._made = -1
        self._first_made: int | None = None
        self.same_bits = True
        """Whether steps executed again must match their records; False if hardware or software has changed."""
        self.tolerance = 0.0
        """Largest difference with which a step executed again matches its record; 0 requires the same digest."""

    @property
    def last_recorded(self) -> int:
        """The highest step on record, -1 before the first."""
        return max(self._recorded, default=-1)

    @property
    def steps(self) -> tuple[LearnerStep, ...]:
        """Every step that was on record when this learner started, in order."""
        return tuple(self._recorded[step] for step in sorted(self._recorded))

    @property
    def publishes_input_versions(self) -> bool:
        """Whether the policy versions of the batches are this learner's, and not those of another run's learner."""
        return self._input_run == self._run

    def resend(self, steps: tuple[LearnerStep, ...]) -> None:
        """Write the recent steps of a checkpoint again."""
        if steps:
            self._log.commit([self._log.record(record) for record in steps])
        self._recorded |= {record.step: record for record in steps}

    def resumes_from(self, offset: int) -> None:
        """Have every further record name the first offset of batch-index that this learner may read again.

        `rollstream prune` goes by the newest record. If that names a later offset, because checkpoints were lost, it is
        written again with this one.
        """
        self._resumes_at = offset
        if self._newest is not None and self._newest.resumes_at > offset:
            self._newest = replace(self._newest, resumes_at=offset)
            self._log.commit([self._log.record(self._newest)])

    def recorded(self, step: int) -> LearnerStep | None:
        """The record of a step, if there is one."""
        return self._recorded.get(step)

    def last_batch(self, step: int) -> int | None:
        """Index offset of the last batch of a step on record; None if it is not on record or used none."""
        recorded = self._recorded.get(step)
        return None if recorded is None else max((use.index_offset for use in recorded.uses), default=None)

    def decided(self, step: int, batch_id: str) -> tuple[BatchUse, ...]:
        """Uses of a batch in a step on record; empty if there are none.

        Later exclusions and publications do not change them.
        """
        recorded = self._recorded.get(step)
        return () if recorded is None else tuple(use for use in recorded.uses if use.batch_id == batch_id)

    @property
    def earlier_steps(self) -> Mapping[int, int]:
        """Steps of the versions that other learners of this run published, counted in the steps of this learner; empty
        if the input run is another run."""
        return self._earlier_steps(self._published()) if self.publishes_input_versions else {}

    def version_steps(self, version: int) -> dict[int, int]:
        """Learner step of every policy version of the input run, including `version` if it exists.

        In the learner's own run, these are its own steps, also for versions of other learners (`earlier_steps`). Reads
        the topic only if the input run is another run, or `version` is not known yet.
        """
        known = self._published() if self.publishes_input_versions else {}
        manifests = known if version in known else read_manifests(self._kafka, self._input_run, none_whole)
        steps = {version: manifest.step for version, manifest in manifests.items()}
        return steps | (self._earlier_steps(manifests) if self.publishes_input_versions else {})

    def _published(self) -> dict[int, PolicyManifest]:
        """Manifests of this run, by version; may be called from another thread."""
        manifests = {version: self._publisher.manifest(version) for version in self._publisher.versions}
        return {version: manifest for version, manifest in manifests.items() if manifest is not None}

    def _earlier_steps(self, manifests: Mapping[int, PolicyManifest]) -> dict[int, int]:
        first = min(self._recorded, default=self._first_made)
        return {} if first is None else earlier_steps(manifests.values(), self._config.name, first)

    def record(
        self,
        step: int,
        uses: tuple[BatchUse, ...],
        position: int,
        metrics: Mapping[str, float],
        params: StepParams,
        previous_position: LearnerPosition,
        *,
        oldest: int = -1,
        stream_time_ms: int = -1,
    ) -> LearnerStep:
        """Commit the record of a step just completed, together with a new policy version if one is due.

        `oldest` and `stream_time_ms` are as in `StepPlan`. Raises StateRefused if the step is on record and
        differs more than `same_bits` and `tolerance` allow; any other difference is recorded as `replay/difference`.
        """
        started, again = time.monotonic(), step in self._recorded
        began_ns = time.time_ns() - int((metrics.get("time/step", 0.0) + params.seconds) * 1e9)
        digest = params.digest
        difference = self._compare(step, digest, uses, metrics)
        if difference:
            metrics = {**metrics, "replay/difference": difference}
        recorded = self._recorded.get(step)
        manifest = self._publisher.published(step, digest, -1 if recorded is None else recorded.policy_version)
        staged: PolicyManifest | None = None
        if manifest is not None:
            self._skip(step)
        elif params.arrays is not None and (step % self._config.publish_every_steps == 0 or self.publishes_again(step)):
            manifest = staged = self._stage(step, params.arrays, digest, {"snapshot_s": params.seconds})
        record = LearnerStep(
            learner=self._config.name,
            step=step,
            input_run=self._input_run,
            uses=uses,
            position=position,
            policy_version=-1 if manifest is None else manifest.version,
            params_digest=digest,
            trained_total=previous_position.trained_total + rows_of(uses, "trained"),
            skipped_total=previous_position.skipped_total + rows_of(uses, "skipped"),
            metrics={
                **metrics,
                "time/snapshot": params.seconds,
                "time/broadcast_weights": time.monotonic() - started,
            },
            timestamp=time.time(),
            oldest=oldest,
            stream_time_ms=stream_time_ms,
            resumes_at=self._resumes_at,
            code=self._code,
        )
        self._log.commit([self._log.record(record)] + ([self._publisher.record(staged)] if staged else []))
        self._made = step
        self._first_made = step if self._first_made is None else self._first_made
        if staged is not None:
            self._publisher.committed(staged)
        if not again:
            serve(record)
            step_recorded(self._run, record, began_ns)
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
            snapshot_s=round(params.seconds, 4),
            wait_for_snapshot_s=round(metrics.get("time/wait_for_snapshot", 0.0), 4),
            wait_for_recording_s=round(metrics.get("time/wait_for_recording", 0.0), 4),
        )
        return record

    def _skip(self, step: int) -> None:
        """Tell the learner's other processes, if they wait for a version of this step, that there is none."""
        if step % self._config.publish_every_steps == 0:
            self._publisher.skip()

    def _stage(self, step: int, arrays: Arrays, digest: str, figures: Mapping[str, float]) -> PolicyManifest:
        """Stage a version of the parameters, in the published dtype."""
        began = time.monotonic()
        published = converted(arrays, self._dtype)
        return self._publisher.stage(
            step,
            published,
            params_digest=digest,
            dtype=self._dtype,
            figures={**figures, "convert_s": time.monotonic() - began},
        )

    def record_skips(self, step: int, uses: tuple[BatchUse, ...], previous_position: LearnerPosition) -> None:
        """Put skipped batches on record before their step is complete.

        Workers wait until their rollouts are trained or skipped: a learner that skipped every batch and recorded the
        skips only with its next step would wait forever. This record has no digest, and the record of the step replaces
        it. Nothing is written for a completed step, whose record already includes its skips.
        """
        if step in self._recorded or step <= self._made:
            return
        record = LearnerStep(
            learner=self._config.name,
            step=step,
            input_run=self._input_run,
            uses=uses,
            position=previous_position.position,
            policy_version=-1,
            params_digest="",
            trained_total=previous_position.trained_total,
            skipped_total=previous_position.skipped_total + rows_of(uses, "skipped"),
            timestamp=time.time(),
            oldest=previous_position.oldest,
            resumes_at=self._resumes_at,
        )
        self._log.commit([self._log.record(record)])

    def publishes_again(self, step: int) -> bool:
        """Whether a learner that resumes after a step publishes its parameters, although it already did or the step
        publishes no version.

        It does if the run has no version, as a fork has none, or if nobody can fetch the newest version: workers that
        hold no version would make no batches for the next step, and without a step there would be no next version.
        """
        return self._publisher.has_none or (step in self._recorded and self._publisher.newest_is_lost)

    def compare(self, step: int, params: StepParams, uses: tuple[BatchUse, ...]) -> None:
        """Raise StateRefused if the parameters after a step must equal those on record but differ.

        Publish nothing, unless `publishes_again`.
        """
        self._compare(step, params.digest, uses)
        if params.arrays is None or not self.publishes_again(step):
            self._skip(step)
            return
        manifest = self._stage(step, params.arrays, params.digest, {"snapshot_s": params.seconds})
        self._log.commit([self._publisher.record(manifest)])
        self._publisher.committed(manifest)

    def _compare(
        self, step: int, digest: str, uses: tuple[BatchUse, ...], metrics: Mapping[str, float] | None = None
    ) -> float:
        """Return the difference from the record; 0 for the same bits or without a record. Raises StateRefused."""
        recorded = self._recorded.get(step)
        if recorded is None:
            return 0.0
        difference = difference_from(recorded, digest, uses, metrics or {}, self.same_bits, self.tolerance)
        if recorded.params_digest != digest:
            event(
                logger,
                "step_differs",
                level=logging.WARNING,
                step=step,
                recorded=recorded.params_digest,
                now=digest,
                difference=difference,
            )
        return difference

    def close(self) -> None:
        """Close both producers."""
        self._stack.close()


def difference_from(
    recorded: LearnerStep,
    digest: str,
    uses: tuple[BatchUse, ...],
    metrics: Mapping[str, float],
    same_bits: bool,
    tolerance: float,
) -> float:
    """Return the relative difference of a step from its record: 0 only for the same bits, or if a measure is missing.

    `same_bits` says whether the devices and the software are the same as on record. Raises StateRefused if the batches
    differ. With `same_bits`, it also raises if the bits differ, unless the tolerance is above 0 and the measures differ
    by at most the tolerance.
    """
    if (recorded.params_digest, recorded.uses) == (digest, uses):
        return 0.0
    difference = replay_difference(recorded.metrics, metrics)
    if recorded.uses == uses and (not same_bits or 0 < tolerance >= difference):
        # If only the bits differ, the result is above 0. If a measure is missing, there is no difference to return.
        return max(difference, sys.float_info.min) if math.isfinite(difference) else 0.0
    raise StateRefused(
        f"step {recorded.step} of learner {recorded.learner!r}, executed again, gives parameters {digest[:16]} from "
        f"batches {names_of(uses)}; on record are {recorded.params_digest[:16]} from {names_of(recorded.uses)}. Loss, "
        f"entropy or gradient norm differ by {difference:.3g} at a tolerance of {tolerance:g}. Restore the settings, "
        "software and thread count of the first execution, or start another learner.name with learner.take_over"
    )


def replay_difference(recorded: Mapping[str, float], again: Mapping[str, float]) -> float:
    """Largest relative difference between the measures of a step on record and of the step executed again.

    Infinite if a measure is missing or not finite.
    """
    return max(_difference(recorded.get(name, math.nan), again.get(name, math.nan)) for name in MEASURES)


def _difference(one: float, other: float) -> float:
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other), _LEAST)
