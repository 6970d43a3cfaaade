"""Evaluates a split at a policy version and writes the rollouts to `evals`; they are never trained on."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from rollstream.producers.environment import Environment, Prompt, Split
from rollstream.producers.inference.client import CompletionsClient
from rollstream.producers.inference.decoding import row_seed
from rollstream.producers.inference.errors import InferenceRefused, InferenceUnavailable
from rollstream.producers.rollout_assembly import GroupStamp, rollout_of
from rollstream.producers.rollout_producer import RolloutProducer
from rollstream.producers.sampling import GroupSampler, GroupSampling
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.records import Rollout


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Means over the prompts of a split."""

    version: int
    """Version requested."""
    lowest_version: int
    """Lowest version that answered; it differs from `version` only if the caller allowed that."""
    highest_version: int
    prompts: int
    reward: float
    components: Mapping[str, float]

    @property
    def exact(self) -> float:
        """Fraction answered exactly; NaN if the environment cannot tell."""
        return self.components.get("exact", float("nan"))


async def evaluate(
    environment: Environment,
    client: CompletionsClient,
    producer: RolloutProducer,
    *,
    version: int,
    phase: str,
    worker_id: str = "eval",
    split: Split = "heldout",
    max_prompts: int = 0,
    concurrency: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    exactly: bool = True,
) -> Evaluation:
    """Answer each prompt of a split once, with the given policy version.

    Waits up to the client's timeout for the servers to have the version. Rollouts carry the requested version as
    policy_version, the versions that answered as lowest and highest, and in extra "split", "phase" and "prompts", the
    number of prompts in the evaluation. Nothing is sent before all prompts are answered. `producer` must write to
    `evals`. `max_prompts` limits the prompts to the first ones; 0 is no limit. Raises InferenceUnavailable if the
    version does not arrive, InferenceRefused if another version answered; a newer one is allowed without `exactly`.
    """
    await _await_version(client, version)
    prompts = environment.prompts(split)[: max_prompts or None]
    if not prompts:
        raise ConfigurationError(
            f"environment {environment.name} has no prompts in split {split}; add some, or set its entry's evaluate to "
            "false"
        )
    slots = asyncio.Semaphore(concurrency)

    async def answer(prompt: Prompt) -> Rollout:
        group_id = f"{worker_id}.{phase}.{version}.{prompt.example_id}"
        stamp = GroupStamp(
            environment=environment.name,
            group_id=group_id,
            group_size=1,
            policy_version=version,
            temperature=temperature,
            logprobs_mode="processed",
            worker_id=worker_id,
        )
        sampling = GroupSampling(
            group_size=1, temperature=temperature, seed=row_seed(seed, group_id) >> 1, assume_version=version
        )
        async with slots:
            sampler = GroupSampler(client, environment, sampling)
            try:
                episode = await environment.run(prompt, sampler.member(0))
            finally:
                sampler.close()
        extra = {"split": split, "phase": phase, "prompts": str(len(prompts))}
        return rollout_of(episode, prompt, stamp, uid=group_id, extra=extra)

    rollouts = await asyncio.gather(*map(answer, prompts))
    for rollout in rollouts:
        if exactly and (rollout.lowest_version, rollout.highest_version) != (version, version):
            raise InferenceRefused(
                f"policy version {rollout.highest_version} answered an evaluation of version {version}; stop the "
                "learner while evaluating, or evaluate the newest version"
            )
    for rollout in rollouts:
        producer.send(rollout)
    await asyncio.to_thread(producer.flush)
    components: Counter[str] = Counter()
    for rollout in rollouts:
        components.update(rollout.reward_components)
    return Evaluation(
        version=version,
        lowest_version=min(rollout.lowest_version for rollout in rollouts),
        highest_version=max(rollout.highest_version for rollout in rollouts),
        prompts=len(rollouts),
        reward=sum(rollout.reward for rollout in rollouts) / len(rollouts),
        components={name: total / len(rollouts) for name, total in components.items()},
    )


async def _await_version(client: CompletionsClient, version: int) -> None:
    deadline = time.monotonic() + client.timeout_s
    # If a server reports no version (-1), the caller vouches for it.
    while 0 <= (now := await client.version()) < version:
        if time.monotonic() > deadline:
            raise InferenceUnavailable(
                f"policy version {version} did not reach the server within {client.timeout_s:g} s; it has {now}"
            )
        await asyncio.sleep(0.05)
