"""Compares what the task's rollouts may be long with the rows a learner packs them into, before anything is trained."""

import logging

from consumers.learner.pretrained import tokenizer_of
from pipeline.config import RunConfig
from producers.tasks import Task
from topics.errors import ConfigurationError
from topics.logs import event

logger = logging.getLogger(__name__)


def check_lengths(config: RunConfig, task: Task) -> None:
    """Raise ConfigurationError where a prompt with the longest answer does not fit into learner.sequence_length, unless
    learner.too_long says what becomes of such rollouts; then log it as a warning.
    """
    learner, encode = config.learner, tokenizer_of(config.learner).encode
    prompt = max(len(encode(prompt.text)) for prompt in task.prompts("train"))
    needed = prompt + task.max_tokens
    if needed <= learner.sequence_length:
        return
    what = (
        f"a rollout of task {config.task} may have {needed} tokens ({prompt} of the longest prompt and "
        f"{task.max_tokens} of an answer), more than learner.sequence_length {learner.sequence_length}"
    )
    if learner.too_long in ("refuse", "error"):
        raise ConfigurationError(
            f'{what}; set it to {needed}, or learner.too_long to "skip" or "truncate": that biases training towards '
            "short answers"
        )
    event(logger, "rollouts_may_be_too_long", level=logging.WARNING, what=what, too_long=learner.too_long)
