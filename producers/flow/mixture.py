"""The mixture of a worker: which environment begins the next group, and with which prompt. Pure.

Groups of any duration are started in the ratio of the weights: every start moves an environment back by
1 / weight, and the environment that is furthest ahead is next (stride scheduling). An environment that could not start
for a while, for lack of capacity, does not catch up later.
"""

import random
from collections.abc import Collection, Iterable, Mapping, Sequence

from rollstream.producers.config import CurriculumConfig
from rollstream.producers.environments.environment import Prompt
from rollstream.producers.flow.curriculum import Curriculum, Lesson
from rollstream.producers.flow.prompt_order import EASY, HARD, PromptOrder, PromptPools
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
