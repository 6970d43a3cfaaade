"""Questions of a JSON-lines file as a task: one question and answer on each line, compared as texts or as numbers."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Literal

from rollstream.producers.environments.environment import Prompt, Score
from rollstream.producers.tasks.task import Task
from rollstream.topics.errors import ConfigurationError

_NUMBER = re.compile(r"-?(?:\d[\d,]*)?\.?\d+")


class QuestionFile(Task):
    """The questions of one file, or of one file for training and one for evaluation."""

    def __init__(
        self,
        path: str,
        *,
        heldout: str = "",
        question: str = "question",
        answer: str = "answer",
        prompt: str = "{question}",
        match: Literal["exact", "text", "number", "contains"] = "text",
        answer_pattern: str = "",
        max_tokens: int = 64,
        stop: Sequence[str] = (),
        warm_start: bool = False,
    ) -> None:
        r"""Read the file `path`; without a file `heldout`, every fifth question is held out.

        `question` and `answer` are the names of a line's fields, `prompt` is a template that holds {question}. `match`
        is how a response is compared with the answer: exact (character by character), text (ignoring case and surplus
        spaces), number (by the last number of the response) or contains (the response contains the answer).
        `answer_pattern` is a regular expression whose first group is the part of the response that is compared, e.g.
        `answer: (.*)` for the rest of a line, or `(?s)<answer>(.*?)</answer>` for several lines; its last match counts.
        With `warm_start`, a model starts with examples of the answers' format; a trained model needs none.
        Raises ConfigurationError if a file cannot be read or a line is not a question; the error names the line.
        """
        if "{question}" not in prompt:
            raise ConfigurationError(f"the prompt template {prompt!r} has no place for {{question}}: add it")
        if match not in ("exact", "text", "number", "contains"):
            raise ConfigurationError(f"match {match!r} is not one of exact, text, number, contains")
        self._answer_in = answer_part(answer_pattern)
        self._match = match
        self._warm_start = warm_start
        self.stop = tuple(stop)

        def read(file: str) -> tuple[Prompt, ...]:
            prompts = tuple(_questions(Path(file), question, answer, prompt))
            wrong = next((p for p in prompts if match == "number" and _number(p.answer) is None), None)
            if wrong is not None:
                raise ConfigurationError(
                    f"{file}, line {wrong.example_id}: its answer {wrong.answer!r} is not a number"
                )
            return prompts

        train = read(path)
        super().__init__(
            name=Path(path).stem,
            vocabulary="".join(sorted({character for p in train for character in p.text + p.answer})),
            max_tokens=max_tokens,
            prompts=train,
        )
        if heldout:
            self._splits = {"train": train, "heldout": read(heldout)}

    def score(self, prompt: Prompt, response_text: str, truncated: bool) -> Score:
        """Return 1 if the response has the right answer and is not truncated, otherwise 0."""
        exact = float(not truncated and self._is_right(prompt.answer, response_text))
        return Score(reward=exact, components={"exact": exact})

    def warm_start_examples(self, seed: int, n: int) -> list[tuple[str, str]]:
        """Return pairs of a question and another question's answer if `warm_start` is set, else none."""
        return super().warm_start_examples(seed, n) if self._warm_start else []

    def _is_right(self, answer: str, response: str) -> bool:
        part = self._answer_in(response)
        if part is None:
            return False
        if self._match == "exact":
            return part == answer
        if self._match == "number":
            number = _number(part)
            return number is not None and number == _number(answer)
        wanted, given = folded(answer), folded(part)
        return given == wanted if self._match == "text" else wanted in given


def answer_part(answer_pattern: str) -> Callable[[str], str | None]:
    """Return a function that takes the answer out of a response: the first group of the pattern's last match.

    Without a pattern the whole response is the answer; without a match there is none. Raises ConfigurationError if the
    pattern is not a regular expression with a group.
    """
    if not answer_pattern:
        return lambda response: response
    try:
        pattern = re.compile(answer_pattern)
    except re.error as error:
        raise ConfigurationError(f"answer_pattern {answer_pattern!r} is not a regular expression: {error}") from error
    if pattern.groups < 1:
        raise ConfigurationError(f"answer_pattern {answer_pattern!r} has no group: put the answer in parentheses")

    def last_match(response: str) -> str | None:
        matches = list(pattern.finditer(response))
        return (matches[-1].group(1) or "") if matches else None

    return last_match


def folded(text: str) -> str:
    """Return a text without case and surplus spaces."""
    return " ".join(text.casefold().split())


def _number(text: str) -> Decimal | None:
    """Return the last number of a text; None if it has none."""
    numbers = _NUMBER.findall(text)
    try:
        return Decimal(numbers[-1].replace(",", "")) if numbers else None
    except InvalidOperation:
        return None


def _questions(path: Path, question: str, answer: str, template: str) -> Iterator[Prompt]:
    """Yield the questions of a file, each named by its line."""
    for number, (asked, right) in rows(path, question, answer):
        yield Prompt(example_id=str(number), text=template.replace("{question}", str(asked)), answer=str(right))


def rows(path: Path, *names: str) -> Iterator[tuple[int, list[Any]]]:
    """Yield the number and the fields `names` of each line of a file of JSON objects; none of them is null.

    Raises ConfigurationError, naming the line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the questions of {path}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            if None in (given := [fields[name] for name in names]):
                raise ValueError("one of them is null")
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"{path}, line {number}: not a JSON object with {' and '.join(map(repr, names))}; name the fields in "
                "options"
            ) from error
        yield number, given
