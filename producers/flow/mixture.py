"""The mixture of a worker: which environment begins the next group, and with which prompt. Pure.

Groups of any duration are started in the ratio of the weights: every start moves an environment back by
1 / weight, and the environment that is furthest ahead is next (stride scheduling). An environment that could not start
for a while, for lack of capacity, does not catch up later.
"""

from collections.abc import Collection, Mapping, Sequence

from rollstream.producers.config import CurriculumConfig
from rollstream.producers.environments.environment import Prompt
from rollstream.producers.flow.curriculum import Curriculum, Lesson
from rollstream.producers.flow.prompt_order import PromptOrder
from rollstream.producers.tasks.environment_loading import LoadedEnvironment
from rollstream.topics.records import EnvironmentState, MixtureState


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
        self.curriculum = Curriculum(lessons, curriculum or CurriculumConfig(), {**locked, **earlier})
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
        return self._prompts[name][self._orders[name].draw()]

    def states(self) -> tuple[EnvironmentState, ...]:
        """Return the state of each environment, for a later process of this worker."""
        return tuple(
            EnvironmentState(
                environment=name,
                drawn=order.drawn,
                successes=self.curriculum.state(name).successes,
                trials=self.curriculum.state(name).trials,
                unlocked=self.curriculum.state(name).unlocked,
            )
            for name, order in self._orders.items()
        )
