"""The order of an environment's prompts: each once in every epoch, over all workers together. Pure.

Epoch e is a permutation of the prompts that is determined by the seed and e; the epochs follow one another in an
endless sequence. Worker i of n takes the places i, i + n, i + 2n and so on, so workers need no communication, and no
two of them play the same place. After a restart, a worker needs only the number of places that it has taken.
"""

import random
from functools import lru_cache


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
