"""The ledger as a value: where every record of a run is, and what does not add up."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from consumers.grouping.selection import Selection
from topics.skipped import SkippedRecords

_MOST_NAMED = 20
PATIENCE_S = 3.0
"""How long what a committed transaction wrote may take to show: it does not on all partitions at once."""


@dataclass
class Ledger:
    """Where every record of a run is."""

    produced: int = 0
    """Records of rollouts."""
    rollouts: int = 0
    """Rollouts among them."""
    batched: int = 0
    batches: int = 0
    trained: int = 0
    skipped: int = 0
    skipped_as: dict[str, int] = field(default_factory=dict)
    """What learners skipped, by the code of the reason."""
    steps: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    dead_lettered: int = 0
    control: int = 0
    in_flight: int = 0
    unread: int = 0
    evals: int = 0
    """Rollouts made for evaluation."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """Each evaluation: environment, split, phase, version asked for and those that answered, rollouts and means."""
    evals_batched: int = 0
    """Rollouts of batches that are made for evaluation: each is a problem."""
    pruned: int = 0
    """Of all these, records known by the journal's counts alone, as they or the journal's beginning were deleted."""
    environments: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Rollouts and tokens read, by environment and fate; empty where a record named no environment."""
    selection: dict[str, Selection] = field(default_factory=dict)
    """Lengths and rewards by environment, of what was batched and of what was not."""
    learners: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Each learner on record: its newest step, how many it made, rollouts trained and skipped and as what, its position
    in the index, and the batches that wait for it there; `input_run` where it trains on another run's."""
    unlabelled: dict[str, int] = field(default_factory=dict)
    """Trajectories that waited for a label, by fate: labelled, left_out, dead_lettered, pending, undecided; `pruned` of
    them are known by counts alone."""
    trajectories: dict[str, Any] = field(default_factory=dict)
    """Trajectories there are, offsets pruned before them, and for each filler its positions and what waits for it."""
    records_skipped: int = 0
    """Records that could not be read and count for nothing, of whatever topic."""
    unreadable: list[str] = field(default_factory=list)
    """The first twenty of them, each with its place and what is wrong with it."""
    undecided: list[str] = field(default_factory=list)
    """What a transaction that stands open hides: it is neither there nor lost until that ends. The first twenty."""
    problems: list[str] = field(default_factory=list)
    """What does not add up; the first twenty."""

    @property
    def balanced(self) -> bool:
        """Whether every record is in exactly one place and every place agrees with the others."""
        placed = self.batched + sum(self.dropped.values()) + self.dead_lettered + self.control
        fates = ("labelled", "left_out", "dead_lettered", "pending", "undecided")
        waited = sum(self.unlabelled.get(fate, 0) for fate in fates)
        whole = self.produced == placed + self.in_flight + self.unread and waited == self.unlabelled.get("produced", 0)
        return not self.problems and whole

    def as_dict(self) -> dict[str, Any]:
        """The ledger as programs read it."""
        return {
            "balanced": self.balanced,
            "produced": self.produced,
            "rollouts": self.rollouts,
            "batched": self.batched,
            "batches": self.batches,
            "trained": self.trained,
            "skipped": self.skipped,
            "skipped_as": dict(sorted(self.skipped_as.items())),
            "steps": self.steps,
            "dropped": dict(sorted(self.dropped.items())),
            "dead_lettered": self.dead_lettered,
            "control": self.control,
            "in_flight": self.in_flight,
            "unread": self.unread,
            "evals": self.evals,
            "evals_batched": self.evals_batched,
            "evaluations": self.evaluations,
            "pruned": self.pruned,
            "learners": self.learners,
            "unlabelled": self.unlabelled,
            "trajectories": self.trajectories,
            "tokens": self.tokens,
            "environments": self.environments,
            "selection": {environment: found.as_dict() for environment, found in self.selection.items()},
            "records_skipped": self.records_skipped,
            "unreadable": self.unreadable,
            "undecided": self.undecided,
            "problems": self.problems,
        }

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens of all that was read, by fate; what is unread is not counted."""
        found: Counter[str] = Counter()
        for figures in self.environments.values():
            found.update(figures["tokens"])
        return dict(found)

    def problem(self, text: str) -> None:
        """Note something that does not add up."""
        if len(self.problems) < _MOST_NAMED:
            self.problems.append(text)

    def undecide(self, what: str, places: str) -> None:
        """Note something that a transaction hides, which stands open at `places`."""
        if len(self.undecided) < _MOST_NAMED:
            self.undecided.append(f"{what}: a transaction stands open on {places}")

    def note_skipped(self, skipped: SkippedRecords) -> None:
        """Take in what a reader passed over."""
        self.records_skipped += skipped.total
        self.unreadable += map(str, skipped.first[: _MOST_NAMED - len(self.unreadable)])
