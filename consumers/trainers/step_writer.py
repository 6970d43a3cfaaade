"""StepWriter: records the policy versions and the steps of an external trainer, with the batches they used.

The ledger, lineage, flow control and prune then treat the trainer like our learner. A step, the resulting position and
the version it publishes are committed in one transaction, so either all of them are on the log or none. It needs numpy
but not JAX.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace

import numpy as np

from rollstream.consumers.batch_reader import IndexedBatch, ReadBatch
from rollstream.consumers.weights.config import WeightsConfig
from rollstream.consumers.weights.content import Arrays
from rollstream.consumers.weights.manifests import none_whole, read_manifests
from rollstream.consumers.weights.publisher import WeightsPublisher
from rollstream.consumers.weights.step_log import StepLog, read_steps
from rollstream.topics.closing import Closing
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError, StateRefused
from rollstream.topics.logs import event
from rollstream.topics.records import BatchUse, LearnerStep, PolicyManifest
from rollstream.topics.records.fates import MISSING_ARRAY
from rollstream.topics.records.learner import names_of, without
from rollstream.topics.wire.params_digest import params_digest
from rollstream.topics.wire.trajectory_arrays import Tree, flatten

logger = logging.getLogger(__name__)


def publish_version(
    kafka: KafkaConfig,
    run: str,
    params: Tree | None = None,
    *,
    version: int | None = None,
    learner: str = "trainer",
    digest: str = "",
    model: str = "{}",
    config: WeightsConfig | None = None,
    take_over: bool = False,
) -> int:
    """Publish one policy version; return its number once the version is committed.

    A reader sees the version when Kafka has written the transaction's markers, usually milliseconds later.

    Use it for the version before the first step, and for trainers that record no steps. The arguments and
    the errors are those of StepWriter and its `publish_version`. If the version is already published, nothing is done.
    Otherwise the call fences a StepWriter of the same learner, so if you have one, call its `publish_version` instead;
    and it removes versions that `config.keep_versions` does not keep.
    """
    if version is not None:
        manifest = read_manifests(kafka, run, none_whole).get(version)
        if manifest is not None and _is_published(manifest, learner, _arrays(params), digest):
            return version
    with StepWriter(kafka, run, learner=learner, model=model, config=config, take_over=take_over) as writer:
        return writer.publish_version(params, version=version, digest=digest)


class StepWriter(Closing):
    """Records the steps of one trainer, as learner `learner` of a run. Not thread-safe.

    It continues after the last step on record, or after `after_step`: restore the parameters of that step and start a
    BatchReader at `position`. Steps executed again are compared with the record.
    """

    def __init__(
        self,
        kafka: KafkaConfig,
        run: str,
        *,
        learner: str = "trainer",
        input_run: str = "",
        after_step: int | None = None,
        model: str = "{}",
        config: WeightsConfig | None = None,
        take_over: bool = False,
    ) -> None:
        """Become the publisher of a run; the next commit of an earlier publisher of this name raises Fenced.

        `input_run` is the run whose batches are read, if it is not `run`; `after_step` is the step of the restored
        checkpoint; `model` describes the parameters to readers of the manifest. Raises StateRefused if this learner
        is retired, if a learner of another name published last and `take_over` is not set, or if step `after_step` is
        not on record.
        """
        self._learner = learner
        self._run, self._input_run = run, input_run or run
        config = config or WeightsConfig()
        # The next delta is taken from these arrays, which the trainer may change in place.
        self._copies = config.anchor_every > 1
        with ExitStack() as stack:
            # The StepLog is opened first. It fences every earlier publisher, so the topics do not change afterwards.
            self._log = stack.enter_context(closing(StepLog(kafka, run, learner, take_over=take_over)))
            self._publisher = stack.enter_context(closing(WeightsPublisher(kafka, run, learner, model, config)))
            self._recorded = read_steps(kafka, run, learner)
            last = max(self._recorded, default=0)
            self.step = last if after_step is None else after_step
            """The last completed step, 0 before the first."""
            if self.step and self.step not in self._recorded:
                raise StateRefused(
                    f"step {self.step} of learner {learner!r} is not on record in run {run}, the last is {last}; "
                    "record a step before you save its checkpoint, or restore an older checkpoint"
                )
            self._stack = stack.pop_all()

    @property
    def position(self) -> int:
        """Offset of batch-index after the batches of the last step, at which to start a BatchReader."""
        return self._recorded[self.step].position if self.step in self._recorded else 0

    @property
    def version(self) -> int:
        """The run's newest policy version, -1 before the first."""
        return self._publisher.latest_version

    def publish_version(self, params: Tree | None = None, *, version: int | None = None, digest: str = "") -> int:
        """Publish the parameters after the last step as a policy version, and return its number.

        `params` are arrays in mappings of any depth. They are None if they reach the samplers in another way;
        `digest` may then identify them. `version` is the number to publish under: the next number, or the number under
        which these parameters were already published, in which case nothing is written. Raises StateRefused if that
        number belongs to other parameters, or would leave a gap.
        """
        arrays = _arrays(params, self._copies)
        manifest = None if version is None else self._publisher.manifest(version)
        if manifest is not None and _is_published(manifest, self._learner, arrays, digest):
            return manifest.version
        if version not in (None, self.version + 1):
            other = "is published with other parameters" if manifest else "would leave a gap"
            raise StateRefused(
                f"policy version {version} of run {self._run} {other}; the next one is {self.version + 1}, and a "
                "number is never used twice"
            )
        manifest = self._stage(self.step, arrays, _digest(arrays, digest))
        self._log.commit([self._publisher.record(manifest)])
        self._publisher.committed(manifest)
        return manifest.version

    def record(
        self,
        reads: Sequence[ReadBatch],
        params: Tree | None = None,
        *,
        skipped: Mapping[str, str] | None = None,
        publish: bool = True,
        digest: str = "",
        metrics: Mapping[str, float] | None = None,
        oldest_checkpoint: int | None = None,
    ) -> LearnerStep:
        """Record the next step and its policy version in one transaction; return the record of the step.

        `reads` are the batches read since the last step, in order. If several processes read, give the reads of one
        process, which cover all processes. `skipped` gives a reason, by batch id, for each batch that was not
        trained on; rows that lacked an array when they were read are recorded as skipped, too. `params` and `digest`
        are as in `publish_version`; with `publish=False`, or if every batch was
        skipped, the step publishes no version. `oldest_checkpoint` is the lowest step after which this trainer may
        resume (0 to the step recorded here): prune keeps everything read after that step, or everything if it is None.

        A step already on record must consist of the same batches, of which the same were skipped, for whatever reasons;
        otherwise StateRefused is raised. With the same digest nothing is written; otherwise the new record replaces the
        old one and its version gets a new number. Raises StateRefused if batches lie between the last step and `reads`,
        Fenced if another process took over, and DeliveryError or BrokerUnavailable if the step cannot be written; then
        no part of it is on the log, except that after BrokerUnavailable all of it may be, if the broker's answer to the
        commit was lost.
        """
        step = self.step + 1
        uses = self._uses(reads, skipped or {})
        resumes_at = self._resumes_at(oldest_checkpoint, reads[-1].position)
        arrays = _arrays(params, self._copies)
        recorded = self._recorded.get(step)
        digest = _digest(arrays, digest)
        if recorded is not None and self._is_on_record(recorded, uses, digest):
            self.step = step
            return recorded
        totals = {
            use: sum(item.rows for item in uses if item.use == use) + self._total(use) for use in ("trained", "skipped")
        }
        trains = any(use.use == "trained" for use in uses)
        manifest = self._stage(step, arrays, digest) if publish and trains else None
        record = LearnerStep(
            learner=self._learner,
            step=step,
            input_run=self._input_run,
            uses=uses,
            position=reads[-1].position,
            policy_version=-1 if manifest is None else manifest.version,
            params_digest=digest,
            trained_total=totals["trained"],
            skipped_total=totals["skipped"],
            metrics={name: float(value) for name, value in (metrics or {}).items()},
            timestamp=time.time(),
            resumes_at=resumes_at,
        )
        self._log.commit([self._log.record(record)] + ([self._publisher.record(manifest)] if manifest else []))
        if manifest is not None:
            self._publisher.committed(manifest)
        self._recorded[step] = record
        self.step = step
        return record

    def close(self) -> None:
        """Wait until the broker has every record, and close both producers."""
        self._stack.close()

    def _uses(self, reads: Sequence[ReadBatch], skipped: Mapping[str, str]) -> tuple[BatchUse, ...]:
        if not reads:
            raise ConfigurationError("a step needs at least one batch; give the batches that BatchReader.poll returned")
        # The first step of a trainer may begin anywhere: earlier batches belong to another trainer, or are pruned.
        position = self.position if self.step in self._recorded else reads[0].begin
        for read in reads:
            if read.begin != position:
                raise StateRefused(
                    f"batch {read.entry.batch_id} was read from offset {read.begin} of batch-index on, but learner "
                    f"{self._learner!r} is at {position}: give every batch once and in order, also the batches named "
                    f"in `skipped`, and start the BatchReader at `position`"
                )
            position = read.position
        entries = [indexed for read in reads for indexed in read.round]
        if unknown := set(skipped) - {indexed.entry.batch_id for indexed in entries}:
            raise ConfigurationError(f"skipped batches {', '.join(sorted(unknown))} are not in the step")
        uses = [_use(indexed, skipped.get(indexed.entry.batch_id)) for indexed in entries]
        incomplete = [
            BatchUse(
                batch_id=read.entry.batch_id,
                index_offset=read.index_offset,
                rows=1,
                use="skipped",
                reason=reason,
                row_numbers=(row,) if len(read.batch) > 1 else (),
                code=MISSING_ARRAY,
            )
            for read in reads
            for row, reason in sorted(read.missing.items())
            if read.entry.batch_id not in skipped
        ]
        return without(uses, incomplete)

    def _resumes_at(self, checkpoint: int | None, end: int) -> int:
        """First offset that is read again after resuming at a checkpoint; `end` is the position after the new step."""
        if checkpoint is None or checkpoint == 0:
            return 0
        if checkpoint == self.step + 1:
            return end
        if checkpoint not in self._recorded or checkpoint > self.step:
            raise ConfigurationError(
                f"oldest_checkpoint {checkpoint} is not a step of learner {self._learner!r}; the newest is "
                f"{self.step + 1}"
            )
        return self._recorded[checkpoint].position

    def _is_on_record(self, recorded: LearnerStep, uses: Sequence[BatchUse], digest: str) -> bool:
        """Whether a step executed again has the digest on record. Raises StateRefused if its batches differ."""
        if _without_reasons(recorded.uses) != _without_reasons(uses):
            raise StateRefused(
                f"step {recorded.step} of learner {self._learner!r}, executed again, has batches {names_of(uses)}, but "
                f"{names_of(recorded.uses)} are on record. Use the same batches again, or give another learner "
                "name with take_over"
            )
        if digest and recorded.params_digest == digest:
            return True
        # Without a digest it is unknown whether these parameters are those already published.
        if digest:
            digests = {"recorded": recorded.params_digest, "now": digest}
            event(logger, "step_differs", level=logging.WARNING, step=recorded.step, **digests)
        return False

    def _stage(self, step: int, arrays: Arrays | None, digest: str) -> PolicyManifest:
        if arrays is None:
            return self._publisher.stage_external(step, digest)
        return self._publisher.stage(step, arrays, params_digest=digest)

    def _total(self, use: str) -> int:
        """Number of rollouts that the steps so far have used as `use`: trained or skipped."""
        last = self._recorded.get(self.step)
        return 0 if last is None else int(getattr(last, f"{use}_total"))


