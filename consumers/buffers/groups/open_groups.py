"""Open groups: which rollouts join them, and which groups are due. Callers pass the time.

A group is due when it reaches its target size, or when its time is over and it has the minimum size. A smaller group
whose time is over keeps waiting, and is due as soon as it has the minimum size. A group of a declared size counts
complete episodes, as grouping does; other groups count rollouts.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from rollstream.consumers.buffers.groups.config import GroupStoreConfig
from rollstream.consumers.buffers.groups.group_files import PlacedRollout, RolloutGroup, group_of
from rollstream.consumers.buffers.rollouts.record import RECORD
from rollstream.consumers.grouping.core.groups import episode_of
from rollstream.topics.records import GroupCancelled, Rollout
from rollstream.topics.wire.codec import decode_as, encode
from rollstream.topics.wire.rl_examples import Source


class OpenGroupKey(NamedTuple):
    """Key of an open group of one environment: rollouts with equal keys are comparable."""

    partition: int
    example_id: str
    policy_version: int
    group_id: str
    """The producer's group id if its groups are kept apart, or the label of a RolloutRecord's policy, else ""."""

    @property
    def from_log(self) -> bool:
        return self.partition >= 0


class CancelledMembers(NamedTuple):
    """Uids of rollouts or episodes of an open group that will not arrive."""

    key: OpenGroupKey
    uids: tuple[str, ...]


class SavedGroup(NamedTuple):
    """An open group on disk."""

    environment: str
    opened_ts: float
    target: int
    members: tuple[tuple[int, int, bytes], ...]
    """Partition, offset and encoded rollout."""


@dataclass(slots=True)
class OpenGroup:
    """A group that has not sealed yet."""

    opened_ts: float
    target: int
    members: list[PlacedRollout] = field(default_factory=list)
    replicas: Counter[str] = field(default_factory=Counter)
    branches: dict[str, set[int]] = field(default_factory=dict)
    """Branches that arrived, by episode."""
    complete: set[str] = field(default_factory=set)
    """Episodes of which all branches arrived."""

    def add(self, member: PlacedRollout) -> None:
        """Add a rollout."""
        rollout = member.rollout
        self.members.append(member)
        self.replicas[rollout.metadata.replica_id] += 1
        episode = episode_of(rollout)
        arrived = self.branches.setdefault(episode, set())
        arrived.add(rollout.branch)
        if len(arrived) == rollout.branches:
            self.complete.add(episode)

    def incomplete(self, uids: Iterable[str]) -> set[str]:
        """Return the episodes of these rollouts that are not complete; a uid that has not arrived is an episode."""
        episodes = {member.rollout.uid: episode_of(member.rollout) for member in self.members}
        return {episodes.get(uid, uid) for uid in uids} - self.complete


class OpenGroups:
    """The open groups of an environment. Not thread-safe."""

    def __init__(self, config: GroupStoreConfig) -> None:
        self._config = config
        self._waiting: dict[int, OrderedDict[OpenGroupKey, OpenGroup]] = {}
        """Groups whose time is not over, by partition; oldest first."""
        self._overdue: dict[OpenGroupKey, OpenGroup] = {}
        """Groups whose time is over and that are too small to seal."""
        self._cancelled: dict[OpenGroupKey, set[str]] = {}
        """Cancelled episodes of open groups, and of groups without a rollout yet."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values())) + len(self._overdue)

    @property
    def rollouts(self) -> int:
        """Number of rollouts in open groups."""
        return sum(len(group.members) for group in self._all().values())

    def is_full_for(self, rollout: Rollout, partition: int) -> bool:
        """Whether the rollout's group already has max_per_replica rollouts of its replica."""
        limit = self._config.max_per_replica
        group = self._find(self._key(rollout, partition)) if limit else None
        return group is not None and group.replicas[rollout.metadata.replica_id] >= limit

    def join(self, member: PlacedRollout, now: float) -> RolloutGroup | None:
        """Add a rollout to its group; return the sealed group if it is due now."""
        key = self._key(member.rollout, member.source.partition)
        group = self._find(key)
        if group is None:
            group = OpenGroup(now, self._config.target(member.rollout.group_size, from_log=key.from_log))
            self._waiting.setdefault(key.partition, OrderedDict())[key] = group
        group.add(member)
        return self._sealed_if_enough(key, group, now)

    def is_cancelled(self, rollout: Rollout, partition: int) -> bool:
        """Whether the rollout or its episode was cancelled."""
        cancelled = self._cancelled.get(self._key(rollout, partition), set())
        return not cancelled.isdisjoint((rollout.uid, episode_of(rollout)))

    def cancel(self, record: GroupCancelled, partition: int, now: float) -> RolloutGroup | None:
        """Stop waiting for cancelled episodes; return the sealed group if it is due now.

        Only groups of a declared size are affected; other groups wait for any rollouts of their example. Rollouts that
        arrived before stay in the group, but their episode counts only if it is complete.
        """
        key = self._key(record, partition)
        if not self._config.declared_size_rules(from_log=key.from_log):
            return None
        group = self._find(key)
        episodes = set(record.uids) if group is None else group.incomplete(record.uids)
        self._cancelled.setdefault(key, set()).update(episodes)
        if group is not None:
            return self._sealed_if_enough(key, group, now)
        if len(self._cancelled[key]) >= record.group_size:
            del self._cancelled[key]
        return None

    def due(self, now: float, partition: int | None = None) -> list[RolloutGroup]:
        """Seal the groups whose time is over and that have the minimum size, in one partition or in all."""
        sealed: list[RolloutGroup] = []
        if self._config.seal_timeout_s < 0:
            return sealed
        for number in list(self._waiting) if partition is None else [partition]:
            groups = self._waiting.get(number, OrderedDict())
            while groups:
                key, group = next(iter(groups.items()))
                if now - group.opened_ts < self._config.seal_timeout_s:
                    break
                if self._size(key, group) >= self._least(key, group):
                    sealed.append(self._seal(key, now))
                else:
                    self._overdue[key] = groups.pop(key)
        return sealed

    def oldest(self, now: float) -> RolloutGroup | list[PlacedRollout]:
        """Remove the group that has waited longest; return it sealed, or its rollouts if it is too small."""
        heads = [next(iter(groups.items())) for groups in self._waiting.values() if groups]
        key, group = next(iter(self._overdue.items()), None) or min(heads, key=lambda head: head[1].opened_ts)
        enough = self._size(key, group) >= self._least(key, group)
        return self._seal(key, now) if enough else self._remove(key).members

    def sealable(self, now: float) -> list[RolloutGroup]:
        """Seal every group that has the minimum size, whether its time is over or not."""
        ready = [key for key, group in self._all().items() if self._size(key, group) >= self._least(key, group)]
        return [self._seal(key, now) for key in ready]

    def snapshot(self) -> Iterator[SavedGroup]:
        """Yield the open groups in the form that `restore` accepts, oldest first."""
        for group in sorted(self._all().values(), key=lambda group: group.opened_ts):
            members = tuple((source.partition, source.offset, encode(rollout)) for rollout, source in group.members)
            yield SavedGroup(group.members[0].rollout.environment, group.opened_ts, group.target, members)

    def restore(self, group: SavedGroup, is_known: Callable[[str], bool]) -> list[str]:
        """Restore the next group of a snapshot without members that are known, and return the uids of the others. `due`
        determines again whether its time is over.

        Groups that the producer kept apart become one if this configuration has a target size for them.
        """
        uids = []
        for partition, offset, record in group.members:
            rollout = decode_as(Rollout, record)
            if not is_known(rollout.uid):
                uids.append(rollout.uid)
                key = self._key(rollout, partition)
                restored = self._waiting.setdefault(partition, OrderedDict())
                member = PlacedRollout(rollout, Source(partition, offset, rollout.uid))
                restored.setdefault(key, OpenGroup(group.opened_ts, group.target)).add(member)
        return uids

    def cancelled(self) -> tuple[CancelledMembers, ...]:
        """Return the cancelled members in the form that `restore_cancelled` accepts."""
        return tuple(CancelledMembers(key, tuple(sorted(uids))) for key, uids in self._cancelled.items())

    def restore_cancelled(self, cancelled: Iterable[CancelledMembers]) -> None:
        """Restore cancelled members."""
        self._cancelled = {key: set(uids) for key, uids in cancelled}

    def forget_cancelled_of_closed(self) -> None:
        """Forget the cancelled members of groups that are not open."""
        self._cancelled = {key: uids for key, uids in self._cancelled.items() if self._find(key) is not None}

    def _key(self, record: Rollout | GroupCancelled, partition: int) -> OpenGroupKey:
        # The group id of a RolloutRecord is its policy's label, without which runs of equal numbers would be one.
        apart = self._config.declared_size_rules(from_log=partition >= 0) or RECORD in getattr(record, "extra", ())
        return OpenGroupKey(partition, record.example_id, record.policy_version, record.group_id if apart else "")

    def _find(self, key: OpenGroupKey) -> OpenGroup | None:
        return self._overdue.get(key) or self._waiting.get(key.partition, OrderedDict()).get(key)

    def _size(self, key: OpenGroupKey, group: OpenGroup) -> int:
        """Size of a group, which is compared with its target: complete episodes if the size is declared."""
        declared = self._config.declared_size_rules(from_log=key.from_log)
        return len(group.complete) if declared else len(group.members)

    def _target(self, key: OpenGroupKey, group: OpenGroup) -> int:
        return group.target - len(self._cancelled.get(key, ()))

    def _least(self, key: OpenGroupKey, group: OpenGroup) -> int:
        return self._config.least(self._target(key, group), from_log=key.from_log)

    def _sealed_if_enough(self, key: OpenGroupKey, group: OpenGroup, now: float) -> RolloutGroup | None:
        enough = self._least(key, group) if key in self._overdue else self._target(key, group)
        return self._seal(key, now) if self._size(key, group) >= enough else None

    def _remove(self, key: OpenGroupKey) -> OpenGroup:
        self._cancelled.pop(key, None)
        group = self._overdue.pop(key, None)
        return group if group is not None else self._waiting[key.partition].pop(key)

    def _seal(self, key: OpenGroupKey, now: float) -> RolloutGroup:
        return group_of(self._remove(key).members, now)

    def _all(self) -> dict[OpenGroupKey, OpenGroup]:
        all_groups = dict(self._overdue)
        for groups in self._waiting.values():
            all_groups.update(groups)
        return all_groups
