"""The records on the wire, as frozen dataclasses. The files schemas/*.avsc document their fields.

Arrays are one-dimensional numpy arrays, read-only when decoded. `same` compares records with arrays by content,
because the comparison of numpy arrays has no truth value.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rollstream.topics.arrays import dtype_name, dtype_of, little_endian_bytes, shape_problem
from rollstream.topics.errors import RecordError

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Bool = NDArray[np.bool_]


def _empty(dtype: str) -> Any:
    array = np.empty(0, dtype)
    array.flags.writeable = False
    return array


NO_FLOATS: Float32 = _empty("<f4")
NO_OFFSETS: Int64 = _empty("<i8")
NO_TIMES: Float64 = _empty("<f8")


@dataclass(frozen=True, kw_only=True)
class RolloutMetadata:
    """Origin of a rollout: worker, server and time."""

    worker_id: str = ""
    replica_id: str = "unknown"
    timestamp: float = 0.0
    weight_step: int = -1


@dataclass(frozen=True, kw_only=True)
class NamedArray:
    """An array of any dtype and shape that travels with a rollout."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: NDArray[Any]) -> "NamedArray":
        """Wrap an array; its bytes become little-endian and C-contiguous. Raises RecordError for objects."""
        return cls(dtype=dtype_name(array.dtype), shape=array.shape, data=little_endian_bytes(array))

    def array(self) -> NDArray[Any]:
        """Return the array as a read-only view.

        Raises RecordError if bytes, dtype and shape do not agree, or if the array exceeds the limits of
        rollstream.topics.arrays.
        """
        dtype = dtype_of(self.dtype)
        if problem := shape_problem(self.shape, dtype.itemsize, len(self.data)):
            size = f"{str(self.shape)[:200]} and {self.dtype[:64]} stands in {len(self.data)} bytes"
            raise RecordError(f"an array of shape {size}: {problem}")
        return np.frombuffer(self.data, dtype).reshape(self.shape)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters by which tokens were sampled from the policy's distribution."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def filtered(self) -> bool:
        """Whether some tokens were removed from the distribution, so that logprobs are unfit for importance ratios."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@dataclass(frozen=True, kw_only=True)
class InferenceMetadata:
    """Data of an inference server about a completion."""

    model_version: int = -1
    sampling_params: Mapping[str, str] = field(default_factory=dict)
    inference_time_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One message of an episode and the span of tokens it covers."""

    role: str
    text: str
    start: int = 0
    stop: int = 0
    reward: float = 0.0
    has_logprobs: bool = False
    timestamp: float = 0.0
    inference: InferenceMetadata = field(default_factory=InferenceMetadata)


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """One sampled sequence with its reward; tokens, loss_mask and logprobs have shape [T]."""

    uid: str
    group_size: int
    environment: str
    example_id: str
    policy_version: int
    tokens: Int32
    loss_mask: Bool
    logprobs: Float32
    reward: float
    group_id: str = ""
    lowest_version: int
    highest_version: int
    episode_uid: str = ""
    branch: int = 0
    branches: int = 1
    turns: tuple[Turn, ...] = ()
    logprobs_mode: Literal["raw", "processed"] = "processed"
    sampling: SamplingParams = field(default_factory=SamplingParams)
    token_rewards: Float32 = field(default_factory=lambda: NO_FLOATS)
    reward_components: Mapping[str, float] = field(default_factory=dict)
    truncated: bool = False
    metadata: RolloutMetadata = field(default_factory=RolloutMetadata)
    token_arrays: Mapping[str, NamedArray] = field(default_factory=dict)
    extra: Mapping[str, str] = field(default_factory=dict)

    @property
    def prompt_length(self) -> int:
        """Tokens before the first one the policy sampled."""
        return int(np.argmax(self.loss_mask)) if self.loss_mask.any() else len(self.tokens)

    @property
    def prompt_tokens(self) -> Int32:
        """View of the tokens before the first sampled one."""
        return self.tokens[: self.prompt_length]

    @property
    def response_tokens(self) -> Int32:
        """View of the tokens from the first sampled one on (later turns' prompts included)."""
        return self.tokens[self.prompt_length :]

    @property
    def response_logprobs(self) -> Float32:
        """View of logprobs over response_tokens, 0 where the policy did not sample the token."""
        return self.logprobs[self.prompt_length :]


