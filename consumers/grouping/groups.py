"""A group while it is collected: its members, cancellations and the count that says it is complete.

Counts episodes, not rollouts: the branches of one episode complete together, and are cancelled together.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

from topics.examples import REFERENCE, Source
from topics.records import NO_FLOATS, Rollout, RolloutMetadata


class GroupKey(NamedTuple):
    """What makes rollouts comparable."""

    environment: str
    example_id: str
    policy_version: int
    group_id: str

    def __str__(self) -> str:
        suffix = f"/{self.group_id}" if self.group_id else ""
        return f"{self.environment}/{self.example_id}@{self.policy_version}{suffix}"


class Stage(Enum):
    """How far a group has come."""

    OPEN = 0
    """It collects members."""
    WAITING = 1
    """It is sealed, of a version ahead of the policy clock."""
    OFFERED = 2
    """It is sealed, and with the batch maker."""
    OVER = 3
    """Every one of its records has its fate."""


class Member(NamedTuple):
    """A rollout that joined a group."""

    source: Source
    rollout: Rollout
    """What is left of it: see `kept`."""
    size_bytes: int
    """What it counts for in grouping.capacity_bytes."""
    append_ms: int
    """Stream time when it was read."""


class Worth(NamedTuple):
    """What a member of a sealed group is worth."""

    advantage: float
    """Advantage of its episode, in float64, before any stage over a batch."""
    branches: int
    """Declared branches of the episode, which share it."""

    @property
    def share(self) -> float:
        """Advantage of the member."""
        return self.advantage / self.branches


def kept(rollout: Rollout) -> Rollout:
    """A rollout without what neither its fate nor its batch depends on: turns, rewards of tokens and components, arrays
    but the reference log-probabilities, free-form metadata. Some of it costs fifty times its bytes in the log.
    """
    arrays = rollout.token_arrays
    fields = {
        **vars(rollout),
        "turns": (),
        "token_rewards": NO_FLOATS,
        "reward_components": _NOTHING,
        "metadata": RolloutMetadata(worker_id=rollout.metadata.worker_id),
        "token_arrays": {REFERENCE: arrays[REFERENCE]} if REFERENCE in arrays else _NOTHING,
        "extra": _NOTHING,
    }
    # Of a frozen dataclass __init__ costs more than all else that happens to a record.
    left: Rollout = object.__new__(Rollout)
    object.__setattr__(left, "__dict__", fields)
    return left


_NOTHING: Mapping[str, Any] = MappingProxyType({})


def episode_of(rollout: Rollout) -> str:
    """The episode a rollout counts for: itself, unless it is one of several branches."""
    return rollout.episode_uid if rollout.branches > 1 else rollout.uid


class _Episode(NamedTuple):
    branches: int
    come: dict[int, str]
    """Uids of the branches that came, by branch."""

    @property
    def complete(self) -> bool:
        return len(self.come) == self.branches


@dataclass(eq=False, slots=True)
class Group:
    """One group from its first record to its end."""

    key: GroupKey
    opened_offset: int
    opened_ms: int
    declared_size: int
    stage: Stage = Stage.OPEN
    members: dict[str, Member] = field(default_factory=dict)
    """By uid, in order of arrival."""
    cancelled: set[str] = field(default_factory=set)
    """Episodes cancelled, whether they had come or not."""
    cancelled_members: list[Member] = field(default_factory=list)
    """Members that had arrived when they were cancelled; they finish with the group."""
    control_offsets: list[int] = field(default_factory=list)
    """Cancellations that joined the group; they finish with it."""
    size_bytes: int = 0
    """What it counts for in grouping.capacity_bytes, cancelled members too."""
    batch_bytes: int = 0
    """Bytes it takes in a batch; known once it is sealed."""
    sealed_ms: int = -1
    fates: dict[int, str] = field(default_factory=dict)
    """Offsets already decided in a group that is not over: delivered to a batch, or thrown away by the maker."""
    estimator: str = ""
    """Estimator in force when it sealed."""
    worths: dict[str, Worth] = field(default_factory=dict)
    """What each member is worth, by uid in the order they came; known once it is sealed."""
    complete_episodes: int = 0
    _episodes: dict[str, "_Episode"] = field(default_factory=dict)
    """Episodes begun."""
    _gone: set[str] = field(default_factory=set)
    """Uids of `cancelled_members`."""

    @property
    def expected(self) -> int:
        """Episodes still declared: the size less what was cancelled."""
        return self.declared_size - len(self.cancelled)

    @property
    def complete(self) -> bool:
        return self.complete_episodes >= self.expected

    @property
    def lowest_version(self) -> int:
        """Lowest policy version that sampled any token of any member."""
        return min((m.rollout.lowest_version for m in self.members.values()), default=self.key.policy_version)

    def refusal(self, rollout: Rollout) -> tuple[str, str] | None:
        """Why a rollout cannot join, as drop reason and detail; None when it can."""
        episode = episode_of(rollout)
        if rollout.uid in self.members:
            return "duplicate_uid", f"uid {rollout.uid} is in group {self.key}"
        if episode in self.cancelled or rollout.uid in self.cancelled:
            return "cancelled", f"uid {rollout.uid} was cancelled before it came"
        if rollout.group_size != self.declared_size:
            return "invalid", f"group_size {rollout.group_size}, where group {self.key} declared {self.declared_size}"
        begun = self._episodes.get(episode)
        if begun and (rollout.branches != begun.branches or rollout.branch in begun.come):
            return (
                "invalid",
                f"branch {rollout.branch} of {rollout.branches} of episode {episode} does not fit the others",
            )
        return None

    def add(self, member: Member) -> None:
        """Take a member that is not refused."""
        rollout = member.rollout
        self.members[rollout.uid] = member
        episode = self._episodes.setdefault(episode_of(rollout), _Episode(rollout.branches, {}))
        episode.come[rollout.branch] = rollout.uid
        self.complete_episodes += episode.complete

    def cancel(self, uids: tuple[str, ...]) -> bool:
        """Take the episodes of these rollouts out of the group; False when all of them were out already.

        A uid that has not come counts as an episode of its own, be it that of a rollout or of an episode. Costs as much
        for each uid, however many there are and however large the group is.
        """
        before = len(self.cancelled)
        for uid in uids:
            member = self.members.get(uid)
            episode = uid if member is None else episode_of(member.rollout)
            if episode in self.cancelled or uid in self._gone:
                continue
            self.cancelled.add(episode)
            begun = self._episodes.pop(episode, None)
            if begun is not None:
                self.complete_episodes -= begun.complete
                self._gone.update(begun.come.values())
                self.cancelled_members += (self.members.pop(gone) for gone in begun.come.values())
        return len(self.cancelled) > before
