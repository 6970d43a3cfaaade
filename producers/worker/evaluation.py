"""Evaluates a split at a policy version and writes the rollouts to `evals`; they are never trained on.

An environment that calls the policy itself plays through a gateway like a worker's, but its calls are only in `evals`.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from rollstream.producers.config import WorkerConfig
from rollstream.producers.environments.environment import AgentEnvironment, Prompt, Split
from rollstream.producers.flow.component_means import ComponentMeans
from rollstream.producers.flow.policy_versions import PolicyFollower
from rollstream.producers.gateway.config import GatewayConfig
from rollstream.producers.gateway.episode_rollouts import rollout_uids
from rollstream.producers.inference.client import CompletionsClient
from rollstream.producers.inference.decoding import row_seed
from rollstream.producers.inference.errors import InferenceRefused, InferenceUnavailable
from rollstream.producers.rollout_producer import RolloutProducer
from rollstream.producers.tasks.environment_loading import LoadedEnvironment
from rollstream.producers.worker import evaluation_figures
from rollstream.producers.worker.agent_player import play_agents
from rollstream.producers.worker.evaluation_figures import Answer
from rollstream.producers.worker.group_player import EpisodeLimits, play_group
from rollstream.producers.worker.local_gateway import LocalGateway
from rollstream.producers.worker.rollout_assembly import GroupStamp, rollout_of, uids_of
from rollstream.producers.worker.sampling import GroupSampling
from rollstream.topics.config import KafkaConfig
from rollstream.topics.errors import ConfigurationError
from rollstream.topics.records import Rollout


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Results of an evaluation."""

    version: int
    """Version requested."""
    lowest_version: int
    """Lowest version that answered; it differs from `version` only if the caller allowed that."""
    highest_version: int
    prompts: int
    figures: Mapping[str, float]
    """Means over the prompts: `reward`, `success` and, of several samples, `pass@k`."""
    components: Mapping[str, float]
    """Means over the answers."""

    @property
    def reward(self) -> float:
        """Mean reward."""
        return self.figures["reward"]

    @property
    def success(self) -> float:
        """Share of the answers that succeeded."""
        return self.figures["success"]


@asynccontextmanager
async def evaluation_gateway(
    environments: Sequence[LoadedEnvironment],
    kafka: KafkaConfig,
    run: str,
    worker: WorkerConfig,
    policies: PolicyFollower,
    *,
    max_calls: int,
    temperature: float = 0.0,
) -> AsyncIterator[LocalGateway | None]:
    """Yield the gateway for environments that call the policy themselves; None if there is no such environment.
    `max_calls` limits the calls of an episode, as gateway.max_calls does for workers."""
    if not any(environment.agent for environment in environments):
        yield None
        return
    gateway = LocalGateway(
        kafka,
        run,
        worker,
        GatewayConfig(max_calls=max_calls),
        name="eval",
        policies=policies,
        temperatures={environment.name: temperature for environment in environments},
        recorded=False,
    )
    async with gateway:
        yield gateway


