"""The auditor's own idea of grouping: what the batches and drops of a partition must be, for the cases it knows.

Written from the description of the behaviour, not from its code: whole groups in the order they sealed, cut by number
of rollouts, by the age of the oldest, or by a drain. It names the records it does not know, and judges none of them.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.faults.evidence import Decoded, Raw, decode

Key = tuple[str, str, int, str]

GIVEN = ("invalid", "wrong_partition", "too_large", "capacity")
"""Reasons taken from the journal, since they need the application's own limits; everything else must follow."""
OF_WHOLE_GROUPS = ("too_large", "capacity")
_OPEN, _FUTURE, _BATCH_AGE = 0, 1, 3


class NotModelled(Exception):
    """The log holds something that this model does not cover."""


@dataclass
class Expected:
    """Fates that the records of one partition must have."""

    batches: list[tuple[str, list[int]]] = field(default_factory=list)
    """Reason of the cut and source offsets, in order."""
    drops: dict[int, str] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)
    control: set[int] = field(default_factory=set)
    in_flight: set[int] = field(default_factory=set)


@dataclass(eq=False)
class _Group:
    key: Key
    size: int
    opened_ms: int
    opened_offset: int
    members: dict[str, int] = field(default_factory=dict)
    """Offset by uid."""
    rewards: dict[str, list[float]] = field(default_factory=dict)
    """Rewards of the branches that came, by episode."""
    branches: dict[str, set[int]] = field(default_factory=dict)
    """Numbers of the branches that came, by episode."""
    complete: int = 0
    """Episodes of which all branches came."""
    lowest: int = 2**62
    size_bytes: int = 0
    state: str = "open"
    """open, waiting (for the policy clock), queued (for a batch), given (see GIVEN) or over."""


class _Partition:
    def __init__(self, config: Mapping[str, Any], clock: int, given: Mapping[int, str]) -> None:
        if config["maker"] != "fifo" or config["max_age_s"] >= 0 or config["drop_superseded"]:
            raise NotModelled("another maker, an age limit or superseding")
        if config.get("mark_keys") or config.get("environment_keys") or config.get("quotas"):
            raise NotModelled("keys or quotas")
        self.config, self.clock, self.given = config, clock, given
        self.time = -1
        self.expected = Expected()
        self.groups: dict[Key, _Group] = {}
        self.waiting: list[_Group] = []
        self.queue: list[_Group] = []
        self.due: list[tuple[int, int, int, Key]] = []

    # ------------------------------------------------------------------ reading

    def read(self, raw: Raw) -> None:
        if raw.timestamp_ms > self.time:
            self.time = raw.timestamp_ms
            self._fire()
        record = decode(raw.value)
        if raw.offset in self.given:
            self.expected.drops[raw.offset] = self.given[raw.offset]
            if record is not None and record.name == "Rollout" and self.given[raw.offset] in OF_WHOLE_GROUPS:
                self._take(raw, record).state = "given"
        elif record is None:
            self.expected.dead.add(raw.offset)
        elif record.name == "Mark":
            self.expected.control.add(raw.offset)
            self._mark(record)
        elif record.name == "Rollout":
            self._rollout(raw, record)
        else:
            raise NotModelled(f"a {record.name}")
        self._cut_full()

    def _rollout(self, raw: Raw, rollout: Decoded) -> None:
        group = self.groups.get(_key(rollout))
        if group is None or (group.state == "open" and rollout["uid"] not in group.members):
            group = self._take(raw, rollout)
            if group.complete >= group.size:
                self._seal(group)
        elif group.state == "given" and rollout["uid"] not in group.members:
            self.expected.drops[raw.offset] = "late"
        elif group.state == "given":
            raise NotModelled("a repeated member of a group given up, before or after")
        else:
            over = group.state == "over"
            self.expected.drops[raw.offset] = "late" if over or rollout["uid"] not in group.members else "duplicate_uid"

    def _take(self, raw: Raw, rollout: Decoded) -> _Group:
        key = _key(rollout)
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = _Group(key, rollout["group_size"], self.time, raw.offset)
            self._later(self.config["group_deadline_s"], _OPEN, group)
        group.members[rollout["uid"]] = raw.offset
        came = group.branches.setdefault(episode(rollout), set())
        came.add(rollout["branch"])
        group.complete += len(came) == rollout["branches"]
        group.rewards.setdefault(episode(rollout), []).append(rollout["reward"])
        group.lowest = min(group.lowest, rollout["lowest_version"])
        group.size_bytes += len(raw.value or b"")
        return group

    def _mark(self, mark: Decoded) -> None:
        if mark["kind"] == "configuration":
            raise NotModelled("a configuration mark")
        if mark["policy_version"] > self.clock:
            self.clock = mark["policy_version"]
            for group in [*self.waiting, *self.queue]:
                if self._stale(group):
                    self._drop(group, "stale_version")
            ready = [group for group in self.waiting if group.key[2] <= self.clock]
            self.waiting = [group for group in self.waiting if group.key[2] > self.clock]
            for group in ready:
                self._enqueue(group)
        if mark["kind"] == "drain":
            for group in self.groups.values():
                if group.state == "open":
                    self._drop(group, "cancelled")
            self._cut_full()
            self._cut_everything("drain")

    # ------------------------------------------------------------------ groups

    def _seal(self, group: _Group) -> None:
        if self._stale(group):
            self._drop(group, "stale_version")
        elif group.complete < self.config["min_group_size"]:
            self._drop(group, "group_too_small")
        elif equal([mean(rewards) for rewards in group.rewards.values()]):
            self._drop(group, "zero_variance")
        elif group.key[2] > self.clock:
            group.state = "waiting"
            self.waiting.append(group)
            self._later(self.config["future_deadline_s"], _FUTURE, group)
        else:
            self._enqueue(group)

    def _stale(self, group: _Group) -> bool:
        return 0 <= self.config["max_policy_lag"] < self.clock - group.lowest

    def _enqueue(self, group: _Group) -> None:
        group.state = "queued"
        self.queue.append(group)
        if 2 * sum(queued.size_bytes for queued in self.queue) > self.config["batch_bytes"]:
            raise NotModelled("batches cut by bytes")
        self._later(self.config["max_batch_age_s"], _BATCH_AGE, group)

    def _drop(self, group: _Group, reason: str) -> None:
        for place in (self.waiting, self.queue):
            if group in place:
                place.remove(group)
        group.state = "over"
        self.expected.drops.update(dict.fromkeys(group.members.values(), reason))

    def _cut(self, why: str, size: int) -> None:
        offsets: list[int] = []
        while self.queue and len(offsets) < size:
            group = self.queue.pop(0)
            group.state = "over"
            offsets += group.members.values()
        self.expected.batches.append((why, offsets))

    def _cut_full(self) -> None:
        while sum(len(group.members) for group in self.queue) >= self.config["batch_rollouts"]:
            self._cut("size", self.config["batch_rollouts"])

    def _cut_everything(self, why: str) -> None:
        if self.queue:
            self._cut(why, 2**62)

    # ------------------------------------------------------------------ time

    def _later(self, after_s: float, kind: int, group: _Group) -> None:
        heapq.heappush(self.due, (self.time + round(after_s * 1000), kind, group.opened_offset, group.key))

    def _fire(self) -> None:
        while self.due and self.due[0][0] <= self.time:
            _, kind, opened_offset, key = heapq.heappop(self.due)
            group = self.groups[key]
            if group.opened_offset != opened_offset:
                continue
            if kind == _OPEN and group.state == "open":
                least = self.config["min_group_size"] or group.size
                if group.complete >= least:
                    self._seal(group)
                else:
                    self._drop(group, "group_too_small")
            elif kind == _FUTURE and group.state == "waiting":
                self._drop(group, "future_version")
            elif kind == _BATCH_AGE and group.state == "queued":
                self._cut_full()
                if group.state == "queued":
                    self._cut_everything("age")

    def rest(self) -> Expected:
        for group in self.groups.values():
            if group.state not in ("over", "given"):
                self.expected.in_flight.update(group.members.values())
        return self.expected


