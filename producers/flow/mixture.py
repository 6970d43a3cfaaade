"""The mixture of a worker: which environment begins the next group, with which prompt, and how weights follow success.

Groups of any duration are started in the ratio of the weights: every start moves an environment back by 1 / weight, and
the environment that is furthest ahead is next (stride scheduling). An environment that could not start for a while, for
lack of capacity, does not catch up later.

An environment's success rate comes from the newest groups: each group counts as one trial, and the weight of older
groups decays. The weight of an environment peaks where half of the trials succeed, because groups of equal rewards
teach nothing. Each worker counts its own groups and adds the counts that the other workers last recorded on `control`,
so all workers see nearly the same rates.

Epoch e is a permutation of the prompts that is determined by the seed and e; the epochs follow one another in an
endless sequence. Worker i of n takes the places i, i + n, i + 2n and so on, so workers need no communication, and no
two of them play the same place. After a restart, a worker needs only the number of places that it has taken.
"""

import math
import random
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from rollstream.producers.config import CurriculumConfig
from rollstream.producers.environments.environment import Prompt
from rollstream.producers.tasks.environment_loading import LoadedEnvironment
from rollstream.topics.records import EnvironmentState, MixtureState


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """An environment as the curriculum sees it."""

    environment: str
    weight: float
    after: tuple[str, ...] = ()
    """Environments that unlock it."""
    unlock_at: float = 0.5
    """Success rate that each environment of `after` must reach."""


def difficulty_weight(success_rate: float, floor: float) -> float:
    """Return 4 r (1 - r) for the success rate r, at least `floor`: 1 where half of the trials succeed."""
    return max(floor, 4.0 * success_rate * (1.0 - success_rate))


def groups_counted(trials: float, window_groups: int) -> float:
    """Return the whole number of groups that a worker counted for these decayed trials; infinity if they are too many
    to tell.

    n groups leave window * (1 - (1 - 1 / window)**n) trials, which stay below the window.
    """
    if window_groups == 1:
        return trials  # only the newest group counts
    if trials >= window_groups:
        return math.inf
    return round(math.log1p(-trials / window_groups) / math.log1p(-1.0 / window_groups))


class Curriculum:
    """Success rates and weights of the environments of one worker."""

    def __init__(
        self, lessons: Sequence[Lesson], config: CurriculumConfig, own: Mapping[str, EnvironmentState]
    ) -> None:
        """`own` is the worker's earlier state by environment; environments missing from it start from zero."""
        self._lessons = {lesson.environment: lesson for lesson in lessons}
        self._config = config
        self._own = {name: own.get(name, EnvironmentState(environment=name)) for name in self._lessons}
        self._others: tuple[MixtureState, ...] = ()
        self._weights: Mapping[str, float] = {}
        self._unlock()

    def state(self, environment: str) -> EnvironmentState:
        """Return this worker's own counts of an environment."""
        return self._own[environment]

    def success_rate(self, environment: str) -> float | None:
        """Return the success rate over all workers; None before curriculum.min_groups groups."""
        own = [self._own[environment]] if environment in self._own else []
        states = [*own, *self._elsewhere(environment)]
        window = self._config.window_groups
        if sum(groups_counted(state.trials, window) for state in states) < self._config.min_groups:
            return None
        return sum(state.successes for state in states) / sum(state.trials for state in states)

    def weights(self) -> dict[str, float]:
        """Return the weight of each environment now; 0 for a locked environment."""
        return {name: self._weight(lesson) for name, lesson in self._lessons.items()}

    def note_group(self, environment: str, success: float) -> None:
        """Count a group; `success` is the share of its rollouts that succeeded."""
        state = self._own[environment]
        kept = 1.0 - 1.0 / self._config.window_groups
        self._own[environment] = replace(
            state, successes=state.successes * kept + success, trials=state.trials * kept + 1.0
        )
        self._unlock()

    def note_others(self, states: Iterable[MixtureState]) -> None:
        """Replace the other workers' states; environments that they have unlocked are unlocked here, too."""
        self._others = tuple(states)
        for name, state in self._own.items():
            if any(other.unlocked for other in self._elsewhere(name)):
                self._own[name] = replace(state, unlocked=True)
        self._unlock()

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Use these weights, by environment, instead of the lessons' weights until the next call."""
        self._weights = dict(weights)

    def _weight(self, lesson: Lesson) -> float:
        if not self._own[lesson.environment].unlocked:
            return 0.0
        rate = self.success_rate(lesson.environment) if self._config.enabled else None
        # Until its success rate is known, an environment has its full weight.
        weight = self._weights.get(lesson.environment, lesson.weight)
        return weight * (1.0 if rate is None else difficulty_weight(rate, self._config.floor))

    def _elsewhere(self, environment: str) -> list[EnvironmentState]:
        return [state for other in self._others for state in other.environments if state.environment == environment]

    def _unlock(self) -> None:
        """Unlock environments that are due; they stay unlocked even if the success rates that unlocked them fall."""
        for name, lesson in self._lessons.items():
            if not self._own[name].unlocked and all(
                (self.success_rate(before) or 0.0) >= lesson.unlock_at and self.success_rate(before) is not None
                for before in lesson.after
            ):
                self._own[name] = replace(self._own[name], unlocked=True)


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


