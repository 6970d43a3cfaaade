"""Evaluation of a split at a policy version, onto `evals`: never trained on, and on record like the rest."""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from producers.assembly import Stamp, rollout_of
from producers.environment import Environment, Prompt, Split
from producers.inference.batching import row_seed
from producers.inference.client import CompletionsClient, InferenceRefused, InferenceUnavailable
from producers.rollout_producer import RolloutProducer
from producers.sampling import GroupSampler, Sampling
from topics.records import Rollout


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Means over the prompts of a split."""

    version: int
    """The version asked for."""
    lowest_version: int
    """Lowest version that answered; it differs from `version` only where that was allowed."""
    highest_version: int
    prompts: int
    reward: float
    components: Mapping[str, float]

    @property
    def exact(self) -> float:
        """Fraction answered exactly; NaN where the environment does not know."""
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

    Waits for the servers to have the version, no longer than the client's timeout. Rollouts carry the version asked
    for as their policy_version and those that answered as lowest and highest, and extra "split", "phase" and
    "prompts", how many the evaluation has; nothing is sent before all are answered. `producer` must write to `evals`.
    `max_prompts` takes the first so many, 0 all. Raises InferenceUnavailable when the version does not come,
    InferenceRefused when another one answered; without `exactly` a newer one may.
    """
    await _wait_for(client, version)
    prompts = environment.prompts(split)[: max_prompts or None]
    slots = asyncio.Semaphore(concurrency)

    async def one(prompt: Prompt) -> Rollout:
        group_id = f"{worker_id}.{phase}.{version}.{prompt.example_id}"
        stamp = Stamp(
            environment=environment.name,
            group_id=group_id,
            group_size=1,
            policy_version=version,
            temperature=temperature,
            logprobs_mode="processed",
            worker_id=worker_id,
        )
        sampling = Sampling(
            group_size=1, temperature=temperature, seed=row_seed(seed, group_id) >> 1, assume_version=version
        )
        async with slots:
            sampler = GroupSampler(client, environment, sampling)
            try:
                episode = await environment.run(prompt, sampler.member(0))
            finally:
                sampler.close()
        extra = {"split": split, "phase": phase, "prompts": str(len(prompts))}
        return rollout_of(episode, prompt, stamp, uid=group_id, timestamp=time.time(), extra=extra)

    rollouts = await asyncio.gather(*map(one, prompts))
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


async def _wait_for(client: CompletionsClient, version: int) -> None:
    deadline = time.monotonic() + client.timeout_s
    # A server that names no version (-1) is taken at the caller's word.
    while 0 <= (now := await client.version()) < version:
        if time.monotonic() > deadline:
            raise InferenceUnavailable(
                f"policy version {version} did not reach the server within {client.timeout_s:g} s; it has {now}"
            )
        await asyncio.sleep(0.05)
