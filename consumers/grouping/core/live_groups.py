"""The unfinished groups of a partition: by stage and by example, with the memory that they take."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from rollstream.consumers.grouping.core.groups import Group, GroupKey, Stage
from rollstream.consumers.grouping.core.quotas import Quota


@dataclass(slots=True)
class _Share:
    """The unfinished groups of one environment."""

    groups: int = 0
    held_bytes: int = 0
    open: OrderedDict[GroupKey, Group] = field(default_factory=OrderedDict)
    """Groups that still collect members, oldest first."""


class LiveGroups:
    """Groups that collect members, wait for the policy clock, or are held by the batch maker."""

    def __init__(self) -> None:
        self.held_bytes = 0
        """Memory that the groups take, as grouping.capacity_bytes counts it."""
        self.open: OrderedDict[GroupKey, Group] = OrderedDict()
        """Groups that collect members, oldest first."""
        self._sealed: dict[GroupKey, Group] = {}
        self._sealed_by_example: dict[tuple[str, str], dict[GroupKey, Group]] = {}
        self._waiting: OrderedDict[GroupKey, Group] = OrderedDict()
        self._by_environment: dict[str, _Share] = {}

    def sealed(self, key: GroupKey) -> Group | None:
        """Return the sealed group with that key, None if there is none."""
        return self._sealed.get(key)

    def all_sealed(self) -> list[Group]:
        """Return every sealed group, in the order in which they sealed."""
        return list(self._sealed.values())

    def older_versions(self, key: GroupKey) -> list[Group]:
        """Return the sealed groups of the same example that have a lower policy version."""
        of_example = self._sealed_by_example.get(key[:2], {}).values()
        return [group for group in of_example if group.key.policy_version < key.policy_version]

    def add_open(self, group: Group) -> None:
        """Add a new group that collects members."""
        self.open[group.key] = group
        share = self._by_environment.setdefault(group.key.environment, _Share())
        share.groups += 1
        share.open[group.key] = group

    def hold(self, group: Group, size_bytes: int) -> None:
        """Count `size_bytes` more memory for a group."""
        group.size_bytes += size_bytes
        self.held_bytes += size_bytes
        self._by_environment[group.key.environment].held_bytes += size_bytes

    def close(self, group: Group) -> None:
        """Close an open group, so that it collects no further members."""
        del self.open[group.key]
        del self._by_environment[group.key.environment].open[group.key]
        group.stage = Stage.WAITING

    def beyond(self, environment: str, quota: Quota) -> tuple[Group, str] | None:
        """Return the oldest open group of an environment that exceeds a quota, with the quota; otherwise None."""
        share = self._by_environment.get(environment)
        if share is None or not share.open:
            return None
        for key, used, most in (
            ("open_groups", len(share.open), quota.open_groups),
            ("held_bytes", share.held_bytes, quota.held_bytes),
        ):
            if used > most:
                return next(iter(share.open.values())), f"{environment}:{key}={most}"
        return None

    def add_sealed(self, group: Group) -> None:
        """Keep a closed group that passed the checks at sealing."""
        self._sealed[group.key] = group
        self._sealed_by_example.setdefault(group.key[:2], {})[group.key] = group

    def wait(self, group: Group) -> None:
        """Keep a sealed group back until `release` reaches its policy version."""
        self._waiting[group.key] = group

    def release(self, policy_version: int) -> Iterator[Group]:
        """Remove and yield the waiting groups of versions up to `policy_version`; it may remove others meanwhile."""
        for group in [g for g in self._waiting.values() if g.key.policy_version <= policy_version]:
            if self._waiting.pop(group.key, None) is not None:
                yield group

    @property
    def next_to_shed(self) -> Group | None:
        """The oldest open group; without open groups, the oldest group that waits for the policy clock."""
        return next(iter(self.open.values()), None) or next(iter(self._waiting.values()), None)

    def remove(self, group: Group) -> None:
        """Remove a group that is finished, whatever its stage."""
        key = group.key
        share = self._by_environment[key.environment]
        if self.open.pop(key, None) is not None:
            del share.open[key]
        self._waiting.pop(key, None)
        if self._sealed.pop(key, None) is not None:
            of_example = self._sealed_by_example[key[:2]]
            del of_example[key]
            if not of_example:
                del self._sealed_by_example[key[:2]]
        group.stage = Stage.FINISHED
        self.held_bytes -= group.size_bytes
        share.held_bytes -= group.size_bytes
        share.groups -= 1
        if not share.groups:
            del self._by_environment[key.environment]
