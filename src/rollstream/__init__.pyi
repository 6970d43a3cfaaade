from ._version import __version__
from .consumers.batch_reader import BatchReader, ReadBatch
from .consumers.buffers.groups.config import GroupStoreConfig
from .consumers.buffers.groups.forwarding import GrpoBatchMaker
from .consumers.buffers.groups.store import GroupReplayBuffer
from .consumers.buffers.groups.view import GroupStore
from .consumers.buffers.rollouts.buffer import ReplayBufferConfig, RolloutReplayBuffer, RolloutWithCount, TrainParams
from .consumers.buffers.rollouts.record import RecordTurn, RolloutRecord, as_record, as_rollout
from .consumers.buffers.rollouts.rows import RLLossModule, RLOOLoss
from .consumers.buffers.slices.buffer import EpisodeSliceBuffer
from .consumers.buffers.slices.human_in_the_loop import HilEpisodeBuffer, open_episode_buffer
from .consumers.buffers.trajectories.buffer import NothingToSample, NotYetOnDisk, TrajectoryReplayBuffer
from .consumers.buffers.trajectories.dataset import MixedDataset
from .consumers.buffers.trajectories.filler import TrajectoryFiller
from .consumers.buffers.trajectories.shelf import TrajectoryCache
from .consumers.grouping.config import GrouperConfig, GroupingConfig
from .consumers.grouping.core.estimators import Estimator, Outcomes
from .consumers.grouping.makers.batch_maker import BatchMaker, FifoBatchMaker, MakerContext, SealedGroup, example_bytes
from .consumers.grouping.makers.reservoir import ReservoirBatchMaker
from .consumers.grouping.testing import GroupingTestDriver, example_rollout
from .consumers.learner.objective import LossRecipe, OptimizerConfig, TokenArrays, TokenLoss
from .consumers.learner.testing import check_loss
from .consumers.models.huggingface import checkpoint_model
from .consumers.trainers.step_writer import StepWriter, publish_version
from .consumers.weights.follower import WeightsFollower
from .consumers.weights.state_manager import LocalStateManager, StateFollower, StateManager
from .pipeline.config import RunConfig
from .producers.environments.chat import Chat, ChatEnvironment, ChatReply, Tool
from .producers.environments.environment import (
    AgentEnvironment,
    Conversation,
    Endpoint,
    Environment,
    Episode,
    Generate,
    Message,
    Prompt,
    Reply,
    Score,
    SingleTurn,
)
from .producers.environments.scripted_policy import ScriptedPolicy
from .producers.environments.verifier_pool import VerifierFailed, VerifierPool
from .producers.rollout_producer import RolloutProducer
from .producers.trajectories.collecting import Seat, TrajectoryProducer
from .producers.trajectories.collector import ChunkStepResult, TrajectoryCollector
from .topics.config import KafkaConfig, TopicsConfig
from .topics.errors import (
    BrokerUnavailable,
    ConfigurationError,
    DeadlineExceeded,
    DeliveryError,
    Fenced,
    RecordError,
    RecordTooLarge,
    RollstreamError,
    StateRefused,
    TopicError,
)
from .topics.files.atomic_files import StoreError
from .topics.records import (
    BatchGroup,
    GroupCancelled,
    InferenceMetadata,
    LearnerStep,
    NamedArray,
    PolicyManifest,
    Rollout,
    RolloutMetadata,
    SamplingParams,
    TrainingBatch,
    Turn,
)
from .topics.wire.codec import decode, encode, schemas, values_of
from .topics.wire.media import image_part, media_arrays, media_of
from .topics.wire.rl_examples import RLExample, Source
from .topics.wire.rollout_batch_upcast import batch_of
from .topics.wire.trajectory_arrays import Trajectory

__all__ = [
    "AgentEnvironment",
    "BatchGroup",
    "BatchMaker",
    "BatchReader",
    "BrokerUnavailable",
    "Chat",
    "ChatEnvironment",
    "ChatReply",
    "ChunkStepResult",
    "ConfigurationError",
    "Conversation",
    "DeadlineExceeded",
    "DeliveryError",
    "Endpoint",
    "Environment",
    "Episode",
    "EpisodeSliceBuffer",
    "Estimator",
    "Fenced",
    "FifoBatchMaker",
    "Generate",
    "GroupCancelled",
    "GroupReplayBuffer",
    "GroupStore",
    "GroupStoreConfig",
    "GrouperConfig",
    "GroupingConfig",
    "GroupingTestDriver",
    "GrpoBatchMaker",
    "HilEpisodeBuffer",
    "InferenceMetadata",
    "KafkaConfig",
    "LearnerStep",
    "LocalStateManager",
    "LossRecipe",
    "MakerContext",
    "Message",
    "MixedDataset",
    "NamedArray",
    "NotYetOnDisk",
    "NothingToSample",
    "OptimizerConfig",
    "Outcomes",
    "PolicyManifest",
    "Prompt",
    "RLExample",
    "RLLossModule",
    "RLOOLoss",
    "ReadBatch",
    "RecordError",
    "RecordTooLarge",
    "RecordTurn",
    "ReplayBufferConfig",
    "Reply",
    "ReservoirBatchMaker",
    "Rollout",
    "RolloutMetadata",
    "RolloutProducer",
    "RolloutRecord",
    "RolloutReplayBuffer",
    "RolloutWithCount",
    "RollstreamError",
    "RunConfig",
    "SamplingParams",
    "Score",
    "ScriptedPolicy",
    "SealedGroup",
    "Seat",
    "SingleTurn",
    "Source",
    "StateFollower",
    "StateManager",
    "StateRefused",
    "StepWriter",
    "StoreError",
    "TokenArrays",
    "TokenLoss",
    "Tool",
    "TopicError",
    "TopicsConfig",
    "TrainParams",
    "TrainingBatch",
    "Trajectory",
    "TrajectoryCache",
    "TrajectoryCollector",
    "TrajectoryFiller",
    "TrajectoryProducer",
    "TrajectoryReplayBuffer",
    "Turn",
    "VerifierFailed",
    "VerifierPool",
    "WeightsFollower",
    "__version__",
    "as_record",
    "as_rollout",
    "batch_of",
    "check_loss",
    "checkpoint_model",
    "decode",
    "encode",
    "example_bytes",
    "example_rollout",
    "image_part",
    "media_arrays",
    "media_of",
    "open_episode_buffer",
    "publish_version",
    "schemas",
    "values_of",
]
