"""Forwarding of sealed groups to a batch maker: each group is offered once, with its advantages. A group leaves the
maker without a batch when it is superseded, or when there are too many groups.

A rollout that a batch has delivered is never offered again.

A GrpoBatchMaker also works without a store, on single rollouts in memory; in a store of groups it acts as a
ReservoirBatchMaker.
"""

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from rollstream.consumers.buffers.groups.config import GroupStoreConfig
from rollstream.consumers.buffers.groups.group_files import PlacedRollout, RolloutGroup, group_of
from rollstream.consumers.buffers.groups.index import GroupEntry
from rollstream.consumers.buffers.rollouts.record import RolloutRecord, as_rollout
from rollstream.consumers.grouping.core.batch_assembly import group_episodes, member_advantages
from rollstream.consumers.grouping.core.estimators import ESTIMATORS
from rollstream.consumers.grouping.core.groups import Group, GroupKey, Member
from rollstream.consumers.grouping.core.held_rollouts import HeldExample, HeldRollout
from rollstream.consumers.grouping.makers.batch_maker import BatchMaker, MakerContext, SealedGroup
from rollstream.consumers.grouping.makers.reservoir import ReservoirBatchMaker
from rollstream.topics.errors import RecordError
from rollstream.topics.files.atomic_files import StoreError
from rollstream.topics.records import Rollout
from rollstream.topics.wire.rl_examples import RLExample, Source


class _HeldGroup(NamedTuple):
    example_id: str
    sources: set[Source]


class Forwarding:
    """A batch maker, with a record of the rollouts it holds, by group. Not thread-safe."""

    def __init__(self, maker: BatchMaker, config: GroupStoreConfig, delivered: Iterable[str]) -> None:
        """`delivered` contains the uids of rollouts in stored batches."""
        self._maker = maker
        self._config = config
        self._delivered = set(delivered)
        self._held: OrderedDict[str, _HeldGroup] = OrderedDict()
        """Groups with rollouts that the maker holds, by group id, oldest first."""
        self._group_of: dict[Source, str] = {}
        self._of_example: dict[str, set[str]] = {}
        """Ids of the groups in `_held`, by example."""
        self._latest: dict[str, int] = {}
        """Latest sealed policy version by example."""
        self._counts: Counter[str] = Counter()
        self._failed = False
        """Whether the maker raised an error, so that the rollouts that it holds are not known."""

    def offer(self, read: Callable[[], RolloutGroup], entry: GroupEntry) -> None:
        """Offer a sealed group to the maker; `read` is called only if the maker accepts the group. A maker that raised
        an error is offered nothing more, because it may hold only a part of a group."""
        if self._failed:
            return
        with self._noting_failure():
            self._offer(read, entry)

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except StoreError:  # of reading the group
            raise
        except BaseException:
            self._failed = True
            raise

    def _offer(self, read: Callable[[], RolloutGroup], entry: GroupEntry) -> None:
        if self._maker.latest_version_only and not self._is_latest(entry):
            self._counts["superseded_version"] += len(entry.uids)
            return
        if entry.group_id in self._held or self._delivered.issuperset(entry.uids):
            return
        group = read()
        sealed, rows = examples_of(group, self._config.estimator)
        fresh = [row for row in rows if row.source.uid not in self._delivered]
        for row in fresh:
            self._maker.add_rollout(row, sealed)
            self._group_of[row.source] = entry.group_id
        self._held[entry.group_id] = _HeldGroup(entry.example_id, {row.source for row in fresh})
        self._of_example.setdefault(entry.example_id, set()).add(entry.group_id)
        for source, reason in self._maker.take_discarded():
            self._counts[reason] += 1
            self._forget(source)
        while len(self._held) > self._config.capacity_groups:
            self._discard(next(iter(self._held)), "capacity")

    def _is_latest(self, entry: GroupEntry) -> bool:
        """Whether this is the newest version of the example that has sealed; if it is, discard older versions."""
        latest = self._latest.get(entry.example_id, entry.policy_version)
        if entry.policy_version < latest:
            return False
        if entry.policy_version > latest:
            for group_id in list(self._of_example.get(entry.example_id, ())):
                self._discard(group_id, "superseded_version")
        self._latest[entry.example_id] = entry.policy_version
        return True

    def _discard(self, group_id: str, reason: str) -> None:
        sources = sorted(self._held[group_id].sources)
        self._counts[reason] += len(sources)
        self._maker.discard(sources)
        for source in sources:
            self._forget(source)

    def _forget(self, source: Source) -> None:
        """Forget a rollout that the maker no longer holds."""
        group_id = self._group_of.pop(source)
        held = self._held[group_id]
        held.sources.discard(source)
        if not held.sources:
            del self._held[group_id]
            groups = self._of_example[held.example_id]
            groups.discard(group_id)
            if not groups:
                del self._of_example[held.example_id]

    def create_batch(self, batch_size: int, number: int) -> tuple[list[RLExample], dict[str, Any]] | None:
        """Return the maker's next batch, with this number, and its metadata; None if the maker has too few rollouts.

        Raises StoreError if the maker raised an error before.
        """
        if self._failed:
            raise StoreError(
                "the batch maker raised an error before and may have lost rollouts; close the store and open it again: "
                "a new maker is then offered every rollout that is in no batch"
            )
        with self._noting_failure():
            self._maker.batch_number = number
            batch = self._maker.create_batch(batch_size)
            if batch is None:
                return None
            for row in batch:
                self._forget(row.source)
                self._delivered.add(row.source.uid)
            return batch, self._maker.get_batch_metadata(batch)

    def stats(self) -> dict[str, int]:
        """Return the number of rollouts that the maker holds (`held`), and those left without a batch, by reason."""
        return {"held": self._maker.held, **self._counts}


