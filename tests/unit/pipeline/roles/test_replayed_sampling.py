"""From the answers of a server to a batch: the learner computes the probabilities with which tokens were sampled."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np

from rollstream.consumers.learner.config import LearnerConfig
from rollstream.consumers.learner.training.loss import log_probs
from rollstream.consumers.learner.training.packing import pack_for, sequences_of
from rollstream.consumers.models.config import ComputeSettings, DecoderConfig, manifest_model
from rollstream.consumers.models.slots import SlotDecoder
from rollstream.consumers.weights.follower import WeightsFollower
from rollstream.pipeline.roles.infer import FollowedPolicy
from rollstream.producers.environments.environment import Episode, Message, Prompt, Score
from rollstream.producers.inference.client import Completion, CompletionsClient
from rollstream.producers.inference.requests import Filters, SampleRequest
from rollstream.producers.worker.rollout_assembly import GroupStamp, rollout_of
from rollstream.topics.records import PolicyManifest
from rollstream.topics.wire.rl_examples import ROUTED_EXPERTS
from tests.support.checkpoints import random_parameters
from tests.support.pairs import driver
from tests.support.producing import TOKENIZER, SortingGenerator, serving

MODEL = DecoderConfig(
    vocab_size=TOKENIZER.vocab_size,
    num_hidden_layers=2,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    norm_topk_prob=True,
)
CONFIG = LearnerConfig(model=MODEL, sequence_length=32, microbatch_rows=2, layers="unrolled")
FILTERS = Filters(top_p=0.9, top_k=9)
STAMP = GroupStamp(
    environment="env", group_id="", group_size=2, policy_version=0, temperature=1.0, logprobs_mode="processed",
    worker_id="w", filters=FILTERS,
)  # fmt: skip


class Followed:
    """A follower that holds version 0."""

    manifest = PolicyManifest(
        version=0, learner="l", step=0, epoch="e", tensors=(), chunks=(), digest="", model=manifest_model(MODEL)
    )

    def __init__(self, params: dict[str, Any]) -> None:
        self.version, self._params = 0, params

    def get_state(self, version: int) -> tuple[int, dict[str, Any]] | None:
        return None if version == 0 else (0, self._params)


class Served(FollowedPolicy):
    """Our decoder behind the server of the tests."""

    tokenizer = TOKENIZER
    slots = 0


async def episodes(url: str) -> list[Episode]:
    """Two episodes of two replies each."""

    async def replies(client: CompletionsClient, prompt: str | Sequence[int], n: int) -> list[Completion]:
        request = SampleRequest(
            prompt=prompt, n=n, max_tokens=6, temperature=1.0, seed=5, filters=FILTERS, routed_experts=True
        )
        return await client.complete(request)

    async with CompletionsClient([url], timeout_s=900.0) as client:
        played = []
        for first in await replies(client, "312>", 2):
            context = [*first.prompt_tokens.tolist(), *first.tokens.tolist(), *TOKENIZER.encode("7>")]
            [later] = await replies(client, context, 1)
            turns = (first, Message(role="user", text="7>"), later)
            played.append(Episode(turns=turns, score=Score(reward=float(len(played)))))
        return played


def test_the_learner_computes_the_probabilities_with_which_a_server_sampled() -> None:
    params = random_parameters(MODEL)
    slots = SlotDecoder(MODEL, slots=2, max_model_len=32, steps=8)
    policy = Served(cast(WeightsFollower, Followed(params)), slots, (TOKENIZER.eos_id,))
    with serving(cast(SortingGenerator, policy), max_rows=2, max_model_len=32) as server:
        played = asyncio.run(episodes(server.base_url))
    d = driver(batch_rollouts=2)
    for number, episode in enumerate(played):
        d.pipe(rollout_of(episode, Prompt(example_id="0", text="312>"), STAMP, uid=f"r{number}"))
    assert not d.drops
    (batch,) = d.batches
    [experts] = [entry.array.array() for entry in batch.token_arrays if entry.name == ROUTED_EXPERTS]
    known = (experts < MODEL.num_experts).all(axis=(1, 2))
    assert np.flatnonzero(~known).tolist() == (batch.splits[1:] - 1).tolist()
    (packed,) = pack_for(CONFIG, sequences_of(batch)).microbatches
    ratios = {}
    for name in ("kept_", "nothing"):
        arrays = {n: a for n, a in packed.arrays().items() if not n.startswith(name)}
        trained = arrays["loss_mask"] > 0
        computed = jax.jit(lambda p, b: log_probs(p, MODEL, ComputeSettings(), b))(params, arrays)
        ratios[name] = np.exp(np.asarray(computed) - arrays["generator_log_probs"])[trained]
    np.testing.assert_allclose(ratios["nothing"], 1.0, atol=1e-4)
    assert ratios["kept_"].mean() < 0.95
