"""Records of `journal`: what each transaction of a grouping task changed."""

from dataclasses import dataclass, field

from rollstream.topics.records.arrays import NO_OFFSETS, Int64


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
    """A group whose records all have a fate."""

    environment: str
    example_id: str
    policy_version: int
    group_id: str
    sealed_ms: int
    """Stream time since which the group superseded older versions of its example, -1 if it never did: the time at which
    it was offered for batches."""
    finished_ms: int


@dataclass(frozen=True, kw_only=True, eq=False)
class FinishedOffsets:
    """Offsets that reached one fate, as ranges."""

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


@dataclass(frozen=True, kw_only=True)
class RateLevel:
    """Remainder of the rates of an environment, in thousandths of a rollout and of a byte."""

    environment: str
    rollouts: int
    bytes: int
    at_ms: int


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
    rates: tuple[RateLevel, ...] = ()
