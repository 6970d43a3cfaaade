"""What a learner is warm-started on: the task's own examples of its format, or those of a JSON-lines file.

A line of a file is {"prompt": text, "answer": text}, or {"tokens": ids, "loss_mask": one 0 or 1 for each, 1 where it is
trained}; other keys are left alone. Whatever is wrong with a line is an error that names it.
"""

import json
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from consumers.learner.pretrained import model_of, tokenizer_of
from pipeline.config import RunConfig
from producers.tasks import create_task
from topics.errors import ConfigurationError, RollstreamError

TASK_EXAMPLES = 2048

Example = tuple[np.ndarray[tuple[int], np.dtype[np.int32]], np.ndarray[tuple[int], np.dtype[np.bool_]]]
"""Tokens int32 and loss mask bool, both [T]."""


class Encoder(Protocol):
    """What is asked of a tokenizer."""

    @property
    def eos_id(self) -> int:
        """The token that ends an answer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""


def warm_start_examples(config: RunConfig, tokenizer: Encoder | None = None) -> list[Example]:
    """Those of learner.warm_start.file where one is set, else the task's. Raises ConfigurationError naming the line."""
    tokenizer = tokenizer or tokenizer_of(config.learner)
    if config.learner.warm_start.file:
        return examples_from(Path(config.learner.warm_start.file), tokenizer, model_of(config.learner).vocab_size)
    pairs = create_task(config.task, config.tasks).warm_start_examples(config.seed, TASK_EXAMPLES)
    return [encode_example(tokenizer, prompt, answer) for prompt, answer in pairs]


def encode_example(tokenizer: Encoder, prompt: str, answer: str) -> Example:
    """Tokens of prompt, answer and end; the mask is true where the answer and the end are."""
    before, after = tokenizer.encode(prompt), [*tokenizer.encode(answer), tokenizer.eos_id]
    mask = [False] * len(before) + [True] * len(after)
    return np.asarray(before + after, np.int32), np.asarray(mask, np.bool_)


def examples_from(path: Path, tokenizer: Encoder, vocab_size: int) -> list[Example]:
    """The examples of a file, one a line, in its order; empty lines are passed over.

    Token ids must be below `vocab_size`. Raises ConfigurationError naming file and line.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigurationError(f"warm-start file {path} cannot be read: {error.strerror}") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                found.append(_example(line, tokenizer, vocab_size))
            except (ValueError, RollstreamError) as error:
                raise ConfigurationError(f"{path}, line {number}: {error}") from error
    if not found:
        raise ConfigurationError(
            f"warm-start file {path} holds no example; leave learner.warm_start.file empty instead"
        )
    return found


def _example(line: bytes, tokenizer: Encoder, vocab_size: int) -> Example:
    try:
        fields = json.loads(line)
    except ValueError as error:  # UnicodeDecodeError is one, too
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"a JSON {type(fields).__name__} where an object belongs")
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
        raise ValueError("no token is trained (the first one never is: it has no context)")
    return example


def _numbers(fields: dict[str, Any], name: str, below: int) -> list[int]:
    values = fields.get(name)
    if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
        raise ValueError(f"{name} is no list of whole numbers")
    wrong = next((value for value in values if not 0 <= value < below), None)
    if wrong is not None:
        raise ValueError(f"{name} holds {wrong}, which is not from 0 to {below - 1}")
    return values
