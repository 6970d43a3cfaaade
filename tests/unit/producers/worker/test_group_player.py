"""An error of an environment ends an attempt at its episode; only a request to stop or Ctrl-C ends the player."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from rollstream.producers.config import WorkerConfig
from rollstream.producers.environments.environment import Episode, Generate, Message, Prompt, Score, SingleTurn, Split
from rollstream.producers.tasks.environment_loading import with_settings
from rollstream.producers.worker.group_player import EpisodeFailed, EpisodeLimits, play_group
from rollstream.producers.worker.sampling import GroupSampling
from tests.support.producing import OneTokenPolicy

PROMPT = Prompt(example_id="t", text="8+9?")
Act = Callable[[], Coroutine[Any, Any, Any]]


class Acting:
    """An environment of one turn whose attempts act in order before they are scored; the last act is repeated."""

    name, max_tokens, stop = "acting", 4, ()

    def __init__(self, *acts: Act) -> None:
        self.acts = list(acts)

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return [PROMPT]

    async def run(self, prompt: Prompt, generate: Generate) -> Episode:
        reply = await generate(prompt.text)
        await (self.acts.pop(0) if len(self.acts) > 1 else self.acts[0])()
        return Episode(turns=(Message(role="user", text=prompt.text), reply), score=Score(reward=1.0))


class Turning(Acting):
    """An environment that returns these turns."""

    def __init__(self, turns: Any) -> None:
        self.turns = turns

    async def run(self, prompt: Prompt, generate: Generate) -> Episode:
        return Episode(turns=self.turns, score=Score(reward=1.0))


class Scoring(SingleTurn):
    """An environment of one turn that gives every response the same score."""

    name, max_tokens = "scoring", 4

    def __init__(self, score: Any) -> None:
        self.given = score

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return [PROMPT]

    def score(self, prompt: Prompt, response_text: str, truncated: bool) -> Score:
        return self.given  # type: ignore[no-any-return]


async def awaits_a_task_that_its_library_cancelled() -> None:
    task = asyncio.ensure_future(asyncio.Event().wait())
    task.cancel()
    await task


async def succeeds() -> None:
    return


class Panic(BaseException):
    """An error as extensions written in Rust raise it."""


def raising(error: BaseException) -> Act:
    async def act() -> None:
        raise error

    return act


async def played(environment: Any, *, size: int = 2, timeout_s: float = 60) -> Sequence[Episode | BaseException]:
    loaded = with_settings(environment, WorkerConfig())
    sampling = GroupSampling(group_size=size, temperature=1.0, seed=1)
    return await play_group(loaded, OneTokenPolicy(), PROMPT, sampling, EpisodeLimits(timeout_s=timeout_s, attempts=2))


def test_a_task_that_a_library_cancelled_fails_the_attempt_and_the_member_is_tried_again() -> None:
    members = asyncio.run(played(Acting(awaits_a_task_that_its_library_cancelled, succeeds)))
    assert [type(member) for member in members] == [Episode, Episode]
    members = asyncio.run(played(Acting(awaits_a_task_that_its_library_cancelled)))
    assert [type(member) for member in members] == [EpisodeFailed, EpisodeFailed]
    assert "acting failed on t: CancelledError()" in str(members[0])


@pytest.mark.parametrize("error", [SystemExit(0), Panic("index out of bounds")])
def test_an_error_that_is_no_exception_fails_the_attempt_and_not_the_process(error: BaseException) -> None:
    members = asyncio.run(played(Acting(raising(error), succeeds)))
    assert [type(member) for member in members] == [Episode, Episode]
    members = asyncio.run(played(Acting(raising(error))))
    assert [type(member) for member in members] == [EpisodeFailed, EpisodeFailed]
    assert f"acting failed on t: {error!r} at {__file__}" in str(members[0])


def test_an_interruption_by_the_keyboard_ends_the_player() -> None:
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(played(Acting(raising(KeyboardInterrupt()))))


def test_a_request_to_stop_cancels_the_members() -> None:
    async def scenario() -> None:
        began = asyncio.Event()

        async def wait() -> None:
            began.set()
            await asyncio.Event().wait()

        playing = asyncio.ensure_future(played(Acting(wait)))
        await began.wait()
        playing.cancel()
        await playing

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(scenario())


@pytest.mark.parametrize(
    ("score", "reason"),
    [
        (1.0, "returned float instead of a Score"),
        (None, "returned NoneType instead of a Score"),
        (Score(reward=None), "a Score whose reward is not a number: must be real number, not NoneType"),
        (Score(reward="1"), "a Score whose reward is not a number: must be real number, not str"),
        (Score(reward=10**400), "a Score whose reward is not a number: int too large"),
        (Score(reward=1.0, components={"exact": None}), "a Score whose exact is not a number"),
        (Score(reward=1.0, components=None), "a Score whose components are of type NoneType"),
    ],
)  # type: ignore[arg-type]
def test_a_score_without_numbers_fails_the_member(score: Any, reason: str) -> None:
    [member] = asyncio.run(played(Scoring(score), size=1))
    assert type(member) is EpisodeFailed
    assert str(member).startswith("environment scoring returned")
    assert reason in str(member)


@pytest.mark.parametrize("turns", [None, 3, (turn for turn in ())])
def test_an_episode_whose_turns_are_no_sequence_fails_the_member(turns: Any) -> None:
    [member] = asyncio.run(played(Turning(turns), size=1))
    assert type(member) is EpisodeFailed
    assert f"returned an Episode whose turns are of type {type(turns).__name__} instead of a tuple" in str(member)


@pytest.mark.parametrize(
    "reward", [1, True, 0.5, np.bool_(True), np.float32(0.5), np.int64(1), Fraction(1, 2), float("nan")]
)
def test_a_score_of_numbers_of_any_type_is_kept(reward: Any) -> None:
    score = Score(reward=reward, components={"exact": reward})
    [member] = asyncio.run(played(Scoring(score), size=1))
    assert isinstance(member, Episode)
    assert member.score is score


class Forgiving(Acting):
    """An environment that passes over every error of `generate`."""

    async def run(self, prompt: Prompt, generate: Generate) -> Episode:
        with contextlib.suppress(Exception):
            await generate(prompt.text)
        return Episode(turns=(), score=Score(reward=0.0))


@pytest.mark.parametrize("environment", [Acting(succeeds), Forgiving()])
def test_a_mistake_of_the_sampler_is_no_failure_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, environment: Acting
) -> None:
    async def mistaken(*_: object, **__: object) -> None:
        raise NameError("name 'row_sed' is not defined")

    monkeypatch.setattr(OneTokenPolicy, "complete", mistaken)
    members = asyncio.run(played(environment))
    assert [type(member) for member in members] == [NameError, NameError]


def test_a_value_that_is_no_text_is_a_failure_of_the_environment_that_asks_with_it() -> None:
    class Asking(Acting):
        async def run(self, prompt: Prompt, generate: Generate) -> Episode:
            await generate(None)  # type: ignore[arg-type]
            raise AssertionError("generate takes no None")

    [member] = asyncio.run(played(Asking(), size=1))
    assert type(member) is EpisodeFailed
    assert "generate takes a str, not a value of type NoneType" in str(member)
