"""The source `rollout_buffer`: the lead follows the index into a buffer of rollouts and draws each step from it.

The contents of the buffer at a checkpoint follow from the log: `steps` names the rollouts, `batches` holds them.
"""

import logging
from collections.abc import Callable

from rollstream.consumers.batch_reader import IndexedBatch, IndexReader
from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.input.batch_selection import index_between
from rollstream.consumers.learner.input.followed_topics import Exclusions
from rollstream.consumers.learner.input.replay_selection import PastUses, ReplaySelection
from rollstream.consumers.learner.input.step_loader import LogSource
from rollstream.consumers.learner.records.step_recorder import StepRecorder
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import TopicError
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)


class ReplaySource(LogSource[ReplaySelection]):
    """The source `rollout_buffer`; see `StepSource`."""

    def __init__(
        self,
        config: LearnerConfig,
        kafka: KafkaConfig,
        run: str,
        step: int,
        position: int,
        process: int = 0,
        recorder: StepRecorder | None = None,
        drained: Callable[[], bool] = lambda: False,
    ) -> None:
        """With a `recorder`, which only the lead has, restore the buffer after `step` and read on from `position`."""
        super().__init__(config, kafka, run, position, process, recorder, drained)
        if recorder is not None:
            self._step = step
            self._restore(kafka, config.input_run or run, step, position, recorder)

    def _new_selection(
        self, config: LearnerConfig, index: IndexReader, exclusions: Exclusions, recorder: StepRecorder
    ) -> ReplaySelection:
        return ReplaySelection(
            config,
            index,
            fetch=self._loader.fetch,
            read_version_steps=recorder.version_steps,
            recorded=recorder.recorded,
            skipped=self._skipped,
            excluded=exclusions.reason,
            earlier_steps=recorder.earlier_steps,
            nothing_after=self._nothing_after,
        )

    def _restore(self, kafka: KafkaConfig, input_run: str, step: int, position: int, recorder: StepRecorder) -> None:
        past = [record for record in recorder.steps if record.step <= step]
        uses = PastUses.after(step, position, past)
        if uses.first >= uses.position:
            return
        entries = index_between(kafka, input_run, uses.first, uses.position)
        if uses.first not in entries:
            raise TopicError(
                f"batch-index of run {input_run} no longer holds offset {uses.first}, the first whose rollouts the "
                f"rollout buffer held after step {step}; start from a later checkpoint"
            )
        self._selection.restore(uses, [IndexedBatch(entry, at) for at, entry in sorted(entries.items())], past)
        event(logger, "rollout_buffer_restored", step=step, rollouts=self._selection.size, position=uses.position)
