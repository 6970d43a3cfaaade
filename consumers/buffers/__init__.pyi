from .groups.config import GroupStoreConfig
from .groups.forwarding import GrpoBatchMaker
from .groups.store import GroupReplayBuffer
from .groups.view import GroupStore
from .rollouts.buffer import ReplayBufferConfig, RolloutReplayBuffer, RolloutWithCount, TrainParams
from .rollouts.record import RecordTurn, RolloutRecord, as_record, as_rollout
from .rollouts.rows import RLLossModule, RLOOLoss
from .slices.buffer import EpisodeSliceBuffer
from .slices.human_in_the_loop import HilEpisodeBuffer, open_episode_buffer
from .trajectories.buffer import NothingToSample, NotYetOnDisk, TrajectoryReplayBuffer
from .trajectories.dataset import MixedDataset
from .trajectories.filler import TrajectoryFiller
from .trajectories.shelf import TrajectoryCache

__all__ = [
    "EpisodeSliceBuffer",
    "GroupReplayBuffer",
    "GroupStore",
    "GroupStoreConfig",
    "GrpoBatchMaker",
    "HilEpisodeBuffer",
    "MixedDataset",
    "NotYetOnDisk",
    "NothingToSample",
    "RLLossModule",
    "RLOOLoss",
    "RecordTurn",
    "ReplayBufferConfig",
    "RolloutRecord",
    "RolloutReplayBuffer",
    "RolloutWithCount",
    "TrainParams",
    "TrajectoryCache",
    "TrajectoryFiller",
    "TrajectoryReplayBuffer",
    "as_record",
    "as_rollout",
    "open_episode_buffer",
]
