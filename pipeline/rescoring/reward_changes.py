"""Differences between the rewards of a rescoring and those on record, by environment."""

from dataclasses import dataclass, field
from typing import Any

from rollstream.topics.records import RescoredRollout

_NAMED = 1000
"""Largest number of changed rollouts that a report names; `rescores` has all of them."""


@dataclass
class EnvironmentChanges:
    """Rewards of the rollouts of one environment."""

    rescored: int = 0
    changed: int = 0
    failed: int = 0
    """Rollouts that the verifier did not judge: they keep their rewards."""
    total_before: float = 0.0
    total_after: float = 0.0
    """Sums over the rollouts that the verifier judged."""
    largest: float = 0.0
    """Largest difference."""

    def add(self, record: RescoredRollout) -> None:
        self.rescored += 1
        if record.failure:
            self.failed += 1
            return
        self.changed += record.changed
        self.total_before += record.reward_before
        self.total_after += record.reward
        self.largest = max(self.largest, abs(record.reward - record.reward_before))

    def merge(self, other: "EnvironmentChanges") -> None:
        self.rescored += other.rescored
        self.changed += other.changed
        self.failed += other.failed
        self.total_before += other.total_before
        self.total_after += other.total_after
        self.largest = max(self.largest, other.largest)

    def as_dict(self) -> dict[str, float]:
        """Convert to plain values for JSON."""
        judged = max(self.rescored - self.failed, 1)
        return {
            "rescored": self.rescored,
            "changed": self.changed,
            "failed": self.failed,
            "mean_before": self.total_before / judged,
            "mean_after": self.total_after / judged,
            "largest_difference": self.largest,
        }


@dataclass
class RewardChanges:
    """Rewards of all rollouts of a rescoring."""

    environments: dict[str, EnvironmentChanges] = field(default_factory=dict)
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    """The first changed rollouts, each with its place and both rewards."""
    failures: list[dict[str, Any]] = field(default_factory=list)
    """The first rollouts that the verifier did not judge, each with the reason."""

    def add(self, record: RescoredRollout) -> None:
        """Count a record."""
        self.environments.setdefault(record.environment, EnvironmentChanges()).add(record)
        place = {"uid": record.uid, "at": f"{record.partition}:{record.offset}"}
        if record.failure and len(self.failures) < _NAMED:
            self.failures.append({**place, "reason": record.failure})
        if record.changed and len(self.rollouts) < _NAMED:
            self.rollouts.append({**place, "before": record.reward_before, "after": record.reward})

    def merge(self, other: "RewardChanges") -> None:
        """Add the records of another partition."""
        for name, changes in other.environments.items():
            self.environments.setdefault(name, EnvironmentChanges()).merge(changes)
        self.rollouts = (self.rollouts + other.rollouts)[:_NAMED]
        self.failures = (self.failures + other.failures)[:_NAMED]

    @property
    def total(self) -> EnvironmentChanges:
        """Sum over the environments."""
        total = EnvironmentChanges()
        for changes in self.environments.values():
            total.merge(changes)
        return total

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        return {
            **self.total.as_dict(),
            "environments": {name: changes.as_dict() for name, changes in sorted(self.environments.items())},
            "rollouts": self.rollouts,
            "failures": self.failures,
        }