@dataclass(frozen=True, kw_only=True)
class GroupCancelled:
    """Members of a group that will never come because of an infrastructure fault."""

    environment: str
    example_id: str
    policy_version: int
    group_size: int
    uids: tuple[str, ...]
    group_id: str = ""
    reason: str = ""
    metadata: RolloutMetadata = field(default_factory=RolloutMetadata)


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A message of a grouping task to itself on its own partition."""

    kind: Literal["deadline", "policy_version", "drain", "configuration"]
    policy_version: int = -1
    generation: int = -1
    configuration: str = ""
    wall_time: float = 0.0
    author: str = ""


@dataclass(frozen=True, kw_only=True)
class BatchGroup:
    """A sealed group, as its batch describes it."""

    environment: str
    example_id: str
    policy_version: int
    group_id: str
    size: int
    opened_ms: int
    sealed_ms: int


@dataclass(frozen=True, kw_only=True, eq=False)
class BatchTokenArray:
    """A named array over the tokens of those rows of a batch that carry it."""

    name: str
    array: NamedArray
    rows: Int32


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingBatch:
    """Whole groups of rollouts; R rows, N tokens. The schema gives the shape of each array."""

    batch_id: str
    partition: int
    number: int
    core_version: int
    generation: int
    cut: Literal["size", "age", "drain"]
    cut_ms: int
    groups: tuple[BatchGroup, ...]
    group_index: Int32
    source_offsets: Int64
    uids: tuple[str, ...]
    splits: Int64
    tokens: Int32
    loss_mask: Bool
    logprobs: Float32
    advantages: Float32
    rewards: Float64
    truncated: Bool
    lowest_versions: Int64
    highest_versions: Int64
    temperatures: Float64
    logprobs_processed: Bool
    reference_logprobs: Float32 = field(default_factory=lambda: NO_FLOATS)
    weight_steps: Int64 = field(default_factory=lambda: NO_OFFSETS)
    timestamps: Float64 = field(default_factory=lambda: NO_TIMES)
    token_arrays: tuple[BatchTokenArray, ...] = ()
    metadata: str = "{}"
    digest: str = ""

    def __len__(self) -> int:
        return len(self.uids)


@dataclass(frozen=True, kw_only=True)
class BatchIndexEntry:
    """Place of a committed batch in `batches`."""

    batch_id: str
    partition: int
    offset: int
    rollouts: int
    tokens: int
    trained_tokens: int
    lowest_version: int
    highest_version: int
    size_bytes: int
    digest: str

    @classmethod
    def of(cls, batch: TrainingBatch, offset: int) -> "BatchIndexEntry":
        """Return the index entry of a batch that lies at `offset` of its partition of `batches`."""
        return cls(
            batch_id=batch.batch_id,
            partition=batch.partition,
            offset=offset,
            rollouts=len(batch),
            tokens=len(batch.tokens),
            trained_tokens=int(batch.loss_mask.sum()),
            lowest_version=int(batch.lowest_versions.min()),
            highest_version=int(batch.highest_versions.max()),
            size_bytes=sum(array.nbytes for array in (batch.tokens, batch.loss_mask, batch.logprobs, batch.advantages)),
            digest=batch.digest,
        )


@dataclass(frozen=True, kw_only=True)
class Drop:
    """A record dropped before training, and the reason."""

    offset: int
    reason: str
    detail: str = ""
    uid: str = ""
    environment: str = ""
    policy_version: int = -1
    lowest_version: int = -1
    age_ms: int = 0
    tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class FinishedGroup:
    """A group whose records all have their fate."""

    environment: str
    example_id: str
    policy_version: int
    group_id: str
    sealed_ms: int
    finished_ms: int


@dataclass(frozen=True, kw_only=True, eq=False)
class FinishedOffsets:
    """Offsets that reached one fate, as runs."""

    fate: str
    runs: Int64


@dataclass(frozen=True, kw_only=True)
class FateCount:
    """Number of rollouts of an environment with one fate, and sums over them."""

    environment: str
    fate: str
    rollouts: int
    tokens: int
    measured: int = 0
    sampled_tokens: int = 0
    sampled_tokens_squared: float = 0.0
    reward: float = 0.0
    reward_squared: float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class JournalRecord:
    """Changes made by one transaction of one grouping task."""

    partition: int
    sequence: int
    core_version: int
    topic_id: str
    partitions: int
    begin: int
    position: int
    watermark: int
    watermark_stream_time_ms: int
    watermark_policy_version: int
    watermark_generation: int
    watermark_configuration: str
    stream_time_ms: int
    policy_version: int
    generation: int
    batch_number: int
    remembered_since_ms: int = -1
    admitted: Int64 = field(default_factory=lambda: NO_OFFSETS)
    finished: tuple[FinishedOffsets, ...] = ()
    drops: tuple[Drop, ...] = ()
    finished_groups: tuple[FinishedGroup, ...] = ()
    batch_ids: tuple[str, ...] = ()
    counts: tuple[FateCount, ...] = ()
    produced: tuple[FateCount, ...] = ()
    snapshot: bool = False
    unfinished: Int64 = field(default_factory=lambda: NO_OFFSETS)
    delivered: Int64 = field(default_factory=lambda: NO_OFFSETS)
    part: int = 0
    parts: int = 1
    skipped: tuple[int, ...] = ()
    leader_epoch: int = -1
    hopped: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BatchUse:
    """Use of a batch by a step."""

    batch_id: str
    index_offset: int
    rows: int
    use: Literal["trained", "skipped"]
    reason: str = ""
    row_numbers: tuple[int, ...] = ()
    again: bool = False
    code: str = ""


@dataclass(frozen=True, kw_only=True)
class LearnerStep:
    """One optimizer step: its batches, metrics and parameters' digest."""

    learner: str
    step: int
    input_run: str
    uses: tuple[BatchUse, ...]
    position: int
    policy_version: int
    params_digest: str
    trained_total: int
    skipped_total: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    timestamp: float = 0.0
    oldest: int = -1
    stream_time_ms: int = -1
    resumes_at: int = -1


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One tensor of a policy version and the place of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size_bytes: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One chunk of a policy version's bytes and its place in `weights`."""

    index: int
    partition: int
    offset: int
    size_bytes: int
    digest: str


