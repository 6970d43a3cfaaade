"""Records of `steps`: learner steps, and their uses of batches."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


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
