"""An evaluation answers the first prompts of a split, whatever class holds them, within the limit of calls."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import openai
import pytest

from rollstream.producers.config import EnvironmentConfig, WorkerConfig
from rollstream.producers.environments.environment import Endpoint, Episode, Generate, Prompt, Score, SingleTurn, Split
from rollstream.producers.flow.policy_versions import PolicyVersions
from rollstream.producers.inference.client import CompletionsClient
from rollstream.producers.tasks.environment_loading import with_settings
from rollstream.producers.worker.evaluation import Evaluation, evaluate, evaluation_gateway
from rollstream.producers.worker.group_player import EpisodeFailed
from rollstream.topics.config import KafkaConfig
from rollstream.topics.records import Rollout
from tests.support.producing import SortingGenerator, serving


class Numbers:
    """A lazy list of four prompts, which knows no slices and has no IndexError at its end."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Prompt:
        assert 0 <= index < 4
        return Prompt(example_id=f"{index}", text=f"{index}1>", answer=f"1{index}")


class Sorting(SingleTurn):
    name, max_tokens = "sorting", 8

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return Numbers()  # type: ignore[return-value]

    def score(self, prompt: Prompt, response_text: str, truncated: bool) -> Score:
        exact = float(response_text == "".join(sorted(prompt.answer)))
        return Score(reward=exact, components={"exact": exact})


class Evals:
    """Keeps the rollouts of evaluations."""

    def __init__(self) -> None:
        self.sent: list[Rollout] = []

    def send(self, rollout: Rollout) -> None:
        self.sent.append(rollout)

    def flush(self) -> None:
        return


def test_the_first_prompts_of_a_lazy_list_are_evaluated() -> None:
    evals = Evals()

    async def evaluated(base_url: str) -> Evaluation:
        environment = with_settings(Sorting(), WorkerConfig())
        async with CompletionsClient([base_url]) as client:
            return await evaluate(environment, client, evals, version=3, phase="end", max_prompts=3)  # type: ignore[arg-type]

    with serving(SortingGenerator(versions=(3,))) as server:
        evaluation = asyncio.run(evaluated(server.base_url))
    assert (evaluation.prompts, evaluation.success) == (3, 1.0)
    assert [rollout.example_id for rollout in evals.sent] == ["0", "1", "2"]


def test_each_prompt_gets_as_many_answers_as_asked_for_and_its_figures_are_over_all_of_them() -> None:
    evals = Evals()

    class HalfRight(Sorting):
        async def run(self, prompt: Prompt, generate: Generate) -> Episode:
            episode = await super().run(prompt, generate)
            right = float(next(turns) % 4 < int(prompt.example_id))
            return replace(episode, score=Score(reward=right, components={"exact": right}))

    turns = itertools.count()

    async def evaluated(base_url: str) -> Evaluation:
        entry = EnvironmentConfig(use="sorting", suites=("numbers",))
        environment = with_settings(HalfRight(), WorkerConfig(), entry)
        async with CompletionsClient([base_url]) as client:
            return await evaluate(
                environment,
                client,
                evals,
                version=3,
                phase="end",
                samples=4,
                temperature=1.0,
                concurrency=1,  # type: ignore[arg-type]
            )

    with serving(SortingGenerator(versions=(3,))) as server:
        evaluation = asyncio.run(evaluated(server.base_url))
    # Of four answers, n are right for prompt n from 0 to 3.
    assert evaluation.figures == {
        "reward": 0.375,
        "success": 0.375,
        "pass@2": (0 + 1 / 2 + 5 / 6 + 1) / 4,
        "pass@4": 0.75,
    }
    assert evaluation.prompts == 4
    assert [rollout.uid for rollout in evals.sent[:4]] == [f"eval.end.3.0.{member}" for member in range(4)]
    assert {(r.group_size, r.extra["prompts"], r.extra["suites"]) for r in evals.sent} == {(4, "4", '["numbers"]')}


class TwoCalls:
    """An agent that makes two calls."""

    name, max_tokens = "two-calls", 8

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return [Prompt(example_id="t", text="41>")]

    async def play(self, prompt: Prompt, endpoint: Endpoint) -> Score:
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as agent:
            for text in (prompt.text, "73>"):
                await agent.completions.create(model=endpoint.model, prompt=text)
        return Score(reward=1.0)


class NoPolicy:
    """Policies without a version on record."""

    versions = PolicyVersions()

    def read(self, _wait_s: float) -> PolicyVersions:
        return self.versions


def test_an_agent_that_is_evaluated_makes_as_many_calls_as_the_setting_allows() -> None:
    async def evaluated(base_url: str, max_calls: int) -> Evaluation:
        worker = WorkerConfig(inference_urls=(base_url,))
        environment = with_settings(TwoCalls(), worker)
        policies: Any = NoPolicy()
        opening = evaluation_gateway([environment], KafkaConfig(), "run", worker, policies, max_calls=max_calls)
        async with CompletionsClient([base_url]) as client, opening as gateway:
            return await evaluate(environment, client, Evals(), version=3, phase="end", gateway=gateway)  # type: ignore[arg-type]

    with serving(SortingGenerator(versions=(3,))) as server:
        assert asyncio.run(evaluated(server.base_url, 2)).reward == 1.0
        with pytest.raises(EpisodeFailed, match=r"has made 1 calls, the maximum \(gateway.max_calls\)"):
            asyncio.run(evaluated(server.base_url, 1))


class Leaving(SingleTurn):
    """An environment that fails on its first prompt, and needs a while to end the episodes of the others."""

    name, max_tokens = "leaving", 8

    def __init__(self) -> None:
        self.playing = 0

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return [Prompt(example_id=text, text=text) for text in ("21>", "31>")]

    async def run(self, prompt: Prompt, generate: Generate) -> Episode:
        self.playing += 1
        try:
            if prompt.text == "21>":
                while self.playing < 2:
                    await asyncio.sleep(0)
                raise ValueError("the verifier is down")
            return await asyncio.Event().wait()  # type: ignore[return-value]
        finally:
            for _ in range(9):
                await asyncio.sleep(0)
            self.playing -= 1

    def score(self, prompt: Prompt, response_text: str, truncated: bool) -> Score:
        raise NotImplementedError


def test_an_evaluation_that_fails_has_ended_all_its_episodes() -> None:
    leaving = Leaving()

    async def evaluated(base_url: str) -> int:
        async with CompletionsClient([base_url]) as client:
            environment = with_settings(leaving, WorkerConfig())
            with pytest.raises(EpisodeFailed, match="the verifier is down"):
                await evaluate(environment, client, Evals(), version=3, phase="end")  # type: ignore[arg-type]
            return leaving.playing

    with serving(SortingGenerator(versions=(3,))) as server:
        assert asyncio.run(evaluated(server.base_url)) == 0
