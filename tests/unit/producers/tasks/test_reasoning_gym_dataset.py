"""Datasets of the real reasoning-gym: the same prompts everywhere, scored by the library's own verifiers."""

import json
import subprocess
import sys

import pytest

from rollstream.producers.tasks.reasoning_gym_dataset import ReasoningGymDataset
from rollstream.topics.errors import ConfigurationError

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def sums(**options: object) -> ReasoningGymDataset:
    return ReasoningGymDataset("chain_sum", size=100, config=SUMS, **options)  # type: ignore[arg-type]


@pytest.mark.long
def test_another_process_lists_the_same_prompts_and_gives_the_same_scores() -> None:
    task = sums()
    here = [
        (p.example_id, p.text, task.score(p, answer, False).reward)
        for p in task.prompts("train")
        for answer in (p.answer, "7")
    ]
    there = subprocess.run(
        [
            sys.executable,
            "-c",
            "import json\n"
            "from tests.unit.producers.tasks.test_reasoning_gym_dataset import sums\n"
            "task = sums()\n"
            "print(json.dumps([(p.example_id, p.text, task.score(p, a, False).reward)"
            " for p in task.prompts('train') for a in (p.answer, '7')]))",
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    assert [tuple(row) for row in json.loads(there.stdout)] == here


def test_equal_questions_are_one_prompt_and_none_is_in_both_splits() -> None:
    texts = [p.text for split in ("train", "heldout") for p in sums().prompts(split)]  # type: ignore[arg-type]
    assert len(texts) == len(set(texts)) < 100  # a hundred draws of two digits repeat some


def test_exact_scoring_pays_for_right_answers_only_and_partial_scoring_what_the_verifier_says() -> None:
    exact, partial = sums(), sums(scoring="partial")
    prompt = exact.prompts("train")[0]
    beside = prompt.answer + " or so"
    assert exact.score(prompt, prompt.answer, False).reward == partial.score(prompt, prompt.answer, False).reward == 1.0
    assert exact.score(prompt, beside, False).reward == 0.0
    assert 0.0 < partial.score(prompt, beside, False).reward < 1.0
    assert exact.score(prompt, prompt.answer, True).reward == 0.0  # cut off


def test_patterns_choose_what_is_shown_and_what_is_scored() -> None:
    task = sums(question_pattern=": (.*)", answer_pattern="<answer>(.*?)</answer>", prompt="Q {question}")
    prompt = task.prompts("train")[0]
    assert prompt.text.startswith("Q ")
    assert "problem" not in prompt.text
    assert task.score(prompt, f"<answer>x</answer> so <answer>{prompt.answer}</answer>.", False).reward == 1.0
    assert task.score(prompt, prompt.answer, False).reward == 0.0  # no answer is marked


@pytest.mark.parametrize("dataset", ["leg_counting", "word_sorting", "countdown"])
def test_any_dataset_pays_its_own_answers(dataset: str) -> None:
    task = ReasoningGymDataset(dataset, size=20)
    assert task.name == dataset
    for prompt in task.prompts("train"):
        if prompt.answer != "None":  # some have many right answers and name none
            assert task.score(prompt, prompt.answer, False).components["exact"] == 1.0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dataset": "chain_summ"}, "chain_summ"),
        ({"dataset": "chain_sum", "config": {"min_termz": 2}}, "min_termz"),
        ({"dataset": "chain_sum", "prompt": "question"}, "{question}"),
        ({"dataset": "chain_sum", "question_pattern": "(no such words)"}, "no such words"),
        ({"dataset": "chain_sum", "answer_pattern": "("}, "answer_pattern"),
        ({"dataset": "chain_sum", "answer_pattern": "x"}, "parentheses"),
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named.replace("{", r"\{")):
        ReasoningGymDataset(size=5, **options)  # type: ignore[arg-type]