_MOST_POOLED = 10_000_000
"""Maximum number of prompts that are counted, because a state may come from any worker."""


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
    pools = _inflated(packed, prompts + 1)
    return pools if len(pools) == prompts else b""


def _inflated(packed: bytes, most: int) -> bytes:
    try:
        return zlib.decompressobj().decompress(packed, most)
    except zlib.error:
        return b""


def pool_sizes(packed: bytes) -> dict[str, int] | None:
    """Return the number of prompts in each pool of a state, where `other` have had no group or a mixed one; None
    without pools."""
    pools = _inflated(packed, _MOST_POOLED)
    numbers = {"easy": EASY, "hard": HARD, "other": MIXED}
    return {name: pools.count(number) for name, number in numbers.items()} if pools else None


class Mixture:
    """The environments of one worker, and the worker's position in the prompts of each."""

    def __init__(
        self,
        environments: Sequence[LoadedEnvironment],
        *,
        seed: int = 0,
        worker: int = 0,
        workers: int = 1,
        curriculum: CurriculumConfig | None = None,
        state: MixtureState | None = None,
    ) -> None:
        """`worker` is this worker's index among `workers`; `state` is the last state of its previous process."""
        self.environments = tuple(environments)
        earlier: Mapping[str, EnvironmentState] = {s.environment: s for s in state.environments} if state else {}
        lessons = [
            Lesson(environment=e.name, weight=e.entry.weight, after=e.entry.after, unlock_at=e.entry.unlock_at)
            for e in environments
        ]
        locked = {e.name: EnvironmentState(environment=e.name, unlocked=not e.entry.after) for e in environments}
        curriculum = curriculum or CurriculumConfig()
        self.curriculum = Curriculum(lessons, curriculum, {**locked, **earlier})
        self._prompts = {e.name: e.prompts("train") for e in environments}
        self._orders = {
            e.name: PromptOrder(
                len(self._prompts[e.name]),
                seed=f"{seed}/{e.name}",
                worker=worker,
                workers=min(workers, e.entry.workers or workers),
                drawn=earlier[e.name].drawn if e.name in earlier else 0,
            )
            for e in environments
        }
        self._shares = {EASY: curriculum.easy_share, HARD: curriculum.hard_share}
        self._seed = seed
        pooled = min(self._shares.values()) < 1.0
        self._pools = {
            name: PromptPools(len(prompts), earlier[name].pools if name in earlier else b"")
            for name, prompts in self._prompts.items()
            if pooled
        }
        self._places = {
            name: {self._prompts[name][i].example_id: i for i in range(len(self._prompts[name]))}
            for name in self._pools
        }
        """Index of each prompt by environment and example id."""
        self._passes = dict.fromkeys(self._orders, 0.0)
        self._time = 0.0
        self._paused: frozenset[str] = frozenset()

    def adjust(self, paused: Collection[str], weights: Mapping[str, float]) -> None:
        """Begin no groups of the paused environments, and use these weights in place of the configured weights."""
        self._paused = frozenset(paused)
        self.curriculum.weigh(weights)

    def candidates(self) -> list[LoadedEnvironment]:
        """Return the unlocked environments that are not paused, in the order in which they may begin the next group."""
        weights = self.curriculum.weights()
        ready = [e for e in self.environments if weights[e.name] > 0.0 and e.name not in self._paused]
        return sorted(ready, key=lambda environment: max(self._passes[environment.name], self._time))

    def start(self, environment: LoadedEnvironment) -> Prompt:
        """Begin a group of an environment; return its prompt."""
        name = environment.name
        self._time = max(self._passes[name], self._time)
        self._passes[name] = self._time + 1.0 / self.curriculum.weights()[name]
        return self._prompts[name][self._drawn(name)]

    def _drawn(self, name: str) -> int:
        """Return the index of the next prompt, passing over prompts of the pools of which a share is played."""
        order, pools = self._orders[name], self._pools.get(name)
        for _place in range(len(self._prompts[name])):
            epoch, index = order.epoch, order.draw()
            share = 1.0 if pools is None else self._shares.get(pools.pool(index), 1.0)
            # Each epoch plays other prompts of the pool, and a restarted worker the same ones.
            if share >= 1.0 or random.Random(f"{self._seed}/{name}/{epoch}/{index}").random() < share:
                break
        return index  # after a whole epoch without another one

    def note_group(self, environment: str, example_id: str, success: float) -> None:
        """Count a group of a prompt; `success` is the share of its rollouts that succeeded."""
        self.curriculum.note_group(environment, success)
        if environment in self._pools and example_id in self._places[environment]:
            self._pools[environment].note(self._places[environment][example_id], success)

    def note_others(self, states: Iterable[MixtureState]) -> None:
        """Replace the other workers' states."""
        states = list(states)
        self.curriculum.note_others(states)
        for name, pools in self._pools.items():
            pools.note_others(s.pools for state in states for s in state.environments if s.environment == name)

    def states(self) -> tuple[EnvironmentState, ...]:
        """Return the state of each environment, for a later process of this worker."""
        return tuple(
            EnvironmentState(
                environment=name,
                drawn=order.drawn,
                successes=self.curriculum.state(name).successes,
                trials=self.curriculum.state(name).trials,
                unlocked=self.curriculum.state(name).unlocked,
                pools=self._pools[name].packed if name in self._pools else b"",
            )
            for name, order in self._orders.items()
        )
