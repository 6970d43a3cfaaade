"""Records of `batches` and `batch-index`: training batches, and their places."""

from dataclasses import dataclass, field
from typing import Literal

from rollstream.topics.decimal_numbers import decimal_number
from rollstream.topics.errors import RecordError
from rollstream.topics.records.arrays import (
    NO_FLOATS,
    Bool,
    Float32,
    Float64,
    Int32,
    Int64,
    NamedArray,
)


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
    """A named array over the tokens of the rows of a batch that carry the array."""

    name: str
    array: NamedArray
    rows: Int32


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingBatch:
    """Rollouts of sealed groups, as a batch maker put them together; R rows, N tokens. The default maker delivers whole
    groups. The schema gives the shape of each array."""

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
    weight_steps: Int64
    timestamps: Float64
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


def batch_numbers(batch_id: str) -> tuple[int, int]:
    """Return the partition and number in a batch id. Raises RecordError if the id has another form."""
    first, _, second = batch_id.partition("-")
    partition, number = decimal_number(first), decimal_number(second)
    if partition is None or number is None:
        raise RecordError(f"batch id {batch_id[:100]!r} is not a partition and a number, such as 0-17")
    return partition, number
