"""The seam where sealed groups become batches: BatchMaker, and the default that keeps whole groups first in, first out.

A maker is part of the pure fold: no clock, no I/O, no randomness but what it derives from (seed, partition, batch
number). Every rollout given to it is delivered in a batch, reported as discarded with a reason, or still held.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from topics.examples import RLExample, Source


@dataclass(frozen=True, kw_only=True)
class SealedGroup:
    """A sealed group, as makers see it."""

    environment: str
    example_id: str
    policy_version: int
    group_id: str
    rewards: tuple[float, ...]
    """Rewards of the members, in the order they are added."""
    advantages: tuple[float, ...]
    """Advantages of the members, same order."""
    sealed_ms: int
    """Stream time when it sealed, milliseconds since the Unix epoch."""

    @property
    def size(self) -> int:
        return len(self.rewards)

    @property
    def name_bytes(self) -> int:
        """Most bytes the group takes in a batch besides its rows."""
        return group_bytes(self.environment, self.example_id, self.group_id)


@dataclass(frozen=True, kw_only=True)
class MakerContext:
    """What a maker may depend on besides the groups it is given."""

    partition: int
    seed: int
    batch_bytes: int


class BatchMaker(ABC):
    """Makes batches of RL examples; purely in memory.

    What it does may depend on its context, on `batch_number` and on the rollouts it holds, and on nothing else it
    remembers: after a restart it is given again what was held, in the same order, and must do the same.

    A maker of two methods, `create_batch` and `get_batch_metadata`, finds what it holds in `waiting`. One that keeps
    rollouts in another way defines `add_rollout`, `discard` and `held`, too.
    """

    latest_version_only: ClassVar[bool] = False
    """Whether groups go as soon as a newer version of their example has sealed, whatever grouping.drop_superseded says.
    The fold sees to it, also for versions whose rollouts have long been delivered."""
    batch_number: int = 0
    """Number the next batch gets, set by the fold; seeds of random choices are made of it."""

    def __init__(self, context: MakerContext | None = None) -> None:
        """Without a context, as a store of groups by hand may do: seed 0, and batches of any size."""
        self.context = context or MakerContext(partition=0, seed=0, batch_bytes=2**40)
        self.waiting: dict[Source, RLExample] = {}
        """Rollouts held, in the order they came."""

    def add_rollout(self, example: RLExample, group: SealedGroup) -> None:
        """Take one rollout of a group that has just sealed; all members of a group come in a row."""
        self.waiting[example.source] = example

    def take(self, batch: Iterable[RLExample]) -> list[RLExample]:
        """Remove examples from `waiting`, and return them: what `create_batch` hands out."""
        return [self.waiting.pop(example.source) for example in batch]

    @abstractmethod
    def create_batch(self, batch_size: int) -> list[RLExample] | None:
        """Remove and return the examples of the next batch, or None when it is not time for one.

        A batch holds at least one example and at most `context.batch_bytes`, as example_bytes and the name_bytes of its
        groups count them; rows leave in the order given, each as it was added.

        Called with the configured batch size after every sealing, and with the number of rollouts held when what is
        waiting must go out (its age, or a drain).
        """

    @abstractmethod
    def get_batch_metadata(self, batch: Sequence[RLExample]) -> dict[str, Any]:
        """What is worth saying of a batch, as JSON-compatible values: at most 4,096 characters."""

    def discard(self, sources: Iterable[Source]) -> None:
        """Forget rollouts the fold dropped (too stale by now, excluded, ...); never called for delivered ones."""
        for source in sources:
            del self.waiting[source]

    @property
    def held(self) -> int:
        """Rollouts held: added, and neither delivered nor discarded."""
        return len(self.waiting)

    def take_discarded(self) -> list[tuple[Source, str]]:
        """Rollouts the maker itself threw away since the last call, each with a reason (a drop reason, or its own)."""
        return []


def row_bytes(tokens: int, uid: str, reference: bool) -> int:
    """Most bytes a rollout takes in an encoded batch: 13 a token, 17 with reference log-probabilities, and its row."""
    return tokens * (17 if reference else 13) + 64 + len(uid.encode())


def group_bytes(environment: str, example_id: str, group_id: str) -> int:
    """Most bytes a group takes in an encoded batch besides its rows."""
    return 64 + len(environment.encode()) + len(example_id.encode()) + len(group_id.encode())


def example_bytes(example: RLExample) -> int:
    """Most bytes an example takes in an encoded batch besides its group's."""
    return row_bytes(len(example.tokens), example.source.uid, example.reference_log_probs is not None)


@dataclass(slots=True)
class _Waiting:
    group: SealedGroup
    size_bytes: int
    """Most bytes it takes in a batch."""
    examples: dict[Source, RLExample] = field(default_factory=dict)


class FifoBatchMaker(BatchMaker):
    """Whole groups, first in, first out; a batch takes groups until it is full by rollouts or by bytes."""

    def __init__(self, context: MakerContext) -> None:
        super().__init__(context)
        self._waiting: OrderedDict[int, _Waiting] = OrderedDict()
        """By the identity of its group, oldest first."""
        self._group_of: dict[Source, int] = {}
        self._held_bytes = 0

    def add_rollout(self, example: RLExample, group: SealedGroup) -> None:
        waiting = self._waiting.get(id(group))
        if waiting is None:
            waiting = self._waiting[id(group)] = _Waiting(group, group.name_bytes)
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

    def _forget(self, key: int) -> _Waiting:
        gone = self._waiting.pop(key)
        self._held_bytes -= gone.size_bytes
        return gone
