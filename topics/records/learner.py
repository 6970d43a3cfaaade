"""Records of a learner: `steps`, with their uses of batches, and `policies`, the manifests of policy versions."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from rollstream.topics.records.fates import ROW_CODES


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
    """One learner step: the uses of its batches, its metrics, and the digest of the parameters after it."""

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
    resumes_at: int = 0
    code: Mapping[str, str] = field(default_factory=dict)

    @property
    def made(self) -> bool:
        """Whether the step was made; if not, the record only names batches that a waiting step skipped so far."""
        return bool(self.params_digest) or any(use.use == "trained" for use in self.uses)


def rows_of(uses: Sequence[BatchUse], use: str) -> int:
    """Number of rollouts with one kind of use; rollouts that had been trained on before are not counted."""
    return sum(item.rows for item in uses if item.use == use and not item.again)


def names_of(uses: Sequence[BatchUse]) -> str:
    """Return the batch id and the kind of each use as text."""
    return ", ".join(f"{use.batch_id} {use.use}" for use in uses) or "none"


def reused_share(uses: Sequence[BatchUse]) -> float:
    """Share of the rollouts of a step that had been trained on before."""
    trained = [use for use in uses if use.use == "trained"]
    return sum(use.rows for use in trained if use.again) / max(sum(use.rows for use in trained), 1)


def is_left_out(use: BatchUse) -> bool:
    """Whether a use lists single rows that could not be trained on, in a batch that was otherwise used."""
    return use.use == "skipped" and use.code in ROW_CODES


def left_out_rows(uses: Sequence[BatchUse]) -> Counter[str]:
    """Number of rows that could not be trained on, by code."""
    counts: Counter[str] = Counter()
    for use in uses:
        if is_left_out(use):
            counts[use.code] += use.rows
    return counts


def trained_rows(uses: Sequence[BatchUse]) -> dict[int, tuple[int, ...]]:
    """Rows that a step trains on, by the index offset of their batch; offsets and rows ascend."""
    rows: dict[int, list[int]] = {}
    for use in uses:
        if use.use == "trained":
            rows.setdefault(use.index_offset, []).extend(use.row_numbers or range(use.rows))
    return {offset: tuple(sorted(rows[offset])) for offset in sorted(rows)}


def taken_rows(uses: Sequence[BatchUse]) -> dict[int, tuple[int, ...]]:
    """Return `trained_rows`, with an empty entry for each batch of the step whose rows were all left out."""
    return {use.index_offset: () for use in uses if is_left_out(use)} | trained_rows(uses)


def without(uses: Sequence[BatchUse], left_out: Sequence[BatchUse]) -> tuple[BatchUse, ...]:
    """Split uses of whole batches: for each batch, first the rows that are trained on, then the rows left out."""
    by_batch: dict[int, list[BatchUse]] = {}
    for use in left_out:
        by_batch.setdefault(use.index_offset, []).append(use)
    remaining: list[BatchUse] = []
    for use in uses:
        skipped = sorted(by_batch.get(use.index_offset, ()), key=lambda left: left.reason)
        gone = {number for left in skipped for number in left.row_numbers or range(left.rows)}
        kept = tuple(number for number in range(use.rows) if number not in gone)
        if not skipped or kept:
            remaining.append(replace(use, rows=len(kept), row_numbers=kept) if skipped else use)
        remaining += skipped
    return tuple(remaining)


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One tensor of a policy version and the place of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size_bytes: int
    digest: str
    changed: int = -1


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One chunk of a policy version's bytes and its place in `weights`, or the file that holds it."""

    index: int
    partition: int
    offset: int
    size_bytes: int
    digest: str
    codec: str = ""
    content_bytes: int = -1
    url: str = ""


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
    params_digest: str = ""
    dtype: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TokenizerPart:
    """One of the records that hold a tokenizer: texts of some of its tokens, or a piece of one of its files."""

    digest: str
    part: int
    parts: int
    first_id: int = 0
    texts: tuple[str, ...] = ()
    file: str = ""
    data: bytes = b""
