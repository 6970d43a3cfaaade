from .config import WorkerConfig
from .environments.environment import Environment, Episode, Generate, Message, Prompt, Reply, Score, SingleTurn
from .environments.verifier_pool import VerifierFailed, VerifierPool
from .rollout_producer import RolloutProducer
from .trajectories.collecting import Seat, TrajectoryProducer
from .trajectories.collector import ChunkStepResult, TrajectoryCollector

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
