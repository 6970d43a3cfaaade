from .config import GrouperConfig, GroupingConfig
from .core.estimators import Estimator, Outcomes, estimator
from .makers.batch_maker import BatchMaker, FifoBatchMaker, MakerContext, SealedGroup, example_bytes
from .makers.reservoir import ReservoirBatchMaker
from .testing import GroupingTestDriver, example_rollout

__all__ = [
    "BatchMaker",
    "Estimator",
    "FifoBatchMaker",
    "GrouperConfig",
    "GroupingConfig",
    "GroupingTestDriver",
    "MakerContext",
    "Outcomes",
    "ReservoirBatchMaker",
    "SealedGroup",
    "estimator",
    "example_bytes",
    "example_rollout",
]
