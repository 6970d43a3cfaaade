"""Checks before training that the environments' rollouts fit the rows a learner packs them into, and that the learning
rate's warm-up fits the run."""

import logging
from collections.abc import Sequence

from rollstream.consumers.learner.pretrained import tokenizer_of
from rollstream.pipeline.config import RunConfig
from rollstream.producers.tasks.environment_loading import LoadedEnvironment
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)


def check_lengths(config: RunConfig, environments: Sequence[LoadedEnvironment]) -> None:
    """Raise ConfigurationError if a prompt with the longest answer does not fit into learner.sequence_length.

    If learner.too_long handles such rollouts, log a warning instead, and also if the learning rate's warm-up is as long
    as the run. Later turns of an episode are not checked, because the inference server ends an episode at
    inference.max_model_len. Raises PromptRefused for a prompt that cannot be encoded.
    """
    learner, encode = config.learner, tokenizer_of(config.learner).encode
    updates, warm_up = learner.max_steps * learner.epochs * learner.minibatches, learner.optimizer.warmup_updates
    if warm_up >= updates:
        what = (
            f"learner.optimizer.warmup_updates, {warm_up}, is not below the {updates} updates of learner.max_steps, "
            f"{learner.max_steps}, so the learning rate never reaches its value; lower it, or raise learner.max_steps"
        )
        event(logger, "warm_up_longer_than_run", level=logging.WARNING, what=what)
    for environment in environments:
        if not environment.entry.weight:
            continue  # The learner gets none of its rollouts.
        prompt = max(len(encode(prompt.text)) for prompt in environment.prompts("train"))
        needed = prompt + environment.max_tokens
        if needed <= learner.sequence_length:
            continue
        what = (
            f"a rollout of environment {environment.name} may have {needed} tokens ({prompt} of the longest prompt and "
            f"{environment.max_tokens} of an answer), more than learner.sequence_length, {learner.sequence_length}"
        )
        if learner.too_long in ("refuse", "error"):
            raise ConfigurationError(
                f'{what}; set it to {needed}, or set learner.too_long to "skip" or "truncate", which biases training '
                "towards short answers"
            )
        event(logger, "rollouts_may_be_too_long", level=logging.WARNING, what=what, too_long=learner.too_long)
