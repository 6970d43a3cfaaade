"""Formulas, played with scripted expressions that run in the sandbox."""

import asyncio
from types import SimpleNamespace

import pytest

from rollstream.producers.environments.environment import Episode, Message
from rollstream.producers.environments.sandbox import SandboxFailed
from rollstream.producers.tasks.formulas import Formulas
from rollstream.topics.errors import ConfigurationError


@pytest.fixture(scope="module")
def environment() -> Formulas:
    return Formulas(turns=3)


def play(environment: Formulas, *expressions: str, truncated: bool = False) -> tuple[Episode, list[str]]:
    [prompt] = [p for p in environment.prompts("train") if p.example_id == "times 2"]
    shown: list[str] = []
    script = iter(expressions)

    async def generate(text: str) -> SimpleNamespace:
        shown.append(text)
        return SimpleNamespace(text=next(script), truncated=truncated)

    return asyncio.run(environment.run(prompt, generate)), shown


def test_a_tool_runs_each_expression_and_the_episode_ends_with_one_that_passes(environment: Formulas) -> None:
    episode, shown = play(environment, "x+2", "x*9", "x*2")
    assert shown == ["times 2:", "0/2:", "1/2:"]
    assert (episode.score.reward, episode.score.components) == (1.0, {"exact": 1.0, "passed": 1.0})
    assert [turn.role for turn in episode.turns if isinstance(turn, Message)] == ["user", "tool", "tool"]
    assert len(play(environment, "x+x")[0].turns) == 2


@pytest.mark.parametrize(
    ("expressions", "reward"),
    [(("x*2", "unused"), 1.0), (("x+2",) * 3, 0.2), (("x*3", "", "x+"), 0.0), (("x*2 if x<9 else 0",), 0.6)],
)
def test_the_hidden_tests_of_the_last_expression_decide_the_reward(
    environment: Formulas, expressions: tuple[str, ...], reward: float
) -> None:
    episode, _ = play(environment, *expressions)
    assert episode.score.reward == reward
    assert episode.score.components["exact"] == float(reward == 1.0)


def test_an_expression_that_was_cut_off_ends_the_episode_truncated(environment: Formulas) -> None:
    episode, shown = play(environment, "x+2", truncated=True)
    assert (episode.truncated, shown) == (True, ["times 2:"])


def test_each_expression_is_run_once_and_again_after_the_sandbox_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = Formulas()
    with monkeypatch.context() as broken:
        broken.setattr("rollstream.producers.environments.sandbox.ISOLATIONS", ())
        with pytest.raises(SandboxFailed):
            play(environment, "x*2")
    play(environment, "x*2")
    monkeypatch.setattr("rollstream.producers.environments.sandbox.sys.executable", "/missing")
    assert play(environment, "x*2")[0].score.reward == 1.0


def test_examples_of_the_warm_start_show_expressions_and_not_the_right_one() -> None:
    environment = Formulas()
    answers = {p.text: p.answer for p in environment.prompts("train")}
    examples = environment.warm_start_examples(0, 1200)
    assert {answer for _, answer in examples} == set(answers.values())
    assert sum(answers[text] == answer for text, answer in examples) < 1200 / len(answers) * 1.5
    assert environment.max_tokens == len("x+5") + 2
    assert len(environment.prompts("heldout")) == 3


@pytest.mark.parametrize("options", [{"highest": 0}, {"turns": 0}])
def test_a_game_without_numbers_or_turns_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="both must be at least 1"):
        Formulas(**options)
