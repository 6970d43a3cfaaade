"""The curriculum of a mixture: success rates of environments, their weights, and when they are unlocked. Pure.

An environment's success rate comes from the newest groups: each group counts as one trial, and the weight of older
groups decays. The weight of an environment peaks where half of the trials succeed, because groups of equal rewards
teach nothing. Each worker counts its own groups and adds the counts that the other workers last recorded on `control`,
so all workers see nearly the same rates.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rollstream.producers.config import CurriculumConfig
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
