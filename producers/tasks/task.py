"""The base class of the built-in tasks, small enough to list, and the split of their prompts: every fifth is held out.

A task also provides examples that teach a model its format without teaching it the task. Functions here are shared by
the built-in environments.
"""

import hashlib
import random
import re
from collections.abc import Iterable, Sequence
from typing import Any

from rollstream.producers.environments.environment import Prompt, SingleTurn, Split
from rollstream.topics.errors import ConfigurationError

HELD_OUT_EVERY = 5


def split_prompts(name: str, prompts: Iterable[Prompt]) -> dict[Split, tuple[Prompt, ...]]:
    """Return both splits of a task's prompts; `name` is the name of the task.

    Prompts are ordered by the sha256 of their names, and every fifth is held out. In counting order, every fifth would
    remove a digit or operand from training.
    """
    ordered = sorted(prompts, key=lambda p: hashlib.sha256(f"{name}/{p.example_id}".encode()).digest())
    return {
        "train": tuple(p for i, p in enumerate(ordered) if i % HELD_OUT_EVERY),
        "heldout": tuple(ordered[::HELD_OUT_EVERY]),
    }


_UNREADABLE = re.compile(r"[^ -~\n]")


class Task(SingleTurn):
    """A named list of prompts with one right answer each."""

    vocabulary: str
    """Characters of all prompts and answers, for a character tokenizer."""

    def __init__(
        self, name: str, vocabulary: str, max_tokens: int, prompts: Iterable[Prompt], *, demonstrated: float = 0.0
    ) -> None:
        """`demonstrated` is the share of warm-start examples that show the right answer to their prompt.

        Raises ConfigurationError if the share is not from 0 to 1.
        """
        self.name = name
        self.vocabulary = vocabulary
        self.max_tokens = max_tokens
        self.demonstrated = checked_share(name, demonstrated)
        self._splits = split_prompts(name, prompts)

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Return the prompts of a split."""
        return self._splits[split]

    def warm_start_examples(self, seed: int, n: int) -> list[tuple[str, str]]:
        """Return `n` pairs of a training prompt and another prompt's answer, which teach the format, not the task.

        The answers of the drawn prompts are shuffled across them, except for a share `demonstrated` of them; the seed
        determines the result.
        """
        generator = random.Random(seed)
        drawn = generator.choices(self._splits["train"], k=n)
        right = round(n * self.demonstrated)
        answers = [prompt.answer for prompt in drawn[right:]]
        generator.shuffle(answers)
        answers = [*(prompt.answer for prompt in drawn[:right]), *answers]
        return [(prompt.text, answer) for prompt, answer in zip(drawn, answers, strict=True)]


def checked_share(name: str, demonstrated: float) -> float:
    """Return the share of right demonstrations. Raises ConfigurationError if it is not from 0 to 1."""
    if not 0.0 <= demonstrated <= 1.0:
        raise ConfigurationError(
            f"environment {name} has demonstrated = {demonstrated}; it must be a share of examples, from 0 to 1"
        )
    return demonstrated


def text_argument(arguments: Any, name: str) -> str:
    """Return an argument of a tool's call. Raises ValueError if it is no text."""
    value = arguments.get(name) if isinstance(arguments, dict) else None
    if not isinstance(value, str):
        raise ValueError(f"the argument {name} must be a text")
    return value


def printable(text: str) -> str:
    """Replace each character that is not printable ASCII by `?`.

    A tool's answer may quote the policy, and the policy's tokenizer may not be able to encode the character.
    """
    return _UNREADABLE.sub("?", text)
