"""Finished groups and sealed versions that a fold remembers, within a horizon of stream time and a limit of memory.

The fold drops members of finished groups as `late`, and groups of older versions as `superseded_version`. Every entry
keeps its own time, and `since_ms` never decreases. Therefore these tables can be rebuilt from `since_ms` and the
finished groups in the journal.
"""

import heapq
from collections import Counter, deque
from collections.abc import Iterable

from rollstream.consumers.grouping.core import memory_costs
from rollstream.consumers.grouping.core.groups import GroupKey
from rollstream.topics.records import FinishedGroup


class FinishedGroups:
    """Groups that finished, and versions of each example that sealed, since `since_ms` of stream time."""

    def __init__(self, since_ms: int, groups: Iterable[FinishedGroup] = ()) -> None:
        """Rebuild the tables from the groups that a journal names, in the order in which they finished."""
        self.since_ms = since_ms
        self._finished: deque[tuple[int, GroupKey]] = deque()
        self._counts: Counter[GroupKey] = Counter()
        self._sealed: list[tuple[int, str, str, int]] = []
        self._versions: dict[tuple[str, str], Counter[int]] = {}
        self._held_bytes = 0
        for group in groups:
            key = GroupKey(group.environment, group.example_id, group.policy_version, group.group_id)
            self.add(key, group.finished_ms)
            if group.sealed_ms >= 0:
                self.add_sealed(key, group.sealed_ms)

    def add(self, key: GroupKey, time_ms: int) -> None:
        """Add a group that finished at `time_ms`, which never decreases from call to call."""
        if time_ms < self.since_ms:
            return  # Other groups that finished at this time were already forgotten, to stay within the memory limit.
        self._finished.append((time_ms, key))
        self._counts[key] += 1
        self._held_bytes += memory_costs.finished_group_cost(key)

    def add_sealed(self, key: GroupKey, time_ms: int) -> None:
        """Add the policy version of an example whose group was sealed at `time_ms`."""
        if time_ms < self.since_ms:
            return
        heapq.heappush(self._sealed, (time_ms, key.environment, key.example_id, key.policy_version))
        self._versions.setdefault(key[:2], Counter())[key.policy_version] += 1

    def forget_before(self, before_ms: int) -> None:
        """Forget entries older than `before_ms` for good: a longer horizon later does not bring them back."""
        self.since_ms = max(self.since_ms, before_ms)
        while self._finished and self._finished[0][0] < self.since_ms:
            _time, key = self._finished.popleft()
            self._held_bytes -= memory_costs.finished_group_cost(key)
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key]
        while self._sealed and self._sealed[0][0] < self.since_ms:
            _time, environment, example_id, version = heapq.heappop(self._sealed)
            versions = self._versions[environment, example_id]
            versions[version] -= 1
            if not versions[version]:
                del versions[version]
            if not versions:
                del self._versions[environment, example_id]

    def shrink_to(self, limit_bytes: int) -> None:
        """Forget the oldest groups until at most `limit_bytes` are used; groups of the same time go together."""
        while self._held_bytes > limit_bytes:
            self.forget_before(self._finished[0][0] + 1)

    def newest_sealed(self, environment: str, example_id: str) -> int:
        """Return the highest version of the example that sealed within the horizon, -1 if there is none."""
        return max(self._versions.get((environment, example_id), ()), default=-1)

    def __contains__(self, key: GroupKey) -> bool:
        return key in self._counts

    def __len__(self) -> int:
        return len(self._finished)
