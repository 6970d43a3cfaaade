"""The seam where sealed groups become batches: BatchMaker, and the default that keeps whole groups first in, first out.

A maker is part of the pure fold: no clock, no I/O, no randomness but what it derives from (seed, partition, batch
number). Every rollout given to it is delivered in a batch, reported as discarded with a reason, or still held.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from topics.errors import ConfigurationError
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
    """

    batch_number: int = 0
    """Number the next batch gets, set by the fold; seeds of random choices are made of it."""

    def __init__(self, context: MakerContext) -> None:
        self.context = context

    @abstractmethod
    def add_rollout(self, example: RLExample, group: SealedGroup) -> None:
        """Take one rollout of a group that has just sealed; all members of a group come in a row."""

    @abstractmethod
    def create_batch(self, batch_size: int) -> list[RLExample] | None:
        """Remove and return the examples of the next batch, or None when it is not time for one.

        Called with the configured batch size after every sealing, and with the number of rollouts held when what is
        waiting must go out (its age, or a drain).
        """

    @abstractmethod
    def get_batch_metadata(self, batch: Sequence[RLExample]) -> dict[str, Any]:
        """What is worth saying of a batch, as JSON-compatible values."""

    @abstractmethod
    def discard(self, sources: Iterable[Source]) -> None:
        """Forget rollouts the fold dropped (too stale by now, excluded, ...); never called for delivered ones."""

    @property
    @abstractmethod
    def held(self) -> int:
        """Rollouts held: added, and neither delivered nor discarded."""

    def take_discarded(self) -> list[tuple[Source, str]]:
        """Rollouts the maker itself threw away since the last call, each with a reason."""
        return []


def example_bytes(example: RLExample) -> int:
    """Bytes an example takes in a batch, uid and per-row arrays included."""
    reference = 4 if example.reference_log_probs is not None else 0
    return len(example.tokens) * (13 + reference) + 64 + 2 * len(example.source.uid)


class FifoBatchMaker(BatchMaker):
    """Whole groups, first in, first out; a batch takes groups until it is full by rollouts or by bytes."""

    def __init__(self, context: MakerContext) -> None:
        super().__init__(context)
        self._groups: deque[list[RLExample]] = deque()
        self._bytes: deque[int] = deque()
        self._last: SealedGroup | None = None
        self._held = 0
        self._held_bytes = 0

    def add_rollout(self, example: RLExample, group: SealedGroup) -> None:
        if group is not self._last:
            self._last = group
            self._groups.append([])
            self._bytes.append(0)
        size_bytes = example_bytes(example)
        self._groups[-1].append(example)
        self._bytes[-1] += size_bytes
        self._held += 1
        self._held_bytes += size_bytes

    def create_batch(self, batch_size: int) -> list[RLExample] | None:
        if not self._held or (self._held < batch_size and self._held_bytes < self.context.batch_bytes):
            return None
        batch: list[RLExample] = []
        size_bytes = 0
        while self._groups and len(batch) < batch_size:
            if batch and size_bytes + self._bytes[0] > self.context.batch_bytes:
                break
            size_bytes += self._bytes.popleft()
            batch += self._groups.popleft()
        self._held -= len(batch)
        self._held_bytes -= size_bytes
        return batch

    def get_batch_metadata(self, batch: Sequence[RLExample]) -> dict[str, Any]:
        return {"maker": "fifo", "batch_size": len(batch)}

    def discard(self, sources: Iterable[Source]) -> None:
        gone = set(sources)
        kept = [[e for e in group if e.source not in gone] for group in self._groups]
        self._groups = deque(group for group in kept if group)
        self._bytes = deque(sum(map(example_bytes, group)) for group in self._groups)
        self._held = sum(map(len, self._groups))
        self._held_bytes = sum(self._bytes)
        self._last = None

    @property
    def held(self) -> int:
        return self._held


MakerFactory = Callable[[MakerContext], BatchMaker]
MAKERS: dict[str, MakerFactory] = {"fifo": FifoBatchMaker}


def batch_maker(name: str, context: MakerContext, makers: Mapping[str, MakerFactory] = MAKERS) -> BatchMaker:
    """A maker by name, among `makers`. Raises ConfigurationError for an unknown one."""
    if name not in makers:
        raise ConfigurationError(f"grouping.maker is {name!r}; makers are {', '.join(makers)}")
    return makers[name](context)
