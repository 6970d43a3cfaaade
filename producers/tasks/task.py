"""The base of the built-in tasks: a single-turn environment over a character vocabulary, small enough to list.

A task also provides examples that teach a model its format without teaching it the task.
"""

import random
from collections.abc import Iterable, Sequence

from rollstream.producers.environment import Prompt, SingleTurn, Split
from rollstream.producers.tasks.splits import split_prompts


class Task(SingleTurn):
    """A named list of prompts with one right answer each."""

    vocabulary: str
    """Characters of all prompts and answers, for a character tokenizer."""

    def __init__(self, name: str, vocabulary: str, max_tokens: int, prompts: Iterable[Prompt]) -> None:
        self.name = name
        self.vocabulary = vocabulary
        self.max_tokens = max_tokens
        self._splits = split_prompts(name, prompts)

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Return the prompts of a split."""
        return self._splits[split]

    def warm_start_examples(self, seed: int, n: int) -> list[tuple[str, str]]:
        """Return `n` pairs of a training prompt and another prompt's answer: they teach the format, not the task.

        The answers of the drawn prompts are shuffled across them; the seed determines the result.
        """
        generator = random.Random(seed)
        drawn = generator.choices(self._splits["train"], k=n)
        answers = [prompt.answer for prompt in drawn]
        generator.shuffle(answers)
        return [(prompt.text, answer) for prompt, answer in zip(drawn, answers, strict=True)]
