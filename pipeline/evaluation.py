"""Asks the inference server of a run to answer every held-out prompt, and says how well one policy version does."""

import asyncio

from pipeline.config import RunConfig
from pipeline.report import Evaluation
from producers.evaluation import evaluate as play
from producers.inference.client import CompletionsClient
from producers.rollout_producer import RolloutProducer
from producers.tasks import create_task


def evaluate(config: RunConfig, version: int, phase: str) -> Evaluation:
    """Evaluate the held-out split greedily at a version, onto `evals`; waits for the server to have it.

    Raises InferenceUnavailable when it does not get it in time, InferenceRefused when it has a newer one.
    """
    return asyncio.run(_evaluate(config, version, phase))


async def _evaluate(config: RunConfig, version: int, phase: str) -> Evaluation:
    worker = config.worker
    with RolloutProducer(config.kafka, config.run, topic="evals") as producer:
        async with CompletionsClient(
            worker.inference_urls, model=worker.model, api_key=worker.api_key, timeout_s=worker.request_timeout_s
        ) as client:
            found = await play(create_task(config.task, config.tasks), client, producer, version=version, phase=phase)
    return Evaluation(version=found.version, prompts=found.prompts, reward=found.reward, exact=found.exact)
