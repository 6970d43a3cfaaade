"""The records on the wire, as frozen dataclasses. The files schemas/*.avsc document their fields.

Arrays are one-dimensional numpy arrays, read-only when decoded. `same` compares records with arrays by content.
"""

from rollstream.topics.records.arrays import (
    NO_FLOATS,
    NO_OFFSETS,
    NO_TIMES,
    Bool,
    Float32,
    Float64,
    Int32,
    Int64,
    NamedArray,
)
from rollstream.topics.records.batches import BatchGroup, BatchIndexEntry, BatchTokenArray, TrainingBatch, batch_numbers
from rollstream.topics.records.control import (
    DesiredProcesses,
    DrainRequest,
    EnvironmentState,
    EvaluationRequest,
    ExcludedBatch,
    ForkedLearner,
    Metrics,
    MixtureState,
    MixtureWeight,
    PausedEnvironment,
    PausedPartition,
    RequestAnswer,
    RetiredLearner,
    RunSupervisor,
    SkippedOffset,
    StopRequest,
)
from rollstream.topics.records.equality import same
from rollstream.topics.records.journal import Drop, FateCount, FinishedGroup, FinishedOffsets, JournalRecord, RateLevel
from rollstream.topics.records.policies import Chunk, PolicyManifest, Tensor
from rollstream.topics.records.rescores import RescoredRollout
from rollstream.topics.records.rollout_batches import OldGroup, OldMetadata, OldRollout, RolloutBatch
from rollstream.topics.records.rollouts import (
    GroupCancelled,
    InferenceMetadata,
    Mark,
    Rollout,
    RolloutMetadata,
    SamplingParams,
    Turn,
)
from rollstream.topics.records.samples import SampleField, SamplesCleared
from rollstream.topics.records.sessions import AnswerSpan, CallAnswer, ModelCall, SessionEvent
from rollstream.topics.records.steps import BatchUse, LearnerStep
from rollstream.topics.records.trajectories import EpisodeSpan, TrajectoryRecord

__all__ = [
    "NO_FLOATS",
    "NO_OFFSETS",
    "NO_TIMES",
    "AnswerSpan",
    "BatchGroup",
    "BatchIndexEntry",
    "BatchTokenArray",
    "BatchUse",
    "Bool",
    "CallAnswer",
    "Chunk",
    "DesiredProcesses",
    "DrainRequest",
    "Drop",
    "EnvironmentState",
    "EpisodeSpan",
    "EvaluationRequest",
    "ExcludedBatch",
    "FateCount",
    "FinishedGroup",
    "FinishedOffsets",
    "Float32",
    "Float64",
    "ForkedLearner",
    "GroupCancelled",
    "InferenceMetadata",
    "Int32",
    "Int64",
    "JournalRecord",
    "LearnerStep",
    "Mark",
    "Metrics",
    "MixtureState",
    "MixtureWeight",
    "ModelCall",
    "NamedArray",
    "OldGroup",
    "OldMetadata",
    "OldRollout",
    "PausedEnvironment",
    "PausedPartition",
    "PolicyManifest",
    "RateLevel",
    "RequestAnswer",
    "RescoredRollout",
    "RetiredLearner",
    "Rollout",
    "RolloutBatch",
    "RolloutMetadata",
    "RunSupervisor",
    "SampleField",
    "SamplesCleared",
    "SamplingParams",
    "SessionEvent",
    "SkippedOffset",
    "StopRequest",
    "Tensor",
    "TrainingBatch",
    "TrajectoryRecord",
    "Turn",
    "batch_numbers",
    "same",
]
