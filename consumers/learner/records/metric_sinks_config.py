"""Settings of the sinks for copies of a learner's metrics; imports neither JAX nor the packages of the sinks."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class SinksConfig:
    """Copies of the metrics of each step, outside the log. An empty setting turns its sink off; sinks may share
    a directory."""

    jsonl: str = ""
    """Directory of JSON lines: {run}/{learner}.jsonl holds one line per step."""
    tensorboard: str = ""
    """Directory of TensorBoard events, under {run}/{learner}; needs the extra `sinks`."""
    wandb: str = ""
    """Directory of Weights & Biases runs, one id for each learner of a run; needs the extra `sinks`."""
    wandb_project: str = "rollstream"
    """Project of the Weights & Biases runs."""
    wandb_mode: Literal["offline", "online"] = "offline"
    """Mode of Weights & Biases; offline keeps everything on disk, for a later `wandb sync`."""
