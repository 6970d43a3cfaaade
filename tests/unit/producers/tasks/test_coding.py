"""Coding: what the tools answer, how solutions are scored, and which cheats earn nothing."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollstream.producers.environments.environment import Prompt
from rollstream.producers.environments.sandbox import SandboxFailed
from rollstream.producers.tasks.coding import Coding, same
from rollstream.topics.errors import ConfigurationError
from tests.support.scripted_endpoint import call, play

DOUBLE = """
[multiply]
text = "Return the number times {k}."
k = [2, 2]
arguments = ["count"]
solution = "def f(n): return n * {k}"
"""
RIGHT, WRONG = "def f(n): return n + n", "def f(n): return n + 2"


@pytest.fixture
def problem(tmp_path: Path) -> tuple[Coding, Prompt]:
    """An environment of one problem, and the problem."""
    path = tmp_path / "double.toml"
    path.write_text(DOUBLE)
    environment = Coding(problems=str(path))
    [prompt] = environment.prompts("heldout")
    return environment, prompt


def score(problem: tuple[Coding, Prompt], solution: str) -> float:
    environment, prompt = problem
    return asyncio.run(environment.score(prompt, solution)).reward


def test_every_solution_that_is_shipped_passes_its_tests_in_the_sandbox() -> None:
    environment = Coding(variations=1)

    async def rewards() -> dict[str, float]:
        prompts = [*environment.prompts("train"), *environment.prompts("heldout")]
        return {prompt.example_id: (await environment.score(prompt, prompt.answer)).reward for prompt in prompts}

    scores = asyncio.run(rewards())
    assert len(scores) == 24
    assert set(scores.values()) == {1.0}, scores


def test_what_is_held_out_is_not_trained_on() -> None:
    environment = Coding()
    train, heldout = (
        {prompt.example_id.split("/")[0] for prompt in prompts}
        for prompts in (environment.prompts("train"), environment.prompts("heldout"))
    )
    assert not train & heldout
    assert (len(train), len(heldout)) == (19, 5)


def test_the_seed_chooses_the_variations_and_their_tests() -> None:
    first, again, other = (Coding(seed=seed) for seed in (1, 1, 2))
    assert first.prompts("train") == again.prompts("train")
    assert first.prompts("train") != other.prompts("train")
    shared = {p.example_id: p.text for p in first.prompts("train")}
    assert any(shared.get(p.example_id, p.text) != p.text for p in other.prompts("train"))


def test_a_policy_tries_its_code_corrects_it_and_is_scored_by_hidden_tests(problem: tuple[Coding, Prompt]) -> None:
    environment, prompt = problem
    assert prompt.text.startswith("Return the number times 2.\n\nWrite a Python function f. Examples:\nf(")
    last, requests = play(
        environment,
        prompt,
        call("python", code="print('4\u00e9')\n1/0"),
        call("run_tests", code=WRONG),
        call("run_tests", code=RIGHT),
        {"content": "Done."},
    )
    answers = [message["content"] for message in requests[-1]["messages"] if message["role"] == "tool"]
    assert answers[0] == "4?\nZeroDivisionError: division by zero"
    assert answers[1].startswith("0 of 2 passed; f(")
    assert answers[2] == "2 of 2 passed"
    assert (last.reward, last.components) == (1.0, {"exact": 1.0, "passed": 1.0})
    assert [tool["function"]["name"] for tool in requests[0]["tools"]] == ["run_tests", "python"]


def test_code_in_the_last_reply_counts_and_else_that_of_the_last_test_run(problem: tuple[Coding, Prompt]) -> None:
    block = {"content": f"Better:\n```python\n{RIGHT}\n```"}
    assert play(*problem, call("run_tests", code=WRONG), block)[0].reward == 1.0
    assert play(*problem, call("run_tests", code=RIGHT), call("run_tests", code=WRONG), (400, "context"))[0].reward < 1
    assert play(*problem, call("python", code=RIGHT), {"content": "Done."})[0].reward == 0.0
    assert play(*problem, *[call("run_tests", code=RIGHT)] * 4)[0].reward == 1.0


def test_a_call_that_cannot_be_read_is_answered_with_the_error(problem: tuple[Coding, Prompt]) -> None:
    _, requests = play(*problem, call("run_tests", kode=RIGHT), call("sql", code=""), {"content": ""})
    answers = [message["content"] for message in requests[-1]["messages"] if message["role"] == "tool"]
    assert answers == ["error: the argument code must be a text", "error: there is no tool sql"]


def test_the_reward_is_the_share_of_tests_passed(problem: tuple[Coding, Prompt]) -> None:
    assert score(problem, RIGHT) == 1.0
    assert 0.0 < score(problem, "def f(n): return n * 2 if n < 60 else 0") < 1.0


@pytest.mark.parametrize(
    "cheat",
    [
        "print('{\"value\": true}'); print('10 of 10 passed')",
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "import json\njson.dumps = lambda *_: 'true'\ndef f(n): return True",
        "class Equal(int):\n    __eq__ = lambda *_: True\ndef f(n): return Equal(-1)",
        "import os\nfor n in range(16):\n    try: os.write(n, b'{\"value\": true}\\n' * 20)\n    except OSError: pass",
        "import rollstream.producers.tasks.coding as c\nc.same = lambda *_: True\ndef f(n): return 0",
        "import gc\ndef f(n):\n    return [o for o in gc.get_objects() if isinstance(o, dict) and 'expected' in o][0]",
        "def f(n): return str(2 * n)",
    ],
)
def test_a_cheat_passes_no_test(problem: tuple[Coding, Prompt], cheat: str) -> None:
    assert score(problem, cheat) == 0.0


@pytest.mark.parametrize(
    ("value", "expected", "equal"),
    [
        (1, True, False),
        (True, True, True),
        (0.1 + 0.2, 0.3, True),
        (2.0, 2, True),
        ("1", 1, False),
        ([1, [2]], [1, [2]], True),
        ([1], [1, 2], False),
        ({"a": 1}, {"a": 1.0}, True),
        ({"a": True}, {"a": 1}, False),
        (None, 0, False),
    ],
)
def test_values_are_compared_as_json(value: object, expected: object, equal: bool) -> None:
    assert same(value, expected) is equal


def test_a_sandbox_that_fails_is_a_failure_of_the_episode_and_is_tried_again(
    problem: tuple[Coding, Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr("rollstream.producers.environments.sandbox.FOLDERS", ["/missing"])
        broken.setattr("rollstream.producers.environments.sandbox.ISOLATIONS", ("namespaces",))
        with pytest.raises(SandboxFailed):
            play(*problem, call("run_tests", code=RIGHT))
    assert play(*problem, call("run_tests", code=RIGHT), {"content": "ok"})[0].reward == 1.0


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (DOUBLE, {"turns": 0}, "turns 0"),
        ("[", {}, "cannot read the problems of"),
        (DOUBLE.replace("count", "number"), {}, r"problem multiply: its arguments are \['number'\]"),
        (DOUBLE.replace("[2, 2]", "[3, 2]"), {}, r"problem multiply: .*k is \[3, 2\]"),
        (DOUBLE.replace("solution", "answer"), {}, "problem multiply: KeyError: 'solution'"),
    ],
)
def test_what_is_no_problem_is_refused_by_name(
    tmp_path: Path, text: str, options: dict[str, Any], message: str
) -> None:
    path = tmp_path / "problems.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        Coding(problems=str(path), **options)
