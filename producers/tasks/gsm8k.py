"""Arithmetic word problems in the format of GSM8K (arXiv:2110.14168): worked answers that end in #### and a number.

The problems come from the user's files; nothing is downloaded. The final number is compared as a number. An answer with
several ####, with text next to the number, or without an end earns nothing.
"""

import json
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

from rollstream.producers.config import Gsm8kConfig
from rollstream.producers.environments.environment import Prompt, Score
from rollstream.producers.tasks.task import Task
from rollstream.topics.errors import ConfigurationError

MARK = "####"
_INSTRUCTION = f"Solve the problem step by step. Then write {MARK} and the answer as a number alone, e.g. {MARK} 42"
_PROMPTS = {
    "plain": _INSTRUCTION + "\n\nQuestion: {question}\nAnswer:",
    "chatml": "<|im_start|>system\n"
    + _INSTRUCTION
    + "<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n",
}
_NUMBER = re.compile(r"\$?\s*(-?\$?(?:\d[\d,]*)?(?:\.\d+)?)\s*[.%]?")


class Gsm8k(Task):
    """The problems of the files that the settings name."""

    def __init__(self, name: str, config: Gsm8kConfig) -> None:
        """Raises ConfigurationError if a file is missing or a line is not a problem, naming the line."""
        if not config.train_file:
            raise ConfigurationError(
                f"the task {name} needs problems: set tasks.gsm8k.train_file to a file in GSM8K's format"
            )
        train = tuple(_read(Path(config.train_file), "train", _PROMPTS[config.prompt]))
        super().__init__(
            name=name,
            vocabulary="".join(sorted({character for p in train for character in p.text + p.answer})),
            max_tokens=config.max_tokens,
            prompts=train,
        )
        if config.heldout_file:
            heldout = tuple(_read(Path(config.heldout_file), "heldout", _PROMPTS[config.prompt]))
            self._splits = {"train": train, "heldout": heldout}
        if config.prompt == "plain":
            self.stop = ("\nQuestion:",)

    def score(self, prompt: Prompt, response_text: str, truncated: bool) -> Score:
        """Return 1 if the right number follows the only #### and the answer is not truncated, otherwise 0.

        `format` is 1 if there is such a number, right or wrong.
        """
        answer = None if truncated else answer_of(response_text)
        exact = float(answer is not None and answer == Decimal(prompt.answer))
        return Score(reward=exact, components={"exact": exact, "format": float(answer is not None)})

    def warm_start_examples(self, seed: int, n: int) -> list[tuple[str, str]]:
        """Return no examples: a language model follows the format from the instruction."""
        return []


def answer_of(text: str) -> Decimal | None:
    """Return the number that stands alone on its line after the only ####; None if there is no such number."""
    parts = text.split(MARK)
    if len(parts) != 2:
        return None
    line = parts[1].strip().split("\n", 1)[0].strip()
    number = _NUMBER.fullmatch(line)
    digits = number[1].replace(",", "").replace("$", "") if number else ""
    return Decimal(digits) if digits.strip("-") else None


def _read(path: Path, split: str, template: str) -> Iterator[Prompt]:
    """Yield the problems of a file, named by split and line."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the problems of {path}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            problem = json.loads(line)
            if (question := problem["question"]) is None:
                raise ValueError("the question is null")
            question, answer = str(question), answer_of(str(problem["answer"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"{path}, line {number}: not a JSON object with question and answer") from error
        if answer is None:
            raise ConfigurationError(f"{path}, line {number}: its answer does not end in {MARK} and a number")
        yield Prompt(
            example_id=f"{split}-{number}", text=template.format(question=question), answer=f"{answer.normalize():f}"
        )
