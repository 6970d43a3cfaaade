"""Datasets of reasoning-gym (arXiv:2505.24760) as tasks: procedurally generated questions with their own verifiers.

A dataset is determined by its name, its configuration, its seed and its size, so every process lists the same prompts.
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rollstream.producers.environments.environment import Prompt, Score
from rollstream.producers.tasks.task import Task
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.secrets import error_text


class ReasoningGymDataset(Task):
    """One dataset of reasoning-gym. Its own verifier scores the answers; equal questions are one prompt."""

    def __init__(
        self,
        dataset: str,
        *,
        name: str = "",
        size: int = 1000,
        seed: int = 1,
        config: Mapping[str, Any] | None = None,
        prompt: str = "{question}",
        question_pattern: str = "",
        answer_pattern: str = "",
        scoring: Literal["exact", "partial"] = "exact",
        max_tokens: int = 64,
        stop: Sequence[str] = (),
        demonstrated: float = 0.0,
    ) -> None:
        r"""Generate `size` questions of `dataset` with the dataset's settings `config`; every fifth is held out.

        `prompt` is a template that holds {question}. `question_pattern` and `answer_pattern` are regular expressions,
        e.g. `<answer>(.*?)</answer>`: the first group of a question's first match is shown, and the first group of a
        response's last match is scored; without a pattern, the whole text is used. In both, `.` also matches the end
        of a line, because questions have several lines. `scoring` is exact (1 if the verifier gives 1, else 0) or
        partial (the verifier's own score, which may reward form without content).
        `demonstrated` is as in Task. Raises ConfigurationError for an unknown dataset or configuration, or if
        reasoning-gym is not installed.
        """
        if "{question}" not in prompt:
            raise ConfigurationError(f"the prompt template {prompt!r} has no place for {{question}}: add it")
        self._question = _compiled("question_pattern", question_pattern)
        self._answer = _compiled("answer_pattern", answer_pattern)
        self._scoring = scoring
        self._dataset = _create(dataset, seed, size, config or {})
        self.stop = tuple(stop)
        prompts: dict[str, Prompt] = {}
        for index in range(size):
            entry = self._dataset[index]
            text = prompt.replace("{question}", self._shown(dataset, entry["question"]))
            prompts.setdefault(
                text,
                Prompt(
                    example_id=f"{seed}/{index}", text=text, answer=str(entry["answer"]), extra={"entry": str(index)}
                ),
            )
        super().__init__(
            name=name or dataset,
            vocabulary="".join(sorted({c for p in prompts.values() for c in p.text + p.answer})),
            max_tokens=max_tokens,
            prompts=prompts.values(),
            demonstrated=demonstrated,
        )

    def score(self, prompt: Prompt, response_text: str, truncated: bool) -> Score:
        """Return the verifier's score of the answer; 0 if the response was truncated or holds no answer."""
        answer: str | None = response_text
        if self._answer is not None:
            matches = list(self._answer.finditer(response_text))
            answer = matches[-1].group(1) if matches else None
        scored = 0.0
        if answer is not None and not truncated:
            scored = float(self._dataset.score_answer(answer, self._dataset[int(prompt.extra["entry"])]))
        exact = float(scored == 1.0)
        return Score(
            reward=exact if self._scoring == "exact" else scored, components={"exact": exact, "partial": scored}
        )

    def _shown(self, dataset: str, question: str) -> str:
        if self._question is None:
            return question
        match = self._question.search(question)
        if match is None:
            raise ConfigurationError(
                f"question_pattern {self._question.pattern!r} does not match this question of {dataset}: {question!r}"
            )
        return match.group(1)


def _compiled(name: str, pattern: str) -> re.Pattern[str] | None:
    if not pattern:
        return None
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigurationError(f"{name} {pattern!r} is not a regular expression: {error}") from error
    if compiled.groups < 1:
        raise ConfigurationError(f"{name} {pattern!r} has no group: put the part to keep in parentheses")
    return compiled


def _create(dataset: str, seed: int, size: int, config: Mapping[str, Any]) -> Any:
    try:
        with warnings.catch_warnings():
            # Some of its dependencies compile with syntax warnings.
            warnings.simplefilter("ignore", SyntaxWarning)
            import reasoning_gym
    except ImportError as error:
        raise ConfigurationError(
            f"the dataset {dataset} belongs to reasoning-gym, which is not installed; "
            "install it: pip install 'rollstream[reasoning-gym]'"
        ) from error
    try:
        return reasoning_gym.create_dataset(dataset, seed=seed, size=size, **config)
    except (ValueError, TypeError, AssertionError) as error:
        settings = f"with the settings {', '.join(config)}" if config else "without settings"
        raise ConfigurationError(
            f"reasoning-gym refuses the dataset {dataset} {settings}: {error_text(error, config)}"
        ) from None
