"""Evaluates the held-out split at every so many policy versions while a run goes on, onto `evals`.

Each version that is due is evaluated once, whoever restarts in between; one that a later due version overtook first is
passed by, which is logged. Servers move on meanwhile: what answered is on each rollout.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import ExitStack, closing
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, TopicPartition

from producers.config import EvaluationConfig, WorkerConfig
from producers.environment import Environment
from producers.evaluation import Evaluation, evaluate
from producers.inference.client import CompletionsClient, InferenceRefused, InferenceUnavailable
from producers.rollout_producer import RolloutProducer
from topics import clients
from topics.catalogue import topic_name
from topics.config import KafkaConfig
from topics.following import TopicFollower
from topics.logs import event
from topics.metrics import MetricsWriter
from topics.records import PolicyManifest, Rollout
from topics.skipped import SkippedRecords

logger = logging.getLogger(__name__)

PHASE = "periodic"
COMPONENT = "eval"
_LOOK_EVERY_S = 0.2


def due(published: Iterable[int], every: int, settled: Iterable[int]) -> tuple[int | None, list[int]]:
    """The version to evaluate now, None where there is none, and those that it, or one settled, overtook.

    `published` are the versions on record, `settled` those evaluated or passed by.
    """
    known = set(settled)
    newest = max((v for v in known if v % every == 0), default=-1)
    waiting = sorted(v for v in published if v % every == 0 and v not in known)
    if waiting and waiting[-1] > newest:
        return waiting[-1], waiting[:-1]
    return None, waiting


def evaluated(rollouts: Iterable[Rollout], environment: str) -> set[int]:
    """The versions of which all answers are there. An evaluation that a crash cut short is none."""
    answers: dict[int, set[str]] = defaultdict(set)
    prompts: dict[int, int] = {}
    for rollout in rollouts:
        asked = rollout.extra.get("prompts", "")
        # Whoever else writes to `evals` may have put anything there.
        whole = asked.isdecimal() and len(asked) < 10
        if whole and rollout.environment == environment and rollout.extra.get("phase") == PHASE:
            answers[rollout.policy_version].add(rollout.uid)
            prompts[rollout.policy_version] = int(asked)
    return {version for version, uids in answers.items() if len(uids) >= prompts[version]}


def figures(found: Evaluation) -> dict[str, float]:
    """What is told on `metrics` of an evaluation."""
    return {
        "eval/version": float(found.version),
        "eval/lowest_version": float(found.lowest_version),
        "eval/highest_version": float(found.highest_version),
        "eval/prompts": float(found.prompts),
        "eval/reward": found.reward,
        **{f"eval/{name}": value for name, value in found.components.items()},
    }


async def run_evaluator(
    environment: Environment,
    kafka: KafkaConfig,
    run: str,
    config: EvaluationConfig,
    worker: WorkerConfig,
    *,
    stop: asyncio.Event,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Evaluate what is due until `stop` is set; then what is due still, within worker.drain_timeout_s.

    `worker` says where and how servers are asked. Raises TopicError, BrokerUnavailable, DeliveryError.
    """
    skipped = SkippedRecords(COMPONENT)
    with ExitStack() as stack:
        manifests = stack.enter_context(closing(_Manifests(kafka, run, skipped)))
        producer = stack.enter_context(RolloutProducer(kafka, run, topic="evals"))
        metrics = stack.enter_context(closing(MetricsWriter(kafka, run, COMPONENT)))
        past = clients.read_to_end(kafka, topic_name(run, "evals"))
        settled = evaluated((rollout for _message, rollout in skipped.records(Rollout, past)), environment.name)
        event(logger, "evaluator_started", every_versions=config.every_versions, evaluated=sorted(settled))
        client = CompletionsClient(
            worker.inference_urls, model=worker.model, api_key=worker.api_key, timeout_s=worker.request_timeout_s
        )
        async with client:
            on_ready()
            while True:
                stopping = stop.is_set()
                version, passed = due(await asyncio.to_thread(manifests.read), config.every_versions, settled)
                if passed:
                    event(logger, "evaluations_passed_by", versions=passed)
                    settled.update(passed)
                if version is None:
                    if stopping:
                        return
                    continue
                settled.add(version)
                asked = evaluate(
                    environment,
                    client,
                    producer,
                    version=version,
                    phase=PHASE,
                    max_prompts=config.max_prompts,
                    concurrency=config.concurrency,
                    temperature=config.temperature,
                    seed=config.seed,
                    exactly=False,
                )
                try:
                    found = await _within(asked, stop, worker.drain_timeout_s)
                except (InferenceRefused, InferenceUnavailable, TimeoutError) as error:
                    reason = str(error) or f"not done {worker.drain_timeout_s:g} s after it was told to stop"
                    event(logger, "evaluation_failed", level=logging.WARNING, version=version, error=reason)
                    continue
                told = {**figures(found), "records_skipped_total": float(skipped.total)}
                metrics.write(
                    told, {"environment": environment.name, "split": "heldout"}, step=manifests.steps[version]
                )
                event(logger, "evaluated", figures={name: round(value, 4) for name, value in told.items()})


async def _within(asked: Coroutine[Any, Any, Evaluation], stop: asyncio.Event, drain_timeout_s: float) -> Evaluation:
    """Wait for an evaluation; once `stop` is set no longer than that. Raises TimeoutError then."""
    task = asyncio.ensure_future(asked)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return await asyncio.wait_for(task, drain_timeout_s)
    finally:
        task.cancel()
        stopping.cancel()
        await asyncio.gather(task, stopping, return_exceptions=True)


class _Manifests:
    """The policy versions of a run, as they are published."""

    def __init__(self, kafka: KafkaConfig, run: str, skipped: SkippedRecords) -> None:
        self._skipped = skipped
        self._place = topic_name(run, "policies"), 0
        self._follower = TopicFollower(kafka, [TopicPartition(*self._place, OFFSET_BEGINNING)])
        self.steps: dict[int, int] = {}
        """Learner step of each version."""

    def read(self) -> Mapping[int, int]:
        """Read on to the end, or wait a moment where it is reached; everything so far."""
        while messages := self._follower.poll(500, _LOOK_EVERY_S):
            for _message, manifest in self._skipped.records(PolicyManifest, messages):
                self.steps[manifest.version] = manifest.step
            # A learner may publish faster than we wait: the end is where it was, not where nothing comes.
            if self._place in self._follower.ends:
                break
        return self.steps

    def close(self) -> None:
        self._follower.close()
