"""The ledger as a value: the place of every record of a run, and the problems found."""

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from rollstream.consumers.grouping.selection_bias import Selection
from rollstream.pipeline.audit.record_counts import RecordCounts
from rollstream.topics.kafka.skipped_records import SkippedRecords

_MOST_NAMED = 20


@dataclass
class Ledger(RecordCounts):
    """Place of every record of a run."""

    skipped_as: dict[str, int] = field(default_factory=dict)
    """Rollouts that learners skipped, by the code of the reason."""
    steps: int = 0
    evals: int = 0
    """Rollouts made for evaluation."""
    evals_batched: int = 0
    """Evaluation rollouts in batches, each of which is a problem."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """Each evaluation: environment, split, phase, requested version, versions that answered, rollouts and means."""
    pruned: int = 0
    """Number of records that are known only from the journal's counts, because they or their journal were deleted."""
    learners: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Each learner on record: its newest step, number of steps, rollouts trained, rollouts skipped (in total and by
    code), its position in the index, and the number of batches after it; `input_run` if it trains on another run's
    batches."""
    unlabelled: dict[str, int] = field(default_factory=dict)
    """Trajectories and rollouts that waited for a label, by fate: labeled, left_out, dead_lettered, pending, undecided;
    `pruned` is the number of these that are known only from counts."""
    trajectories: dict[str, Any] = field(default_factory=dict)
    """Number of trajectories and of offsets pruned before them; for each filler, its positions and waiting records."""
    calls: dict[str, Any] = field(default_factory=dict)
    """Model calls recorded, by fate: in_rollouts, open, dropped as cancelled, retried, late or no_session, or pruned
    (the start of the session is no longer on the log); sessions, and the reasons of cancelled sessions. Empty for a run
    without the topic `calls`."""
    environments: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Rollouts and tokens read, by environment and fate; the environment is empty for records without one."""
    selection: dict[str, Selection] = field(default_factory=dict)
    """Lengths and rewards by environment, of batched rollouts and of lost rollouts."""
    configurations: list[dict[str, Any]] = field(default_factory=list)
    """Grouping configurations, oldest first: generation, by partition the offset from which it was in force, the
    partitions in which it is in force now, and the settings that it changed (old and new value; None until known)."""
    records_skipped: int = 0
    """Records of any topic that could not be read; no other count includes them."""
    unreadable: list[str] = field(default_factory=list)
    """The first twenty unreadable records, each with its place and the error."""
    undecided: list[str] = field(default_factory=list)
    """The first twenty records that an open transaction hides: neither present nor lost until it ends."""
    problems: list[str] = field(default_factory=list)
    """The first twenty contradictions."""

    @property
    def balanced(self) -> bool:
        """Whether every record is in exactly one place, and no two places contradict each other."""
        fates = ("labeled", "left_out", "dead_lettered", "pending", "undecided")
        waited = sum(self.unlabelled.get(fate, 0) for fate in fates)
        whole = self.produced == self.placed and waited == self.unlabelled.get("produced", 0)
        captured = ("in_rollouts", "open", "cancelled", "retried", "late", "no_session", "pruned")
        whole = whole and self.calls.get("recorded", 0) == sum(self.calls.get(fate, 0) for fate in captured)
        return not self.problems and whole

    def as_dict(self) -> dict[str, Any]:
        """Return the ledger as plain values for JSON."""
        counts: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("skipped_as", "dropped"):
            counts[name] = dict(sorted(counts[name].items()))
        counts["selection"] = {environment: selection.as_dict() for environment, selection in self.selection.items()}
        return {"balanced": self.balanced, "tokens": self.tokens, **counts}

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens of all records read, by fate; unread records are not counted."""
        tokens: Counter[str] = Counter()
        for counts in self.environments.values():
            tokens.update(counts["tokens"])
        return dict(tokens)

    def problem(self, text: str) -> None:
        """Note a contradiction."""
        if len(self.problems) < _MOST_NAMED:
            self.problems.append(text)

    def undecide(self, what: str, places: str) -> None:
        """Note records hidden by a transaction that is open at `places`."""
        if len(self.undecided) < _MOST_NAMED:
            self.undecided.append(f"{what}: a transaction is open on {places}")

    def note_skipped(self, skipped: SkippedRecords) -> None:
        """Add the records that a reader skipped."""
        self.records_skipped += skipped.total
        # Sorted, because partitions are read in any order.
        self.unreadable += map(str, sorted(skipped.first)[: _MOST_NAMED - len(self.unreadable)])