def episode(rollout: Decoded) -> str:
    """Unit that a rollout counts for: its episode, if that has several branches."""
    return str(rollout["episode_uid"] if rollout["branches"] > 1 else rollout["uid"])


def equal(rewards: Sequence[float]) -> bool:
    """Whether rewards differ by no more than a millionth of the largest, as sums of float32 in another order do."""
    return max(rewards) - min(rewards) <= 2**-20 * max(map(abs, rewards))


def mean(values: Sequence[float]) -> float:
    """Mean, of a correctly rounded sum; if all values are equal, that value."""
    return values[0] if len(set(values)) == 1 else math.fsum(values) / len(values)


def _key(rollout: Decoded) -> Key:
    return rollout["environment"], rollout["example_id"], rollout["policy_version"], rollout["group_id"]


def refold(
    records: Sequence[Raw], position: int, config: Mapping[str, Any], clock: int, given: Mapping[int, str]
) -> Expected:
    """Fates that must be those of the records below `position`, which began under `config` and policy version `clock`.

    Raises NotModelled for a log that this model does not cover.
    """
    partition = _Partition(config, clock, given)
    times = [raw.timestamp_ms for raw in records if raw.timestamp_ms >= 0]
    if times and max(times) - min(times) > config["horizon_s"] * 1000:
        raise NotModelled("groups older than the horizon are forgotten")
    rollouts = [raw for raw in records if raw.offset not in given and decode(raw.value) is not None]
    # This is more than they can count for, however they are grouped.
    if sum(2 * len(raw.value or b"") + 7_000 for raw in rollouts) > config["capacity_bytes"]:
        raise NotModelled("more bytes than the partition may hold")
    if 1_800 * len(rollouts) > config.get("remembered_bytes", math.inf):
        raise NotModelled("more groups than are remembered")
    for raw in records:
        if raw.offset < position:
            partition.read(raw)
    return partition.rest()
