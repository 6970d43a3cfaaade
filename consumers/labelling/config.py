"""Settings of the labelling stage."""

from dataclasses import dataclass

from topics.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class LabellingConfig:
    """How labelling processes run."""

    processes: int = 0
    """Labelling processes that `rollstream run` starts; a run that has some has none of the token roles."""
    labeler: str = ""
    """Function that labels, package.module:function, where the command line names none."""
    group: str = "labeller"
    """Consumer group, prefixed with the run's name."""
    max_poll_records: int = 16
    """Most trajectories taken from the client at once; judging that many must take less than five minutes."""
    commit_interval_s: float = 0.1
    """How long labelled trajectories may wait for their transaction, and for each other."""
    metrics_interval_s: float = 5.0
    """Time between figures of the process on the metrics topic; 0 writes none."""

    def __post_init__(self) -> None:
        if self.max_poll_records < 1 or self.commit_interval_s <= 0:
            raise ConfigurationError(
                f"max_poll_records {self.max_poll_records} must be at least 1, and commit_interval_s "
                f"{self.commit_interval_s:g} above 0"
            )

        if self.processes < 0:
            raise ConfigurationError(f"labelling.processes is {self.processes}; it must be at least 0")
        if self.processes and not self.labeler:
            raise ConfigurationError(
                f"labelling.processes is {self.processes}, and no labeler is named; set labelling.labeler to "
                "package.module:function"
            )

    def group_id(self, run: str) -> str:
        """Full name of the consumer group of a run."""
        return f"{run}.{self.group}"
