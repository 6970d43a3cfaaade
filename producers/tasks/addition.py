"""Addition of two digits: the right answer to `7+8=` is `15`. No partial credit."""

import itertools

from rollstream.producers.environments.environment import Prompt, Score
from rollstream.producers.tasks.task import Task


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
        """Return 1 if the answer is exactly the sum and not truncated, otherwise 0."""
        exact = float(not truncated and response_text == prompt.answer)
        return Score(reward=exact, components={"exact": exact})
