"""Addition of two digits: `7+8=` is to be answered `15`. All or nothing."""

import itertools

from producers.environment import Prompt, Score
from producers.tasks.task import Task


class Addition(Task):
    """Every sum of two single digits, a hundred prompts."""

    def __init__(self, name: str) -> None:
        super().__init__(
            name=name,
            vocabulary="0123456789+=",
            max_tokens=6,
            prompts=(
                Prompt(example_id=f"{a}+{b}", text=f"{a}+{b}=", answer=str(a + b))
                for a, b in itertools.product(range(10), repeat=2)
            ),
        )

    def score(self, prompt: Prompt, response_text: str, truncated: bool) -> Score:
        """1 for the sum and nothing else, ended; otherwise 0."""
        exact = float(not truncated and response_text == prompt.answer)
        return Score(reward=exact, components={"exact": exact})
