"""Arithmetic in words: what is asked, and that only one right number after #### is rewarded."""

import json
from decimal import Decimal
from pathlib import Path

import pytest

from rollstream.producers.config import Gsm8kConfig, TasksConfig
from rollstream.producers.environments.environment import Prompt
from rollstream.producers.tasks import create_task
from rollstream.producers.tasks.gsm8k import Gsm8k, answer_of
from rollstream.topics.errors import ConfigurationError

PROBLEMS = [
    {
        "question": "Weng earns $12 an hour for babysitting. Yesterday, she worked 50 minutes. How much did she earn?",
        "answer": "Weng earns 12/60 = $<<12/60=0.2>>0.2 per minute.\nShe earned 0.2 x 50 = $<<0.2*50=10>>10.\n#### 10",
    },
    *({"question": f"Say {number:,}.", "answer": f"It is {number}.\n#### {number:,}"} for number in range(995, 1004)),
]


def write(path: Path, problems: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    return str(path)


@pytest.fixture
def train_file(tmp_path: Path) -> str:
    return write(tmp_path / "train.jsonl", PROBLEMS)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1 + 1 is 2.\n#### 2", "2"),
        ("#### 1,234.50", "1234.5"),
        ("#### $18.", "18"),
        ("#### -$7", "-7"),
        ("#### .5", "0.5"),
        ("#### 5 %\nand so on", "5"),
        ("####42", "42"),
        ("#### 42 apples", None),
        ("#### 41 or 42", None),
        ("#### 41 #### 42", None),
        ("#### ", None),
        ("#### -", None),
        ("#### many", None),
        ("the answer is 42", None),
        ("", None),
    ],
)
def test_an_answer_is_the_number_that_stands_alone_after_the_only_mark(text: str, number: str | None) -> None:
    assert answer_of(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("text", "truncated", "reward", "formatted"),
    [
        ("so it is\n#### 10", False, 1.0, 1.0),
        ("#### 10.00", False, 1.0, 1.0),
        ("#### 11", False, 0.0, 1.0),
        ("10", False, 0.0, 0.0),
        ("#### 10", True, 0.0, 0.0),
    ],
)
def test_the_right_number_pays_once_the_answer_has_ended(
    text: str, truncated: bool, reward: float, formatted: float, train_file: str
) -> None:
    task = Gsm8k("gsm8k", Gsm8kConfig(train_file=train_file))
    score = task.score(Prompt(example_id="train-1", text="", answer="10"), text, truncated)
    assert score.reward == reward
    assert score.components == {"exact": reward, "format": formatted}


def test_problems_keep_their_names_and_every_fifth_is_held_out_unless_a_file_is(
    train_file: str, tmp_path: Path
) -> None:
    task = create_task("gsm8k", TasksConfig(gsm8k=Gsm8kConfig(train_file=train_file)))
    train, heldout = task.prompts("train"), task.prompts("heldout")
    assert (len(train), len(heldout)) == (8, 2)
    assert {p.example_id: p.answer for p in (*train, *heldout)}["train-7"] == "1000"

    heldout_file = write(tmp_path / "test.jsonl", PROBLEMS[:3])
    task = Gsm8k("gsm8k", Gsm8kConfig(train_file=train_file, heldout_file=heldout_file))
    assert [p.example_id for p in task.prompts("heldout")] == ["heldout-1", "heldout-2", "heldout-3"]
    assert len(task.prompts("train")) == 10
    assert task.warm_start_examples(seed=0, n=5) == []


def test_a_problem_is_put_as_a_chat_or_as_text_that_stops_before_the_next_question(train_file: str) -> None:
    chat = Gsm8k("gsm8k", Gsm8kConfig(train_file=train_file))
    text = chat.prompts("train")[0].text
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert chat.stop == ()

    plain = Gsm8k("gsm8k", Gsm8kConfig(train_file=train_file, prompt="plain"))
    assert plain.prompts("train")[0].text.endswith("\nAnswer:")
    assert plain.stop == ("\nQuestion:",)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"question": "How many?"}', "line 2: not a JSON object with question and answer"),
        ('{"question": null, "answer": "#### 4"}', "line 2: not a JSON object with question and answer"),
        ('{"question": ', "line 2: not a JSON object with question and answer"),
        ("[1]", "line 2: not a JSON object with question and answer"),
        ('{"question": "How many?", "answer": "many"}', "line 2: its answer does not end in #### and a number"),
    ],
)
def test_a_line_that_is_no_problem_is_named(line: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps(PROBLEMS[0]) + "\n" + line + "\n")
    with pytest.raises(ConfigurationError, match=problem):
        Gsm8k("gsm8k", Gsm8kConfig(train_file=str(path)))


def test_without_a_file_the_setting_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"set tasks\.gsm8k\.train_file"):
        create_task("gsm8k")
    with pytest.raises(ConfigurationError, match="cannot read the problems"):
        Gsm8k("gsm8k", Gsm8kConfig(train_file=str(tmp_path / "none")))
