"""A batch maker that takes groups apart: it draws batches at random from rollouts of each example's latest version.

The draw is counter-based: it depends on (seed, partition, batch number) and on the held rollouts in order of arrival.
Therefore a restarted task makes the same draws as a task that never stopped.
"""

import hashlib
import math
import struct
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rollstream.consumers.grouping.makers.batch_maker import BatchMaker, MakerContext, SealedGroup, example_bytes
from rollstream.topics.errors import RecordError
from rollstream.topics.wire.rl_examples import RLExample, Source


class _Held(NamedTuple):
    example: RLExample
    group: SealedGroup


class ReservoirBatchMaker(BatchMaker):
    """Shuffles rollouts whose advantage is not zero; the fold drops rollouts of superseded versions.

    The cost of a rollout depends on the number of held rollouts only because a removal moves 8 bytes for each of them.
    """

    latest_version_only = True

    def __init__(self, context: MakerContext) -> None:
        super().__init__(context)
        self._arrivals = 0
        self._order: list[int] = []
        """Arrival numbers of the held rollouts, ascending."""
        self._held: dict[int, _Held] = {}
        self._numbers: dict[Source, int] = {}
        self._held_bytes = 0
        self._discarded: list[tuple[Source, str]] = []

    def add_rollout(self, example: RLExample, group: SealedGroup | None = None) -> None:
        if group is None:
            raise RecordError(f"example {example.source.uid!r} has no group; give its group, or use GrpoBatchMaker")
        if not example.advantage.any():
            self._discarded.append((example.source, "zero_advantage"))
            return
        self._order.append(self._arrivals)
        self._held[self._arrivals] = _Held(example, group)
        self._numbers[example.source] = self._arrivals
        self._held_bytes += example_bytes(example)
        self._arrivals += 1

    def create_batch(self, batch_size: int) -> list[RLExample] | None:
        if not self._order or (len(self._order) < batch_size and self._held_bytes < self.context.batch_bytes):
            return None
        batch: list[RLExample] = []
        groups: set[int] = set()
        size_bytes = 0
        for draw in draws(
            self.context.seed, self.context.partition, self.batch_number, min(batch_size, len(self._order))
        ):
            index = draw % len(self._order)
            example, group = self._held[self._order[index]]
            size_bytes += example_bytes(example)
            if id(group) not in groups:
                groups.add(id(group))
                size_bytes += group.name_bytes
            if batch and size_bytes > self.context.batch_bytes:
                break  # A search for a smaller rollout that fits would favour short rollouts.
            self._remove(index)
            batch.append(example)
        return batch

    def get_batch_metadata(self, batch: Sequence[RLExample]) -> dict[str, Any]:
        """Return the batch size, and the mean, population standard deviation and range of the rows' advantages."""
        values = [float(example.advantage[0]) if len(example.advantage) else 0.0 for example in batch]
        if not values:
            return {"maker": "reservoir", "batch_size": 0}
        mean = math.fsum(values) / len(values)
        std = math.sqrt(math.fsum((v - mean) * (v - mean) for v in values) / len(values))
        stats = {"mean": mean, "std": std, "max": max(values), "min": min(values)}
        return {"maker": "reservoir", "batch_size": len(batch), "advantage_stats": stats}

    def discard(self, sources: Iterable[Source]) -> None:
        for source in sources:
            self._remove(bisect_left(self._order, self._numbers[source]))

    @property
    def held(self) -> int:
        return len(self._order)

    def take_discarded(self) -> list[tuple[Source, str]]:
        discarded, self._discarded = self._discarded, []
        return discarded

    def _remove(self, index: int) -> None:
        held = self._held.pop(self._order.pop(index))
        del self._numbers[held.example.source]
        self._held_bytes -= example_bytes(held.example)


def draws(seed: int, partition: int, batch_number: int, count: int) -> tuple[int, ...]:
    """Return `count` numbers, uniform below 2**64: SHAKE-256 of "seed/partition/batch_number", little-endian."""
    stream = hashlib.shake_256(f"{seed}/{partition}/{batch_number}".encode()).digest(8 * count)
    return struct.unpack(f"<{count}Q", stream)
