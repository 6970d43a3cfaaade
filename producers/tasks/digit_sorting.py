"""Digit sorting: `429>` is to be answered `249`. Partial credit by position, nothing for an answer that never ends."""

import itertools

from producers.environment import Prompt, Score
from producers.tasks.task import Task

DIGITS = "0123456789"


class DigitSorting(Task):
    """Sort a given number of digits in ascending order; every string of that many digits is a prompt."""

    def __init__(self, name: str, digits: int) -> None:
        numbers = ("".join(number) for number in itertools.product(DIGITS, repeat=digits))
        super().__init__(
            name=name,
            vocabulary=DIGITS + ">",
            # Room to say too much: an answer that does not end must be possible, or ending could not be learned.
            max_tokens=digits + 5,
            prompts=(Prompt(example_id=n, text=f"{n}>", answer="".join(sorted(n))) for n in numbers),
        )

    def score(self, prompt: Prompt, response_text: str, truncated: bool) -> Score:
        """The fraction of positions that are right, 0 when truncated; characters too many count as wrong positions."""
        right = sum(said == wanted for said, wanted in zip(response_text, prompt.answer, strict=False))
        fraction = right / max(len(prompt.answer), len(response_text))
        reward = 0.0 if truncated else fraction
        return Score(reward=reward, components={"exact": float(reward == 1.0)})
