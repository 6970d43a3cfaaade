"""Settings of trackers; this module does not import their packages."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollstream.topics.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class TrackerConfig:
    """The tracker that `rollstream sink` fills with the steps of a learner, from the log."""

    to: str = ""
    """trackio, wandb, tensorboard, jsonl, or your own class: package.module:Class or path/to/file.py:Class. If it is
    set, `rollstream run` starts `rollstream sink`."""
    directory: str = ""
    """Directory for the tracker's files on this machine; empty: trackers in data_dir."""
    project: str = "rollstream"
    """Project that the run appears in."""
    traces: int = 4
    """Number of rollouts that are sent as traces for each step, drawn from its trained rollouts; 0: none."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Further arguments of the tracker, such as space_id for trackio or mode for wandb."""

    def __post_init__(self) -> None:
        if self.traces < 0:
            raise ConfigurationError(f"tracker.traces is {self.traces}; it must be at least 0")
