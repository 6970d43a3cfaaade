"""Findings of an audit, and the batches it looks at; shared by the parts of the auditor."""

from collections import Counter
from dataclasses import dataclass, field

from tests.faults.evidence import Decoded, Raw


@dataclass
class Audit:
    """Result of an audit. `findings` is empty for a run that kept its promises."""

    findings: list[str] = field(default_factory=list)
    produced: int = 0
    batches: int = 0
    places: Counter[str] = field(default_factory=Counter)
    """Offsets of rollouts by where they are: batched, dropped:<reason>, dead letter, control, in flight, unread."""
    refolded: list[int] = field(default_factory=list)
    """Partitions whose batches and drops were compared with the model's."""
    not_modelled: dict[int, str] = field(default_factory=dict)
    """Partitions that were not, and why."""

    def found(self, promise: str, text: str) -> None:
        """Note a broken promise."""
        self.findings.append(f"{promise}: {text}")


@dataclass
class Batch:
    raw: Raw
    record: Decoded

    @property
    def name(self) -> str:
        return str(self.record["batch_id"])

    @property
    def offsets(self) -> list[int]:
        return list(map(int, self.record["source_offsets"]))
