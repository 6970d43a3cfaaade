"""The order of an environment's prompts: each once in every epoch, over all workers together. Pure.

Epoch e is a permutation of the prompts that is determined by the seed and e; the epochs follow one another in an
endless sequence. Worker i of n takes the places i, i + n, i + 2n and so on, so workers need no communication, and no
two of them play the same place. After a restart, a worker needs only the number of places that it has taken.
"""

import random
import zlib
from collections.abc import Iterable
from functools import lru_cache

MIXED, EASY, HARD = range(3)
"""Pools of prompts: of mixed results or not known, solved by every member of their last group, and by none."""


class PromptOrder:
    """The places of one worker in the sequence of epochs."""

    def __init__(self, prompts: int, *, seed: str, worker: int = 0, workers: int = 1, drawn: int = 0) -> None:
        """`prompts` is the number of prompts, `drawn` the number of places taken; `worker` counts from 0."""
        assert prompts > 0
        self._prompts = prompts
        self._seed = seed
        # A worker beyond the configured number plays the places of another worker instead of failing.
        self._worker = worker % workers
        self._workers = workers
        self.drawn = drawn
        """Places taken so far."""
        self._permutation = lru_cache(maxsize=2)(self._shuffled)

    @property
    def epoch(self) -> int:
        """Epoch of the next place."""
        return (self.drawn * self._workers + self._worker) // self._prompts

    def draw(self) -> int:
        """Take the next place; return the index of its prompt."""
        place = self.drawn * self._workers + self._worker
        self.drawn += 1
        return self._permutation(place // self._prompts)[place % self._prompts]

    def _shuffled(self, epoch: int) -> list[int]:
        indices = list(range(self._prompts))
        random.Random(f"{self._seed}/{epoch}").shuffle(indices)
        return indices


class PromptPools:
    """The pool of each prompt of an environment, by its last group. A worker knows its own groups, and for the other
    prompts the pools that other workers recorded."""

    def __init__(self, prompts: int, packed: bytes = b"") -> None:
        """`packed` is the earlier state; one of another number of prompts is left out."""
        self._own = bytearray(_unpacked(packed, prompts) or bytes(prompts))
        self._others: list[bytes] = []

    def note(self, index: int, success: float) -> None:
        """Put a prompt into the pool of a group of which this share succeeded."""
        self._own[index] = EASY if success >= 1.0 else HARD if success <= 0.0 else MIXED

    def note_others(self, packed: Iterable[bytes]) -> None:
        """Replace the pools that other workers recorded."""
        self._others = [pools for each in packed if (pools := _unpacked(each, len(self._own)))]

    def pool(self, index: int) -> int:
        """Return the pool of a prompt."""
        return self._own[index] or next((pools[index] for pools in self._others if pools[index]), MIXED)

    @property
    def packed(self) -> bytes:
        """The worker's own pools as bytes."""
        return zlib.compress(self._own, 1)


def _unpacked(packed: bytes, prompts: int) -> bytes:
    """Return the pools in a state; empty if it has none, or those of other prompts."""
    inflating = zlib.decompressobj()
    try:
        pools = inflating.decompress(packed, prompts + 1)
    except zlib.error:
        return b""
    return pools if len(pools) == prompts else b""
