"""Parameters that a learner starts with: the state of step 0, the reference of the KL term, and the teacher.

The learner and retraining use this module.
"""

import logging
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.pretrained import initial_params, tokenizer_of
from rollstream.consumers.learner.records.checkpoints import Checkpoints
from rollstream.consumers.learner.training.packing import TrainingSequence
from rollstream.consumers.learner.training.train_step import Metrics, OnUpdate, Params, TrainState, TrainStep
from rollstream.consumers.models.adapters import without_adapters
from rollstream.consumers.models.config import DecoderConfig
from rollstream.consumers.models.huggingface import CONFIG, load_config
from rollstream.consumers.models.tokenizer import PRINTABLE_ASCII, Tokenizer
from rollstream.consumers.models.tokenizer_file import load_tokenizer
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)

Example = tuple[NDArray[np.int32], NDArray[np.bool_]]
"""Tokens and loss mask of one supervised example, both [tokens]."""


def begin(
    train_step: TrainStep, examples: Sequence[Example], on_update: OnUpdate = lambda _done, _updates, _loss: None
) -> tuple[TrainState, Metrics]:
    """Return the state of step 0: random or pretrained parameters, after the warm start on `examples`.

    `on_update` is called from time to time with the progress. Raises ConfigurationError if examples do not fit the
    settings, or have no token to train on.
    """
    config = train_step.config
    if config.warm_start.steps:
        _check_lengths(config, examples)
    if config.pretrained:
        params = initial_params(config.pretrained, config.model, train_step.shardings.params)
        state = train_step.fresh_state(params)
    else:
        state = train_step.initial_state()
    return train_step.warm_start(state, supervised(examples), on_update)


def _check_lengths(config: LearnerConfig, examples: Sequence[Example]) -> None:
    room = config.sequence_length
    lengths = [len(tokens) for tokens, _mask in examples]
    long, longest = sum(length > room for length in lengths), max(lengths, default=0)
    what = (
        f"{long} of {len(examples)} examples of the warm start are longer than learner.sequence_length {room}; the "
        f"longest has {longest} tokens"
    )
    if long and config.too_long in ("refuse", "error"):
        raise ConfigurationError(
            f'{what}. Set learner.sequence_length to at least {longest}, learner.too_long to "skip" or "truncate", or '
            "learner.warm_start.steps to 0"
        )
    kept = [mask for _tokens, mask in examples if len(mask) <= room or config.too_long == "truncate"]
    if examples and not any(mask[1:room].any() for mask in kept):
        raise ConfigurationError(
            f"the warm start has no token to train on: {what}. Set learner.sequence_length to at "
            f"least {longest}, or learner.warm_start.steps to 0"
        )
    if long:
        event(logger, "warm_start_too_long", level=logging.WARNING, what=what, too_long=config.too_long)


def load_reference(train_step: TrainStep, checkpoints: Checkpoints) -> Params | None:
    """Return the reference parameters of the KL term; None if the learner does not compute their log-probabilities.

    Raises ConfigurationError if learner.reference is a checkpoint of another model than the policy, and
    CheckpointRefused if its tensors do not fit its model.
    """
    config = train_step.config
    if config.reference in ("", "carried"):
        return None
    if config.reference == "initial":
        params = checkpoints.reference(train_step.abstract_state().params)
    else:
        _check_same_model(config.reference, without_adapters(config.model))
        params = initial_params(config.reference, config.model, train_step.shardings.params)
    return train_step.frozen(params)


def _check_same_model(reference: str, policy: DecoderConfig) -> None:
    """Compare the models, because the policy's program computes the log-probabilities of the reference."""
    model = asdict(load_config(reference))
    differing = [f"{n} {model[n]} instead of {value}" for n, value in asdict(policy).items() if model[n] != value]
    if differing:
        raise ConfigurationError(
            f"learner.reference {reference} is another model than the policy: its {CONFIG} has {', '.join(differing)}; "
            "give a checkpoint of the policy's own model"
        )


def load_teacher(train_step: TrainStep) -> Params | None:
    """Return the parameters of the teacher; None without one.

    Raises ConfigurationError if its vocabulary differs from the policy's, and CheckpointRefused if its tensors do not
    fit its model.
    """
    config, teacher = train_step.config, train_step.teacher
    if teacher is None:
        return None
    if not _same_vocabulary(load_tokenizer(config.teacher), tokenizer_of(config)):
        raise ConfigurationError(
            f"learner.teacher {config.teacher} has another vocabulary than the policy, so the tokens that the "
            "policy samples would mean something else to the teacher; choose a teacher of the same family"
        )
    return train_step.frozen(initial_params(config.teacher, teacher.model, teacher.shardings), teacher.shardings)


def _same_vocabulary(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether two tokenizers agree in size, end token, printable characters and about a thousand tokens."""
    ids = range(0, one.vocab_size, max(1, one.vocab_size // 1000))
    return (
        (one.vocab_size, one.eos_id) == (other.vocab_size, other.eos_id)
        and one.encode(PRINTABLE_ASCII) == other.encode(PRINTABLE_ASCII)
        and all(one.decode([token]) == other.decode([token]) for token in ids)
    )


def supervised(examples: Sequence[Example]) -> list[TrainingSequence]:
    """Convert examples to training sequences."""
    return [
        TrainingSequence(
            tokens=np.asarray(tokens, np.int32),
            loss_mask=np.asarray(mask, bool),
            advantages=np.zeros(1, np.float32),
            generator_log_probs=np.zeros(len(tokens), np.float32),
        )
        for tokens, mask in examples
    ]
