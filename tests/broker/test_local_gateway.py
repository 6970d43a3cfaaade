"""The gateway inside a worker: an environment's own HTTP calls become rollouts, and the ledger knows each call."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest

from rollstream.pipeline.audit.ledger import ledger
from rollstream.producers.config import WorkerConfig
from rollstream.producers.environments.environment import Score
from rollstream.producers.flow.policy_versions import PolicyFollower
from rollstream.producers.gateway.config import GatewayConfig
from rollstream.producers.gateway.service import EpisodeStamp
from rollstream.producers.inference.errors import InferenceUnavailable
from rollstream.producers.worker.local_gateway import LocalGateway
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import RecordError
from rollstream.topics.records import Rollout
from rollstream.topics.wire.validation import problems
from tests.support.gateways import calls_of, records
from tests.support.http_front import BUSY, http_front
from tests.support.producing import ScriptedGenerator, serving
from tests.support.waiting import eventually


@pytest.fixture
def server() -> Iterator[str]:
    with serving(ScriptedGenerator(["hm", "42"], versions=(3,)), conversation_cache_tokens=0) as running:
        eventually(lambda: running.version == 3, 60, "weights are loaded")
        yield running.base_url


def stamp(member: int) -> EpisodeStamp:
    return EpisodeStamp(
        environment="sums", example_id="t", group_id="w.1.0", group_size=3, member=member, policy_version=3
    )


def local_gateway(kafka: KafkaConfig, run: str, policies: PolicyFollower, **settings: Any) -> LocalGateway:
    worker = WorkerConfig(worker_id="w", temperature=0.5, **settings)
    return LocalGateway(kafka, run, worker, GatewayConfig(), name="w", policies=policies, temperatures={})


@pytest.mark.parametrize("looks_refused", [0, 2])
def test_episodes_played_over_http_become_rollouts(
    kafka: KafkaConfig, run_name: str, server: str, looks_refused: int
) -> None:
    async def play(url: str) -> tuple[Sequence[Rollout], list[int]]:
        settings = {"inference_urls": (url,), "request_timeout_s": 60.0}
        with PolicyFollower(kafka, run_name) as policies:
            async with local_gateway(kafka, run_name, policies, **settings) as gateway:
                session = await gateway.open(stamp(0))
                endpoint = gateway.endpoint_of(session)
                async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key="wrong") as stranger:
                    with pytest.raises(openai.NotFoundError):
                        await stranger.chat.completions.create(model="policy", messages=[])
                address = {"base_url": endpoint.base_url, "api_key": endpoint.api_key}
                async with openai.AsyncOpenAI(**address, max_retries=0) as agent:
                    messages = [{"role": "user", "content": "20+22?"}]
                    for _turn in range(2):
                        answer = await agent.chat.completions.create(
                            model=endpoint.model,
                            messages=messages,  # type: ignore[arg-type]
                            extra_body={"return_token_ids": True},
                        )
                        text = answer.choices[0].message.content or ""
                        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "so?"}]
                        tokens = [*answer.prompt_token_ids, *answer.choices[0].token_ids]  # type: ignore[attr-defined]
                rollouts = await gateway.finish(session, Score(reward=0.5, components={"exact": 1.0}))
                written = gateway.written(session)
                assert (written.end, written.rollouts) == (1, 1)
                idle = await gateway.open(stamp(1))
                with pytest.raises(RecordError, match="no model call was made"):
                    await gateway.finish(idle, Score(reward=1.0))
                await gateway.open(stamp(2))  # a worker that is killed leaves it open
        return rollouts, tokens

    with http_front(server) as front:
        # The server refuses to say what it accepts, when the worker begins and at its first request.
        front.faults["GET"].extend([BUSY] * looks_refused)
        (rollout,), tokens = asyncio.run(play(f"{front.url}/v1"))
        assert front.struck["GET", BUSY] == looks_refused
    assert problems(rollout) == []
    assert (rollout.uid, rollout.reward, rollout.reward_components) == ("w.1.0.0", 0.5, {"exact": 1.0})
    assert rollout.tokens.tolist() == tokens, "one sequence: the second turn continued the first from its tokens"
    assert [turn.role for turn in rollout.turns] == ["user", "assistant", "user", "assistant"]
    assert rollout.sampling.temperature == 0.5
    written, cancelled = records(kafka, run_name)
    assert (written.uid, cancelled.uids, cancelled.reason) == ("w.1.0.0", ("w.1.0.1",), "no model call was made")
    kinds = [getattr(record, "kind", "call") for record in calls_of(kafka, run_name, "w.1.0.0")]
    assert kinds == ["start", "call", "call", "reward", "end", "finishing", "finished"]
    book = ledger(kafka, run_name)
    assert book.problems == []
    assert book.balanced
    assert (book.calls["in_rollouts"], book.calls["sessions"], book.calls["open_sessions"]) == (2, 3, 1)
    assert book.calls["reasons"] == {"no model call was made": 1}


def test_a_call_that_no_server_answers_fails_its_episode(kafka: KafkaConfig, run_name: str) -> None:
    async def play() -> None:
        settings = {"inference_urls": ("http://127.0.0.1:9/v1",), "request_timeout_s": 0.2}
        with PolicyFollower(kafka, run_name) as policies:
            async with local_gateway(kafka, run_name, policies, **settings) as gateway:
                session = await gateway.open(stamp(0))
                endpoint = gateway.endpoint_of(session)
                address = {"base_url": endpoint.base_url, "api_key": endpoint.api_key}
                async with openai.AsyncOpenAI(**address, max_retries=0) as agent:
                    with pytest.raises(openai.APIStatusError, match="no answer from"):
                        await agent.completions.create(model="policy", prompt="1")
                with pytest.raises(InferenceUnavailable, match="a model call failed: no answer from"):
                    await gateway.finish(session, Score(reward=1.0))

    asyncio.run(play())
    (cancelled,) = records(kafka, run_name)
    assert cancelled.reason.startswith("a model call failed: no answer from")