def _is_published(manifest: PolicyManifest, learner: str, arrays: Arrays | None, digest: str) -> bool:
    """Whether a version has these parameters of this learner."""
    now = learner, arrays is None, _digest(arrays, digest)
    return now == (manifest.learner, manifest.kind == "external", manifest.params_digest)


def _arrays(params: Tree | None, copies: bool = False) -> Arrays | None:
    if params is None:
        return None
    return {path: np.array(leaf) if copies else np.asarray(leaf) for path, leaf in flatten(params).items()}


def _digest(arrays: Arrays | None, digest: str) -> str:
    """Digest of the parameters: that of the arrays, or the given one if there are none."""
    if arrays is None:
        return digest
    if digest:
        raise ConfigurationError(
            "`digest` is only for parameters that are not given; the digest of `params` is computed"
        )
    return params_digest(arrays)


def _without_reasons(uses: Sequence[BatchUse]) -> list[BatchUse]:
    """Return the uses without reasons, whose texts may hold numbers that differ when a step is executed again, and
    without the codes that an upcast of an old record derived from them."""
    return [replace(use, reason="", code="") for use in uses]


def _use(indexed: IndexedBatch, reason: str | None) -> BatchUse:
    entry = indexed.entry
    return BatchUse(
        batch_id=entry.batch_id,
        index_offset=indexed.index_offset,
        rows=entry.rollouts,
        use="trained" if reason is None else "skipped",
        reason=reason or "",
    )
