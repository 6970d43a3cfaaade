"""Batch makers, which turn sealed groups into batches: the interface, and the default maker, first in, first out.

A maker is part of the pure fold: it has no clock, no I/O, and no randomness except what it derives from (seed,
partition, batch number). It delivers every rollout in a batch, reports it as discarded with a reason, or still holds
it.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from rollstream.topics.errors import RecordError
from rollstream.topics.wire.rl_examples import RLExample, Source

if TYPE_CHECKING:
    from rollstream.consumers.buffers.groups.group_files import PlacedRollout
    from rollstream.consumers.buffers.rollouts.record import RolloutRecord
    from rollstream.topics.records import Rollout


@dataclass(frozen=True, kw_only=True)
class SealedGroup:
    """A sealed group as makers see it."""

    environment: str
    example_id: str
    policy_version: int
    group_id: str
    rewards: tuple[float, ...]
    """Rewards of the members, in the order in which they are added."""
    advantages: tuple[float, ...]
    """Advantages of the members, in the same order."""
    sealed_ms: int
    """Stream time at which the group sealed, in milliseconds since the Unix epoch."""

    @property
    def size(self) -> int:
        return len(self.rewards)

    @property
    def name_bytes(self) -> int:
        """Maximum number of bytes that the group takes in a batch in addition to its rows."""
        return group_bytes(self.environment, self.example_id, self.group_id)


@dataclass(frozen=True, kw_only=True)
class MakerContext:
    """Values that a maker may depend on, in addition to the groups that it gets."""

    partition: int
    seed: int
    batch_bytes: int


class BatchMaker(ABC):
    """Makes batches of RL examples, purely in memory.

    Its batches may only depend on its context, on `batch_number` and on the rollouts that it holds: after a restart, it
    gets the held rollouts again, in the same order, and must repeat its batches.

    A maker that defines only `create_batch` and `get_batch_metadata` finds the rollouts that it holds in `waiting`. A
    maker that keeps rollouts in another way also defines `add_rollout`, `discard` and `held`.
    """

    latest_version_only: ClassVar[bool] = False
    """Whether the fold drops groups once a newer version of their example was offered, even if grouping.drop_superseded
    is not set. This includes newer versions whose rollouts were delivered long ago."""
    batch_number: int = 0
    """Number of the next batch, set by the fold; part of the seed of random choices."""

    def __init__(self, context: MakerContext | None = None) -> None:
        """Without a context, as in a group store, the seed is 0 and batches may have any size."""
        self.context = context or MakerContext(partition=0, seed=0, batch_bytes=2**40)
        self.waiting: dict[Source, RLExample] = {}
        """Rollouts that the maker holds, in order of arrival."""
        self._single: dict[tuple[str, str, int, str], list[PlacedRollout]] = {}
        """Single rollouts by environment, example, policy version and group."""

    def add_rollout(self, example: Any, group: SealedGroup | None = None) -> None:
        """Add one rollout of a group that has just sealed; the members of a group are added one after another.

        `example` is an RLExample. A maker without a run or a store takes a Rollout or RolloutRecord, too: each new
        member changes the advantages (`rloo`) of the members of its group that wait. A known uid is skipped.
        """
        if isinstance(example, RLExample):
            self.waiting[example.source] = example
        else:
            self._add_single(example)

    def _add_single(self, single: "Rollout | RolloutRecord") -> None:
        # Imported here because a run's makers get examples.
        from rollstream.consumers.buffers.groups.forwarding import examples_of
        from rollstream.consumers.buffers.groups.group_files import PlacedRollout, group_of
        from rollstream.consumers.buffers.rollouts.record import RolloutRecord, as_rollout

        rollout = as_rollout(single) if isinstance(single, RolloutRecord) else single
        key = (rollout.environment, rollout.example_id, rollout.policy_version, rollout.group_id)
        members = self._single.setdefault(key, [])
        if any(member.rollout.uid == rollout.uid for member in members):
            return
        added = Source(-1, -1, rollout.uid)
        members.append(PlacedRollout(rollout, added))
        _group, rows = examples_of(group_of(members, 0.0), "rloo")
        self.waiting.update((row.source, row) for row in rows if row.source == added or row.source in self.waiting)

    def pop_waiting(self, batch: Iterable[RLExample]) -> list[RLExample]:
        """Remove examples from `waiting` and return them, for `create_batch` to return."""
        return [self.waiting.pop(example.source) for example in batch]

    @abstractmethod
    def create_batch(self, batch_size: int) -> list[RLExample] | None:
        """Remove and return the examples of the next batch, or return None if no batch is due.

        A batch holds at least one example and at most `context.batch_bytes`: the sum of example_bytes of its examples
        and name_bytes of its groups. Rows keep the order of the list, and examples must be returned as they were added.

        The fold calls this with the configured batch size, until it returns None, whenever the held rollouts or the
        configuration have changed, and after that with the number of held rollouts if all of them must be delivered
        because of their age or a drain.
        """

    @abstractmethod
    def get_batch_metadata(self, batch: Sequence[RLExample]) -> dict[str, Any]:
        """Return metadata of a batch as JSON-compatible values; as JSON, they may have at most 4,096 characters."""

    def discard(self, sources: Iterable[Source]) -> None:
        """Forget rollouts that the fold dropped (stale, excluded, ...); never called for delivered rollouts."""
        for source in sources:
            del self.waiting[source]

    @property
    def held(self) -> int:
        """Number of rollouts that were added and neither delivered nor discarded."""
        return len(self.waiting)

    def take_discarded(self) -> list[tuple[Source, str]]:
        """Return the rollouts that the maker itself discarded since the last call, each with a reason.

        A discard may depend only on the rollout and its group: after a crash, a new maker must make the same one.
        """
        return []


def row_bytes(tokens: int, uid: str, reference: bool) -> int:
    """Return the maximum size of a rollout in an encoded batch: 13 bytes per token, or 17 with reference
    log-probabilities, plus its name, time and weight step."""
    return tokens * (17 if reference else 13) + 80 + len(uid.encode())


def group_bytes(environment: str, example_id: str, group_id: str) -> int:
    """Return the maximum number of bytes that a group takes in an encoded batch in addition to its rows."""
    return 64 + len(environment.encode()) + len(example_id.encode()) + len(group_id.encode())


def array_bytes(name: str, size_bytes: int, dimensions: int) -> int:
    """Return the maximum number of bytes that a named array of a rollout takes in an encoded batch."""
    return 64 + len(name.encode()) + 10 * dimensions + size_bytes


def example_bytes(example: RLExample) -> int:
    """Return the maximum number of bytes that an example takes in an encoded batch, without its group."""
    return row_bytes(example.length, example.source.uid, example.reference_log_probs is not None) + sum(
        (
            *(array_bytes(name, array.nbytes, array.ndim) for name, array in example.token_arrays.items()),
            *(
                array_bytes(name, stored.record_bytes, len(stored.shape))
                for name, stored in example.stored_arrays.items()
            ),
        )
    )


@dataclass(slots=True)
class _WaitingGroup:
    group: SealedGroup
    size_bytes: int
    """Maximum number of bytes that the group takes in a batch."""
    examples: dict[Source, RLExample] = field(default_factory=dict)


class FifoBatchMaker(BatchMaker):
    """Delivers whole groups, first in, first out; a batch is full at `batch_size` rollouts or `batch_bytes`."""

    def __init__(self, context: MakerContext) -> None:
        super().__init__(context)
        self._waiting: OrderedDict[int, _WaitingGroup] = OrderedDict()
        """Waiting groups by their identity, oldest first."""
        self._group_of: dict[Source, int] = {}
        self._held_bytes = 0

    def add_rollout(self, example: RLExample, group: SealedGroup | None = None) -> None:
        if group is None:
            raise RecordError(f"example {example.source.uid!r} has no group; give its group, or use GrpoBatchMaker")
        waiting = self._waiting.get(id(group))
        if waiting is None:
            waiting = self._waiting[id(group)] = _WaitingGroup(group, group.name_bytes)
            self._held_bytes += waiting.size_bytes
        size_bytes = example_bytes(example)
        waiting.examples[example.source] = example
        waiting.size_bytes += size_bytes
        self._held_bytes += size_bytes
        self._group_of[example.source] = id(group)

    def create_batch(self, batch_size: int) -> list[RLExample] | None:
        if not self._waiting or (self.held < batch_size and self._held_bytes < self.context.batch_bytes):
            return None
        batch: list[RLExample] = []
        size_bytes = 0
        while self._waiting and len(batch) < batch_size:
            key = next(iter(self._waiting))
            size_bytes += self._waiting[key].size_bytes
            if batch and size_bytes > self.context.batch_bytes:
                break
            batch += self._forget(key).examples.values()
        for example in batch:
            del self._group_of[example.source]
        return batch

    def get_batch_metadata(self, batch: Sequence[RLExample]) -> dict[str, Any]:
        return {"maker": "fifo", "batch_size": len(batch)}

    def discard(self, sources: Iterable[Source]) -> None:
        for source in sources:
            key = self._group_of.pop(source)
            waiting = self._waiting[key]
            size_bytes = example_bytes(waiting.examples.pop(source))
            waiting.size_bytes -= size_bytes
            self._held_bytes -= size_bytes
            if not waiting.examples:
                self._forget(key)

    @property
    def held(self) -> int:
        return len(self._group_of)

    def _forget(self, key: int) -> _WaitingGroup:
        waiting = self._waiting.pop(key)
        self._held_bytes -= waiting.size_bytes
        return waiting


class SftBatchMaker(FifoBatchMaker):
    """Leaves out rollouts whose advantage is zero: with the estimator `best`, all but the best of each group."""

    name: ClassVar[str] = "sft"

    def __init__(self, context: MakerContext) -> None:
        super().__init__(context)
        self._discarded: list[tuple[Source, str]] = []

    def add_rollout(self, example: RLExample, group: SealedGroup | None = None) -> None:
        if example.advantage.any():
            super().add_rollout(example, group)
        else:
            self._discarded.append((example.source, "zero_advantage"))

    def get_batch_metadata(self, batch: Sequence[RLExample]) -> dict[str, Any]:
        return {"maker": self.name, "batch_size": len(batch)}

    def take_discarded(self) -> list[tuple[Source, str]]:
        discarded, self._discarded = self._discarded, []
        return discarded


class PairsBatchMaker(SftBatchMaker):
    """Delivers two rollouts of each group, one with an advantage above 0 and one below: with the estimator
    `best_worst`, the best and the worst. A group that does not have exactly one of each makes no pair."""

    name: ClassVar[str] = "pairs"

    def add_rollout(self, example: RLExample, group: SealedGroup | None = None) -> None:
        signs = [] if group is None else [advantage > 0 for advantage in group.advantages if advantage]
        if example.advantage.any() and group is not None and sorted(signs) != [False, True]:
            self._discarded.append((example.source, "no_pair"))
        else:
            super().add_rollout(example, group)
