"""The groups of a partition that a fold holds: unfinished and remembered ones, with the memory that they take.

The fold drops members of finished groups as `late`, and groups of older versions as `superseded_version`. Every entry
keeps its own time, and `since_ms` never decreases. Therefore these tables can be rebuilt from `since_ms` and the
finished groups in the journal.

The fold drops and forgets groups by these numbers, so they are part of its behaviour: they follow from the records
alone and are the same on every machine. Each cost is slightly higher than what CPython 3.11 uses on 64-bit machines;
tests compare the two.
"""

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rollstream.consumers.grouping.core.estimators import RolloutDetails
from rollstream.consumers.grouping.core.groups import Group, GroupKey, Stage
from rollstream.consumers.grouping.core.held_rollouts import HeldRollout
from rollstream.consumers.grouping.core.limits import Quota
from rollstream.topics.records import FinishedGroup
from rollstream.topics.wire.rl_examples import REFERENCE


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


GROUP = 2_000
"""A group without its members: its tables, its deadlines, and its entries in the fold and the batch maker."""
MEMBER = 4_200
"""A rollout without its arrays and names: its record and fields, its offset, and its row in the batch maker."""
TOKEN = 13
"""Token, mask, log-probability, and the advantage once the group is sealed; row_bytes counts the same in a batch."""
REFERENCE_ARRAY = 600
"""Reference log-probabilities, without their bytes in the record and their float32 copy."""
TOKEN_ARRAY = 600
"""A named array of a rollout, without its bytes and its name."""
DETAILS, DETAIL = 500, 300
"""The details of a rollout for an estimator, and each component of its reward and each turn among them."""
STAMP = 100
"""Time and weight step of a rollout."""
CANCELLATION = 500
UID = 200
"""A cancelled uid."""
FINISHED_GROUP = 900
"""A finished group."""


def group_cost(key: GroupKey) -> int:
    """Return the cost of a group when it opens."""
    return GROUP + _texts(key.environment, key.example_id, key.group_id)


def member_cost(rollout: HeldRollout) -> int:
    """Return the memory cost of a rollout in a group, once trimmed: its arrays, names and metadata."""
    reference = rollout.token_arrays.get(REFERENCE)
    arrays = rollout.length * TOKEN
    if reference is not None:
        arrays += REFERENCE_ARRAY + len(reference.data) + 4 * rollout.length
    for name, array in rollout.token_arrays.items():
        arrays += TOKEN_ARRAY + _text(name) + array.record_bytes + 8 * len(array.shape) if name != REFERENCE else 0
    if rollout.timestamp or rollout.weight_step != -1:
        arrays += STAMP
    names = (rollout.environment, rollout.example_id, rollout.group_id, rollout.episode_uid)
    return MEMBER + arrays + _texts(rollout.uid, rollout.worker_id, *names)


def details_cost(details: RolloutDetails) -> int:
    """Return the cost of a rollout's details, besides that of the member."""
    names = _texts(*details.components, *(turn.role for turn in details.turns))
    return DETAILS + names + DETAIL * (len(details.components) + len(details.turns))


def cancellation_cost(uids: Iterable[str]) -> int:
    """Return the cost of a cancellation that joined a group."""
    return CANCELLATION + sum(UID + _text(uid) for uid in uids)


def finished_group_cost(key: GroupKey) -> int:
    """Return the cost of a finished group while it is remembered."""
    return FINISHED_GROUP + _texts(key.environment, key.example_id, key.group_id)


def _texts(*texts: str) -> int:
    together = "".join(texts)
    return len(together) if together.isascii() else sum(map(_text, texts))


def _text(text: str) -> int:
    return len(text) if text.isascii() else 4 * len(text)


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
        self._held_bytes += finished_group_cost(key)

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
            self._held_bytes -= finished_group_cost(key)
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
