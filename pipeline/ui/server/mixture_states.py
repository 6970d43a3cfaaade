"""Mixtures of the workers for the page: prompts drawn, success rates and weights, by worker and environment."""

from collections.abc import Iterable
from typing import Any

from rollstream.pipeline.config import RunConfig
from rollstream.producers.flow.curriculum import Curriculum, Lesson
from rollstream.producers.flow.mixture_states import newest_states
from rollstream.topics.control.steering import DesiredState, desired_state
from rollstream.topics.records import EnvironmentState, MixtureState


def mixture(config: RunConfig) -> dict[str, Any]:
    """Return the newest state of each worker's mixture."""
    newest = newest_states(config.kafka, config.run)
    wanted = desired_state(config.kafka, config.run)
    states = [newest[name] for name in sorted(newest)]
    return {
        "workers": [
            {"worker": state.worker_id, "environments": _environments(config, state, states, wanted)}
            for state in states
        ]
    }


def _environments(
    config: RunConfig, state: MixtureState, states: Iterable[MixtureState], wanted: DesiredState
) -> list[dict[str, Any]]:
    """Return the rows of a worker, with the weights of its curriculum; a locked or paused environment has weight 0."""
    configured = {each.name or each.use: each.weight for each in config.mixture}
    names = [each.environment for each in state.environments]
    curriculum = Curriculum(
        [Lesson(environment=name, weight=configured.get(name, 1.0)) for name in names],
        config.curriculum,
        {each.environment: each for each in state.environments},
    )
    curriculum.note_others(other for other in states if other is not state)
    curriculum.weigh(wanted.weights)
    weights = curriculum.weights()
    return [
        {
            "environment": each.environment,
            "weight": weights[each.environment] if each.unlocked and each.environment not in wanted.paused else 0.0,
            "drawn": each.drawn,
            "success": _success(each),
            "unlocked": each.unlocked,
            "paused": each.environment in wanted.paused,
        }
        for each in state.environments
    ]


def _success(state: EnvironmentState) -> float | None:
    return state.successes / state.trials if state.trials > 0 else None
