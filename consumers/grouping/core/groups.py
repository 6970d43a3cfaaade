"""A group from its first record to its end: members, cancellations, and how many of its episodes are complete.

A group counts episodes, not rollouts: the branches of one episode complete together and are cancelled together.

Deadlines are in stream time, in a heap, so that the cost of a record hardly grows with the number of open groups. Those
of groups that have moved on are ignored, and are removed before there are many. A deadline names its group by offset,
so it keeps no rollouts in memory.
"""

import heapq
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import NamedTuple

from rollstream.consumers.grouping.core.held_rollouts import HeldRollout
from rollstream.topics.records import Rollout
from rollstream.topics.wire.rl_examples import Source


class GroupKey(NamedTuple):
    """Identity of a group: rollouts with the same key are compared with each other."""

    environment: str
    example_id: str
    policy_version: int
    group_id: str

    def __str__(self) -> str:
        suffix = f"/{self.group_id}" if self.group_id else ""
        return f"{self.environment}/{self.example_id}@{self.policy_version}{suffix}"


class Stage(Enum):
    """Stage of a group."""

    OPEN = 0
    """The group collects members."""
    WAITING = 1
    """The group is sealed, and its version is ahead of the policy clock."""
    OFFERED = 2
    """The group is sealed, and the batch maker holds it."""
    FINISHED = 3
    """Every record of the group has its fate."""


class Member(NamedTuple):
    """A rollout that joined a group."""

    source: Source
    rollout: HeldRollout
    size_bytes: int
    """Memory that the member takes, as grouping.capacity_bytes counts it."""
    append_ms: int
    """Stream time when the rollout was read."""


class MemberAdvantage(NamedTuple):
    """Advantage of the episode of a member of a sealed group."""

    episode: float
    """Advantage of the episode, in float64, before any stage over a batch."""
    branches: int
    """Declared number of branches of the episode, which share its advantage equally."""

    @property
    def share(self) -> float:
        """Advantage of the member: its share of the advantage of the episode."""
        return self.episode / self.branches


def episode_of(rollout: Rollout | HeldRollout) -> str:
    """Return the uid of the episode that a rollout counts for: its own uid if the episode has only this branch."""
    return rollout.episode_uid if rollout.branches > 1 else rollout.uid


class _Episode(NamedTuple):
    branches: int
    arrived: dict[int, str]
    """Uids of the branches that arrived, by branch."""

    @property
    def complete(self) -> bool:
        return len(self.arrived) == self.branches


@dataclass(eq=False, slots=True)
class Group:
    """One group from its first record to its end."""

    key: GroupKey
    opened_offset: int
    opened_ms: int
    declared_size: int
    stage: Stage = Stage.OPEN
    members: dict[str, Member] = field(default_factory=dict)
    """Members by uid, in order of arrival."""
    cancelled: set[str] = field(default_factory=set)
    """Cancelled episodes, including those that never arrived."""
    cancelled_members: list[Member] = field(default_factory=list)
    """Members that had arrived when they were cancelled; they finish with the group."""
    control_offsets: list[int] = field(default_factory=list)
    """Cancellations that joined the group; they finish with it."""
    size_bytes: int = 0
    """Memory that the group takes, including cancelled members, as grouping.capacity_bytes counts it."""
    batch_bytes: int = 0
    """Maximum number of bytes that the group takes in a batch, known once it is sealed."""
    sealed_ms: int = -1
    supersedes_ms: int = -1
    """Stream time since which older versions of its example are superseded, -1 if they are not."""
    fates: dict[int, str] = field(default_factory=dict)
    """Fates of members in a group that is not finished: delivered in a batch, or discarded by the maker."""
    estimator: str = ""
    """Estimator in force when the group sealed."""
    advantages: dict[str, MemberAdvantage] = field(default_factory=dict)
    """Advantages by uid, in order of arrival; known once the group is sealed."""
    complete_episodes: int = 0
    _episodes: dict[str, "_Episode"] = field(default_factory=dict)
    """Episodes of which at least one branch arrived, by uid."""
    _cancelled_uids: set[str] = field(default_factory=set)
    """Uids of `cancelled_members`."""

    @property
    def expected(self) -> int:
        """Number of episodes still expected: the declared size less the cancelled episodes."""
        return self.declared_size - len(self.cancelled)

    @property
    def complete(self) -> bool:
        return self.complete_episodes >= self.expected

    @property
    def lowest_version(self) -> int:
        """Lowest policy version that sampled any token of any member."""
        return min((m.rollout.lowest_version for m in self.members.values()), default=self.key.policy_version)

    def refusal(self, rollout: HeldRollout) -> tuple[str, str] | None:
        """Return why a rollout cannot join, as drop reason and detail; None if it can."""
        episode = episode_of(rollout)
        if rollout.uid in self.members:
            return "duplicate_uid", f"uid {rollout.uid} is in group {self.key}"
        if episode in self.cancelled or rollout.uid in self.cancelled:
            return "cancelled", f"uid {rollout.uid} was cancelled before it came"
        if rollout.group_size != self.declared_size:
            return "invalid", f"group_size {rollout.group_size}, where group {self.key} declared {self.declared_size}"
        known = self._episodes.get(episode)
        if known and (rollout.branches != known.branches or rollout.branch in known.arrived):
            return (
                "invalid",
                f"branch {rollout.branch} of {rollout.branches} of episode {episode} does not fit the others",
            )
        return None

    def add(self, member: Member) -> None:
        """Add a member for which `refusal` returned None."""
        rollout = member.rollout
        self.members[rollout.uid] = member
        episode = self._episodes.setdefault(episode_of(rollout), _Episode(rollout.branches, {}))
        episode.arrived[rollout.branch] = rollout.uid
        self.complete_episodes += episode.complete

    def cancel(self, uids: tuple[str, ...]) -> bool:
        """Remove the episodes of these rollouts from the group; return False if all of them had been cancelled before.

        A uid that has not arrived counts as a separate episode. The cost per uid depends neither on the number of uids
        nor on the size of the group.
        """
        before = len(self.cancelled)
        for uid in uids:
            member = self.members.get(uid)
            episode = uid if member is None else episode_of(member.rollout)
            if episode in self.cancelled or uid in self._cancelled_uids:
                continue
            self.cancelled.add(episode)
            known = self._episodes.pop(episode, None)
            if known is not None:
                self.complete_episodes -= known.complete
                self._cancelled_uids.update(known.arrived.values())
                self.cancelled_members += (self.members.pop(arrived) for arrived in known.arrived.values())
        return len(self.cancelled) > before