@dataclass(frozen=True, kw_only=True)
class PolicyManifest:
    """The commit point of a policy version."""

    version: int
    learner: str
    step: int
    epoch: str
    tensors: tuple[Tensor, ...]
    chunks: tuple[Chunk, ...]
    digest: str
    kind: Literal["full", "delta", "external"] = "full"
    base: int = -1
    model: str = "{}"
    created: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Metrics of one component at one time."""

    component: str
    timestamp: float
    step: int = -1
    values: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ExcludedBatch:
    """A batch that learners leave out from the time of this record."""

    batch_id: str
    reason: str
    generation: int
    wall_time: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SkippedOffset:
    """Consecutive records of `rollouts`, from `offset` on, that grouping must leave out unread."""

    partition: int
    offset: int
    reason: str
    wall_time: float = 0.0
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class RetiredLearner:
    """A learner that has stopped for good; nothing is kept for it."""

    learner: str
    reason: str = ""
    wall_time: float = 0.0


@dataclass(frozen=True, kw_only=True)
class EnvironmentState:
    """State of a worker in one environment."""

    environment: str
    drawn: int = 0
    """Prompts that the worker has taken from its order."""
    successes: float = 0.0
    """Sum of the successes of its groups, each from 0 to 1; older ones faded."""
    trials: float = 0.0
    """Number of these groups, faded in the same way."""
    unlocked: bool = True
    """Whether the curriculum lets the environment be played."""


@dataclass(frozen=True, kw_only=True)
class MixtureState:
    """State of a worker's mixture, for its next process and for the other workers."""

    worker_id: str
    environments: tuple[EnvironmentState, ...]
    wall_time: float = 0.0


