"""Which rollouts a rollout buffer holds and which it draws: freshness, capacity, recency and retirement. Pure.

Nothing here looks at a clock or at what a rollout contains. Whatever leaves without having been used up is returned,
with the reason, so that its caller can account for it.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from consumers.buffers.draws import weighted_without_replacement
from topics.errors import ConfigurationError
from topics.skip_codes import Skip

T = TypeVar("T")
StaleCode = Literal["", "ahead", "old_step", "too_old"]
"""Why a rollout is not fresh: a step of the future, too many steps ago, too long ago."""


@dataclass(frozen=True, kw_only=True)
class ShelfRules:
    """What is held, for how long, and how it is drawn."""

    capacity: int = 4096
    """Rollouts of one environment; the newest stay."""
    alpha: float = 3.0
    """Exponent of recency: of n rollouts of an environment number i, the oldest being 0, weighs (i + 1)**alpha."""
    max_samples: int = 1
    """How often a rollout is drawn before it is retired; negative: as often as it comes."""
    max_step_delay: int = 1
    """A rollout of a weight step this many steps back is the oldest that is fresh; negative: however old."""
    max_timestamp_delay_s: float = 3600.0
    """A rollout of this age in seconds, or older, is stale; negative: however old."""
    balanced: bool = False
    """Draw from every environment alike; else in proportion to what is held of each."""

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ConfigurationError(f"a rollout buffer's capacity is {self.capacity}; it must be at least 1")
        if self.max_samples == 0:
            raise ConfigurationError(
                "a rollout buffer's max_samples is 0, which retires what was never drawn; give at least 1, or -1 for "
                "no limit"
            )
        if not math.isfinite(self.alpha):
            raise ConfigurationError(
                f"a rollout buffer's alpha is {self.alpha}; give a finite number, 0 for no recency"
            )

    def stale(self, weight_step: int, timestamp: float, step: int, now: float) -> str:
        """Why a rollout is not fresh at a step and a time, "" where it is."""
        match self.stale_code(weight_step, timestamp, step, now):
            case "ahead":
                return f"weight step {weight_step} is ahead of step {step}"
            case "old_step":
                old = step - weight_step
                return f"weight step {weight_step} is {old} steps old, at most {self.max_step_delay} may be"
            case "too_old":
                return f"{self.max_timestamp_delay_s:g} s old or more"
        return ""

    def stale_code(self, weight_step: int, timestamp: float, step: int, now: float) -> StaleCode:
        """Why a rollout is not fresh, as one word, "" where it is.

        Fresh iff step - max_step_delay <= weight_step <= step and timestamp > now - max_timestamp_delay_s.
        """
        if weight_step > step:
            return "ahead"
        if 0 <= self.max_step_delay < step - weight_step:
            return "old_step"
        if self.max_timestamp_delay_s >= 0 and not timestamp > now - self.max_timestamp_delay_s:
            return "too_old"
        return ""

    def used_up(self, usage_count: int) -> bool:
        """Whether a rollout was drawn as often as it may be, or more often."""
        return 0 <= self.max_samples <= usage_count


@dataclass(slots=True)
class Entry(Generic[T]):
    """One rollout on the shelf."""

    item: T
    environment: str
    weight_step: int
    """Learner step of the weights that sampled it."""
    timestamp: float
    """When it was made, in seconds."""
    usage_count: int = 0
    """How often it was drawn."""


class Left(NamedTuple, Generic[T]):
    """A rollout that left before it was used up."""

    entry: Entry[T]
    reason: str
    code: str
    """The reason as one word: a StaleCode, `used_up`, `capacity`, or what `remove` was given."""


class Shelf(Generic[T]):
    """Rollouts by environment, each in the order they came. Not thread-safe: its owner holds a lock."""

    def __init__(self, rules: ShelfRules) -> None:
        self.rules = rules
        self._held: dict[str, list[Entry[T]]] = {}
        # Bounds over all that is held: while they are fresh, so is everything, and nothing is gone through.
        self._lowest_step, self._highest_step, self._oldest = math.inf, -math.inf, math.inf

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    @property
    def sizes(self) -> dict[str, int]:
        """Rollouts held by environment, those with none left out."""
        return {name: len(self._held[name]) for name in sorted(self._held) if self._held[name]}

    def entries(self) -> list[Entry[T]]:
        """Everything held, by environment and then in order of arrival."""
        return [entry for name in sorted(self._held) for entry in self._held[name]]

    def add(self, entries: Iterable[Entry[T]], step: int, now: float) -> list[Left[T]]:
        """Put rollouts behind those that are there; returns what is not admitted, and what has to make room."""
        left: list[Left[T]] = []
        grown = set()
        for entry in entries:
            if self.rules.used_up(entry.usage_count):
                left.append(Left(entry, f"drawn {entry.usage_count} times", "used_up"))
                continue
            if code := self.rules.stale_code(entry.weight_step, entry.timestamp, step, now):
                reason = self.rules.stale(entry.weight_step, entry.timestamp, step, now)
                left.append(Left(entry, reason, code))
                continue
            self._held.setdefault(entry.environment, []).append(entry)
            self._bound(entry)
            grown.add(entry.environment)
        for name in sorted(grown):
            held = self._held[name]
            if (over := len(held) - self.rules.capacity) > 0:
                reason = f"{self.rules.capacity} newer ones fill the buffer"
                left += [Left(entry, reason, "capacity") for entry in held[:over]]
                del held[:over]
        return left

    def put_back(self, entries: Iterable[Entry[T]]) -> None:
        """Put rollouts behind those that are there, as they were held before: nothing is judged."""
        for entry in entries:
            self._held.setdefault(entry.environment, []).append(entry)
            self._bound(entry)

    def refresh(self, step: int, now: float) -> list[Left[T]]:
        """Take out what is not fresh any more, or was never to be: one of a step ahead."""
        rules = self.rules
        if not (
            self._highest_step > step
            or 0 <= rules.max_step_delay < step - self._lowest_step
            or (rules.max_timestamp_delay_s >= 0 and self._oldest <= now - rules.max_timestamp_delay_s)
        ):
            return []

        def stale(entry: Entry[T]) -> Skip | None:
            place = (entry.weight_step, entry.timestamp, step, now)
            code = rules.stale_code(*place)
            return Skip(code, rules.stale(*place)) if code else None

        return self.remove(stale)

    def remove(self, why: Callable[[Entry[T]], Skip | None]) -> list[Left[T]]:
        """Take out what `why` gives a reason for."""
        left: list[Left[T]] = []
        self._lowest_step, self._highest_step, self._oldest = math.inf, -math.inf, math.inf
        for name in sorted(self._held):
            kept = []
            for entry in self._held[name]:
                if skip := why(entry):
                    left.append(Left(entry, skip.reason, skip.code))
                else:
                    kept.append(entry)
                    self._bound(entry)
            self._held[name] = kept
        return left

    def draw(self, count: int, generator: np.random.Generator) -> list[Entry[T]] | None:
        """`count` different rollouts in random order, None where fewer are held: each used once more, and retired
        where that was the last time.

        How many of each environment: as a uniform draw of `count` of all gives, or alike (`balanced`). Within one,
        successive draws in proportion to (i + 1)**alpha of what is left, i by order of arrival.
        """
        sizes = self.sizes
        if not 0 <= count <= sum(sizes.values()):
            return None
        shares = (_balanced if self.rules.balanced else _proportional)(list(sizes.values()), count, generator)
        drawn: list[Entry[T]] = []
        for name, share in zip(sizes, shares, strict=True):
            held = self._held[name]
            weights = self.rules.alpha * _log_ranks(len(held))
            drawn += [held[i] for i in weighted_without_replacement(generator, weights, share).tolist()]
        retired = False
        for entry in drawn:
            entry.usage_count += 1
            retired |= self.rules.used_up(entry.usage_count)
        if retired:
            for name in sizes:
                self._held[name] = [entry for entry in self._held[name] if not self.rules.used_up(entry.usage_count)]
        order = np.argsort(generator.random(count), kind="stable")
        return [drawn[i] for i in order.tolist()]

    def _bound(self, entry: Entry[T]) -> None:
        self._lowest_step = min(self._lowest_step, entry.weight_step)
        self._highest_step = max(self._highest_step, entry.weight_step)
        self._oldest = min(self._oldest, entry.timestamp)


@lru_cache(maxsize=64)
def _log_ranks(count: int) -> NDArray[np.float64]:
    """log(i + 1) for i from 0."""
    ranks: NDArray[np.float64] = np.log(np.arange(1, count + 1, dtype=np.float64))
    ranks.flags.writeable = False
    return ranks


def _proportional(sizes: Sequence[int], count: int, generator: np.random.Generator) -> list[int]:
    """How many of each a uniform draw of `count` of all gives (multivariate hypergeometric)."""
    if len(sizes) < 2:
        return [count] * len(sizes)
    ends = np.cumsum(np.array(sizes, np.int64))
    chosen = np.argsort(generator.random(int(ends[-1])), kind="stable")[:count]
    return [int(n) for n in np.bincount(np.searchsorted(ends, chosen, side="right"), minlength=len(sizes))]


def _balanced(sizes: Sequence[int], count: int, generator: np.random.Generator) -> list[int]:
    """Equal shares; what one cannot give the others do, and who gives one more is drawn."""
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