class DeadlineKind(IntEnum):
    """Kinds of deadlines. Deadlines at the same time fall due in this order."""

    OPEN = 0
    """An open group seals if it is complete enough, and is dropped otherwise."""
    FUTURE = 1
    """A sealed group has waited too long for the policy clock."""
    AGE = 2
    """A sealed group may be too old for a batch."""
    BATCH_AGE = 3
    """A sealed group has waited long enough for its batch to fill."""


class _Deadline(NamedTuple):
    due_ms: int
    kind: DeadlineKind
    opened_offset: int


class Deadlines:
    """Deadlines of the groups that are not finished."""

    def __init__(self) -> None:
        self._heap: list[_Deadline] = []
        self._groups: dict[int, Group] = {}

    def add(self, due_ms: int, kind: DeadlineKind, group: Group) -> None:
        """Add a deadline, which is ignored if the group has moved on when it is due."""
        self._groups[group.opened_offset] = group
        heapq.heappush(self._heap, _Deadline(due_ms, kind, group.opened_offset))
        if len(self._heap) > 64 + 4 * len(self._groups):
            self._heap = [deadline for deadline in dict.fromkeys(self._heap) if self._alive(deadline)]
            heapq.heapify(self._heap)

    def forget(self, group: Group) -> None:
        """Forget the deadlines of a finished group."""
        self._groups.pop(group.opened_offset, None)

    @property
    def next_ms(self) -> int | None:
        """Stream time of the next deadline; None if there is none."""
        while self._heap and not self._alive(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0].due_ms if self._heap else None

    def pop(self, now_ms: int) -> tuple[DeadlineKind, Group] | None:
        """Remove and return the next deadline that is due at `now_ms`; None if there is none."""
        due_ms = self.next_ms
        if due_ms is None or due_ms > now_ms:
            return None
        deadline = heapq.heappop(self._heap)
        return deadline.kind, self._groups[deadline.opened_offset]

    def __len__(self) -> int:
        return len(self._heap)

    def _alive(self, deadline: _Deadline) -> bool:
        group = self._groups.get(deadline.opened_offset)
        if group is None:
            return False
        if deadline.kind is DeadlineKind.OPEN:
            return group.stage is Stage.OPEN
        if deadline.kind is DeadlineKind.FUTURE:
            return group.stage is Stage.WAITING
        if deadline.kind is DeadlineKind.BATCH_AGE:
            return group.stage is Stage.OFFERED
        return group.stage in (Stage.WAITING, Stage.OFFERED)
