"""Position of a learner in the log, stored in its checkpoint with the arrays."""

from dataclasses import dataclass, replace

from rollstream.topics.records import LearnerStep


@dataclass(frozen=True, kw_only=True)
class LearnerPosition:
    """Position of a learner in the log, with its totals and recent steps."""

    position: int = 0
    """Next offset of batch-index to read."""
    trained_total: int = 0
    """Rollouts trained on since the start of the run."""
    skipped_total: int = 0
    """Rollouts skipped since the start of the run."""
    oldest: int = -1
    """First offset before `position` whose batch may be used again; -1 if there is none."""
    recent_steps: tuple[LearnerStep, ...] = ()
    """Records of the steps since the previous checkpoint, which a resumed learner writes again."""

    def after(self, record: LearnerStep) -> "LearnerPosition":
        """Return the position after this step, with its record among the recent steps."""
        return LearnerPosition(
            position=record.position,
            trained_total=record.trained_total,
            skipped_total=record.skipped_total,
            oldest=record.oldest,
            recent_steps=(*self.recent_steps, record),
        )

    def saved(self) -> "LearnerPosition":
        """Return the position as it is after a checkpoint, without recent steps."""
        return replace(self, recent_steps=())
