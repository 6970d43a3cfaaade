from .batch_reader import BatchFetcher, BatchReader, IndexReader, ReadBatch
from .trainers.step_writer import StepWriter, publish_version
from .weights.follower import WeightsFollower
from .weights.state_manager import LocalStateManager, StateManager

__all__ = [
    "BatchFetcher",
    "BatchReader",
    "IndexReader",
    "LocalStateManager",
    "ReadBatch",
    "StateManager",
    "StepWriter",
    "WeightsFollower",
    "publish_version",
]
