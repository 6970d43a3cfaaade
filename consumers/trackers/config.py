"""Settings of trackers, without the packages they need."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollstream.topics.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class TrackerConfig:
    """The tracker that `rollstream sink` fills with the steps of a learner, from the log."""

    to: str = "trackio"
    """trackio, wandb, tensorboard, or your own: package.module:Class or path/to/file.py:Class."""
    directory: str = ""
    """Directory of what the tracker keeps on this machine; empty: trackers in data_dir."""
    project: str = "rollstream"
    """Project that the run appears in."""
    traces: int = 4
    """Rollouts of each step that are sent as traces, drawn from those it trained on; 0: none."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Further arguments of the tracker's own, such as space_id for trackio or mode for wandb."""

    def __post_init__(self) -> None:
        if self.traces < 0:
            raise ConfigurationError(f"tracker.traces is {self.traces}; it must be 0 or more rollouts of a step")
