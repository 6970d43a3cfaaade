"""The built-in tasks: what they ask, what they reward, what they hold out."""

import asyncio
import subprocess
import sys
from dataclasses import dataclass

import pytest

from rollstream.producers.environments.environment import Message, Prompt
from rollstream.producers.tasks import TASKS, Task, create_task
from rollstream.topics.errors import ConfigurationError

SELF_CONTAINED = [name for name in TASKS if name != "gsm8k"]
"""Tasks that need no file."""


@dataclass(frozen=True)
class Said:
    text: str
    truncated: bool = False


def by_id(task: Task, example_id: str) -> Prompt:
    return next(p for split in ("train", "heldout") for p in task.prompts(split) if p.example_id == example_id)


@pytest.mark.parametrize(
    ("text", "truncated", "reward", "exact"),
    [
        ("249", False, 1.0, 1.0),
        ("249", True, 0.0, 0.0),
        ("429", False, 1 / 3, 0.0),
        ("294", False, 1 / 3, 0.0),
        ("924", False, 0.0, 0.0),
        ("24", False, 2 / 3, 0.0),
        ("", False, 0.0, 0.0),
        ("2499", False, 3 / 4, 0.0),
        (">>>", False, 0.0, 0.0),
    ],
)
def test_digit_sorting_rewards_the_fraction_of_positions(
    text: str, truncated: bool, reward: float, exact: float
) -> None:
    task = create_task("dsort3")
    prompt = by_id(task, "429")
    assert (prompt.text, prompt.answer) == ("429>", "249")
    score = task.score(prompt, text, truncated)
    assert score.reward == pytest.approx(reward)
    assert score.components == {"exact": exact}


@pytest.mark.parametrize(
    ("text", "truncated", "reward"),
    [("15", False, 1.0), ("15", True, 0.0), ("1", False, 0.0), ("155", False, 0.0), ("", False, 0.0)],
)
def test_addition_is_all_or_nothing(text: str, truncated: bool, reward: float) -> None:
    task = create_task("add")
    prompt = by_id(task, "7+8")
    assert (prompt.text, prompt.answer) == ("7+8=", "15")
    score = task.score(prompt, text, truncated)
    assert score.reward == score.components["exact"] == reward


@pytest.mark.parametrize(("name", "count"), [("dsort3", 1000), ("dsort4", 10_000), ("add", 100)])
def test_one_prompt_in_five_is_held_out_and_none_is_in_both_splits(name: str, count: int) -> None:
    task = create_task(name)
    train = {p.example_id for p in task.prompts("train")}
    heldout = {p.example_id for p in task.prompts("heldout")}
    assert len(heldout) == count // 5
    assert len(train) == count - count // 5
    assert not train & heldout


def test_every_digit_is_trained_in_every_place() -> None:
    for place in range(3):
        assert {p.example_id[place] for p in create_task("dsort3").prompts("train")} == set("0123456789")
    sums = [p.example_id.split("+") for p in create_task("add").prompts("train")]
    assert {a for a, _ in sums} == {b for _, b in sums} == set("0123456789")


def test_splits_and_their_order_are_the_same_in_another_process() -> None:
    code = "from rollstream.producers.tasks import create_task as c\n"
    code += "print(*(p.example_id for p in c('add').prompts('heldout')))"
    other = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert other == [p.example_id for p in create_task("add").prompts("heldout")]


@pytest.mark.parametrize("name", SELF_CONTAINED)
def test_prompts_and_answers_are_within_the_vocabulary_and_the_token_limit(name: str) -> None:
    task = create_task(name)
    for split in ("train", "heldout"):
        for prompt in task.prompts(split):
            assert set(prompt.text + prompt.answer) <= set(task.vocabulary)
            # One token for the end.
            assert len(prompt.answer) + 1 <= task.max_tokens


@pytest.mark.parametrize("name", SELF_CONTAINED)
def test_warm_start_teaches_the_format_but_not_the_task(name: str) -> None:
    task = create_task(name)
    pairs = task.warm_start_examples(seed=3, n=400)
    assert pairs == task.warm_start_examples(seed=3, n=400)
    assert pairs != task.warm_start_examples(seed=4, n=400)
    answers = {p.text: p.answer for p in task.prompts("train")}
    assert {text for text, _ in pairs} <= set(answers)
    assert sorted(answer for _, answer in pairs) == sorted(answers[text] for text, _ in pairs)
    right = sum(answers[text] == answer for text, answer in pairs)
    assert right < 400 * 0.2


def test_a_share_of_the_examples_of_a_warm_start_is_right_if_told_so() -> None:
    task = create_task("chain_sum", demonstrated=0.5)
    answers = {p.text: p.answer for p in task.prompts("train")}
    right = [answers[text] == answer for text, answer in task.warm_start_examples(seed=3, n=400)]
    assert 200 <= sum(right) < 260
    assert task.demonstrated == 0.5
    with pytest.raises(ConfigurationError, match=r"demonstrated = 2"):
        create_task("chain_sum", demonstrated=2.0)


def test_a_single_turn_episode_is_the_question_and_the_reply() -> None:
    task = create_task("add")
    request = []

    async def generate(text: str) -> Said:
        request.append(text)
        return Said("15", truncated=True)

    episode = asyncio.run(task.run(by_id(task, "7+8"), generate))
    assert request == ["7+8="]
    assert episode.turns == (Message(role="user", text="7+8="), Said("15", truncated=True))
    assert episode.truncated
    assert episode.score.reward == 0.0


def test_an_unknown_task_names_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match="dsort3"):
        create_task("dsrt3")
