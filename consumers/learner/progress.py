"""Where a learner stands in the log: kept in its checkpoint, beside its arrays."""

from dataclasses import dataclass, replace

from topics.records import LearnerStep


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a learner stands in the log."""

    position: int = 0
    """Next offset of batch-index to read."""
    trained_total: int = 0
    """Rollouts trained on since the start of the run."""
    skipped_total: int = 0
    """Rollouts skipped since the start of the run."""
    oldest: int = -1
    """First offset before it whose batch may be used again; -1 where there is none."""
    recent_steps: tuple[LearnerStep, ...] = ()
    """Records of the steps since the checkpoint before, which a resumed learner sends again."""

    def after(self, record: LearnerStep) -> "Progress":
        """Where it stands once a step is on record."""
        return Progress(
            position=record.position,
            trained_total=record.trained_total,
            skipped_total=record.skipped_total,
            oldest=record.oldest,
            recent_steps=(*self.recent_steps, record),
        )

    def saved(self) -> "Progress":
        """The same after a checkpoint: recent steps count from it."""
        return replace(self, recent_steps=())
