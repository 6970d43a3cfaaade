"""The source `rollout_buffer`: the lead follows the index into a buffer of rollouts and draws each step from it.

What the buffer held at a checkpoint is read from the log: which rollouts from `steps`, themselves from `batches`.
"""

import logging
import threading

from consumers.batch_reader import Indexed, IndexReader
from consumers.learner.config import LearnerConfig
from consumers.learner.exclusions import Exclusions
from consumers.learner.intake import Taken
from consumers.learner.recorded import index_between
from consumers.learner.recorder import Recorder
from consumers.learner.replay import Replay, Uses
from consumers.learner.supply import LogSource
from topics.config import KafkaConfig
from topics.errors import TopicError
from topics.logs import event

logger = logging.getLogger(__name__)


class RolloutBuffer(LogSource):
    """The source `rollout_buffer`. See `Source`."""

    def __init__(
        self,
        config: LearnerConfig,
        kafka: KafkaConfig,
        run: str,
        step: int,
        position: int,
        process: int = 0,
        recorder: Recorder | None = None,
    ) -> None:
        """With a `recorder`, that is in the lead, it holds what it held after `step`, and reads on from `position`."""
        super().__init__(config, kafka, run, process)
        if recorder is None:
            return
        input_run = config.input_run or run
        index = self._stack.enter_context(IndexReader(kafka, input_run, position))
        exclusions = self._stack.enter_context(Exclusions(kafka, input_run))
        self._replay = Replay(
            config,
            index,
            fetch=self._loader.fetch,
            read_version_steps=recorder.version_steps,
            recorded=recorder.recorded,
            skipped=self._skipped,
            excluded=exclusions.reason,
        )
        self._step = step
        self._restore(kafka, input_run, step, position, recorder)

    def take(self, step: int, stop: threading.Event) -> Taken | None:
        """As many rollouts as a step takes, drawn from all that are fresh."""
        self._step = step
        return self._replay.take(step, stop)

    def _restore(self, kafka: KafkaConfig, input_run: str, step: int, position: int, recorder: Recorder) -> None:
        past = [record for record in recorder.steps if record.step <= step]
        uses = Uses.after(step, position, past)
        if uses.first >= uses.position:
            return
        found = index_between(kafka, input_run, uses.first, uses.position)
        if uses.first not in found:
            raise TopicError(
                f"batch-index of run {input_run} does not hold offset {uses.first} any more, from which on the rollout "
                f"buffer held rollouts after step {step}; begin at a later checkpoint"
            )
        self._replay.restore(uses, [Indexed(entry, at) for at, entry in sorted(found.items())], past)
        event(logger, "rollout_buffer_restored", step=step, rollouts=self._replay.size, position=uses.position)
