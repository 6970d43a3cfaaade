"""A group while it is collected: its members, cancellations and the count that says it is complete.

Counts episodes, not rollouts: the branches of one episode complete together.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from topics.examples import Source
from topics.records import Rollout


class GroupKey(NamedTuple):
    """What makes rollouts comparable."""

    environment: str
    example_id: str
    policy_version: int
    group_id: str

    def __str__(self) -> str:
        suffix = f"/{self.group_id}" if self.group_id else ""
        return f"{self.environment}/{self.example_id}@{self.policy_version}{suffix}"


class Member(NamedTuple):
    """A rollout that joined a group."""

    source: Source
    rollout: Rollout
    size_bytes: int
    append_ms: int
    """Stream time when it was read."""


@dataclass(eq=False, slots=True)
class Group:
    """One group from its first record to its end."""

    key: GroupKey
    opened_offset: int
    opened_ms: int
    declared_size: int
    members: dict[str, Member] = field(default_factory=dict)
    """By uid, in order of arrival."""
    cancelled_uids: set[str] = field(default_factory=set)
    cancelled_members: list[Member] = field(default_factory=list)
    """Members that had arrived when they were cancelled; they finish with the group."""
    control_offsets: list[int] = field(default_factory=list)
    """Cancellations that joined the group; they finish with it."""
    size_bytes: int = 0
    sealed_ms: int = -1
    fates: dict[int, str] = field(default_factory=dict)
    """Offsets already decided in a group that is not over: delivered to a batch, or thrown away by the maker."""
    advantages: tuple[float, ...] = ()
    complete_episodes: int = 0
    _missing: dict[str, int] = field(default_factory=dict)
    """Episodes begun, and how many of their branches have not come."""

    @property
    def expected(self) -> int:
        """Episodes still declared: the size less what was cancelled."""
        return self.declared_size - len(self.cancelled_uids)

    @property
    def complete(self) -> bool:
        return self.complete_episodes >= self.expected

    @property
    def lowest_version(self) -> int:
        """Lowest policy version that sampled any token of any member."""
        return min((m.rollout.lowest_version for m in self.members.values()), default=self.key.policy_version)

    def add(self, member: Member) -> None:
        """Take a member whose uid is new to the group."""
        rollout = member.rollout
        self.members[rollout.uid] = member
        self.size_bytes += member.size_bytes
        episode = rollout.episode_uid or rollout.uid
        missing = self._missing.get(episode, rollout.branches) - 1
        self._missing[episode] = missing
        self.complete_episodes += missing == 0

    def cancel(self, uids: tuple[str, ...]) -> bool:
        """Take uids out of the group; False when all of them were out already."""
        new = [uid for uid in dict.fromkeys(uids) if uid not in self.cancelled_uids]
        for uid in new:
            self.cancelled_uids.add(uid)
            member = self.members.pop(uid, None)
            if member is not None:
                self.cancelled_members.append(member)
                self.complete_episodes -= self._missing.pop(member.rollout.episode_uid or uid, 1) == 0
        return bool(new)
