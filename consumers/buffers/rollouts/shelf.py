"""The rules by which a rollout buffer holds and draws rollouts: freshness, capacity, recency and retirement.

This module reads no clock and no content of rollouts. It returns every rollout that it refuses, or removes before it is
used up, with the reason, so that the caller can count it.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.buffers.storage.seeded_draws import weighted_without_replacement
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.records.fates import Skip

T = TypeVar("T")
StaleCode = Literal["", "old_step", "too_old"]
"""The reason why a rollout is not fresh: too many steps old, too many seconds old; "" if it is fresh."""


@dataclass(frozen=True, kw_only=True)
class ShelfRules:
    """Limits of a shelf, and settings of draws from it."""

    capacity: int = 4096
    """Maximum number of rollouts of one environment; the newest stay."""
    alpha: float = 3.0
    """Exponent of recency: rollout number i of an environment, 0 the oldest, has weight (i + 1)**alpha."""
    max_samples: int = 1
    """Number of draws after which a rollout is retired; negative: no limit."""
    max_rollout_step_delay: int = 1
    """Maximum age of a fresh rollout's weights in steps; negative: no limit."""
    max_rollout_timestamp_delay: float = 3600.0
    """Age in seconds from which a rollout is stale; negative: no limit."""
    balanced: bool = False
    """Whether every environment is drawn equally often; if not, in proportion to its number of rollouts."""

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ConfigurationError(f"a rollout buffer's capacity is {self.capacity}; it must be at least 1")
        if self.max_samples == 0:
            raise ConfigurationError(
                "a rollout buffer's max_samples is 0, which retires rollouts before any draw; give at least 1, or -1 "
                "for no limit"
            )
        if not math.isfinite(self.alpha):
            raise ConfigurationError(
                f"a rollout buffer's alpha is {self.alpha}; give a finite number, 0 for no recency"
            )

    def stale(self, weight_step: int, timestamp: float, step: int, now: float) -> str:
        """Return why a rollout is not fresh at a step and a time; "" if it is fresh."""
        match self.stale_code(weight_step, timestamp, step, now):
            case "old_step":
                old = step - weight_step
                return f"weight step {weight_step} is {old} steps old, at most {self.max_rollout_step_delay} may be"
            case "too_old":
                return f"{self.max_rollout_timestamp_delay:g} s old or more"
        return ""

    def stale_code(self, weight_step: int, timestamp: float, step: int, now: float) -> StaleCode:
        """Return why a rollout is not fresh, as one word; "" if it is fresh.

        It is fresh if weight_step >= step - max_rollout_step_delay, and timestamp > now - max_rollout_timestamp_delay.
        """
        if 0 <= self.max_rollout_step_delay < step - weight_step:
            return "old_step"
        if self.max_rollout_timestamp_delay >= 0 and not timestamp > now - self.max_rollout_timestamp_delay:
            return "too_old"
        return ""

    def used_up(self, usage_count: int) -> bool:
        """Whether a rollout was drawn max_samples times or more."""
        return 0 <= self.max_samples <= usage_count


@dataclass(slots=True)
class ShelfEntry(Generic[T]):
    """One rollout on the shelf."""

    item: T
    environment: str
    weight_step: int
    """Learner step of the weights that sampled the rollout."""
    timestamp: float
    """Time at which the rollout was created, in seconds."""
    usage_count: int = 0
    """Number of draws."""


class Removal(NamedTuple, Generic[T]):
    """A rollout that was refused, or removed before it was used up, and the reason."""

    entry: ShelfEntry[T]
    reason: str
    code: str
    """The reason as one word: a StaleCode, `used_up`, `capacity`, or one given to `remove`."""


