from .config import WorkerConfig
from .environments.environment import Environment, Episode, Generate, Message, Prompt, Reply, Score, SingleTurn
from .environments.verifier_pool import VerifierFailed, VerifierPool
from .rollout_producer import RolloutProducer
from .trajectories.collecting import Seat
from .trajectories.collector import TrajectoryCollector
from .trajectories.producer import TrajectoryProducer
from .trajectories.steps import ChunkStepResult

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
