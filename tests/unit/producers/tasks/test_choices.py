"""Multiple choice: questions of a JSON-lines file, their shuffled options, and how replies are read."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rollstream.producers.environments.scripted_policy import ScriptedPolicy
from rollstream.producers.tasks.choices import Choices
from rollstream.topics.errors import ConfigurationError

CAPITAL = {"question": "The capital of France?", "options": ["Rome", "Paris", "Oslo"], "answer": "B"}


def choices(tmp_path: Path, *lines: dict[str, Any] | str, **options: Any) -> Choices:
    path = tmp_path / "capitals.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return Choices(str(path), **options)


def one(tmp_path: Path, *lines: dict[str, Any] | str, **options: Any) -> Any:
    """The only question of a file, and its environment."""
    task = choices(tmp_path, *lines, **options)
    [prompt] = task.prompts("heldout")
    return prompt, task


@pytest.mark.parametrize("answer", ["B", "Paris"])
def test_an_answer_is_a_letter_or_the_text_of_an_option(tmp_path: Path, answer: str) -> None:
    prompt, task = one(tmp_path, CAPITAL | {"answer": answer}, orders=0)
    assert prompt.text == "The capital of France?\nA) Rome\nB) Paris\nC) Oslo\nAnswer: "
    assert (prompt.answer, task.name, task.demonstrated, task.warm_start_examples(0, 4)) == ("B", "capitals", 0.0, [])


def test_the_seed_shuffles_the_options_and_the_letter_follows_its_text(tmp_path: Path) -> None:
    def asked(seed: int) -> list[Any]:
        task = choices(tmp_path, *[CAPITAL] * 20, orders=3, seed=seed)
        return [*task.prompts("train"), *task.prompts("heldout")]

    prompts = asked(1)
    assert prompts == asked(1)
    assert [prompt.text for prompt in prompts] != [prompt.text for prompt in asked(2)]
    assert {prompt.answer for prompt in prompts} == {"A", "B", "C"}
    assert all(f"{prompt.answer}) Paris" in prompt.text for prompt in prompts)
    assert len({prompt.example_id for prompt in prompts}) == len(prompts) == 60


def test_all_orders_of_a_question_are_in_one_split() -> None:
    task = Choices(orders=4)
    train, heldout = ({p.example_id.split("/")[0] for p in task.prompts(split)} for split in ("train", "heldout"))  # type: ignore[arg-type]
    assert not train & heldout
    assert (len(train), len(heldout)) == (32, 8)


def test_a_file_of_its_own_can_be_held_out(tmp_path: Path) -> None:
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text(json.dumps(CAPITAL | {"question": "And now?"}))
    task = choices(tmp_path, *[CAPITAL] * 6, heldout=str(heldout))
    assert [prompt.text.split("\n")[0] for prompt in task.prompts("heldout")] == ["And now?"]
    assert len(task.prompts("train")) == 6


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("B", True),
        (" B\n", True),
        ("(B)", True),
        ("B) Paris", True),
        ("B. It is B, and not A.", True),
        ("A", False),
        ("Paris", False),
        ("BB", False),
        ("B or C", False),
        ("", False),
    ],
)
def test_a_letter_is_read_with_its_usual_marks(tmp_path: Path, response: str, right: bool) -> None:
    prompt, task = one(tmp_path, CAPITAL, orders=0)
    episode = asyncio.run(task.run(prompt, ScriptedPolicy(response)))
    assert (episode.score.reward, episode.score.components) == (float(right), {"exact": float(right)})
    assert asyncio.run(task.run(prompt, ScriptedPolicy(response, truncated=True))).score.reward == 0.0


def test_a_policy_may_have_to_reply_with_the_text(tmp_path: Path) -> None:
    prompt, task = one(tmp_path, CAPITAL, reply="text", orders=0, prompt="{question}\n{options}\n")
    assert prompt.text == "The capital of France?\n- Rome\n- Paris\n- Oslo\n"
    assert [task.score(prompt, text, False).reward for text in (" paris", "B", "Rome")] == [1.0, 0.0, 0.0]


def test_a_pattern_takes_the_letter_out_of_a_longer_reply(tmp_path: Path) -> None:
    prompt, task = one(tmp_path, CAPITAL, orders=0, answer_pattern="answer is (.*)")
    texts = ("Not A. The answer is B.", "The answer is A. No, B.", "B")
    assert [task.score(prompt, text, False).reward for text in texts] == [1.0, 0.0, 0.0]


def test_a_template_fills_its_places_once(tmp_path: Path) -> None:
    braces = {"question": "What is {options}?", "options": ["{question}", "nothing"], "answer": "A"}
    prompt, _task = one(tmp_path, braces, orders=0)
    assert prompt.text == "What is {options}?\nA) {question}\nB) nothing\nAnswer: "


def test_examples_are_right_in_the_share_that_is_asked_for() -> None:
    task = Choices(orders=8, demonstrated=1.0)
    answers = {prompt.text: prompt.answer for prompt in task.prompts("train")}
    assert all(answers[text] == answer for text, answer in task.warm_start_examples(0, 50))


@pytest.mark.parametrize(
    ("line", "options", "message"),
    [
        ('{"question": "?", "answer": "A"}', {}, "capitals.jsonl, line 1: not a JSON object with 'question' and 'opti"),
        ({"options": "ABC"}, {}, "line 1: its options are 'ABC'; give a list of 2 to 26 different options"),
        ({"options": ["a"]}, {}, "give a list of 2 to 26"),
        ({"options": ["Rome", "Rome"]}, {}, "give a list of 2 to 26 different"),
        ({"options": ["Rome", None]}, {}, "give a list of 2 to 26"),
        ({"answer": "D"}, {}, "its answer 'D' is neither an option nor its letter"),
        ({"options": ["B", "A"], "answer": "A"}, {}, "is the text of one option and the letter of another"),
        ({}, {"reply": "number"}, "reply must be letter or text"),
        ({}, {"orders": -1}, "orders at least 0"),
        ({}, {"prompt": "{question}"}, "needs {question} and {options}"),
        ({}, {"answer_pattern": "a"}, "has no group"),
        ({}, {"demonstrated": 2.0}, "demonstrated = 2.0"),
        ({}, {"heldout": "missing.jsonl"}, "cannot read the questions of missing"),
    ],
)
def test_what_is_no_question_is_refused_with_its_line(
    tmp_path: Path, line: dict[str, Any] | str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        choices(tmp_path, line if isinstance(line, str) else CAPITAL | line, **options)
