"""Multiple choice: questions of a JSON-lines file with options, of which the policy names one.

The options are shuffled, so that a policy cannot learn where the right one stands; a seed determines their order.
"""

import random
import re
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rollstream.producers.environments.environment import Prompt, Score
from rollstream.producers.tasks.question_file import answer_part, folded, rows
from rollstream.producers.tasks.task import Task, split_prompts
from rollstream.topics.errors import ConfigurationError

_LETTERS = string.ascii_uppercase
_LETTER = re.compile(r"\s*(?:\(([A-Z])\)|([A-Z])[.:)]|([A-Z])\s*$)")
_PLACES = re.compile(r"(\{question\}|\{options\})")
_DIGITS = Path(__file__).with_name("digits.jsonl")
"""Questions that need little knowledge: which of four options is a digit."""


class Choices(Task):
    """The questions of one file, or of one file for training and one for evaluation."""

    def __init__(
        self,
        path: str = "",
        *,
        heldout: str = "",
        question: str = "question",
        options: str = "options",
        answer: str = "answer",
        prompt: str = "{question}\n{options}\nAnswer: ",
        reply: Literal["letter", "text"] = "letter",
        answer_pattern: str = "",
        orders: int = 1,
        seed: int = 0,
        max_tokens: int = 16,
        stop: Sequence[str] = (),
        demonstrated: float | None = None,
    ) -> None:
        """Read the file `path` (default: a file that comes with rollstream). Without a file `heldout`, every fifth
        question is held out, in all its orders.

        `question`, `options` and `answer` are the names of a line's fields: a text, a list, and either the text of one
        option or its letter (A is the first). `prompt` is a template that holds {question} and {options}. Each question
        is asked in `orders` orders of its options, which follow from `seed`; with 0 it is asked once, in the file's
        order. The policy replies with the letter or the text of an option; `answer_pattern` is as for QuestionFile.
        With `demonstrated`, a model starts with examples, of which this share is right; a trained model needs none.
        Raises ConfigurationError if a file cannot be read or a line is not a question; the error names the line.
        """
        if "{question}" not in prompt or "{options}" not in prompt:
            raise ConfigurationError(f"the prompt template {prompt!r} needs {{question}} and {{options}}: add them")
        if reply not in ("letter", "text") or orders < 0:
            raise ConfigurationError(
                f"an environment choices has reply {reply!r} and orders {orders}; reply must be letter or text, and "
                "orders at least 0"
            )
        self._reply = reply
        self._answer_in = answer_part(answer_pattern)
        self._has_examples = demonstrated is not None
        self.stop = tuple(stop)

        def asked(number: int, text: object, options: Sequence[str], right: int) -> list[Prompt]:
            """Return one question in each of its orders."""
            prompts = []
            for index in range(orders or 1):
                order = list(range(len(options)))
                if orders:
                    random.Random(f"{seed}/{number}/{index}").shuffle(order)
                marks = [f"{letter})" for letter in _LETTERS] if reply == "letter" else ["-"] * len(order)
                listed = "\n".join(f"{mark} {options[place]}" for mark, place in zip(marks, order, strict=False))
                parts = {"{question}": str(text), "{options}": listed}
                prompts.append(
                    Prompt(
                        example_id=f"{number}/{index}",
                        text="".join(parts.get(part, part) for part in _PLACES.split(prompt)),
                        answer=_LETTERS[order.index(right)] if reply == "letter" else options[right],
                    )
                )
            return prompts

        def read(file: Path) -> dict[str, list[Prompt]]:
            """Return the prompts of each question by its line's number."""
            return {
                str(number): asked(number, text, *_options(f"{file}, line {number}", offered, right))
                for number, (text, offered, right) in rows(file, question, options, answer)
            }

        train = read(Path(path) if path else _DIGITS)
        prompts = [prompt for orders_of_one in train.values() for prompt in orders_of_one]
        super().__init__(
            name=Path(path).stem if path else "choices",
            vocabulary="".join(sorted({character for p in prompts for character in p.text + p.answer})),
            max_tokens=max_tokens,
            prompts=prompts,
            demonstrated=demonstrated or 0.0,
        )
        if heldout:
            held = read(Path(heldout)).values()
            self._splits = {"train": tuple(prompts), "heldout": tuple(p for one in held for p in one)}
        else:
            questions = split_prompts(self.name, (Prompt(example_id=number, text="") for number in train))
            self._splits = {
                split: tuple(p for question in chosen for p in train[question.example_id])
                for split, chosen in questions.items()
            }

    def score(self, prompt: Prompt, response_text: str, truncated: bool) -> Score:
        """Return 1 if the response names the right option and is not truncated, otherwise 0.

        A letter stands alone, in parentheses, or before a period, a colon or a parenthesis, which text may follow.
        """
        part = self._answer_in(response_text) or ""
        if self._reply == "text":
            right = folded(part) == folded(prompt.answer)
        else:
            letter = _LETTER.match(part)
            right = letter is not None and prompt.answer in letter.groups()
        exact = float(right and not truncated)
        return Score(reward=exact, components={"exact": exact})

    def warm_start_examples(self, seed: int, n: int) -> list[tuple[str, str]]:
        """Return pairs of a question and an answer if `demonstrated` is set, else none."""
        return super().warm_start_examples(seed, n) if self._has_examples else []


def _options(place: str, offered: Any, right: Any) -> tuple[list[str], int]:
    """Return a question's options and the index of the right one. Raises ConfigurationError, naming the place."""
    options = [str(option) for option in offered] if isinstance(offered, list) and None not in offered else []
    if not 2 <= len(set(options)) == len(options) <= len(_LETTERS):
        raise ConfigurationError(
            f"{place}: its options are {offered!r}; give a list of 2 to {len(_LETTERS)} different options"
        )
    texts = [index for index, option in enumerate(options) if option == str(right)]
    letters = [index for index, letter in enumerate(_LETTERS[: len(options)]) if letter == right]
    if len({*texts, *letters}) != 1:
        fault = (
            "is the text of one option and the letter of another" if texts else "is neither an option nor its letter"
        )
        raise ConfigurationError(f"{place}: its answer {right!r} {fault}; give the text of an option, or a letter")
    return options, (texts or letters)[0]
