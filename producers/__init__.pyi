from .config import WorkerConfig
from .environment import Environment, Episode, Generate, Message, Prompt, Reply, Score, SingleTurn
from .rollout_producer import RolloutProducer
from .trajectories.collecting import Seat
from .trajectories.collector import TrajectoryCollector
from .trajectories.producer import TrajectoryProducer
from .trajectories.steps import ChunkStepResult
from .verifier_pool import VerifierFailed, VerifierPool

__all__ = [
    "ChunkStepResult",
    "Environment",
    "Episode",
    "Generate",
    "Message",
    "Prompt",
    "Reply",
    "RolloutProducer",
    "Score",
    "Seat",
    "SingleTurn",
    "TrajectoryCollector",
    "TrajectoryProducer",
    "VerifierFailed",
    "VerifierPool",
    "WorkerConfig",
]
