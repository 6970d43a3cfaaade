"""Our client and worker against a real vLLM: tokens, masks and logprobs are the engine's own."""

import asyncio
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rollstream.consumers.models.decoder import logits
from rollstream.consumers.models.huggingface import load, load_config
from rollstream.consumers.models.tokenizer_file import load_tokenizer
from rollstream.producers.config import WorkerConfig
from rollstream.producers.environments.environment import Episode, Generate, Message, Prompt, Reply, Score, Split
from rollstream.producers.inference.client import CompletionsClient
from rollstream.producers.inference.errors import ContextTooLong
from rollstream.producers.inference.requests import SampleRequest
from rollstream.producers.tasks.environment_loading import with_settings
from rollstream.producers.worker.worker_process import run_worker
from rollstream.topics.config import KafkaConfig, TopicsConfig
from rollstream.topics.kafka.provisioning import apply
from rollstream.topics.kafka.reader import read_to_end
from rollstream.topics.records import Rollout
from rollstream.topics.wire.catalogue import topic_name
from rollstream.topics.wire.codec import decode
from rollstream.topics.wire.validation import problems
from tests.engines.conftest import Vllm

pytestmark = pytest.mark.long


class Conversation:
    """Three turns, whatever the policy says."""

    name = "conversation"
    max_tokens = 8
    stop = ()

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return [Prompt(example_id=str(n), text=f"{n}+{n}=") for n in range(10)]

    async def run(self, prompt: Prompt, generate: Generate) -> Episode:
        turns: list[Message | Reply] = []
        for text in (prompt.text, " sure?", " really?"):
            turns += [Message(role="user", text=text), await generate(text)]
        return Episode(turns=tuple(turns), score=Score(reward=float(len(turns[1].text))))


def client_of(vllm: Vllm) -> CompletionsClient:
    return CompletionsClient([vllm.url], model=vllm.model, timeout_s=120.0)


def test_the_learner_computes_the_logprobs_that_vllm_sampled_with(vllm: Vllm) -> None:
    async def ask() -> list[tuple[list[int], list[int], np.ndarray]]:  # type: ignore[type-arg]
        async with client_of(vllm) as client:
            samples = await client.complete(
                SampleRequest(prompt=[40, 41, 42], n=4, max_tokens=32, temperature=1.0, seed=11)
            )
        return [(s.prompt_tokens.tolist(), s.tokens.tolist(), s.logprobs) for s in samples]

    samples = asyncio.run(ask())
    assert len({tuple(tokens) for _prompt, tokens, _logprobs in samples}) > 1
    config = load_config(vllm.directory)
    params = {name: jnp.asarray(array) for name, array in load(vllm.directory, config).items()}
    for prompt, tokens, logprobs in samples:
        assert prompt == [40, 41, 42]
        row = jnp.asarray([prompt + tokens])
        actual = jax.nn.log_softmax(logits(params, config, row, jnp.arange(row.shape[1])[None], jnp.ones_like(row)))
        places = np.arange(len(prompt), row.shape[1])
        np.testing.assert_allclose(np.asarray(actual)[0, places - 1, tokens], logprobs, atol=2e-3)


def test_a_worker_plays_several_turns_against_vllm(vllm: Vllm, broker: str, run_name: str) -> None:
    kafka = KafkaConfig(bootstrap_servers=broker)
    apply(kafka, TopicsConfig(partitions=2), run_name)
    config = WorkerConfig(
        worker_id="w", inference_urls=(vllm.url,), model=vllm.model, group_size=4, groups=8, assume_version=0
    )

    environments = (with_settings(Conversation(), config),)
    report = asyncio.run(run_worker(environments, kafka, run_name, config, incarnation="1", stop=asyncio.Event()))
    assert report.rollouts == 32
    rollouts = [decode(message.value) for message in read_to_end(kafka, topic_name(run_name, "rollouts"))]
    assert [problems(rollout) for rollout in rollouts if problems(rollout)] == []
    tokenizer = load_tokenizer(vllm.directory)
    for rollout in rollouts:
        assert isinstance(rollout, Rollout)
        assert [turn.role for turn in rollout.turns] == ["user", "assistant"] * 3
        for turn in rollout.turns:
            if turn.role != "assistant":
                assert rollout.tokens[turn.start : turn.stop].tolist() == tokenizer.encode(turn.text)
                assert not rollout.loss_mask[turn.start : turn.stop].any()
            else:
                assert rollout.loss_mask[turn.start : turn.stop].all()
                assert (rollout.logprobs[turn.start : turn.stop] < 0).all()


def test_a_conversation_beyond_the_model_length_is_a_refusal_for_length(vllm: Vllm) -> None:
    async def ask() -> None:
        async with client_of(vllm) as client:
            await client.complete(SampleRequest(prompt=[40] * 1025, n=1, max_tokens=1, temperature=1.0, seed=0))

    with pytest.raises(ContextTooLong, match="1024"):
        asyncio.run(ask())
