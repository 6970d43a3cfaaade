"""Formulas: coding in a few characters, for a model that `rollstream demo --task coding` trains from nothing.

The policy is told a function in words and writes it as an expression of x. A tool runs the expression on examples, in
the sandbox of `coding`, and after a failure the policy may write another one. Hidden tests decide the reward.
"""

import random
from collections.abc import Sequence
from typing import Any

from rollstream.producers.environments.environment import Episode, Generate, Message, Prompt, Reply, Score, Split
from rollstream.producers.environments.sandbox import Sandbox
from rollstream.producers.tasks.coding import same
from rollstream.producers.tasks.task import split_prompts
from rollstream.topics.errors import ConfigurationError

_OPERATORS = {"plus": "+", "minus": "-", "times": "*"}
_EXAMPLES, _HIDDEN = (0, 7), (1, 2, 3, 10, 99)
"""Values of x that the tool tries, and those that decide the reward."""
_RUNS_KEPT = 4096


class Formulas:
    """Write `x+3` for `plus 3:` within `turns` attempts; the reward is the share of hidden tests of the last one."""

    stop: Sequence[str] = ()
    demonstrated = 0.0

    def __init__(self, *, name: str = "formulas", highest: int = 5, turns: int = 2) -> None:
        """The numbers are from 1 to `highest`. Raises ConfigurationError if it or `turns` is below 1."""
        if highest < 1 or turns < 1:
            raise ConfigurationError(
                f"the environment {name} has highest = {highest} and turns = {turns}; both must be at least 1"
            )
        self.name = name
        self.max_tokens = len(str(highest)) + 4
        """An expression, its end token and one more token, so that endless ones are possible and can be unlearnt."""
        self._turns = turns
        self._sandbox = Sandbox()
        self._values: dict[str, Sequence[Any]] = {}
        prompts = (
            Prompt(example_id=f"{word} {number}", text=f"{word} {number}:", answer=f"x{operator}{number}")
            for word, operator in _OPERATORS.items()
            for number in range(1, highest + 1)
        )
        self._splits = split_prompts(name, prompts)

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Return the functions of a split."""
        return self._splits[split]

    async def run(self, prompt: Prompt, generate: Generate) -> Episode:
        """Play until an expression passes both examples, is cut off, or no turns are left.

        Raises SandboxFailed if code cannot be run here.
        """
        expected = await self._values_of(prompt.answer)
        turns: list[Message | Reply] = []
        message = Message(role="user", text=prompt.text)
        while True:
            reply = await generate(message.text)
            turns += [message, reply]
            passed = list(map(same, await self._values_of(reply.text), expected))
            shown, share = sum(passed[: len(_EXAMPLES)]), sum(passed[len(_EXAMPLES) :]) / len(_HIDDEN)
            if reply.truncated or shown == len(_EXAMPLES) or len(turns) == 2 * self._turns:
                break
            message = Message(role="tool", text=f"{shown}/{len(_EXAMPLES)}:")
        components = {"exact": float(share == 1.0), "passed": share}
        return Episode(turns=tuple(turns), score=Score(reward=share, components=components), truncated=reply.truncated)

    def warm_start_examples(self, seed: int, n: int) -> list[tuple[str, str]]:
        """Return `n` pairs of a function and an expression drawn at random, which teach what an expression is."""
        generator = random.Random(seed)
        train = self._splits["train"]
        return [(generator.choice(train).text, generator.choice(train).answer) for _ in range(n)]

    async def _values_of(self, expression: str) -> Sequence[Any]:
        """Return the values of an expression for each x, or Failures. Each expression is run once."""
        if expression not in self._values:
            if len(self._values) >= _RUNS_KEPT:
                self._values.clear()
            calls = [[x] for x in (*_EXAMPLES, *_HIDDEN)]
            outcome = await self._sandbox.run(f"f = lambda x: {expression}", "f", calls)
            self._values[expression] = outcome.values
        return self._values[expression]
