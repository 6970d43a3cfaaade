"""Groups while they are collected: which rollouts join, and which groups are due. Pure: the time is what callers say.

A group is due when it has its target size, or when its time is over and it has the least size; a smaller one whose
time is over waits on, and is due as soon as it has it.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from consumers.buffers.group_config import GroupStoreConfig
from consumers.buffers.group_files import Placed, RolloutGroup, group_of
from topics.records import GroupCancelled, Rollout


class Key(NamedTuple):
    """What makes rollouts of one environment comparable, on one partition of the log."""

    partition: int
    example_id: str
    policy_version: int
    group_id: str
    """The producer's, where its groups are kept apart."""

    @property
    def from_log(self) -> bool:
        return self.partition >= 0


class Cancelled(NamedTuple):
    """Members of an open group that will not come."""

    key: Key
    uids: tuple[str, ...]


@dataclass(slots=True)
class OpenGroup:
    """A group that has not sealed."""

    opened_ts: float
    target: int
    members: list[Placed] = field(default_factory=list)
    replicas: Counter[str] = field(default_factory=Counter)


class OpenGroups:
    """The open groups of an environment. Not safe from several threads by itself."""

    def __init__(self, config: GroupStoreConfig) -> None:
        self._config = config
        self._waiting: dict[int, OrderedDict[Key, OpenGroup]] = {}
        """By partition; oldest first."""
        self._overdue: dict[Key, OpenGroup] = {}
        """Groups whose time is over and that are too small to seal."""
        self._cancelled: dict[Key, set[str]] = {}
        """Uids of groups that have not sealed, or of which no rollout came yet."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values())) + len(self._overdue)

    @property
    def rollouts(self) -> int:
        """Rollouts in them."""
        return sum(len(group.members) for group in self._all().values())

    def is_full_for(self, rollout: Rollout, partition: int) -> bool:
        """Whether the rollout's group has as many of its replica as it may."""
        limit = self._config.max_per_replica
        group = self._find(self._key(rollout, partition)) if limit else None
        return group is not None and group.replicas[rollout.metadata.replica_id] >= limit

    def join(self, member: Placed, now: float) -> RolloutGroup | None:
        """Put a rollout into its group; the group, sealed, where that made it due."""
        key = self._key(member.rollout, member.source.partition)
        group = self._find(key)
        if group is None:
            group = OpenGroup(now, self._config.target(member.rollout.group_size, from_log=key.from_log))
            self._waiting.setdefault(key.partition, OrderedDict())[key] = group
        group.members.append(member)
        group.replicas[member.rollout.metadata.replica_id] += 1
        return self._sealed_if_enough(key, group, now)

    def is_cancelled(self, rollout: Rollout, partition: int) -> bool:
        """Whether it was said that the rollout does not come."""
        return rollout.uid in self._cancelled.get(self._key(rollout, partition), ())

    def cancel(self, record: GroupCancelled, partition: int, now: float) -> RolloutGroup | None:
        """Wait no longer for members that will not come; the group, sealed, where that made it due.

        Only where the declared size rules: other groups wait for any rollouts of their example.
        """
        key = self._key(record, partition)
        if not self._config.declared_size_rules(from_log=key.from_log):
            return None
        group = self._find(key)
        there = {member.rollout.uid for member in group.members} if group is not None else set()
        self._cancelled.setdefault(key, set()).update(set(record.uids) - there)
        if group is not None:
            return self._sealed_if_enough(key, group, now)
        if len(self._cancelled[key]) >= record.group_size:
            del self._cancelled[key]
        return None

    def due(self, now: float, partition: int | None = None) -> list[RolloutGroup]:
        """Groups whose time is over and that have the least size, sealed: of one partition or of all."""
        found: list[RolloutGroup] = []
        if self._config.seal_timeout_s < 0:
            return found
        for number in list(self._waiting) if partition is None else [partition]:
            groups = self._waiting.get(number, OrderedDict())
            while groups:
                key, group = next(iter(groups.items()))
                if now - group.opened_ts < self._config.seal_timeout_s:
                    break
                if len(group.members) >= self._least(key, group):
                    found.append(self._seal(key, now))
                else:
                    self._overdue[key] = groups.pop(key)
        return found

    def oldest(self, now: float) -> RolloutGroup | list[Placed]:
        """Take out the group that has waited longest: sealed, or its rollouts where it is too small for that."""
        heads = [next(iter(groups.items())) for groups in self._waiting.values() if groups]
        key, group = next(iter(self._overdue.items()), None) or min(heads, key=lambda head: head[1].opened_ts)
        return self._seal(key, now) if len(group.members) >= self._least(key, group) else self._take(key).members

    def sealable(self, now: float) -> list[RolloutGroup]:
        """Every group that has the least size, sealed whether its time is over or not."""
        ready = [key for key, group in self._all().items() if len(group.members) >= self._least(key, group)]
        return [self._seal(key, now) for key in ready]

    def snapshot(self) -> list[RolloutGroup]:
        """The open groups as `restore` takes them, oldest first."""
        return [
            group_of(group.members, None, opened_ts=group.opened_ts, target=group.target)
            for group in sorted(self._all().values(), key=lambda group: group.opened_ts)
        ]

    def restore(self, group: RolloutGroup) -> None:
        """Take back the next group of a snapshot. One whose time was over is found to be so again by `due`."""
        replicas = Counter(rollout.metadata.replica_id for rollout in group.rollouts)
        said = group.metadata
        restored = OpenGroup(said["opened_ts"], said["target"], list(group.members), replicas)
        key = self._key(group.rollouts[0], group.members[0].source.partition)
        self._waiting.setdefault(key.partition, OrderedDict())[key] = restored

    def cancelled(self) -> tuple[Cancelled, ...]:
        """What `restore_cancelled` takes back."""
        return tuple(Cancelled(key, tuple(sorted(uids))) for key, uids in self._cancelled.items())

    def restore_cancelled(self, cancelled: Iterable[Cancelled]) -> None:
        """Take back what was said not to come."""
        self._cancelled = {key: set(uids) for key, uids in cancelled}

    def _key(self, record: Rollout | GroupCancelled, partition: int) -> Key:
        own = record.group_id if self._config.declared_size_rules(from_log=partition >= 0) else ""
        return Key(partition, record.example_id, record.policy_version, own)

    def _find(self, key: Key) -> OpenGroup | None:
        return self._overdue.get(key) or self._waiting.get(key.partition, OrderedDict()).get(key)

    def _target(self, key: Key, group: OpenGroup) -> int:
        return group.target - len(self._cancelled.get(key, ()))

    def _least(self, key: Key, group: OpenGroup) -> int:
        return self._config.least(self._target(key, group), from_log=key.from_log)

    def _sealed_if_enough(self, key: Key, group: OpenGroup, now: float) -> RolloutGroup | None:
        enough = self._least(key, group) if key in self._overdue else self._target(key, group)
        return self._seal(key, now) if len(group.members) >= enough else None

    def _take(self, key: Key) -> OpenGroup:
        self._cancelled.pop(key, None)
        group = self._overdue.pop(key, None)
        return group if group is not None else self._waiting[key.partition].pop(key)

    def _seal(self, key: Key, now: float) -> RolloutGroup:
        return group_of(self._take(key).members, now)

    def _all(self) -> dict[Key, OpenGroup]:
        found = dict(self._overdue)
        for groups in self._waiting.values():
            found.update(groups)
        return found
