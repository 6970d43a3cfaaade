"""Number guessing, played with scripted guesses."""

import asyncio
from dataclasses import dataclass

import pytest

from rollstream.producers.environments.environment import Episode
from rollstream.producers.tasks.number_guessing import NumberGuessing
from rollstream.topics.errors import ConfigurationError


@dataclass
class Guess:
    text: str
    truncated: bool = False


def play(hidden: int, *guesses: Guess, turns: int = 6) -> tuple[Episode, list[str]]:
    game = NumberGuessing(turns=turns)
    [prompt] = [p for split in ("train", "heldout") for p in game.prompts(split) if p.answer == str(hidden)]  # type: ignore[arg-type]
    shown: list[str] = []
    script = iter(guesses)

    async def generate(text: str) -> Guess:
        shown.append(text)
        return next(script)

    return asyncio.run(game.run(prompt, generate)), shown


def test_each_wrong_guess_is_answered_and_costs_a_part_of_the_reward() -> None:
    episode, shown = play(20, Guess("16"), Guess("24"), Guess("20"))
    assert shown == ["0-31?", ">", "<"]
    assert episode.score.reward == pytest.approx(1 - 2 / 6)
    assert episode.score.components == {"exact": 1.0, "guesses": 3.0}
    assert len(episode.turns) == 6


def test_the_first_guess_may_be_right() -> None:
    episode, _ = play(7, Guess("7"))
    assert episode.score.reward == 1.0


def test_a_number_that_is_not_found_earns_nothing() -> None:
    episode, shown = play(31, Guess("1"), Guess("2"), turns=2)
    assert episode.score.reward == 0.0
    assert len(shown) == 2


@pytest.mark.parametrize("text", ["", "-1", "1?", "٣", "1 "])
def test_a_guess_that_is_no_number_ends_the_game_without_reward(text: str) -> None:
    episode, shown = play(7, Guess(text))
    assert episode.score.reward == 0.0
    assert not episode.truncated
    assert len(shown) == 1


def test_a_guess_that_was_cut_off_ends_the_game_truncated() -> None:
    episode, _ = play(7, Guess("7", truncated=True))
    assert episode.truncated
    assert episode.score.reward == 0.0


def test_a_game_without_numbers_or_turns_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="turns = 0"):
        NumberGuessing(turns=0)
