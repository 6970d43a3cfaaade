"""Settings of the process that fills a trajectory buffer on disk."""

from dataclasses import dataclass

from rollstream.topics.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class FillConfig:
    """The process that fills a trajectory buffer on disk. A run with this process has no token roles."""

    directory: str = ""
    """Directory of the buffer; empty: `rollstream run` does not start the process."""
    name: str = "fill"
    """Name of the filler, unique within the run: its consumer group is {run}.filler-{name}."""
    trajectory_format: str = "npz"
    """Format of the files."""
    max_trajectories: int = 0
    """Maximum number of trajectories; beyond it the oldest are removed; 0 is no limit."""
    max_bytes: int = 0
    """Maximum size of the arrays in bytes; beyond it the oldest are removed; 0 is no limit."""
    seed: int = 0
    """Seed of the buffer's draws."""

    def __post_init__(self) -> None:
        if self.max_trajectories < 0 or self.max_bytes < 0:
            raise ConfigurationError(
                f"fill.max_trajectories {self.max_trajectories} and fill.max_bytes {self.max_bytes} must be at least 0"
            )
        if not self.name:
            raise ConfigurationError("fill.name is empty; name the filler, e.g. fill")
