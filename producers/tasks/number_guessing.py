"""Number guessing, a game of several turns: the policy guesses a number and learns whether it is higher or lower.

Bisection needs the fewest turns, and a policy can learn it only from the answers to its own guesses.
"""

import random
from collections.abc import Sequence

from rollstream.producers.environments.environment import Episode, Generate, Message, Prompt, Reply, Score, Split
from rollstream.producers.tasks.task import split_prompts
from rollstream.topics.errors import ConfigurationError

HIGHER, LOWER = ">", "<"


class NumberGuessing:
    """Guess a number from 0 to `highest` within `turns` guesses; each wrong guess is answered with `>` or `<`.

    The reward is 1 for a number found with the first guess and falls by 1/`turns` with each further guess; it is 0 if
    the number is not found or a guess is not a number.
    """

    stop: Sequence[str] = ()
    demonstrated = 0.0
    vocabulary = "0123456789-?" + HIGHER + LOWER

    def __init__(self, *, name: str = "guess", highest: int = 31, turns: int = 6) -> None:
        """Raises ConfigurationError for a range or a number of turns below 1."""
        if highest < 1 or turns < 1:
            raise ConfigurationError(
                f"the game {name} has highest = {highest} and turns = {turns}; both must be at least 1"
            )
        self.name = name
        self.turns = turns
        self.max_tokens = len(str(highest)) + 2
        """A guess, its end token and one more token, so that endless guesses are possible and can be unlearnt."""
        text = f"0-{highest}?"
        numbers = range(highest + 1)
        self._splits = split_prompts(name, (Prompt(example_id=str(n), text=text, answer=str(n)) for n in numbers))

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Return one prompt for each hidden number of a split; all have the same text."""
        return self._splits[split]

    async def run(self, prompt: Prompt, generate: Generate) -> Episode:
        """Play until the number is found, a guess is not a number, or no turns are left."""
        hidden = int(prompt.answer)
        turns: list[Message | Reply] = []
        text, guesses = prompt.text, 0
        reward, truncated = 0.0, False
        while guesses < self.turns:
            reply = await generate(text)
            turns += [Message(role="user", text=text), reply]
            guesses += 1
            truncated = reply.truncated
            if truncated or not _is_number(reply.text):
                break
            guess = int(reply.text)
            if guess == hidden:
                reward = 1.0 - (guesses - 1) / self.turns
                break
            text = HIGHER if hidden > guess else LOWER
        return Episode(
            turns=tuple(turns),
            score=Score(reward=reward, components={"exact": float(reward > 0), "guesses": float(guesses)}),
            truncated=truncated,
        )

    def warm_start_examples(self, seed: int, n: int) -> list[tuple[str, str]]:
        """Return `n` pairs of the prompt and a number drawn at random, which teach what a guess looks like."""
        generator = random.Random(seed)
        prompts = self._splits["train"]
        return [(prompts[0].text, generator.choice(prompts).answer) for _ in range(n)]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
