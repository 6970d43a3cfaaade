"""`rollstream env new`: writes an environment of several turns and its test, which passes as written."""

import argparse
import re
from pathlib import Path

from rollstream.pipeline.command_line.text_tables import command_text
from rollstream.topics.errors import ConfigurationError

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_ENVIRONMENT = '''"""The environment {name}: guess a hidden number; the answer to each guess is higher or lower."""

from collections.abc import Sequence

from rollstream import Episode, Generate, Message, Prompt, Reply, Score


class {cls}:
    """Replace this game by your own: `prompts` lists the problems, and `run` plays one problem and scores it."""

    name = "{name}"
    max_tokens = 4
    """Largest number of tokens in a reply."""
    stop: Sequence[str] = ()
    """Texts that end a reply, besides the model's own end token."""
    vocabulary = "0123456789"
    """Characters of the replies of `rollstream env check` if there is no server."""

    def __init__(self, highest: int = 20, turns: int = 4) -> None:
        """Arguments come from `options` of the environment's entry in the configuration."""
        self.turns = turns
        numbers = [Prompt(example_id=str(n), text=f"0-{{highest}}?", answer=str(n)) for n in range(highest + 1)]
        # Every fifth number is held out: it is evaluated on and never trained on.
        self._splits: dict[str, list[Prompt]] = {{
            "train": [prompt for prompt in numbers if int(prompt.answer) % 5],
            "heldout": [prompt for prompt in numbers if int(prompt.answer) % 5 == 0],
        }}

    def prompts(self, split: str) -> Sequence[Prompt]:
        """Return the problems of a split, in an order that is the same in every process."""
        return self._splits[split]

    async def run(self, prompt: Prompt, generate: Generate) -> Episode:
        """Play one episode. `generate` sends a text and returns the policy's reply; earlier turns stay in context."""
        hidden, text = int(prompt.answer), prompt.text
        turns: list[Message | Reply] = []
        for turn in range(self.turns):
            reply = await generate(text)
            turns += [Message(role="user", text=text), reply]
            if reply.text == str(hidden):
                reward = 1.0 - turn / self.turns
                return Episode(turns=tuple(turns), score=Score(reward=reward, components={{"exact": 1.0}}))
            if reply.truncated or not reply.text.isdecimal():
                break
            text = "higher?" if hidden > int(reply.text) else "lower?"
        return Episode(turns=tuple(turns), score=Score(reward=0.0, components={{"exact": 0.0}}))

    def warm_start_examples(self, seed: int, n: int) -> list[tuple[str, str]]:
        """Return texts and replies that show an untrained model how to guess; not needed for a trained model."""
        prompts = self._splits["train"]
        return [(prompts[0].text, prompts[(seed + i) % len(prompts)].answer) for i in range(n)]
'''
_TEST = '''"""The environment {name}, played by scripts, so no model or server is needed."""

import asyncio

from {name} import {cls}
from rollstream import Episode, Prompt, ScriptedPolicy


def play(number: str, policy: ScriptedPolicy) -> Episode:
    environment = {cls}()
    prompt = Prompt(example_id=number, text="0-20?", answer=number)
    return asyncio.run(environment.run(prompt, policy))


def test_each_guess_is_answered_and_a_late_one_is_worth_less() -> None:
    policy = ScriptedPolicy("10", "5", "7")
    episode = play("7", policy)
    assert policy.texts == ["0-20?", "lower?", "higher?"]
    assert episode.score.reward == 0.5


def test_what_is_no_number_ends_the_game_without_a_reward() -> None:
    assert play("7", ScriptedPolicy("seven")).score.reward == 0.0


def test_no_problem_is_both_trained_on_and_held_out() -> None:
    environment = {cls}()
    train, heldout = environment.prompts("train"), environment.prompts("heldout")
    assert train and heldout
    assert not {{prompt.example_id for prompt in train}} & {{prompt.example_id for prompt in heldout}}
'''


def register(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `rollstream env new`."""
    parser.epilog = f"example:\n{command_text('rollstream env new my_game')}"
    parser.add_argument("name", metavar="NAME", help="name of the environment, in lower case, e.g. my_game")
    parser.add_argument(
        "--directory", type=Path, default=Path(), metavar="DIR", help="where to write (default: the working directory)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write both files, and print the commands to try. Raises ConfigurationError if one of the files exists."""
    name: str = args.name
    if not _NAME.fullmatch(name):
        raise ConfigurationError(f"{name!r} cannot be a module's name; use lower-case letters, digits and _: my_game")
    cls = "".join(part.capitalize() for part in name.split("_"))
    files = {args.directory / f"{name}.py": _ENVIRONMENT, args.directory / f"test_{name}.py": _TEST}
    existing = [path for path in files if path.exists()]
    if existing:
        raise ConfigurationError(f"{existing[0]} exists already; choose another name, or remove it")
    args.directory.mkdir(parents=True, exist_ok=True)
    for path, template in files.items():
        path.write_text(template.format(name=name, cls=cls), encoding="utf-8")
    use = f"{args.directory / name}.py:{cls}"
    print(f"wrote {' and '.join(map(str, files))}; try")
    for command in (
        f"python -m pytest {args.directory / f'test_{name}.py'}",
        f"rollstream env check {use}",
        f"rollstream demo --task {use}",
    ):
        print(f"  {command}")
    return 0
