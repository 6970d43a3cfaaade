"""Digit sorting: the right answer to `429>` is `249`. Positions earn partial credit, a truncated answer none."""

import itertools

from rollstream.producers.environments.environment import Prompt, Score
from rollstream.producers.tasks.task import Task

DIGITS = "0123456789"


class DigitSorting(Task):
    """Sort a given number of digits in ascending order; every string of that many digits is a prompt."""

    def __init__(self, name: str, digits: int) -> None:
        numbers = ("".join(number) for number in itertools.product(DIGITS, repeat=digits))
        super().__init__(
            name=name,
            vocabulary=DIGITS + ">",
            # Longer than the answer: the policy can only learn to end if answers that do not end are possible.
            max_tokens=digits + 5,
            prompts=(Prompt(example_id=n, text=f"{n}>", answer="".join(sorted(n))) for n in numbers),
        )

    def score(self, prompt: Prompt, response_text: str, truncated: bool) -> Score:
        """Return the fraction of right positions, 0 if truncated; surplus characters count as wrong positions."""
        right = sum(actual == wanted for actual, wanted in zip(response_text, prompt.answer, strict=False))
        fraction = right / max(len(prompt.answer), len(response_text))
        reward = 0.0 if truncated else fraction
        return Score(reward=reward, components={"exact": float(reward == 1.0)})
