"""What a learner needs before it trains: examples for its warm start, and rollouts that fit the rows it packs.

A line of a file is {"prompt": text, "answer": text}, or {"tokens": ids, "loss_mask": 0 or 1 for each token, 1 if it is
trained}; other keys are ignored. Errors name the line.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rollstream.consumers.learner.pretrained import model_of, tokenizer_of
from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.run.run_environments import environments_of
from rollstream.producers.inference.chat.selection import chat_template
from rollstream.producers.tasks.environment_loading import LoadedEnvironment
from rollstream.topics.errors import ConfigurationError, RollstreamError
from rollstream.topics.logs import event

logger = logging.getLogger(__name__)

TASK_EXAMPLES = 2048

Example = tuple[np.ndarray[tuple[int], np.dtype[np.int32]], np.ndarray[tuple[int], np.dtype[np.bool_]]]
"""Tokens int32 and loss mask bool, both [T]."""


class Encoder(Protocol):
    """The part of a tokenizer that the examples need."""

    @property
    def eos_id(self) -> int:
        """The token that ends an answer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""


def warm_start_examples(config: RunConfig, tokenizer: Encoder | None = None) -> list[Example]:
    """Return the examples of learner.warm_start.file if it is set, else equally many from each environment.

    Raises ConfigurationError, which names the line of the file.
    """
    tokenizer = tokenizer or tokenizer_of(config.learner)
    if config.learner.warm_start.file:
        return examples_from(Path(config.learner.warm_start.file), tokenizer, model_of(config.learner).vocab_size)
    environments = [each for each in environments_of(config) if each.entry.weight]
    each = -(-TASK_EXAMPLES // max(len(environments), 1))
    examples = [
        encode_example(tokenizer, prompt, answer)
        for environment in environments
        for prompt, answer in environment.warm_start_examples(config.seed, each)
    ]
    conversations = [c for environment in environments for c in environment.warm_start_conversations(config.seed, each)]
    if conversations:
        # Render the conversations as the inference server shows them to the policy.
        template = chat_template(
            config.inference.chat_template,
            tokenizer_of(config.learner),
            config.learner.pretrained,
            config.inference.chat_template_kwargs,
        )
        examples += [
            masked_example(
                template.render([dict(m) for m in c.messages], [dict(t) for t in c.tools]), tokenizer, c.turn
            )
            for c in conversations
        ]
    return examples


def demonstrated(environments: Sequence[LoadedEnvironment]) -> float | None:
    """Return the share of the environments' examples that show a right answer; None if an environment does not say."""
    shares = [environment.demonstrated for environment in environments if environment.entry.weight]
    known = [share for share in shares if share is not None]
    return sum(known) / len(known) if len(known) == len(shares) else None


def encode_example(tokenizer: Encoder, prompt: str, answer: str) -> Example:
    """Encode a prompt, an answer and its end; the mask is true for the answer and the end."""
    return masked_example(tokenizer.encode(prompt), tokenizer, answer)


def masked_example(untrained: Sequence[int], tokenizer: Encoder, answer: str) -> Example:
    """Return the tokens of a prompt, an answer and its end; the mask is true for the answer and the end."""
    untrained, trained = list(untrained), [*tokenizer.encode(answer), tokenizer.eos_id]
    mask = [False] * len(untrained) + [True] * len(trained)
    return np.asarray(untrained + trained, np.int32), np.asarray(mask, np.bool_)


def examples_from(path: Path, tokenizer: Encoder, vocab_size: int) -> list[Example]:
    """Read the examples of a file, one per line, in order; empty lines are skipped.

    Token ids must be below `vocab_size`. Raises ConfigurationError, which names the file and the line.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigurationError(f"warm-start file {path} cannot be read: {error.strerror}") from error
    examples = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                examples.append(_example(line, tokenizer, vocab_size))
            except (ValueError, RollstreamError) as error:
                raise ConfigurationError(f"{path}, line {number}: {error}") from error
    if not examples:
        raise ConfigurationError(
            f"warm-start file {path} holds no example; leave learner.warm_start.file empty instead"
        )
    return examples


def _example(line: bytes, tokenizer: Encoder, vocab_size: int) -> Example:
    try:
        fields = json.loads(line)
    except ValueError as error:  # UnicodeDecodeError is a ValueError
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"a JSON {type(fields).__name__} instead of an object")
    if "tokens" in fields:
        tokens, mask = _numbers(fields, "tokens", vocab_size), _numbers(fields, "loss_mask", 2)
        if len(mask) != len(tokens):
            raise ValueError(f"loss_mask has {len(mask)} entries for {len(tokens)} tokens")
        example = np.asarray(tokens, np.int32), np.asarray(mask, np.bool_)
    else:
        for name in ("prompt", "answer"):
            if not isinstance(fields.get(name), str):
                raise ValueError(
                    f'{name} is {fields.get(name)!r}; give "prompt" and "answer", or "tokens" and "loss_mask"'
                )
        example = encode_example(tokenizer, fields["prompt"], fields["answer"])
        if example[0].max() >= vocab_size:
            raise ValueError(f"token {example[0].max()} is beyond the model's vocabulary of {vocab_size}")
    if not example[1][1:].any():
        raise ValueError("no token is trained (the first token never is, because it has no context)")
    return example


def _numbers(fields: dict[str, Any], name: str, below: int) -> list[int]:
    values = fields.get(name)
    if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
        raise ValueError(f"{name} is not a list of whole numbers")
    wrong = next((value for value in values if not 0 <= value < below), None)
    if wrong is not None:
        raise ValueError(f"{name} contains {wrong}, which is not between 0 and {below - 1}")
    return values


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