def examples_of(group: RolloutGroup, estimator: str) -> tuple[SealedGroup, list[RLExample]]:
    """Convert a sealed group for batch makers; return it and its examples with advantages, in order of arrival."""
    sealed_ms = round(group.sealed_ts * 1000)
    first = group.rollouts[0]
    collected = Group(
        key=GroupKey(group.environment, group.example_id, group.policy_version, first.group_id),
        opened_offset=group.members[0].source.offset,
        opened_ms=sealed_ms,
        declared_size=len(group.members),
        members={r.uid: Member(source, HeldRollout.of(r).trimmed(), 0, sealed_ms) for r, source in group.members},
    )
    advantages = member_advantages(collected, group_episodes(collected), ESTIMATORS[estimator])
    sealed = SealedGroup(
        environment=group.environment,
        example_id=group.example_id,
        policy_version=group.policy_version,
        group_id=first.group_id,
        rewards=tuple(rollout.reward for rollout in group.rollouts),
        advantages=tuple(worth.share for worth in advantages.values()),
        sealed_ms=sealed_ms,
    )
    return sealed, [
        HeldExample.of(m.rollout, m.source, advantages[uid].share).plain() for uid, m in collected.members.items()
    ]


_BATCH_BYTES = 2**40
"""No limit in practice, because batches in memory need none."""


class GrpoBatchMaker(ReservoirBatchMaker):
    """Groups rollouts by (environment, example, policy version), keeps only the latest version of each example, and
    draws from rollouts with a nonzero advantage (`rloo`).

    A rollout is delivered once. Advantages of undelivered rollouts change as their group grows.
    """

    def __init__(self, rng_seed: int = 0, environment_name: str = "") -> None:
        """`environment_name` is the only environment whose rollouts are accepted; empty accepts all."""
        super().__init__(MakerContext(partition=0, seed=rng_seed, batch_bytes=_BATCH_BYTES))
        self.environment_name = environment_name
        self._groups: dict[tuple[str, str], list[PlacedRollout]] = {}
        """Single rollouts of the latest version, by environment and example."""
        self._grown: set[tuple[str, str]] = set()
        self._delivered: set[Source] = set()
        self._drawn = 0

    def add_rollout(self, example: RLExample | Rollout | RolloutRecord, group: SealedGroup | None = None) -> None:
        """Add a rollout. A store passes its sealed group; other callers pass no group.

        A rollout with a known uid, or of a superseded version, is skipped. Raises RecordError for a rollout of another
        environment.
        """
        if isinstance(example, RLExample):
            super().add_rollout(example, group)
            return
        rollout = as_rollout(example) if isinstance(example, RolloutRecord) else example
        if self.environment_name not in ("", rollout.environment):
            raise RecordError(
                f"rollout {rollout.uid!r} is of environment {rollout.environment!r}, but this maker accepts "
                f"only {self.environment_name!r}; use another maker for it"
            )
        key = (rollout.environment, rollout.example_id)
        members = self._groups.setdefault(key, [])
        latest = members[0].rollout.policy_version if members else rollout.policy_version
        if rollout.policy_version > latest:
            self._forget(members)
            members.clear()
        elif rollout.policy_version < latest or any(rollout.uid == member.rollout.uid for member in members):
            return
        members.append(PlacedRollout(rollout, Source(-1, -1, rollout.uid)))
        self._grown.add(key)

    def create_batch(self, batch_size: int) -> list[RLExample] | None:
        """Return `batch_size` examples in an order drawn from the seed, or None if there are fewer."""
        for key in sorted(self._grown):
            members = self._groups[key]
            self._forget(members)
            sealed, rows = examples_of(group_of(members, 0.0), "rloo")
            for row in rows:
                if row.source not in self._delivered:
                    super().add_rollout(row, sealed)
        self._grown.clear()
        if self._groups:
            self.take_discarded()  # Without a store, discarded rollouts are not counted.
            self.batch_number = self._drawn
        batch = super().create_batch(batch_size)
        if batch is not None and self._groups:
            self._drawn += 1
            self._delivered.update(row.source for row in batch)
        return batch

    def _forget(self, members: Iterable[PlacedRollout]) -> None:
        self.discard([member.source for member in members if member.source in self._numbers])
