"""What a fold remembers of groups that are over, for `late` and `superseded_version`: up to a horizon, and some bytes.

Every entry keeps its own time, and the time before which everything is forgotten never goes back, so the memory can be
rebuilt from the journal's finished groups and that one number.
"""

import heapq
from collections import Counter, deque

from consumers.grouping import costs
from consumers.grouping.groups import GroupKey


class Memory:
    """Finished groups, and versions sealed per example, since `since_ms` of stream time."""

    def __init__(self, since_ms: int) -> None:
        self.since_ms = since_ms
        self._finished: deque[tuple[int, GroupKey]] = deque()
        self._counts: Counter[GroupKey] = Counter()
        self._sealed: list[tuple[int, str, str, int]] = []
        self._versions: dict[tuple[str, str], Counter[int]] = {}
        self._held_bytes = 0

    def finish(self, key: GroupKey, time_ms: int) -> None:
        """Remember that a group is over since `time_ms`, which never decreases from call to call."""
        if time_ms < self.since_ms:
            return  # Others of this instant were forgotten already, for want of room.
        self._finished.append((time_ms, key))
        self._counts[key] += 1
        self._held_bytes += costs.of_remembered(key)

    def seal(self, key: GroupKey, time_ms: int) -> None:
        """Remember that a version of an example sealed."""
        if time_ms < self.since_ms:
            return
        heapq.heappush(self._sealed, (time_ms, key.environment, key.example_id, key.policy_version))
        self._versions.setdefault(key[:2], Counter())[key.policy_version] += 1

    def forget(self, before_ms: int) -> None:
        """Forget what is older than `before_ms`, for good: a longer horizon later does not bring it back."""
        self.since_ms = max(self.since_ms, before_ms)
        while self._finished and self._finished[0][0] < self.since_ms:
            _time, key = self._finished.popleft()
            self._held_bytes -= costs.of_remembered(key)
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

    def forget_excess(self, limit_bytes: int) -> None:
        """Forget the oldest of what takes more than `limit_bytes`, and what finished at the same instants as they."""
        while self._held_bytes > limit_bytes:
            self.forget(self._finished[0][0] + 1)

    def over(self, key: GroupKey) -> bool:
        """Whether the group finished within the horizon."""
        return key in self._counts

    def newest_sealed(self, environment: str, example_id: str) -> int:
        """Highest version of the example that sealed within the horizon, -1 for none."""
        return max(self._versions.get((environment, example_id), ()), default=-1)

    def __len__(self) -> int:
        return len(self._finished)