class Shelf(Generic[T]):
    """Rollouts by environment, in order of arrival. Not thread-safe: its owner holds a lock."""

    def __init__(self, rules: ShelfRules) -> None:
        self.rules = rules
        self._held: dict[str, list[ShelfEntry[T]]] = {}
        # Bounds over all rollouts. While the bounds are fresh, so is every rollout, and no rollout is checked.
        self._lowest_step, self._oldest = math.inf, math.inf

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    @property
    def sizes(self) -> dict[str, int]:
        """Number of rollouts by environment, without empty environments."""
        return {name: len(self._held[name]) for name in sorted(self._held) if self._held[name]}

    def entries(self) -> list[ShelfEntry[T]]:
        """All rollouts, by environment and then in order of arrival."""
        return [entry for name in sorted(self._held) for entry in self._held[name]]

    def add(self, entries: Iterable[ShelfEntry[T]], step: int, now: float) -> list[Removal[T]]:
        """Append rollouts; return the rollouts that were refused, and those removed to make room."""
        left: list[Removal[T]] = []
        fresh: dict[str, list[ShelfEntry[T]]] = {}
        for entry in entries:
            if entry.usage_count and self.rules.used_up(entry.usage_count):
                left.append(Removal(entry, f"drawn {entry.usage_count} times", "used_up"))
            elif code := self.rules.stale_code(entry.weight_step, entry.timestamp, step, now):
                reason = self.rules.stale(entry.weight_step, entry.timestamp, step, now)
                left.append(Removal(entry, reason, code))
            else:
                fresh.setdefault(entry.environment, []).append(entry)
        for name in sorted(fresh):
            self._append(name, fresh[name])
            held = self._held[name]
            if (over := len(held) - self.rules.capacity) > 0:
                reason = f"{self.rules.capacity} newer ones fill the buffer"
                left += [Removal(entry, reason, "capacity") for entry in held[:over]]
                del held[:over]
        return left

    def put_back(self, entries: Iterable[ShelfEntry[T]]) -> None:
        """Append rollouts without any check, because they were on the shelf before."""
        for entry in entries:
            self._append(entry.environment, [entry])

    def refresh(self, step: int, now: float) -> list[Removal[T]]:
        """Remove rollouts that are no longer fresh."""
        rules = self.rules
        if not (
            0 <= rules.max_rollout_step_delay < step - self._lowest_step
            or (rules.max_rollout_timestamp_delay >= 0 and self._oldest <= now - rules.max_rollout_timestamp_delay)
        ):
            return []

        def stale(entry: ShelfEntry[T]) -> Skip | None:
            place = (entry.weight_step, entry.timestamp, step, now)
            code = rules.stale_code(*place)
            return Skip(code, rules.stale(*place)) if code else None

        return self.remove(stale)

    def remove(self, why: Callable[[ShelfEntry[T]], Skip | None]) -> list[Removal[T]]:
        """Remove the rollouts for which `why` gives a reason."""
        left: list[Removal[T]] = []
        self._lowest_step, self._oldest = math.inf, math.inf
        for name in sorted(self._held):
            kept = []
            for entry in self._held[name]:
                if skip := why(entry):
                    left.append(Removal(entry, skip.reason, skip.code))
                else:
                    kept.append(entry)
            self._held[name] = []
            self._append(name, kept)
        return left

    def draw(self, count: int, generator: np.random.Generator) -> list[ShelfEntry[T]] | None:
        """Draw `count` different rollouts in random order, or None if there are fewer. Count each as used, and
        retire it if it is used up.

        Each environment contributes as many rollouts as in a uniform draw of `count` from all rollouts, or, if
        `balanced`, an equal number. Within an environment, successive draws have weights (i + 1)**alpha over the
        remaining rollouts, where i is the place in order of arrival.
        """
        sizes = self.sizes
        if not 0 <= count <= sum(sizes.values()):
            return None
        shares = (_balanced if self.rules.balanced else _proportional)(list(sizes.values()), count, generator)
        drawn: list[ShelfEntry[T]] = []
        for name, share in zip(sizes, shares, strict=True):
            held = self._held[name]
            weights = self.rules.alpha * _log_ranks(len(held))
            drawn += [held[i] for i in weighted_without_replacement(generator, weights, share).tolist()]
        for entry in drawn:
            entry.usage_count += 1
        if any(self.rules.used_up(entry.usage_count) for entry in drawn):
            for name in sizes:
                self._held[name] = [entry for entry in self._held[name] if not self.rules.used_up(entry.usage_count)]
        order = np.argsort(generator.random(count), kind="stable")
        return [drawn[i] for i in order.tolist()]

    def _append(self, environment: str, entries: Sequence[ShelfEntry[T]]) -> None:
        """Append rollouts of an environment, and widen the bounds to include them."""
        self._held.setdefault(environment, []).extend(entries)
        if entries:
            self._lowest_step = min(self._lowest_step, *[entry.weight_step for entry in entries])
            self._oldest = min(self._oldest, *[entry.timestamp for entry in entries])


@lru_cache(maxsize=64)
def _log_ranks(count: int) -> NDArray[np.float64]:
    """log(i + 1) for i from 0."""
    ranks: NDArray[np.float64] = np.log(np.arange(1, count + 1, dtype=np.float64))
    ranks.flags.writeable = False
    return ranks


def _proportional(sizes: Sequence[int], count: int, generator: np.random.Generator) -> list[int]:
    """Return the number from each environment in a uniform draw of `count` from all (multivariate hypergeometric)."""
    if len(sizes) < 2:
        return [count] * len(sizes)
    ends = np.cumsum(np.array(sizes, np.int64))
    chosen = np.argsort(generator.random(int(ends[-1])), kind="stable")[:count]
    return [int(n) for n in np.bincount(np.searchsorted(ends, chosen, side="right"), minlength=len(sizes))]


def _balanced(sizes: Sequence[int], count: int, generator: np.random.Generator) -> list[int]:
    """Return equal shares; other environments make up for those with too few, and the remainder is drawn at random."""
    shares = [0] * len(sizes)
    while left := count - sum(shares):
        room = [i for i, size in enumerate(sizes) if shares[i] < size]
        each = left // len(room)
        if not each:
            order = np.argsort(generator.random(len(room)), kind="stable")
            for i in order[:left].tolist():
                shares[room[i]] += 1
            break
        for i in room:
            shares[i] = min(sizes[i], shares[i] + each)
    return shares
