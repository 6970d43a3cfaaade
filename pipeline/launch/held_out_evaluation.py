"""Evaluates one policy version on the held-out prompts of each evaluated environment, through the run's inference
server."""

import asyncio

from rollstream.pipeline.config import RunConfig
from rollstream.pipeline.launch.demo_report import HeldOutScore
from rollstream.pipeline.run.run_environments import environments_of
from rollstream.producers.flow.policy_versions import PolicyFollower
from rollstream.producers.inference.client import client_of
from rollstream.producers.rollout_producer import RolloutProducer
from rollstream.producers.worker import evaluation


def evaluate(config: RunConfig, version: int, phase: str) -> HeldOutScore:
    """Evaluate the held-out split greedily at a version, once the server has it, and publish to `evals`.

    Raises InferenceUnavailable if the server does not get the version in time, InferenceRefused if it has a newer one.
    """
    return asyncio.run(_evaluate(config, version, phase))


async def _evaluate(config: RunConfig, version: int, phase: str) -> HeldOutScore:
    with (
        RolloutProducer(config.kafka, config.run, topic="evals") as producer,
        PolicyFollower(config.kafka, config.run) as policies,
    ):
        environments = [environment for environment in environments_of(config) if environment.evaluated]
        max_calls = config.gateway.max_calls
        opening = evaluation.evaluation_gateway(
            environments, config.kafka, config.run, config.worker, policies, max_calls=max_calls
        )
        async with client_of(config.worker, policies) as client, opening as gateway:
            scores = [
                await evaluation.evaluate(
                    environment,
                    client,
                    producer,
                    version=version,
                    phase=phase,
                    gateway=gateway,
                    max_prompts=environment.entry.max_prompts,
                    episode_timeout_s=config.worker.episode_timeout_s,
                )
                for environment in environments
            ]
    prompts = sum(score.prompts for score in scores)
    return HeldOutScore(
        version=version,
        prompts=prompts,
        reward=sum(score.reward * score.prompts for score in scores) / max(prompts, 1),
        success=sum(score.success * score.prompts for score in scores) / max(prompts, 1),
    )
