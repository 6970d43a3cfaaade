"""Mixtures of the workers for the page: what each has drawn, its success rates, and the weights that follow."""

from collections.abc import Iterable
from typing import Any

from rollstream.pipeline.config import RunConfig
from rollstream.producers.curriculum import difficulty_weight
from rollstream.producers.mixture_states import MIXTURE
from rollstream.topics.catalogue import topic_name
from rollstream.topics.errors import RecordError, TopicError
from rollstream.topics.kafka import topic_admin
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.kafka.skipped_records import SkippedRecords
from rollstream.topics.keys import decode_key
from rollstream.topics.records import EnvironmentState, MixtureState


def mixture(config: RunConfig) -> dict[str, Any]:
    """Return the newest state of each worker's mixture; a run of an early release has none."""
    topic = topic_name(config.run, "control")
    try:
        topic_admin.partitions_of(config.kafka, topic)
    except TopicError:
        return {"workers": []}
    newest: dict[str, MixtureState] = {}
    skipped = SkippedRecords(logged=False)
    for message in read_to_end(config.kafka, topic):
        with skipped.passing(message):
            key = decode_key(message.key)
            if len(key) != 2 or key[0] != MIXTURE or message.value is None:
                continue
            state = skipped.decode(MixtureState, message)
            if state is None:
                raise RecordError("no state of a mixture")
            newest[state.worker_id] = state
    states = [newest[name] for name in sorted(newest)]
    return {
        "workers": [
            {
                "worker": state.worker_id,
                "environments": [_environment(config, each, states) for each in state.environments],
            }
            for state in states
        ]
    }


def _environment(config: RunConfig, state: EnvironmentState, workers: Iterable[MixtureState]) -> dict[str, Any]:
    rate = success_rate(workers, state.environment, config.curriculum.min_groups)
    entry = next((each for each in config.mixture if (each.name or each.use) == state.environment), None)
    share = entry.weight if entry else 1.0
    hard = 1.0
    if config.curriculum.enabled and rate is not None:
        hard = difficulty_weight(rate, config.curriculum.floor)
    own = state.successes / state.trials if state.trials > 0 else None
    return {
        "environment": state.environment,
        "weight": share * hard if state.unlocked else 0.0,
        "drawn": state.drawn,
        "success": own,
        "unlocked": state.unlocked,
    }


def success_rate(workers: Iterable[MixtureState], environment: str, min_groups: float) -> float | None:
    """Success rate of an environment over all workers; None before enough groups."""
    states = [each for worker in workers for each in worker.environments if each.environment == environment]
    trials = sum(state.trials for state in states)
    return sum(state.successes for state in states) / trials if trials >= max(min_groups, 1e-9) else None
