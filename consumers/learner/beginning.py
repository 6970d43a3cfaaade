"""What a learner begins with: the parameters before its first step, and those that its KL term compares with.

Shared by the learner and by whoever executes its steps again.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from consumers.learner.checkpoint import Checkpoints
from consumers.learner.packing import TrainingSequence
from consumers.learner.pretrained import initial_params
from consumers.learner.step import Metrics, Params, TrainState, TrainStep

Example = tuple[NDArray[np.int32], NDArray[np.bool_]]
"""Tokens and loss mask of one supervised example, both [tokens]."""


def begin(train_step: TrainStep, examples: Sequence[Example]) -> tuple[TrainState, Metrics]:
    """The state of step 0: random parameters, or those of a checkpoint, after the warm start on `examples`."""
    config = train_step.config
    if config.pretrained:
        params = initial_params(config.pretrained, config.model, train_step.shardings.params)
        state = train_step.fresh_state(params)
    else:
        state = train_step.initial_state()
    return train_step.warm_start(state, supervised(examples))


def load_reference(train_step: TrainStep, checkpoints: Checkpoints) -> Params | None:
    """The parameters the KL term compares with, where the learner computes their log-probabilities."""
    config = train_step.config
    if config.reference in ("", "carried"):
        return None
    if config.reference == "initial":
        found = checkpoints.reference(train_step.abstract_state().params)
    else:
        found = initial_params(config.reference, config.model, train_step.shardings.params)
    return train_step.frozen(found)


def supervised(examples: Sequence[Example]) -> list[TrainingSequence]:
    """Examples as the warm start takes them."""
    return [
        TrainingSequence(
            tokens=np.asarray(tokens, np.int32),
            loss_mask=np.asarray(mask, bool),
            advantages=np.zeros(len(tokens), np.float32),
            generator_log_probs=np.zeros(len(tokens), np.float32),
        )
        for tokens, mask in examples
    ]
