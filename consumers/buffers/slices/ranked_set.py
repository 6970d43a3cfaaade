"""Sets of small numbers with fast selection of the k-th smallest, for uniform draws among episodes.

A set is a binary tree of counts in one array: a change or a selection takes time proportional to the depth of the tree.
"""

import numpy as np
from numpy.typing import NDArray

_LEAST_LEAVES = 1024


class RankedSet:
    """A set of non-negative integers; it takes 8 to 16 bytes for each integer up to the largest ever added."""

    def __init__(self, members: NDArray[np.bool_] | None = None) -> None:
        """Start with the numbers n for which `members[n]` is True; by default, with an empty set."""
        members = np.zeros(0, np.bool_) if members is None else members
        self._leaves = _LEAST_LEAVES
        while self._leaves < len(members):
            self._leaves *= 2
        self._counts = np.zeros(2 * self._leaves, np.int32)
        self._counts[self._leaves : self._leaves + len(members)] = members
        self._sum_up()

    def __len__(self) -> int:
        return int(self._counts[1])

    def __contains__(self, number: int) -> bool:
        return number < self._leaves and bool(self._counts[self._leaves + number])

    def add(self, number: int) -> None:
        """Add a number."""
        while number >= self._leaves:
            self._double()
        self._set(number, 1)

    def discard(self, number: int) -> None:
        """Remove a number, if it is a member."""
        if number < self._leaves:
            self._set(number, 0)

    def select(self, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the members at these ranks [N], where rank 0 is the smallest; ranks must be below the length."""
        rank, node = ranks.copy(), np.ones(len(ranks), np.int64)
        for _level in range(self._leaves.bit_length() - 1):
            node *= 2
            left = self._counts[node]
            right = rank >= left
            rank -= left * right
            node += right
        return node - self._leaves

    def _set(self, number: int, value: int) -> None:
        counts, node = self._counts.data, self._leaves + number
        change = value - counts[node]
        if change:
            while node:
                counts[node] += change
                node //= 2

    def _double(self) -> None:
        leaves = self._counts[self._leaves :]
        self._leaves *= 2
        self._counts = np.zeros(2 * self._leaves, np.int32)
        self._counts[self._leaves : self._leaves + len(leaves)] = leaves
        self._sum_up()

    def _sum_up(self) -> None:
        level = self._leaves // 2
        while level:
            self._counts[level : 2 * level] = self._counts[2 * level : 4 * level].reshape(level, 2).sum(1)
            level //= 2
