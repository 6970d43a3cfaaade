"""Settings of where a learner's figures go besides the log, without JAX or any of the packages written for."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class SinksConfig:
    """Copies of each step's figures, outside the log. What is empty is off; all may share one directory."""

    jsonl: str = ""
    """Directory of JSON lines: {run}/{learner}.jsonl in it holds one line a step."""
    tensorboard: str = ""
    """Directory of TensorBoard's events, under {run}/{learner}; needs the extra `sinks`."""
    wandb: str = ""
    """Directory of Weights & Biases' runs, one id for each learner of a run; needs the extra `sinks`."""
    wandb_project: str = "rollstream"
    """Project they belong to."""
    wandb_mode: Literal["offline", "online"] = "offline"
    """Offline keeps everything on disk, for `wandb sync` later."""