async def evaluate(
    environment: LoadedEnvironment,
    client: CompletionsClient,
    producer: RolloutProducer,
    *,
    version: int,
    phase: str,
    gateway: LocalGateway | None = None,
    worker_id: str = "eval",
    split: Split = "heldout",
    samples: int = 1,
    max_prompts: int = 0,
    concurrency: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    exactly: bool = True,
    episode_timeout_s: float = WorkerConfig.episode_timeout_s,
) -> Evaluation:
    """Answer each prompt of a split `samples` times, with the given policy version.

    Waits up to the client's timeout for the servers to have the version. Nothing is sent before all prompts are
    answered. Rollouts carry the requested version as policy_version, and the versions that answered as lowest and
    highest; their `extra` holds "split", "phase", "prompts" (the number of prompts in the evaluation) and, of an
    environment in suites, "suites". The answers to a prompt are a group. `producer` must write to `evals`. An
    environment that calls the policy itself needs `gateway`, whose temperature it uses. Only the first `max_prompts`
    prompts are answered; 0 means all.

    Raises ConfigurationError if the split has no prompts, InferenceUnavailable if the version does not arrive, and
    EpisodeFailed if the environment fails or an episode takes longer than `episode_timeout_s`. With `exactly`, raises
    InferenceRefused if another version answered; without it, a newer version may answer.
    """
    await _await_version(client, version)
    prompts = environment.prompts(split)[: max_prompts or None]
    if not prompts:
        raise ConfigurationError(
            f"environment {environment.name} has no prompts in split {split}; add some, or set its entry's evaluate to "
            "false"
        )
    slots = asyncio.Semaphore(concurrency)
    limits = EpisodeLimits(timeout_s=episode_timeout_s, attempts=1)

    async def answer(prompt: Prompt) -> list[list[Rollout]]:
        stamp = GroupStamp(
            environment=environment.name,
            group_id=f"{worker_id}.{phase}.{version}.{prompt.example_id}",
            group_size=samples,
            policy_version=version,
            temperature=temperature,
            logprobs_mode="processed",
            worker_id=worker_id,
        )
        async with slots:
            if environment.agent is None:
                episodes = await _text_episodes(environment, client, prompt, stamp, seed, limits)
            else:
                assert gateway, "an environment that calls the policy itself needs a gateway"
                episodes = await _agent_episodes(environment.agent, gateway, prompt, stamp, limits)
        marks = {"split": split, "phase": phase, "prompts": str(len(prompts))}
        if suites := environment.entry.suites:
            marks["suites"] = json.dumps(suites)
        return [[replace(rollout, extra=marks) for rollout in rollouts] for rollouts in episodes]

    answers = [asyncio.ensure_future(answer(prompt)) for prompt in prompts]
    try:
        played = await asyncio.gather(*answers)
    finally:
        for each in answers:
            each.cancel()
        # Their sessions end before this version is evaluated again, because its sessions have the same names.
        await asyncio.gather(*answers, return_exceptions=True)
    episodes = [episode for prompt in played for episode in prompt]
    rollouts = [rollout for episode in episodes for rollout in episode]
    for rollout in rollouts:
        if exactly and (rollout.lowest_version, rollout.highest_version) != (version, version):
            raise InferenceRefused(
                f"policy version {rollout.highest_version} answered an evaluation of version {version}; stop the "
                "learner while evaluating, or evaluate the newest version"
            )
    for rollout in rollouts:
        producer.send(rollout)
    await asyncio.to_thread(producer.flush)
    components = ComponentMeans()
    # Branches of an episode have the same score.
    for first, *_others in episodes:
        components.add(first.reward_components)
    return Evaluation(
        version=version,
        lowest_version=min(rollout.lowest_version for rollout in rollouts),
        highest_version=max(rollout.highest_version for rollout in rollouts),
        prompts=len(prompts),
        figures=evaluation_figures.means(
            Answer(first.example_id, first.reward, first.success) for first, *_others in episodes
        ),
        components=components.means(),
    )


async def _text_episodes(
    environment: LoadedEnvironment,
    client: CompletionsClient,
    prompt: Prompt,
    stamp: GroupStamp,
    seed: int,
    limits: EpisodeLimits,
) -> list[list[Rollout]]:
    """Return the rollout of each episode. Raises EpisodeFailed, InferenceUnavailable, InferenceRefused, RecordError."""
    sampling = GroupSampling(
        group_size=stamp.group_size,
        temperature=stamp.temperature,
        seed=row_seed(seed, stamp.group_id) >> 1,
        assume_version=stamp.policy_version,
    )
    episodes = []
    uids = uids_of(stamp.group_id, stamp.group_size)
    for uid, episode in zip(uids, await play_group(environment, client, prompt, sampling, limits), strict=True):
        if isinstance(episode, BaseException):
            raise episode
        episodes.append([rollout_of(episode, prompt, stamp, uid=uid)])
    return episodes


async def _agent_episodes(
    agent: AgentEnvironment, gateway: LocalGateway, prompt: Prompt, stamp: GroupStamp, limits: EpisodeLimits
) -> list[list[Rollout]]:
    """Return the rollouts of each episode, one for each branch, with uids in the same form as for text episodes.

    Raises EpisodeFailed, InferenceUnavailable, InferenceRefused, RecordError.
    """
    # The group id becomes part of a URL, and the example id may not be valid there.
    session_group = replace(stamp, group_id=hashlib.sha256(stamp.group_id.encode()).hexdigest())
    episodes = []
    members = await play_agents(agent, gateway, prompt, session_group, limits)
    for uid, played in zip(uids_of(stamp.group_id, stamp.group_size), members, strict=True):
        if played.error:
            raise played.error
        episodes.append(
            [
                replace(
                    rollout,
                    uid=branch_uid,
                    episode_uid=uid,
                    group_id=stamp.group_id,
                    metadata=replace(rollout.metadata, worker_id=stamp.worker_id),
                )
                for branch_uid, rollout in zip(rollout_uids(uid, len(played.rollouts)), played.rollouts, strict=True)
            ]
        )
    return episodes


async def _await_version(client: CompletionsClient, version: int) -> None:
    deadline = time.monotonic() + client.timeout_s
    # A server that reports no version (-1) is assumed to have the requested one.
    while 0 <= (now := await client.version()) < version:
        if time.monotonic() > deadline:
            raise InferenceUnavailable(
                f"policy version {version} did not reach the server within {client.timeout_s:g} s; it has {now}"
            )
        await asyncio.sleep(0.05)
