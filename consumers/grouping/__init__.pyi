from .config import GrouperConfig, GroupingConfig
from .core.estimators import estimator
from .makers.batch_maker import BatchMaker, FifoBatchMaker, MakerContext, SealedGroup, example_bytes
from .makers.reservoir import ReservoirBatchMaker
from .testing import GroupingTestDriver, example_rollout

__all__ = [
    "BatchMaker",
    "FifoBatchMaker",
    "GrouperConfig",
    "GroupingConfig",
    "GroupingTestDriver",
    "MakerContext",
    "ReservoirBatchMaker",
    "SealedGroup",
    "estimator",
    "example_bytes",
    "example_rollout",
]