@dataclass(frozen=True, kw_only=True)
class EpisodeSpan:
    """Rows `start` to `stop` of column `column` of a trajectory, all of one episode."""

    uid: str
    column: int
    start: int
    stop: int
    control_mode: int = 0
    """Actor: 0 the policy, 1 a human in the loop."""
    first: bool = True
    """Whether the episode begins in this span; otherwise an earlier trajectory holds its beginning."""
    last: bool = True
    """Whether the episode ends in this span, terminated or truncated; otherwise a later trajectory continues it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrajectoryRecord:
    """Arrays of a control task, by path; `rollstream.topics.trajectories` nests them."""

    uid: str
    environment: str
    arrays: Mapping[str, NamedArray]
    policy_version: int = -1
    model_weights_id: str = ""
    max_episode_length: int = 0
    episodes: tuple[EpisodeSpan, ...] = ()
    metadata: RolloutMetadata = field(default_factory=RolloutMetadata)
    extra: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AnswerSpan:
    """Tokens `start` to `stop` of an answer, sampled by one version of the weights."""

    label: str
    version: int = -1
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, eq=False)
class CallAnswer:
    """One sampled answer of a model call; tokens and logprobs have shape [N]."""

    tokens: Int32
    logprobs: Float32
    spans: tuple[AnswerSpan, ...] = ()
    text: str = ""
    finish_reason: str = "stop"


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelCall:
    """One model call of a session; its prompt is the parent's first `shared` tokens and `prompt`."""

    session: str
    uid: str
    request: str
    prompt: Int32
    prompt_digest: str
    answers: tuple[CallAnswer, ...]
    number: int = 0
    repetition: int = 0
    route: str = "chat/completions"
    parent: str = ""
    parent_answer: int = 0
    shared: int = 0
    messages_shared: int = 0
    messages: str = "[]"
    body: str = "{}"
    sampling: Mapping[str, str] = field(default_factory=dict)
    replica_id: str = "unknown"
    author: str = ""
    began: float = 0.0
    answered: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SessionEvent:
    """One change of a session other than a model call."""

    session: str
    kind: Literal["start", "truncated", "reward", "failed", "end", "mark", "finishing", "finished"]
    author: str = ""
    wall_time: float = 0.0
    request: str = ""
    owner: Literal["gateway", "worker"] = "gateway"
    environment: str = ""
    example_id: str = ""
    group_id: str = ""
    group_size: int = 1
    member: int = 0
    policy_version: int = -1
    idle_timeout_ms: int = -1
    reward_timeout_ms: int = -1
    scored: bool = False
    reward: float = 0.0
    components: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    rollouts_end: int = -1
    uids: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OldMetadata:
    """Origin of a RolloutBatch or of one of its rollouts."""

    worker_id: str = ""
    timestamp: float = 0.0
    weight_step: int = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class OldRollout:
    """A rollout of the old form: prompt [P], response [N]."""

    env_name: str
    env_example_id: str
    prompt_tokens: Int32
    response_tokens: Int32
    response_logprobs: Float32
    token_rewards: Float32
    episode_reward: float
    metadata: tuple[OldMetadata, ...] = ()
    """Its own metadata: one entry or none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OldGroup:
    """The rollouts of one prompt, in a RolloutBatch."""

    rollouts: tuple[OldRollout, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class RolloutBatch:
    """Groups of rollouts with the metadata on the batch: the old form; topics/rollout_batch_upcast.py converts it."""

    groups: tuple[OldGroup, ...]
    metadata: tuple[OldMetadata, ...] = ()
    """One entry or none."""


def batch_numbers(batch_id: str) -> tuple[int, int]:
    """Return the partition and number in a batch id. Raises RecordError if the id has another form."""
    partition, _, number = batch_id.partition("-")
    if not (partition.isdecimal() and number.isdecimal()):
        raise RecordError(f"batch id {batch_id[:100]!r} is not a partition and a number, such as 0-17")
    return int(partition), int(number)


def same(a: object, b: object) -> bool:
    """Return whether two records, or values within them, are equal: dtype, shape and bits of arrays included."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)):
            return False
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if is_dataclass(a) and not isinstance(a, type):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    return a == b
