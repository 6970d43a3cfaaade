"""A worker and an evaluator play environments of `rollstream env serve`, which is killed in mid-episode."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from rollstream.pipeline.audit.ledger import ledger
from rollstream.producers.config import EnvironmentConfig, WorkerConfig
from rollstream.producers.inference.client import CompletionsClient
from rollstream.producers.rollout_producer import RolloutProducer
from rollstream.producers.tasks.environment_loading import load_environments
from rollstream.producers.worker.evaluation import Evaluation, evaluate
from rollstream.topics.config import KafkaConfig
from rollstream.topics.records import Rollout
from rollstream.topics.wire.validation import problems
from tests.broker.test_worker import config_for, groups_of, play, records
from tests.support.environment_servers import ServedEnvironment
from tests.support.producing import TOKENIZER, SortingGenerator, serving

GROUPS, MEMBERS = 4, 4
GAME = '''
"""Sorts digits: in two turns, or by a call of its own."""

from openai import AsyncOpenAI

from rollstream import Episode, Message, Prompt, Score


class Texts:
    name, max_tokens, stop = "texts", 4, ()

    def prompts(self, split):
        numbers = range(120, 140) if split == "train" else range(140, 145)
        return [Prompt(example_id=f"{n}", text=f"{n}>", answer="".join(sorted(str(n)))) for n in numbers]

    async def run(self, prompt, generate):
        first = await generate(prompt.text)
        second = await generate(">31>")
        turns = (Message(role="user", text=prompt.text), first, Message(role="user", text=">31>"), second)
        return Episode(turns=turns, score=Score(reward=float(first.text == prompt.answer) + 0.5))


class Calls:
    name, max_tokens = "calls", 4
    prompts = Texts.prompts

    async def play(self, prompt, endpoint):
        async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0) as client:
            answer = await client.completions.create(model=endpoint.model, prompt=prompt.text, max_tokens=4)
        return Score(reward=float(answer.choices[0].text == prompt.answer) + 0.5)
'''


@pytest.mark.parametrize("name", ["Texts", pytest.param("Calls", marks=pytest.mark.long)])
def test_a_server_that_is_killed_in_mid_episode_costs_attempts_and_no_rollout(
    kafka: KafkaConfig, run_name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    (tmp_path / "game.py").write_text(GAME)
    with ServedEnvironment(tmp_path, f"game.py:{name}") as there:
        rows = 0

        def kill_at_the_tenth_row(prompts: list[str]) -> None:
            """At this moment an episode waits for this reply."""
            nonlocal rows
            rows += len(prompts)
            if rows >= 10 and len(there.processes) == 1:
                there.kill()
                there.start()

        # Here a worker is ready at once, and the server may be slow.
        entry = EnvironmentConfig(use=there.url, options={"wait_s": 300})
        [environment] = load_environments([entry], WorkerConfig())
        generator = SortingGenerator(before_generate=kill_at_the_tenth_row)
        with serving(generator) as server, caplog.at_level(logging.WARNING):
            config = config_for(server.base_url, groups=GROUPS, concurrency=2, group_size=MEMBERS)
            report = play(kafka, run_name, config, environments=[environment.environment])
            evaluation = (
                asyncio.run(_evaluate(kafka, run_name, environment, server.base_url)) if name == "Texts" else None
            )
    assert len(there.processes) == 2
    failures = [record for record in caplog.records if record.message == "episode_failed"]
    assert failures, "episodes were played again"
    assert (report.groups, report.rollouts, report.cancelled) == (GROUPS, GROUPS * MEMBERS, 0)
    rollouts: list[Rollout] = records(kafka, run_name)
    groups = groups_of(rollouts)
    assert len(groups) == GROUPS
    for members in groups.values():
        assert sorted(member.episode_uid for member in members) == sorted({m.episode_uid for m in members})
        assert len(members) == MEMBERS
        for member in members:
            assert problems(member) == []
            text = TOKENIZER.decode(member.tokens)
            assert text.startswith(f"{member.example_id}>")
            assert member.reward == 0.5 + (text[4:7] == "".join(sorted(member.example_id)))
    assert {member.reward for member in rollouts} == {0.5, 1.5}
    assert ledger(kafka, run_name).balanced
    if evaluation is not None:
        assert (evaluation.prompts, evaluation.reward) == (5, 1.5)


async def _evaluate(kafka: KafkaConfig, run: str, environment: Any, base_url: str) -> Evaluation:
    with RolloutProducer(kafka, run, topic="evals") as producer:
        async with CompletionsClient([base_url], timeout_s=60) as client:
            return await evaluate(environment, client, producer, version=0, phase="end")
